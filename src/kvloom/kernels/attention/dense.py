"""Attention over packed K and V outside pages, and the merge of two attention results.

    out, lse = attend_dense(q, k, v, starts)                      # causal, each sequence over its own new tokens
    out, lse = merge_outputs(out, lse, cached_out, cached_lse)    # merged with attention over the cached tokens

MLA prefill needs both functions. New tokens are expanded to full heads (dims 192 and 128), while cached tokens are
latents in pages. CPU tensors run in torch. CUDA tensors run in torch's cuDNN operator or in a Triton kernel. This
module does not depend on pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from .mask import FULL
from .prefill_backends import (
    GATHERED_DIMS,
    HALF_DTYPES,
    MIN_CUDNN_TILES,
    Ints,
    choose_gathered_tile,
    span_list,
)

__all__ = ["attend_dense", "cudnn_attend", "cudnn_supports", "merge_many", "merge_outputs", "supports_dense"]


def attend_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: Sequence[int] | Ints,
    k_starts: Sequence[int] | Ints | None = None,
    causal: bool = True,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention of packed q [tokens, heads, d] over packed k and v [tokens, kv_heads, dim]. Return the outputs
    and their natural log-sum-exps. With causal attention, the last query of a sequence sees all its keys.

    - `starts` ([sequences + 1], on the host) contains the index in q of each sequence's first query.
    - `k_starts` contains the same for k and v, and defaults to `starts`.
    - `backend` ("descriptors" or "cudnn") overrides the choice on a GPU.
    """
    first = np.asarray(starts, dtype=np.int64)
    k_first = first if k_starts is None else np.asarray(k_starts, dtype=np.int64)
    _check(q, k, v, first, k_first)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    if out is None:
        out = q.new_empty((*q.shape[:2], v.shape[2]))
    if lse is None:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if backend is None:
        backend = _choose_backend(q, k, v, first, k_first, causal, sinks)
    if backend == "torch":
        return _attend_torch(q, k, v, first, k_first, causal, scale, sinks, out, lse)
    if backend == "cudnn":
        batch = len(first) - 1
        parts = (x.view(batch, -1, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        found, logs = cudnn_attend(*parts, causal=causal, scale=scale)
        out.copy_(found.transpose(1, 2).flatten(0, 1))
        lse.copy_(logs.transpose(1, 2).flatten(0, 1))
        return out, lse
    from . import prefill_launch

    tile = choose_gathered_tile(k.shape[2], FULL)
    queries, tokens = np.diff(first), np.diff(k_first)
    group = q.shape[1] // k.shape[1]
    blocks = span_list(
        queries, first[:-1], tokens - queries, k_first[:-1], tokens, group, tile.rows, causal, FULL
    )
    listed = torch.from_numpy(blocks).to(q.device, non_blocking=True)
    prefill_launch.attend_gathered(
        tile, listed, q, k.contiguous(), v.contiguous(), scale, causal, FULL, sinks, out, lse
    )
    return out, lse


def supports_dense(q: torch.Tensor, v_dim: int) -> bool:
    """Return whether a GPU kernel supports queries like `q` and values of `v_dim` dims."""
    return q.is_cuda and q.dtype in HALF_DTYPES and (q.shape[2], v_dim) in GATHERED_DIMS


def merge_outputs(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the results of attention over two disjoint sets of tokens. Each result is an attention output [tokens,
    heads, dim] and its natural log-sum-exp [tokens, heads]. The merged result has the same shapes.

    A log-sum-exp of minus infinity marks an input without visible tokens. Such an input does not change the result.
    `out` may be one of the inputs.
    """
    if out_a.shape != out_b.shape or lse_a.shape != lse_b.shape or lse_a.shape != out_a.shape[:2]:
        raise ValueError(
            f"parts {tuple(out_a.shape)}, {tuple(out_b.shape)} with log-sum-exps {tuple(lse_a.shape)}, "
            f"{tuple(lse_b.shape)} are not [tokens, heads, dim] and [tokens, heads] of one size"
        )
    if out is None:
        out = torch.empty_like(out_a)
    if lse is None:
        lse = torch.empty_like(lse_a)
    if out_a.is_cuda:
        from . import prefill_launch

        places = _one_place(out_a.shape[0], out_a.device)
        prefill_launch.merge_parts(
            out_a[None], lse_a[None], out_b[None], lse_b[None], places, out_a.shape[0], None, out, lse
        )
        return out, lse
    top = torch.maximum(lse_a, lse_b)
    safe = top.masked_fill(top.isneginf(), 0.0)
    a, b = (lse_a - safe).exp(), (lse_b - safe).exp()
    total = a + b
    mixed = out_a * a[..., None].to(lse.dtype) + out_b * b[..., None].to(lse.dtype)
    out.copy_(mixed / total.masked_fill(total == 0, 1.0)[..., None])
    lse.copy_(safe + total.log())
    return out, lse


def merge_many(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    """Merge the results of attention over several disjoint sets of tokens: outputs [sets, tokens, heads, dim] and natural
    log-sum-exps [sets, tokens, heads]. Return the merged outputs. Every query must see a token of one of the sets."""
    weights = (lses - lses.logsumexp(0)).exp_()
    return (outs * weights[..., None]).sum(0)


def cudnn_attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run torch's cuDNN attention over tensors [batch, heads, tokens, dim] with any strides. There may be fewer KV
    heads than query heads.

    Return outputs with the layout of q, and natural log-sum-exps [batch, heads, tokens]. With `causal`, query i
    sees the keys 0 to i.
    """
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return found[0], found[1].reshape(q.shape[:3])


@lru_cache(maxsize=64)
def cudnn_supports(
    heads: int, kv_heads: int, k_dim: int, v_dim: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Return whether cuDNN is available and supports these numbers and dimensions of heads. The first call for a
    shape tries cuDNN on 128 tokens.
    """
    if device.type != "cuda" or dtype not in HALF_DTYPES or (k_dim, v_dim) not in GATHERED_DIMS:
        return False
    if not hasattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention"):
        return False
    tried = (
        torch.zeros((1, 128, n, dim), dtype=dtype, device=device).transpose(1, 2)
        for n, dim in ((heads, k_dim), (kv_heads, k_dim), (kv_heads, v_dim))
    )
    try:
        cudnn_attend(*tried, causal=True, scale=1.0)
    except RuntimeError:  # this build has no cuDNN, or cuDNN does not support the shape or the GPU
        return False
    return True


@lru_cache(maxsize=64)
def _one_place(tokens: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([[0, 0, tokens, 0]], dtype=torch.int32, device=device)


def _choose_backend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: Ints,
    k_first: Ints,
    causal: bool,
    sinks: torch.Tensor | None,
) -> str:
    if not q.is_cuda:
        return "torch"
    queries, tokens = np.diff(first), np.diff(k_first)
    equal = bool((queries == queries[0]).all() and (tokens == tokens[0]).all()) and tokens[0] > 0
    aligned = not causal or bool((queries == tokens).all())
    tiles = len(queries) * q.shape[1] * -(-int(queries[0]) // 128)
    # cuDNN makes a plan for each new size, which is worth its cost only for sizes that repeat.
    if equal and aligned and sinks is None and tiles >= MIN_CUDNN_TILES and queries[0] % 128 == 0:
        if cudnn_supports(q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.dtype, q.device):
            return "cudnn"
    if (q.shape[2], v.shape[2]) in GATHERED_DIMS and q.dtype in HALF_DTYPES:
        return "descriptors"
    return "torch"


def _attend_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: Ints,
    k_first: Ints,
    causal: bool,
    scale: float,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention in torch, one sequence at a time, in float32 or float64."""
    kind = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = q.shape[1] // k.shape[1]
    for a, b, c, d in zip(first[:-1], first[1:], k_first[:-1], k_first[1:], strict=True):
        keys = k[c:d].to(kind).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[a:b].to(kind) * scale, keys)
        if causal:
            seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril(int(d - c - b + a))
            scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            logits = sinks.to(kind)[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat((scores, logits), 2)
        log = scores.logsumexp(2)
        weights = (scores - log.masked_fill(log.isneginf(), 0.0)[..., None]).exp()[..., : int(d - c)]
        out[a:b] = torch.einsum("hqk,khd->qhd", weights, v[c:d].to(kind).repeat_interleave(group, 1))
        lse[a:b] = log.T
    return out, lse


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: Ints, k_first: Ints) -> None:
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3 or k.shape[:2] != v.shape[:2] or q.shape[2] != k.shape[2]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} are not packed heads of one size"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} heads do not divide over {k.shape[1]} KV heads")
    if (
        len(first) != len(k_first)
        or len(first) < 2
        or (np.diff(first) < 0).any()
        or (np.diff(k_first) < 0).any()
    ):
        raise ValueError(
            f"{len(first)} starts and {len(k_first)} k_starts: give equally many, in rising order"
        )
    if first[-1] != q.shape[0] or k_first[-1] != k.shape[0]:
        raise ValueError(
            f"starts end at {first[-1]} and {k_first[-1]}, but there are {q.shape[0]} queries and {k.shape[0]} keys"
        )
    if q.stride(2) != 1:
        raise ValueError(f"q has stride {q.stride(2)} in its last dimension; it must be 1")
