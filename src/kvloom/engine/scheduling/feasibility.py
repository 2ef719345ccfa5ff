"""Feasibility: refuses requests that can never run, before they are queued. The error states the numbers.

The check uses only the pool layout. It does not depend on free pages or on the order of requests.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvloom.core import KVCache
from kvloom.engine.offload import MAX_HOST_SHARE, OffloadManager
from kvloom.engine.request import Request

__all__ = ["Feasibility"]

RESIDENT_BLOCKS = 2
"""Blocks with full attention that a long request must have in the pool: the block that it writes, and the block
before it.
"""


class Feasibility:
    """Computes the largest memory that a request needs in one pool. Steps have up to `token_budget` prompt tokens."""

    def __init__(self, cache: KVCache, token_budget: int, offload: OffloadManager | None = None) -> None:
        self.cache, self.token_budget, self._offload = cache, token_budget, offload
        self._slabs_for = lru_cache(4096)(self._most_slabs)

    def check(self, request: Request, reachable_slabs: int = 0) -> bool:
        """Raise ValueError for a request that can never run. Return whether the pool or the tenant's quota is too
        small for the largest length of the request. The request then needs cold pages (pages in host memory). If
        `reachable_slabs` is larger than the pool, the check assumes a pool of `reachable_slabs` slabs.
        """
        slab, may_be_long = self.cache.layout.slab_bytes, False
        quota = self.cache.account(request.control.tenant).tenant.quota
        for owner, needed, limit in (
            (
                "pool has",
                self._slabs_of(request) * slab,
                max(self.cache.usable_slabs, reachable_slabs) * slab,
            ),
            ("tenant's quota is", 0 if quota is None else self._bytes_of(request), quota),
        ):
            if limit is not None and needed > limit:
                may_be_long = True
                refusal = self._refuse_cold(
                    request.limit, request.control.tenant, limit, self._slabs_of(request, RESIDENT_BLOCKS)
                )
                if refusal is not None:
                    raise ValueError(
                        f"{len(request.prompt)} prompt tokens and max_tokens {request.params.max_tokens} need {needed:,} "
                        f"bytes of pages, but the {owner} {limit:,}: shorten the prompt or lower max_tokens{refusal}"
                    )
        if request.images is not None and request.images.min_step_tokens > self.token_budget:
            raise ValueError(
                f"an image of {request.images.min_step_tokens} tokens does not fit one step of {self.token_budget} tokens: "
                "raise token_budget"
            )
        return may_be_long

    def holds(self, length: int, tenant: str, reachable_slabs: int = 0) -> bool:
        """Return whether a sequence of `length` tokens fits into the tenant's quota and into the pool. If
        `reachable_slabs` is larger than the pool, the check assumes a pool of `reachable_slabs` slabs.
        """
        quota, slabs = self.cache.account(tenant).tenant.quota, self._slabs_for(length, None)
        within_quota = quota is None or slabs * self.cache.layout.slab_bytes <= quota
        return within_quota and slabs <= max(self.cache.usable_slabs, reachable_slabs)

    def runs_cold(self, length: int, tenant: str, limit: int) -> bool:
        """Return whether a request of `length` tokens can run with cold pages (pages in host memory), if it may use
        `limit` bytes of the pool."""
        return self._refuse_cold(length, tenant, limit, self._slabs_for(length, RESIDENT_BLOCKS)) is None

    def _refuse_cold(self, length: int, tenant: str, limit: int, slabs: int) -> str | None:
        """Return the reason why a request of `length` tokens cannot run with cold pages, as the end of an error
        message. Return None if the request can run.

        The request may use `limit` bytes of the pool, and needs at least `slabs` slabs."""
        layout = self.cache.layout
        full = [group for group in layout.of("token") if not group.spec.visibility.windowed]
        if not full or slabs * layout.slab_bytes > limit:
            return ""
        blocks = -(-length // self.cache.block_tokens)
        needed = blocks * sum(group.page_stride * group.runs for group in full)
        if self._offload is None or self._offload.cold is None:
            if self._offload is not None and self._offload.cold_refusal:
                return f" ({self._offload.cold_refusal})"
            size = int(needed / MAX_HOST_SHARE) + 1
            return f", or give its oldest pages host memory: --tier host:SIZE with {size:,} bytes"
        most = self._offload.cold.limit(tenant)
        if needed <= most:
            return None
        return f", or raise --tier host:SIZE: its oldest pages need {needed:,} bytes of host memory, and may use {most:,}"

    def _slabs_of(self, request: Request, most_full: int | None = None) -> int:
        """Return the largest number of slabs that a request uses, at its end or while its largest image is computed.
        `most_full` limits how many blocks have full-attention pages in the pool. None means no limit."""
        slabs = self._slabs_for(request.limit, most_full)
        if request.images is None:
            return slabs
        length, media = self._image_peak(request)
        blocks = sum(-(-tokens // self.cache.block_tokens) for tokens in media)
        image_slabs = sum(
            -(-blocks * group.runs // group.pages_per_slab) for group in self.cache.layout.of("media")
        )
        return max(slabs, self._slabs_for(length, most_full) + image_slabs)

    def _bytes_of(self, request: Request) -> int:
        """Return the largest number of bytes that a request's pages use."""
        layout, classes = self.cache.layout, self.cache.inspect.size_classes
        pages = self._pages_for(request.limit)
        each = [count * (layout.slab_bytes / cls.per_slab) for cls, count in zip(classes, pages, strict=True)]
        length, media = self._image_peak(request)
        needed = int(np.ceil(np.sum(each, 0).max()))
        return max(needed, layout.slab_bytes_for(length, media)) if media else needed

    def _image_peak(self, request: Request) -> tuple[int, list[int]]:
        """Return the moment at which a request has the most image pages in use: the length of the request in tokens,
        and the token counts of the images in use.

        - If image pages stay in use after the prompt, this is the end of the request, with all images.
        - Otherwise it is the end of the last image, with only the largest image.
        """
        images = request.images
        if images is None:
            return 0, []
        if self.cache.media_outlives_prompt:
            return request.limit, list({item.digest: item.tokens for item in images.media}.values())
        return images.media[-1].stop, [max(item.tokens for item in images.media)]

    def _most_slabs(self, length: int, most_full: int | None = None) -> int:
        """Return the largest number of slabs that a sequence uses while it grows to `length` tokens. Takes milliseconds
        for models with windows."""
        pages = self._pages_for(length, most_full)
        slabs = [
            -(-count // cls.per_slab)
            for cls, count in zip(self.cache.inspect.size_classes, pages, strict=True)
        ]
        return int(np.sum(slabs, 0).max())

    def _pages_for(self, length: int, most_full: int | None = None) -> list[npt.NDArray[np.int64]]:
        """Return the number of pages that a sequence uses, as one array per size class. With windows, an array has one
        value for each length from 1 to `length`, because a shorter sequence can use more pages. Without windows, an
        array has one value, for `length`. `most_full` limits how many blocks are counted with their full-attention
        pages. None means no limit."""
        layout = self.cache.layout
        windowed = any(group.spec.visibility.windowed for group in layout.of("token"))
        ends = np.arange(1 if windowed else length, length + 1)
        pages = [np.zeros(len(ends), np.int64) for _ in self.cache.inspect.size_classes]
        for group in (*layout.of("token"), *layout.of("state")):
            units = np.ones_like(ends)
            if group.spec.unit == "token":
                left = group.spec.visibility.first_visible_each(ends - 1) // layout.block_tokens
                units = -(-ends // layout.block_tokens) - left
                if most_full is not None and not group.spec.visibility.windowed:
                    units = np.minimum(units, most_full)
            pages[self.cache.class_of[group.index]] += units * group.runs
        return pages
