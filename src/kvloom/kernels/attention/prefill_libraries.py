"""External attention libraries that read pages in place. Prefill uses a library if it is installed and faster than
our kernels.

| library          | found as                                                | supported attention                 |
|------------------|---------------------------------------------------------|-------------------------------------|
| FlashAttention-3 | `flash_attn_interface`, `vllm.vllm_flash_attn` or `fa3` | full, sliding, softcap; dims to 256 |
| FlashInfer       | `flashinfer`                                            | full; dims 64, 128, 256             |

All libraries are optional. Steps of similar size form a size class. The first step of a size class times all
candidates on the tensors of the step, which takes milliseconds. Later steps of the class reuse the result.
`KVLOOM_ATTENTION_LIBRARIES` lists the allowed modules, separated by commas. An empty value allows none. This module
does not depend on our plans and kernels.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import torch

from kvloom.core import Visibility
from kvloom.kernels.device import upload

from .prefill_backends import HALF_DTYPES, QueryRows
from .shape import Shape

__all__ = [
    "Library",
    "LibraryStep",
    "PagedCall",
    "Result",
    "installed_libraries",
    "measure_fastest",
    "size_class",
]

ENVIRONMENT_VARIABLE = "KVLOOM_ATTENTION_LIBRARIES"
WORKSPACE = 384 << 20
MEASURED_RUNS = 3
"""Number of timed runs of each candidate, after one warm-up run."""
MAX_ERROR = 0.02
"""Largest allowed relative difference between the outputs of a library and our outputs. Rounding in half precision
stays below this limit."""

Result = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class PagedCall:
    """The inputs and the output buffer of one layer's attention. If the buffer is None, the library allocates it."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tables: torch.Tensor
    scale: float
    span: Visibility
    softcap: float | None
    out: torch.Tensor | None = None


@dataclass
class LibraryStep:
    """The sequences of a step, on the host and on the device, and the plan that each library made for them."""

    rows: QueryRows
    device: torch.device
    plans: dict[Hashable, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.starts = upload(self.rows.starts.astype(np.int32), self.device)
        self.lengths = upload(self.rows.lengths.astype(np.int32), self.device)
        self.most_queries = int(self.rows.queries.max(initial=0))
        self.most_tokens = int(self.rows.lengths.max(initial=0))


class Library(Protocol):
    """An attention library. It computes causal attention of packed queries over pages. The queries of a sequence
    belong to its last tokens."""

    name: str

    def supports(self, shape: Shape, dtype: torch.dtype, span: Visibility, softcap: float | None) -> bool:
        """Return whether the library supports layers with these properties on this machine."""
        ...

    def attend(self, step: LibraryStep, call: PagedCall) -> Result:
        """Return outputs [queries, heads, v_dim] and natural log-sum-exps [queries, heads]."""
        ...


class FlashAttention3:
    """FlashAttention-3 for Hopper. Several packages contain it under different names."""

    def __init__(self, module: Any) -> None:
        self.module, self.name = module, "FlashAttention-3"

    def supports(self, shape: Shape, dtype: torch.dtype, span: Visibility, softcap: float | None) -> bool:
        return (
            span.kind in ("full", "sliding")
            and dtype in HALF_DTYPES
            and shape.dtype == dtype
            and shape.k_dim == shape.v_dim
            and shape.k_dim in (64, 96, 128, 192, 256)
            and torch.cuda.get_device_capability() == (9, 0)
        )

    def attend(self, step: LibraryStep, call: PagedCall) -> Result:
        tables, module = call.tables[: len(step.rows.lengths)], self.module
        options: dict[str, Any] = {
            "cu_seqlens_q": step.starts,
            "max_seqlen_q": step.most_queries,
            "softmax_scale": call.scale,
            "causal": True,
            "window_size": (call.span.size - 1, 0) if call.span.kind == "sliding" else (-1, -1),
            "softcap": call.softcap or 0.0,
        }
        if module.__name__ == "flash_attn_interface":
            found = module.flash_attn_with_kvcache(
                call.q, call.k, call.v, cache_seqlens=step.lengths, page_table=tables,
                return_softmax_lse=True, **options,
            )  # fmt: skip
            if not isinstance(found, tuple):  # a different package with this name
                raise TypeError("flash_attn_interface returned no log-sum-exps although they were requested")
            return found[0] if call.out is None else call.out.copy_(found[0]), found[1].transpose(0, 1)
        options |= {"max_seqlen_k": step.most_tokens, "seqused_k": step.lengths, "out": call.out}
        if module.__name__ == "fa3":
            out, lse = module.attention(call.q, call.k, call.v, page_table=tables, return_lse=True, **options)
        else:
            out, lse = module.flash_attn_varlen_func(
                call.q, call.k, call.v, block_table=tables, return_softmax_lse=True, fa_version=3, **options
            )
        return out, lse.transpose(0, 1)


class FlashInfer:
    """FlashInfer's prefill over pages. Its plan is made once per step."""

    def __init__(self, module: Any) -> None:
        self.module, self.name = module, "FlashInfer"
        self._workspace: torch.Tensor | None = None

    def supports(self, shape: Shape, dtype: torch.dtype, span: Visibility, softcap: float | None) -> bool:
        return (
            span.kind == "full"
            and softcap is None
            and dtype in HALF_DTYPES
            and shape.dtype == dtype
            and shape.k_dim == shape.v_dim
            and shape.k_dim in (64, 128, 256)
        )

    def attend(self, step: LibraryStep, call: PagedCall) -> Result:
        k, v = call.k, call.v
        by_head = k.stride(1) < k.stride(2)
        key = self.name, call.tables.data_ptr(), call.q.dtype, call.scale, by_head, k.shape[1:]
        if key not in step.plans:
            step.plans[key] = self._plan(step, call, "HND" if by_head else "NHD")
        if by_head:
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        out, lse = step.plans[key].run(call.q, (k, v), out=call.out, return_lse=True)
        return out, lse * math.log(2)

    def _plan(self, step: LibraryStep, call: PagedCall, order: str) -> Any:
        if self._workspace is None:
            self._workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=step.device)
        block, heads, dim = call.k.shape[1:]
        starts, lengths = step.rows.starts, step.rows.lengths
        pages = -(-lengths // block)
        bounds = np.concatenate(([0], np.cumsum(pages)))
        within = np.arange(bounds[-1]) - bounds[:-1].repeat(pages)
        places = np.arange(len(pages)).repeat(pages) * call.tables.stride(0) + within
        flat = call.tables.as_strided((int(places.max(initial=0)) + 1,), (1,))
        plan = self.module.BatchPrefillWithPagedKVCacheWrapper(self._workspace, order)
        plan.plan(
            torch.from_numpy(starts.astype(np.int32)), torch.from_numpy(bounds.astype(np.int32)),
            flat.index_select(0, upload(places, step.device)),
            torch.from_numpy((lengths - (pages - 1) * block).astype(np.int32)),
            call.q.shape[1], heads, dim, block, causal=True, sm_scale=call.scale,
            q_data_type=call.q.dtype, kv_data_type=call.k.dtype,
        )  # fmt: skip
        return plan


MODULES: dict[str, Callable[[Any], Library]] = {
    "flash_attn_interface": FlashAttention3,
    "vllm.vllm_flash_attn": FlashAttention3,
    "fa3": FlashAttention3,
    "flashinfer": FlashInfer,
}


@lru_cache(maxsize=1)
def installed_libraries() -> tuple[Library, ...]:
    """Return the allowed libraries that can be imported, at most one of each kind. The first call takes seconds."""
    wanted = os.environ.get(ENVIRONMENT_VARIABLE)
    names = list(MODULES) if wanted is None else [name.strip() for name in wanted.split(",") if name.strip()]
    unknown = [name for name in names if name not in MODULES]
    if unknown:
        raise ValueError(f"{ENVIRONMENT_VARIABLE} names {', '.join(unknown)}; known are {', '.join(MODULES)}")
    found: dict[str, Library] = {}
    for name in names:
        try:
            library = MODULES[name](import_module(name))
        except ModuleNotFoundError:
            continue
        # the package was built for a different torch or GPU
        except (ImportError, OSError, RuntimeError, AttributeError) as error:
            warnings.warn(f"{name} is installed but cannot be used: {error}", RuntimeWarning, stacklevel=2)
            continue
        found.setdefault(library.name, library)
    return tuple(found.values())


def size_class(
    shape: Shape, dtype: torch.dtype, span: Visibility, softcap: float | None, rows: QueryRows
) -> Hashable:
    """Return the key of the step's size class. Two steps have the same key if their layers have the same properties,
    and if their sizes lie between the same two powers of two.
    """
    queries = rows.queries
    sizes = (
        int((queries > 0).sum()),
        int(queries.sum()),
        int(queries.max(initial=0)),
        int(rows.lengths.sum()),
    )
    return shape, dtype, span, softcap is None, tuple(size.bit_length() for size in sizes)


_FASTEST: dict[Hashable, str] = {}


def measure_fastest(
    key: Hashable, candidates: Mapping[str, Callable[[], Result]], device: torch.device
) -> str:
    """Return the name of the fastest candidate for the size class `key`. The first call for a size class times all
    candidates and stores the result.

    A candidate is excluded with a warning if it fails, or if its result differs from the result of the first
    candidate. During graph capture nothing is timed or stored, and the first candidate is returned.
    """
    if key in _FASTEST and _FASTEST[key] in candidates:
        return _FASTEST[key]
    first, *others = candidates
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return first
    expected = candidates[first]()[0].clone()
    took = {first: _seconds(candidates[first], device)}
    for name in others:
        try:
            off = float((candidates[name]()[0] - expected).float().norm() / expected.float().norm())
            if not off <= MAX_ERROR:
                raise ValueError(f"its outputs differ by {off:.1%}")
            took[name] = _seconds(candidates[name], device)
        except (RuntimeError, ValueError, TypeError) as error:
            warnings.warn(f"{name} is left out for {key}: {error}", RuntimeWarning, stacklevel=2)
    _FASTEST[key] = min(took, key=took.__getitem__)
    return _FASTEST[key]


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Return the shortest time of MEASURED_RUNS calls, in seconds."""
    call()
    best = math.inf
    for _ in range(MEASURED_RUNS):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            call()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - start)
    return best
