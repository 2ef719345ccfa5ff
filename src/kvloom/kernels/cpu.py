"""The small operations of a step on a CPU, one call each, where the package was built with a compiler (`_cpu.c`).

A step of a small model is mostly the price of calling torch: each of these is one call for what would be five to ten, and
attention reads pages where they lie. float32 alone; what is not taken here (`takes` says no) runs in torch, which gives the
same up to rounding. Knows no modules and no plans.

| function    | takes                                                   | gives                                         |
|-------------|---------------------------------------------------------|-----------------------------------------------|
| `rms_norm`  | x [..., dim]                                            | the same shape, dense                         |
| `gated`     | x [..., 2 * dim]                                        | [..., dim]                                    |
| `rotate_`   | x [tokens, heads, dim], cos, sin [tokens, dim]          | x, turned in place                            |
| `put`       | pages [pages, block, heads, dim], new [tokens, heads, dim] | nothing: tokens are at their places         |
| `decode`    | q [rows, heads, dim], pages, tables, what each row sees | [rows, heads, dim of v]                       |
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import numpy.typing as npt
import torch

try:
    from . import _cpu
except ImportError:  # built without a compiler
    _cpu = None  # type: ignore[assignment]

__all__ = ["decode", "gated", "put", "rms_norm", "rotate_", "takes"]

Ints = npt.NDArray[np.int64]
SHARED_WORK = 1 << 20
"""Products of a call of `decode` from which it is done by several threads: half a millisecond for one."""


def takes(*tensors: torch.Tensor) -> bool:
    """Whether these can be computed here: float32 on a CPU, dense in their last dimension."""
    return _cpu is not None and all(
        x.is_cpu and x.dtype == torch.float32 and x.stride(-1) == 1 for x in tensors
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, gemma: bool) -> torch.Tensor:
    """See `fused.rms_norm`."""
    if not x.is_contiguous():
        x = x.contiguous()
    out, dim = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // max(dim, 1)
    _cpu.rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, dim, dim, eps, float(gemma))
    return out


def gated(x: torch.Tensor, tanh: bool) -> torch.Tensor:
    """See `fused.gated`."""
    if not x.is_contiguous():
        x = x.contiguous()
    dim = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], dim))
    _cpu.gated(x.data_ptr(), out.data_ptr(), out.numel() // max(dim, 1), dim, tanh)
    return out


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Turn x [tokens, heads, dim], any strides but dense in dim, into `out` ([tokens, heads, dim], dense)."""
    tokens, heads, dim = x.shape
    if out is None:
        out = x.new_empty((tokens, heads, dim))
    _cpu.rotate(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), tokens, heads, dim // 2, x.stride(0), x.stride(1)
    )  # fmt: skip
    return out


def put(pages: torch.Tensor, new: torch.Tensor, page: torch.Tensor, place: torch.Tensor) -> None:
    """`pages[page, place] = new`; page and place are int64 and dense."""
    tokens, heads, dim = new.shape
    _cpu.put(
        pages.data_ptr(), new.data_ptr(), page.data_ptr(), place.data_ptr(), tokens, heads, dim,
        *pages.stride()[:3], *new.stride()[:2],
    )  # fmt: skip


def decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tables: torch.Tensor,
    firsts: Ints,
    lengths: Ints,
    scale: float,
) -> torch.Tensor:
    """Attention of one query a row, over tokens `firsts` to `lengths` - 1 of its pages; `tables` are int32, dense in their
    last dimension, and name a page for each of them. Every row sees something."""
    rows, heads, dim = q.shape
    kv_heads, v_dim = k.shape[2], v.shape[3]
    out = q.new_empty((rows, heads, v_dim))
    seen = lengths - firsts
    longest, units = int(seen.max(initial=1)), rows * kv_heads
    given = (q.data_ptr(), k.data_ptr(), v.data_ptr(), tables.data_ptr(), firsts.ctypes.data, lengths.ctypes.data, out.data_ptr())
    shape = (heads, kv_heads, dim, v_dim, k.shape[1])
    strides = (q.stride()[:2], k.stride()[:3], v.stride()[:3], tables.stride(0), longest, scale)
    parts = _parts(seen, kv_heads, heads * (dim + v_dim))
    if len(parts) == 2:
        _cpu.decode(*given, 0, units, *shape, *strides)
        return out
    later = [
        _threads().submit(_cpu.decode, *given, begin, end, *shape, *strides)
        for begin, end in zip(parts[1:-1], parts[2:], strict=True)
    ]
    _cpu.decode(*given, parts[0], parts[1], *shape, *strides)
    wait(later)
    for each in later:
        each.result()
    return out


def _parts(seen: Ints, kv_heads: int, products: int) -> list[int]:
    """Bounds of the units (a row's heads one after the other) of each thread, of about equal work."""
    threads, units = torch.get_num_threads(), len(seen) * kv_heads
    total = int(seen.sum()) * products
    count = min(threads, units, total // SHARED_WORK)
    if count < 2:
        return [0, units]
    done = seen.repeat(kv_heads).cumsum()
    inner = np.searchsorted(done, done[-1] * np.arange(1, count) / count) + 1
    return [0, *(int(bound) for bound in inner if bound < units), units]


_POOL: list[ThreadPoolExecutor] = []


def _threads() -> ThreadPoolExecutor:
    if not _POOL:
        _POOL.append(ThreadPoolExecutor(max(1, torch.get_num_threads() - 1), "kvloom-attention"))
    return _POOL[0]
