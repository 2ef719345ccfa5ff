"""The encoder of an encode worker. Other workers write images to its host memory and read the embeddings.

    peers ──▶ image pages ──▶ `poll` queues the image ──▶ `encode_next` ──▶ embedding pages ──▶ peers

Host memory is bounded. It evicts the least recently used pages, within the shares of tenants. An image that cannot be
encoded is dropped. The worker that sent the image then finds neither image nor embeddings, and encodes the image
itself.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvloom.core import Tenant
from kvloom.models.vision import Vision
from kvloom.tiers import HostTier, Ranges, split_write_policy, tenant_shares
from kvloom.tiers.host import HostConfig, HostURL
from kvloom.tiers.peer import PeerConfig, PeerServer, read_secret

from .image_pages import (
    EMBEDDINGS,
    INPUTS,
    PAGE_BYTES,
    PagesError,
    first_page,
    image_key,
    pack,
    page_objects,
    read_fields,
    read_pages,
    unpack,
    write_pages,
)

__all__ = ["Encoder", "EncoderStats", "open_encoder"]

log = logging.getLogger("kvloom.encoding")
_SLAB_BYTES = 1 << 20
_LOCAL_SECONDS = 5.0


@dataclass(slots=True)
class EncoderStats:
    """Counters since the start of an encode worker."""

    encoded_images: int = 0
    refused_images: int = 0
    """Images that this model cannot encode. The workers that sent these images encode them."""
    encode_seconds: float = 0.0
    embedding_bytes: int = 0
    """Bytes of computed embeddings."""


class Encoder:
    """Encodes the images in a host tier that peers can read and write. `fingerprint` identifies the image part of the
    model. Only one thread may call the methods.
    """

    def __init__(self, vision: Vision, fingerprint: str, host: HostTier, server: PeerServer) -> None:
        self.host, self.server, self.stats = host, server, EncoderStats()
        self._vision, self._fingerprint = vision, fingerprint
        self._changes = host.watch()
        self._queue: deque[bytes] = deque()  # hashes of the first pages of waiting images

    @property
    def waiting(self) -> int:
        """Number of images that wait to be encoded."""
        return len(self._queue)

    def poll(self) -> None:
        """Queue the images that peers have written since the last call."""
        for change in self._changes.take():
            if change.is_stored and change.group == INPUTS.first:
                self._queue.append(change.block_hash)

    def encode_next(self) -> None:
        """Encode the image that waited longest, store its embeddings and drop the image. Does nothing if the image
        was evicted, or if its embeddings are already stored.
        """
        block_hash = self._queue.popleft()
        first = first_page(block_hash, INPUTS)
        try:
            self._encode(block_hash)
        except (PagesError, ValueError, RuntimeError, IndexError, TypeError, KeyError) as error:
            self.stats.refused_images += 1
            log.warning("an image was not encoded: %s", error)
        finally:
            self.host.drop(first)

    def _encode(self, block_hash: bytes) -> None:
        head = np.empty(PAGE_BYTES, np.uint8)
        if not self.host.read(first_page(block_hash, INPUTS), Ranges(head, [0])).ok.all():
            return
        deadline = time.monotonic() + _LOCAL_SECONDS
        fields = read_fields(head)
        tenant, digest = fields["tenant"], bytes.fromhex(fields["digest"])
        key = image_key(self._fingerprint, tenant, digest)
        if page_objects(key, INPUTS, tenant, 0, 1).block_hashes != [block_hash]:
            raise PagesError("its worker has another image encoder: serve the same model on both workers")
        pages = read_pages(self.host, key, INPUTS, tenant, deadline)
        try:
            if self._has_embeddings(key, tenant):
                return
            image = self._vision.read_image(unpack(pages)[1], tenant)
            if image.digest != digest:
                raise PagesError("its content does not match its digest")
            began = time.monotonic()
            made = self._vision.embed(image).cpu()
            self.stats.encode_seconds += time.monotonic() - began
            self.stats.encoded_images += 1
            self.stats.embedding_bytes += made.numel() * made.element_size()
            packed = pack({}, {"embeddings": made})
            write_pages(self.host, key, EMBEDDINGS, tenant, packed, time.monotonic() + _LOCAL_SECONDS)
            # Makes the first page the least recently used page of the image, so that it is evicted before the others.
            self.host.acquire(page_objects(key, EMBEDDINGS, tenant, 1, len(packed))).release()
        finally:
            self.host.drop(page_objects(key, INPUTS, tenant, 1, len(pages)))

    def _has_embeddings(self, key: bytes, tenant: str) -> bool:
        """Return whether all embeddings of an image are stored. If some pages were evicted, drop the first page, so
        that peers do not find the incomplete embeddings."""
        first = page_objects(key, EMBEDDINGS, tenant, 0, 1)
        if not self.host.lookup(first).all():
            return False
        try:
            read_pages(self.host, key, EMBEDDINGS, tenant, time.monotonic() + _LOCAL_SECONDS)
        except PagesError:
            self.host.drop(first)
            return False
        return True

    def close(self) -> None:
        """End the connections of peers, and free host memory."""
        self.server.close()
        self.host.close()


def open_encoder(
    vision: Vision, fingerprint: str, tiers: Sequence[str], tenants: Sequence[Tenant] = ()
) -> Encoder:
    """Open the host memory of an encode worker and share it with other workers. `tiers` must contain only one tier,
    `host:SIZE?share=PORT`. The quota of a tenant limits the tenant's bytes in this memory. Raises ValueError for
    other tiers, and if the address is in use.
    """
    shared = HostURL(0)
    if len(tiers) == 1 and tiers[0].startswith("host:"):
        shared = HostURL.parse(split_write_policy(tiers[0])[0])
    if shared.share is None:
        raise ValueError(
            "role encode needs host memory that other workers can use, and no other tier: "
            "give --tier host:SIZE?share=PORT"
        )
    slab = max(PAGE_BYTES, min(_SLAB_BYTES, shared.capacity // 32))
    host = HostTier(HostConfig(shared.capacity, slab, shared.checked, shared.ttl))
    host.set_shares(tenant_shares(tenants, host.capacity))
    secret = read_secret(shared.secret) if shared.secret else b""
    try:
        server = PeerServer(host, PeerConfig(*shared.share, secret, tls=shared.tls))
    except OSError as error:
        raise ValueError(
            f"embeddings cannot be shared at {shared.share[0]}:{shared.share[1]}: {error}; choose another port"
        ) from error
    return Encoder(vision, fingerprint, host, server)
