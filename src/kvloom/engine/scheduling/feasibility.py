"""What requests take of a pool at the most: who could never run is refused, with the numbers, before it waits.

Knows layouts and requests; what is free at the moment is the cache's business, and whose turn it is the scheduler's.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvloom.core import KVCache
from kvloom.engine.request import Request

__all__ = ["Feasibility"]


class Feasibility:
    """The most that requests fill of one cache's pool, in steps of up to `token_budget` tokens of prompts."""

    def __init__(self, cache: KVCache, token_budget: int) -> None:
        self.cache, self.token_budget = cache, token_budget
        self._slabs_for = lru_cache(4096)(self._most_slabs)

    def check(self, request: Request) -> None:
        """Raise ValueError where a request could never run."""
        slab = self.cache.layout.slab_bytes
        quota = self.cache.account(request.control.tenant).tenant.quota
        for whose, needed, there in (
            ("pool has", self._slabs_of(request) * slab, self.cache.usable_slabs * slab),
            ("tenant's quota is", 0 if quota is None else self._bytes_of(request), quota),
        ):
            if there is not None and needed > there:
                raise ValueError(
                    f"{len(request.prompt)} prompt tokens and up to {request.params.max_tokens} new ones need "
                    f"{needed:,} bytes of cache, but the {whose} {there:,}"
                )
        if request.images is not None and request.images.min_step_tokens > self.token_budget:
            raise ValueError(
                f"an image of {request.images.min_step_tokens} tokens, which are computed together, exceeds the {self.token_budget} "
                "tokens of a step: raise token_budget"
            )

    def _slabs_of(self, request: Request) -> int:
        """The most slabs that a request fills: at its end, or while it computes the largest of its images."""
        slabs = self._slabs_for(request.limit)
        if request.images is None:
            return slabs
        length, media = self._seeing(request)
        blocks = sum(-(-tokens // self.cache.block_tokens) for tokens in media)
        seeing = sum(
            -(-blocks * group.runs // group.pages_per_slab) for group in self.cache.layout.of("media")
        )
        return max(slabs, self._slabs_for(length) + seeing)

    def _bytes_of(self, request: Request) -> int:
        """The same in bytes, by the pages alone."""
        layout, classes = self.cache.layout, self.cache.inspect.size_classes
        pages = self._pages_for(request.limit)
        each = [count * (layout.slab_bytes / cls.per_slab) for cls, count in zip(classes, pages, strict=True)]
        length, media = self._seeing(request)
        needed = int(np.ceil(np.sum(each, 0).max()))
        return max(needed, layout.slab_bytes_for(length, media)) if media else needed

    def _seeing(self, request: Request) -> tuple[int, list[int]]:
        """How long a request is when it holds the most pages of images, and the tokens of those: of all of them at its end
        where they last, and else of the largest alone, while that is computed."""
        sight = request.images
        if sight is None:
            return 0, []
        if self.cache.media_outlives_prompt:
            return request.limit, list({item.digest: item.tokens for item in sight.media}.values())
        return sight.media[-1].stop, [max(item.tokens for item in sight.media)]

    def _most_slabs(self, length: int) -> int:
        """The most slabs that a sequence fills on its way to `length` tokens. Costs milliseconds where layers have windows."""
        pages = self._pages_for(length)
        slabs = [
            -(-count // cls.per_slab)
            for cls, count in zip(self.cache.inspect.size_classes, pages, strict=True)
        ]
        return int(np.sum(slabs, 0).max())

    def _pages_for(self, length: int) -> list[npt.NDArray[np.int64]]:
        """The pages of each class that a sequence has at the lengths on its way to `length` tokens. (Windows are widest
        before its end; without them the end alone is told.)"""
        layout = self.cache.layout
        windowed = any(group.spec.visibility.windowed for group in layout.of("token"))
        ends = np.arange(1 if windowed else length, length + 1)
        pages = [np.zeros(len(ends), np.int64) for _ in self.cache.inspect.size_classes]
        for group in (*layout.of("token"), *layout.of("state")):
            units = np.ones_like(ends)
            if group.spec.unit == "token":
                left = group.spec.visibility.first_visible_each(ends - 1) // layout.block_tokens
                units = -(-ends // layout.block_tokens) - left
            pages[self.cache.class_of[group.index]] += units * group.runs
        return pages
