"""Image embeddings in tiers. After an eviction or a restart, the embeddings of an image are loaded, and the image is
not encoded again.

    page    number of tokens of the image (8 bytes) | padding | 16 embeddings
    hash    of the root hash, the content digest of the image, and the index of the page; the layer group is IMAGE_GROUP

The root hash depends on model and tenant, as for block hashes. The vision tower runs if a page is missing, damaged or
late.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch

from kvloom.core import HASH_BYTES, CacheControl, KVCache
from kvloom.engine.config import OffloadConfig
from kvloom.models.paged import Image
from kvloom.tiers import Form, Objects, Ranges
from kvloom.tiers.transfers import TransferManager

from .stats import OffloadStats

__all__ = ["IMAGE_GROUP", "ImageStore"]

IMAGE_GROUP = (1 << 32) - 1
_TOKENS, _HEAD_BYTES, _MAX_TOKENS = 16, 64, 1 << 20
_WAIT_SECONDS = 0.25
"""Longest wait for the embeddings of an image, in seconds. With `load="always"` the deadline of the configuration
applies.
"""


class ImageStore:
    """The image embeddings of one model in tiers. An embedding has `hidden` numbers. Only the engine's thread may call
    the methods."""

    def __init__(
        self,
        cache: KVCache,
        transfers: TransferManager,
        config: Callable[[], OffloadConfig],
        stats: OffloadStats,
        hidden: int,
        dtype: torch.dtype,
    ) -> None:
        self._cache, self._transfers, self._config, self._stats = cache, transfers, config, stats
        self._hidden, self._dtype = hidden, dtype
        size = _HEAD_BYTES + _TOKENS * hidden * dtype.itemsize
        self._form = Form(str(dtype), "TD", size, size, layout=f"image embeddings of {hidden}")
        self._is_usable = size <= transfers.host.slab_bytes

    def has(self, image: Image) -> bool:
        """Return whether host memory has the embeddings of an image. Asks no other tier."""
        if not self._is_usable or self._config().load == "never":
            return False
        return bool(self._transfers.host.lookup(self._objects(image, 0, 1)).all())

    def load(self, image: Image) -> torch.Tensor | None:
        """Return the embeddings of an image as a tensor in host memory. Return None if no tier has them, or if they
        do not arrive in time."""
        if not image.read or self._config().load == "never" or not self._is_usable:
            return None
        found = self._load(image)
        if found is not None:
            self._stats.loaded_images += 1
        return found

    def save(self, image: Image, made: torch.Tensor) -> None:
        """Store `made`, the embeddings of an image ([tokens, hidden]). Copies the embeddings to host memory now. Other
        tiers get them in the background.
        """
        self._stats.encoded_images += 1
        if not image.store or not self._is_usable or made.shape[1] != self._hidden:
            return
        count = -(-len(made) // _TOKENS)
        pages = np.zeros((count, self._form.page_bytes), np.uint8)
        pages[:, :8] = np.frombuffer(len(made).to_bytes(8, "little"), np.uint8)
        whole = torch.zeros(count * _TOKENS, self._hidden, dtype=self._dtype)
        whole[: len(made)] = made.detach().cpu()
        pages[:, _HEAD_BYTES:] = whole.view(torch.uint8).numpy().reshape(count, -1)
        objects = self._objects(image, 0, count)
        if self._transfers.host.write(objects, self._ranges(pages)).ok.all():
            self._transfers.write_to_tiers(objects, used=False)

    def _load(self, image: Image) -> torch.Tensor | None:
        config = self._config()
        wait = config.deadline_seconds[1] if config.load == "always" else _WAIT_SECONDS
        deadline = time.monotonic() + wait
        first = self._read(self._objects(image, 0, 1), deadline)
        if first is None:
            return None
        tokens = int.from_bytes(first[0, :8].tobytes(), "little")
        if not 0 < tokens <= _MAX_TOKENS:
            return None
        count = -(-tokens // _TOKENS)
        if count > 1:
            rest = self._read(self._objects(image, 1, count), deadline)
            if rest is None:
                return None
            first = np.concatenate((first, rest))
        values = torch.from_numpy(np.ascontiguousarray(first[:, _HEAD_BYTES:])).view(self._dtype)
        return values.view(-1, self._hidden)[:tokens]

    def _read(self, objects: Objects, deadline: float) -> npt.NDArray[np.uint8] | None:
        """Load the pages `objects` into host memory and return their bytes. Return None if no tier has one of the
        pages, or if a page does not arrive before `deadline`."""
        transfers = self._transfers
        lookup = transfers.lookup([objects])
        while not lookup.done:  # bounded by the lookup's own deadline
            transfers.wait(0.005)
        if not lookup.found[0].all():
            return None
        if lookup.queue_of:
            job = transfers.fetch([objects], lookup.queue_of, deadline)
            while not job.done:
                transfers.wait(0.005)
        pages = np.empty((len(objects), self._form.page_bytes), np.uint8)
        return pages if transfers.host.read(objects, self._ranges(pages)).ok.all() else None

    def _ranges(self, pages: npt.NDArray[np.uint8]) -> Ranges:
        return Ranges(pages.reshape(-1), np.arange(len(pages)) * self._form.page_bytes)

    def _objects(self, image: Image, start: int, stop: int) -> Objects:
        root = self._cache.root_hash(CacheControl(tenant=image.tenant))
        hashes = [
            blake2b(
                root + image.digest + number.to_bytes(4, "little"),
                digest_size=HASH_BYTES,
                person=b"kvloom.image",
            ).digest()
            for number in range(start, stop)
        ]
        return Objects(hashes, IMAGE_GROUP, self._form, image.tenant)
