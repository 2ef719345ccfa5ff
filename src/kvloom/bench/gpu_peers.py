"""Attention libraries as peers of `kvloom bench kernels`, if they are installed.

Each function returns callables by the name of the library. A callable computes one layer over kvloom's pages.
FlashInfer plans its work before the callables run, so the time of planning is not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import pairwise
from typing import Any

import torch

__all__ = ["Call", "decode_peers", "prefill_peers", "shared_peers", "versions"]

Call = Callable[[], Any]
WORKSPACE = 512 << 20
SPLITS = 32
"""Largest number of parts into which FlashAttention-3 may split a sequence under CUDA graphs, as in vLLM. The kernel
chooses the number on the device."""


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        return None


def versions() -> dict[str, str]:
    """Return the installed libraries and their versions."""
    found = {}
    for label, name in (("FlashAttention-3", "flash_attn_interface"), ("FlashInfer", "flashinfer")):
        module = _library(name)
        if module is not None:
            found[label] = str(getattr(module, "__version__", "installed"))
    return found


def _flash3(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    longest: int,
    splits: int,
    window: int | None = None,
) -> Call | None:
    library = _library("flash_attn_interface")
    if library is None:
        return None
    options: dict[str, Any] = {}
    if splits:
        options["scheduler_metadata"] = library.get_scheduler_metadata(
            lengths.numel(), longest, tables.shape[1] * k.shape[1], q.shape[1], k.shape[2], q.shape[2], lengths,
            qkv_dtype=q.dtype, cu_seqlens_q=starts, page_size=k.shape[1], causal=True, num_splits=splits,
        )  # fmt: skip
    if window is not None:
        options["window_size"] = (window - 1, 0)

    def call() -> Any:
        return library.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lengths, page_table=tables, cu_seqlens_q=starts, max_seqlen_q=longest,
            causal=True, num_splits=splits, **options,
        )  # fmt: skip

    return call


def _page_lists(
    tables: torch.Tensor, lengths: list[int], block: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return block tables in FlashInfer's format, as three tensors:

    - the bounds of each sequence in the list of page ids,
    - the page ids of all sequences,
    - the number of tokens in the last page of each sequence."""
    blocks = [-(-length // block) for length in lengths]
    bounds = torch.tensor([0, *blocks]).cumsum(0).int()
    ids = torch.cat([tables[row, :count] for row, count in enumerate(blocks)])
    last = torch.tensor([(length - 1) % block + 1 for length in lengths]).int()
    return bounds, ids, last


def decode_peers(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    lengths: list[int],
    window: int | None = None,
) -> dict[str, Call]:
    """Return the decode call of each installed library, for bf16 pages and one query per sequence."""
    calls: dict[str, Call] = {}
    flash = _flash3(
        q, k, v, tables, starts, torch.tensor(lengths, dtype=torch.int32, device=q.device), 1, SPLITS, window
    )
    if flash is not None:
        calls["FlashAttention-3"] = flash
    flashinfer = _library("flashinfer")
    if flashinfer is not None and window is None:
        block, heads, kv = k.shape[1], q.shape[1], k.shape[2]
        bounds, ids, last = _page_lists(tables, lengths, block)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(WORKSPACE, dtype=torch.uint8, device=q.device), "NHD", use_tensor_cores=True,
            use_cuda_graph=True, paged_kv_indptr_buffer=torch.zeros_like(bounds, device=q.device),
            paged_kv_indices_buffer=torch.zeros_like(ids),
            paged_kv_last_page_len_buffer=torch.zeros_like(last, device=q.device),
        )  # fmt: skip
        wrapper.plan(
            bounds, ids, last, heads, kv, q.shape[2], block, q_data_type=q.dtype, kv_data_type=k.dtype
        )
        out = torch.empty_like(q)
        calls["FlashInfer"] = partial(wrapper.run, q, (k, v), out=out)
    return calls


def shared_peers(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prefix: torch.Tensor, own: torch.Tensor
) -> dict[str, Call]:
    """Return calls of FlashInfer's two-level cascade. All sequences share the pages `prefix`, and each sequence has
    its own pages `own` ([sequences, pages]). All pages are full.

    Return one call with FlashInfer's default kernels, and one with its older kernels, which split long prefixes.
    """
    flashinfer = _library("flashinfer")
    if flashinfer is None:
        return {}
    rows, device, block = q.shape[0], q.device, k.shape[1]

    def ints(values: Any) -> torch.Tensor:
        return torch.as_tensor(values, dtype=torch.int32, device=device)

    queries = [ints([0, rows]), ints(range(rows + 1))]
    bounds = [ints([0, len(prefix)]), ints(range(rows + 1)) * own.shape[1]]
    ids = [prefix.int(), own.reshape(-1).int()]
    last = [ints([block]), torch.full_like(queries[1][1:], block)]
    calls: dict[str, Call] = {}
    for label, backend in (("FlashInfer cascade", None), ("FlashInfer cascade, fa2", "fa2")):
        wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(
            2, torch.zeros(WORKSPACE, dtype=torch.uint8, device=device), "NHD", use_cuda_graph=True,
            qo_indptr_buf_arr=[x.clone() for x in queries], paged_kv_indptr_buf_arr=[x.clone() for x in bounds],
            paged_kv_indices_buf_arr=[x.clone() for x in ids],
            paged_kv_last_page_len_buf_arr=[x.clone() for x in last],
        )  # fmt: skip
        if backend is not None:
            for part in wrapper._batch_prefill_wrappers:
                part._backend = backend
        wrapper.plan(
            queries, bounds, ids, last, q.shape[1], k.shape[2], q.shape[2], block, causal=True,
            q_data_type=q.dtype, kv_data_type=k.dtype,
        )  # fmt: skip
        calls[label] = partial(wrapper.run, q, (k, v))
    return calls


def prefill_peers(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tables: torch.Tensor,
    starts: list[int],
    lengths: list[int],
    window: int | None = None,
) -> dict[str, Call]:
    """Return the causal prefill call of each installed library. The queries of all sequences are packed into one
    tensor, and K and V are in pages."""
    device, calls = q.device, dict[str, Call]()
    longest = max(end - begin for begin, end in pairwise(starts))
    begins = torch.tensor(starts, dtype=torch.int32, device=device)
    flash = _flash3(
        q, k, v, tables, begins, torch.tensor(lengths, dtype=torch.int32, device=device), longest, 0, window
    )
    if flash is not None:
        calls["FlashAttention-3"] = flash
    flashinfer = _library("flashinfer")
    if flashinfer is not None and window is None:
        bounds, ids, last = _page_lists(tables, lengths, k.shape[1])
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            torch.zeros(WORKSPACE, dtype=torch.uint8, device=device), "NHD"
        )
        wrapper.plan(
            begins, bounds.to(device), ids, last.to(device), q.shape[1], k.shape[2], q.shape[2], k.shape[1],
            causal=True, q_data_type=q.dtype, kv_data_type=k.dtype,
        )  # fmt: skip
        out = torch.empty_like(q)
        calls["FlashInfer"] = partial(wrapper.run, q, (k, v), out=out)
    return calls
