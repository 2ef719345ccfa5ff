"""Asks encode workers for embeddings of images, by the hash of the image.

    lookup ─▶ found: read the embeddings (a hit)
       └────▶ missing: write the image, look up until the encode worker has stored the embeddings, then read

Background threads do this, so that steps do not wait. If several requests need an image at once, the
image is requested once. After a failure of an encode worker, this worker encodes the image itself, and
sends no requests to that encode worker for PAUSE_SECONDS.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from urllib.parse import urlsplit

import torch

from kvloom.models.paged import Image
from kvloom.tiers import Objects, Tier, open_tier

from .image_pages import (
    EMBEDDINGS,
    INPUTS,
    PagesError,
    image_key,
    pack,
    page_objects,
    read_pages,
    unpack,
    write_pages,
)

__all__ = ["EncodingStats", "RemoteEncoders"]

log = logging.getLogger("kvloom.encoding")
PAUSE_SECONDS = 5.0
"""Seconds for which an encode worker gets no requests after a failure."""
THREADS = 16
"""Largest number of images that are requested at once."""
LOST_SECONDS = 0.5
"""If the encode worker has neither an image nor its embeddings for this many seconds, the image counts as lost. For a
shorter time, another worker may still be writing the same image."""
POLL_SECONDS = (0.002, 0.05)
"""Shortest (first) and longest time between two lookups of one image, in seconds."""


@dataclass(slots=True)
class EncodingStats:
    """Counters since the start of the engine."""

    handed_over_images: int = 0
    """Images whose embeddings came from an encode worker."""
    handed_over_bytes: int = 0
    hits: int = 0
    """Images whose embeddings the encode worker already had, so that only the embeddings were transferred."""
    sent_bytes: int = 0
    """Bytes of images that were sent to encode workers."""
    fallbacks: int = 0
    """Images that were encoded here, because their encode worker was lost, late, unknown or refused them."""
    seconds: float = 0.0
    """Sum of the seconds from each request to its embeddings."""


class _EncodeWorker:
    """The connection to one encode worker, which is opened on first use. Until `paused_until`, the worker gets no
    requests."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.address = urlsplit(url).netloc.rpartition("@")[2]
        self.paused_until = 0.0
        self.has_failed = False
        self._tier: Tier | None = None
        self._lock = threading.Lock()

    @property
    def is_paused(self) -> bool:
        return time.monotonic() < self.paused_until

    def tier(self) -> Tier:
        """Return the tier. Raises TierError if the worker cannot be reached."""
        with self._lock:
            if self._tier is None:
                self._tier = open_tier(self.url)
            return self._tier

    def close(self) -> None:
        with self._lock:
            if self._tier is not None:
                self._tier.close()


class RemoteEncoders:
    """The encode workers of one engine. `urls` are their peer tiers (`peer://HOST:PORT?secret=FILE`), `fingerprint`
    identifies the image part of the model, and `shape` is the length and dtype of an embedding. A request for
    embeddings may take up to `seconds`. Only the engine's thread may call the methods.
    """

    def __init__(
        self, urls: Sequence[str], fingerprint: str, shape: tuple[int, torch.dtype], seconds: float
    ) -> None:
        self.stats = EncodingStats()
        self._workers = {one.address: one for one in map(_EncodeWorker, urls)}
        self._fingerprint, self._shape, self._seconds = fingerprint, shape, seconds
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="encoders")
        self._pending: dict[bytes, Future[torch.Tensor | None]] = {}
        self._lock = threading.Lock()  # guards the stats

    def request(self, image: Image, address: str | None = None) -> Future[torch.Tensor | None]:
        """Start to request the embeddings of an image, and return a future. The result of the future is None if this
        worker must encode the image itself.

        `address` (host:port) names the encode worker. Without an address, the hash of the image selects an encode
        worker. If the address is not configured, the result is None.
        """
        self._pending = {key: one for key, one in self._pending.items() if not one.done()}
        key = image_key(self._fingerprint, image.tenant, image.digest)
        if key not in self._pending:
            worker = self._workers.get(address) if address is not None else self._select(key)
            self._pending[key] = self._threads.submit(self._get, worker, key, image)
        return self._pending[key]

    def close(self) -> None:
        """Stop requests and close connections."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers.values():
            worker.close()

    def _select(self, key: bytes) -> _EncodeWorker | None:
        """Return the encode worker that the key of an image selects, or None if all encode workers are paused. A key
        always selects the same encode worker, so that embeddings stored there are found. While that encode worker
        is paused, the key selects another one."""
        usable = [worker for worker in self._workers.values() if not worker.is_paused]
        return max(
            usable, key=lambda one: blake2b(key + one.address.encode(), digest_size=8).digest(), default=None
        )

    def _get(self, worker: _EncodeWorker | None, key: bytes, image: Image) -> torch.Tensor | None:
        if worker is None or worker.is_paused:
            with self._lock:
                self.stats.fallbacks += 1
            return None
        began = time.monotonic()
        try:
            embeddings, sent = self._exchange(worker.tier(), key, image, began + self._seconds)
        except Exception as error:  # noqa: BLE001  the image is encoded here
            if not worker.has_failed:
                log.warning("images of encode worker %s are encoded here: %s", worker.address, error)
            worker.has_failed, worker.paused_until = True, time.monotonic() + PAUSE_SECONDS
            with self._lock:
                self.stats.fallbacks += 1
            return None
        if worker.has_failed:
            log.info("encode worker %s is used again", worker.address)
            worker.has_failed = False
        with self._lock:
            self.stats.handed_over_images += 1
            self.stats.handed_over_bytes += embeddings.numel() * embeddings.element_size()
            self.stats.hits += not sent
            self.stats.sent_bytes += sent
            self.stats.seconds += time.monotonic() - began
        return embeddings

    def _exchange(self, tier: Tier, key: bytes, image: Image, deadline: float) -> tuple[torch.Tensor, int]:
        """Return the embeddings of an image, and the number of sent bytes. Raises PagesError if the encode worker
        fails."""
        tenant = image.tenant
        stored = page_objects(key, EMBEDDINGS, tenant, 0, 1)
        if tier.lookup(stored).all():
            with suppress(PagesError):  # the embeddings were evicted since the lookup
                return self._read(tier, key, tenant, deadline), 0
        pages = pack({"tenant": tenant, "digest": image.digest.hex()}, image.inputs)
        write_pages(tier, key, INPUTS, tenant, pages, deadline)
        self._wait(tier, stored, page_objects(key, INPUTS, tenant, 0, 1), deadline)
        return self._read(tier, key, tenant, deadline), pages.size

    def _read(self, tier: Tier, key: bytes, tenant: str, deadline: float) -> torch.Tensor:
        """Return embeddings that an encode worker has stored. Raises PagesError if they have another width or dtype
        than the embeddings of this model."""
        embeddings = unpack(read_pages(tier, key, EMBEDDINGS, tenant, deadline))[1].get(
            "embeddings", torch.empty(0)
        )
        if embeddings.dim() != 2 or (embeddings.shape[1], embeddings.dtype) != self._shape:
            raise PagesError(
                f"embeddings of {list(embeddings.shape)} in {embeddings.dtype} are not those of this model, which have "
                f"{self._shape[0]} numbers in {self._shape[1]}: start both workers with the same --dtype"
            )
        return embeddings

    def _wait(self, tier: Tier, stored: Objects, sent: Objects, deadline: float) -> None:
        """Wait until the encode worker has stored the embeddings (`stored`), after which it drops the image (`sent`).
        Raises PagesError if the connection is lost, and after the deadline. Also raises PagesError if the encode worker
        has neither image nor embeddings for LOST_SECONDS: it has refused the image or restarted."""
        pause, longest = POLL_SECONDS
        seen = time.monotonic()
        while (now := time.monotonic()) < deadline:
            if (
                tier.lookup(sent).all()
            ):  # check the image first: the encode worker stores the embeddings before it drops the image
                seen = now
            if tier.lookup(stored).all():
                return
            if not tier.is_reachable:
                raise PagesError("the connection is lost")
            if now - seen > LOST_SECONDS:
                raise PagesError("the encode worker did not encode the image")
            time.sleep(pause)
            pause = min(longest, 1.5 * pause)
        raise PagesError(f"no embeddings arrived for {self._seconds:g} s")
