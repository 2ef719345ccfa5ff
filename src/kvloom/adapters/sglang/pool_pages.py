"""The bytes of pages in one of SGLang's host pools. A pool gives access to its pages in one of three ways:

    parts   the pool states the addresses of a page's parts; the parts are copied one after the other
    flat    the pool returns and accepts a page as one tensor
    none    the pool has no bytes of its own: it only contains indices of pages in other pools

A pool that states no addresses uses flat pages.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvloom.tiers import Form
from kvloom.tiers.host import copy_pages

__all__ = ["PoolPages"]

Offsets = npt.NDArray[np.int64]
_GEOMETRY = (
    *("start_layer", "end_layer", "layer_num", "head_num", "head_dim", "v_head_dim", "kv_cache_dim"),
    *("num_mamba_layers", "temporal_dtype", "temporal_state_shape", "conv_dtype", "conv_state_shapes"),
    *("storage_format_tag", "dcp_size"),
)
"""Attributes of pools that change the meaning of a page's bytes."""


class PoolPages:
    """Copies pages between one of SGLang's host pools and kvloom's host memory. `shard` describes the part of the model
    that the pool stores. With `flat`, a page is read and written as one tensor. Raises ValueError if the pool does not
    give access to its pages.
    """

    def __init__(self, name: str, pool: Any, shard: str, flat: bool = False) -> None:
        self.name, self.pool = str(name), pool
        self.page_tokens = int(getattr(pool, "logical_page_size", None) or getattr(pool, "page_size", 1) or 1)
        self._sizes = np.zeros(0, np.int64)
        self.is_flat = flat or not self._find_parts()
        size = self._flat_bytes() if self.is_flat else int(self._sizes.sum())
        self.form = self._form(shard, size) if size else None
        """The form of the pages. None if the pool has no bytes."""

    def read(self, indices: torch.Tensor, pages: Offsets, arena: npt.NDArray[np.uint8], at: Offsets) -> None:
        """Copy pages from the pool to the offsets `at` of the arena (kvloom's host memory). `indices` are the token
        slots of all pages of SGLang's call, page by page. `pages` selects the pages to copy, by their index in the
        call.
        """
        if self.is_flat:
            for index, offset in self._first_slots(indices, pages, at):
                data = as_bytes(self.pool.get_data_page(index, flat=True))
                arena[offset : offset + len(data)] = data
            return
        for pool, ours, memory, size in self._copies(indices, pages, at):
            copy_pages(arena, ours, memory, pool, size)

    def write(self, indices: torch.Tensor, pages: Offsets, arena: npt.NDArray[np.uint8], at: Offsets) -> None:
        """Copy pages from the arena (kvloom's host memory) to the pool. The arguments are those of `read`."""
        if self.is_flat:
            for index, offset in self._first_slots(indices, pages, at):
                page = self.pool.get_dummy_flat_data_page()
                target = as_bytes(page)
                target[:] = arena[offset : offset + len(target)]
                self.pool.set_from_flat_data_page(index, page)
            return
        for pool, ours, memory, size in self._copies(indices, pages, at):
            copy_pages(memory, pool, arena, ours, size)

    def _copies(
        self, indices: torch.Tensor, pages: Offsets, at: Offsets
    ) -> list[tuple[Offsets, Offsets, npt.NDArray[np.uint8], int]]:
        """Return the copies that transfer pages, as one batch for each size of parts. The arguments are those of
        `read`. A page consists of parts, which may have different sizes. A batch has four values: the offsets of the
        parts in the pool's memory, their offsets in the arena (kvloom's host memory), the pool's memory, and the size
        of a part in bytes.
        """
        if not len(pages):
            return []
        slots = indices.reshape(-1, self.page_tokens)[torch.from_numpy(pages)].reshape(-1)
        addresses = np.asarray(self.pool.get_page_buffer_meta(slots)[0], np.int64).reshape(len(pages), -1)
        first = int(addresses.min())
        end = int((addresses + self._sizes).max())
        # A view from the first to the last part. Only the parts themselves are accessed.
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * (end - first)).from_address(first))
        starts = np.cumsum(self._sizes) - self._sizes
        copies = []
        for size in np.unique(self._sizes).tolist():
            these = np.flatnonzero(self._sizes == size)
            pool = (addresses[:, these] - first).reshape(-1)
            copies.append((pool, (at[:, None] + starts[these]).reshape(-1), memory, int(size)))
        return copies

    def _first_slots(self, indices: torch.Tensor, pages: Offsets, at: Offsets) -> list[tuple[int, int]]:
        """Return, for each page, its first token slot and its offset in the arena (kvloom's host memory). The arguments
        are those of `read`."""
        first = indices.reshape(-1, self.page_tokens)[torch.from_numpy(pages), 0]
        return list(zip(first.tolist(), at.tolist(), strict=True))

    def _find_parts(self) -> bool:
        """Set `_sizes` to the sizes of a page's parts. Return False if the pool does not state the addresses of the
        parts."""
        try:
            meta = self.pool.get_page_buffer_meta(torch.arange(self.page_tokens))
        except (AttributeError, NotImplementedError, ValueError):
            return False
        if not meta or not meta[1]:
            return False
        self._sizes = np.asarray(meta[1], np.int64)
        return True

    def _flat_bytes(self) -> int:
        try:
            page = self.pool.get_dummy_flat_data_page()
        except NotImplementedError as error:
            raise ValueError(
                f"SGLang's host pool {self.name} ({type(self.pool).__name__}, layout {self.pool.layout}) gives no "
                f"access to its pages ({error}): use another --hicache-mem-layout, or no storage backend"
            ) from error
        return int(page.numel() * page.element_size())

    def _form(self, shard: str, size: int) -> Form:
        pool = self.pool
        facts = {name: str(getattr(pool, name)) for name in _GEOMETRY if hasattr(pool, name)}
        return Form(
            dtype=str(getattr(pool, "dtype", None)),
            order=f"sglang {pool.layout} {'flat' if self.is_flat else self._sizes.tolist()}",
            page_bytes=size,
            run_bytes=size,
            shard=shard,
            layout=f"{self.name} {type(pool).__name__} {self.page_tokens} tokens {facts}",
        )


def as_bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return the bytes of a contiguous tensor in host memory, without a copy."""
    found: npt.NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return found
