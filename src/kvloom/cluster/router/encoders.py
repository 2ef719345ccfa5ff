"""Chooses the encode worker for the images of a call.

For each image, the router remembers the encode worker that it chose. If the image comes again, the router chooses the
same encode worker, because this worker probably has the embeddings. For a new image, the router chooses the encode
worker with the fewest open images.

The router adds the address of the encode worker to the request. The worker that computes the prompt then asks the
encode worker for embeddings. The router sends nothing to the encode worker.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

__all__ = ["EncoderChooser", "image_hashes"]

MAX_IMAGES = 100_000
"""Largest number of images whose encode worker is remembered."""


def image_hashes(body: dict[str, Any], tenant: str) -> list[bytes]:
    """Return one hash for each image and audio clip of a chat. The hash covers the tenant and the URL or base64 text.
    O(bytes of these texts)."""
    salt = blake2b(tenant.encode(errors="replace"), digest_size=16).digest()
    return [
        blake2b(salt + url.encode(errors="replace"), digest_size=16).digest() for url in _image_urls(body)
    ]


_CONTENTS = (("image_url", "url"), ("audio_url", "url"), ("input_audio", "data"))
"""Fields of content parts with an image or audio clip, and the key of its content."""


def _image_urls(body: dict[str, Any]) -> Iterator[str]:
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            for name, key in _CONTENTS if isinstance(part, dict) else ():
                given = part.get(name)
                url = given.get(key) if isinstance(given, dict) else given
                if isinstance(url, str):
                    yield url


class EncoderChooser:
    """Remembers the encode worker of each image, and counts the open images of each encode worker."""

    def __init__(self) -> None:
        self._worker_of: OrderedDict[bytes, str] = OrderedDict()
        self.open_images: Counter[str] = Counter()
        """Number of open images of each encode worker: images of calls that have no first token yet."""

    def choose(self, images: list[bytes], names: list[str]) -> str | None:
        """Return the encode worker for the images of one call: the worker among `names` that was chosen before for most
        of these images. Among equals, return the worker with the fewest open images. Counts the images as open until
        `ended` is called. Return None if `images` or `names` is empty.
        """
        if not images or not names:
            return None
        had = Counter(self._worker_of.get(image, "") for image in images)
        name = min(names, key=lambda one: (-had[one], self.open_images[one]))
        for image in images:
            self._worker_of[image] = name
            self._worker_of.move_to_end(image)
        while len(self._worker_of) > MAX_IMAGES:
            self._worker_of.popitem(last=False)
        self.open_images[name] += len(images)
        return name

    def ended(self, name: str, count: int) -> None:
        """Record that `count` images of an encode worker are no longer open: they are encoded, or not needed
        any more."""
        self.open_images[name] -= count
        if self.open_images[name] <= 0:
            del self.open_images[name]
