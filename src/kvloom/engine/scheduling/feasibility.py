"""Feasibility: refuses requests that can never run, before they are queued. The error states the numbers.

Uses only the pool layout. It does not depend on free pages or on the order of requests.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvloom.core import KVCache
from kvloom.engine.request import Request

__all__ = ["Feasibility"]


class Feasibility:
    """Computes the largest memory that a request needs in one pool, in steps of up to `token_budget` prompt tokens."""

    def __init__(self, cache: KVCache, token_budget: int) -> None:
        self.cache, self.token_budget = cache, token_budget
        self._slabs_for = lru_cache(4096)(self._most_slabs)

    def check(self, request: Request, reachable_slabs: int = 0) -> None:
        """Raise ValueError for a request that can never run, even after the pool has grown to `reachable_slabs`."""
        slab = self.cache.layout.slab_bytes
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
                raise ValueError(
                    f"{len(request.prompt)} prompt tokens and max_tokens {request.params.max_tokens} need {needed:,} bytes "
                    f"of pages, but the {owner} {limit:,}: shorten the prompt or lower max_tokens"
                )
        if request.images is not None and request.images.min_step_tokens > self.token_budget:
            raise ValueError(
                f"an image of {request.images.min_step_tokens} tokens does not fit one step of {self.token_budget} tokens: "
                "raise token_budget"
            )

    def _slabs_of(self, request: Request) -> int:
        """Return the largest number of slabs that a request uses, at its end or while it computes its largest image."""
        slabs = self._slabs_for(request.limit)
        if request.images is None:
            return slabs
        length, media = self._image_peak(request)
        blocks = sum(-(-tokens // self.cache.block_tokens) for tokens in media)
        image_slabs = sum(
            -(-blocks * group.runs // group.pages_per_slab) for group in self.cache.layout.of("media")
        )
        return max(slabs, self._slabs_for(length) + image_slabs)

    def _bytes_of(self, request: Request) -> int:
        """Return the largest number of bytes that a request's pages use."""
        layout, classes = self.cache.layout, self.cache.inspect.size_classes
        pages = self._pages_for(request.limit)
        each = [count * (layout.slab_bytes / cls.per_slab) for cls, count in zip(classes, pages, strict=True)]
        length, media = self._image_peak(request)
        needed = int(np.ceil(np.sum(each, 0).max()))
        return max(needed, layout.slab_bytes_for(length, media)) if media else needed

    def _image_peak(self, request: Request) -> tuple[int, list[int]]:
        """Return the length at which a request uses the most image pages, and the tokens of these images. If image
        pages stay in use after the prompt, this is the end of the request with all images. Otherwise it is the
        largest image, while it is computed.
        """
        images = request.images
        if images is None:
            return 0, []
        if self.cache.media_outlives_prompt:
            return request.limit, list({item.digest: item.tokens for item in images.media}.values())
        return images.media[-1].stop, [max(item.tokens for item in images.media)]

    def _most_slabs(self, length: int) -> int:
        """Return the largest number of slabs that a sequence uses while it grows to `length` tokens. Takes
        milliseconds with windows.
        """
        pages = self._pages_for(length)
        slabs = [
            -(-count // cls.per_slab)
            for cls, count in zip(self.cache.inspect.size_classes, pages, strict=True)
        ]
        return int(np.sum(slabs, 0).max())

    def _pages_for(self, length: int) -> list[npt.NDArray[np.int64]]:
        """Return the pages of each class at every length up to `length`. Without windows, only at `length`.

        With windows, a sequence may use the most pages before its end.
        """
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
