"""Attention over cold pages, which are in host memory. The result is merged with the result of attention over the
pages in the pool.

    out, lse  over the pool   ──┐
    out, lse  over piece 0    ──┼──▶  out = Σ outᵢ · exp(lseᵢ) / Σ exp(lseᵢ)         (log-sum-exp merge, in float32)
    out, lse  over piece 1 …  ──┘

A piece is a range of cold pages that are processed together. Cold tokens precede all queries of their sequence, so
every query sees every cold token. On a CPU, a piece is gathered directly from host memory. For a GPU, a piece is
gathered on the host and copied to the device. Attention sinks are counted only in the attention over the pool. This
module does not depend on the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvloom.kernels.dtypes import accumulator_dtype

from .dense import attend_dense
from .prefill_backends import GATHERED_DIMS, HALF_DTYPES

__all__ = ["KVPages", "add_cold_attention"]

PIECE_BYTES = 32 << 20
"""Largest size of one piece in bytes: the gathered keys and values, and the scores of all queries over them."""


class KVPages(NamedTuple):
    """The pages of one layer in host memory. They have the same shapes as the pages of the pool in
    `reference.attend`. The scales may be on the device."""

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


def add_cold_attention(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    pages: KVPages,
    ids: torch.Tensor,
    scale: float,
    softcap: float | None = None,
) -> None:
    """Compute the attention of one sequence's queries q [queries, heads, dim] over its cold pages, and merge the result
    into `out`. `ids` are the ids of the cold pages, on the host.

    Changes `out` [queries, heads, dim of v] and its natural log-sum-exp `lse` [queries, heads] in place.
    """
    kind = accumulator_dtype(q)
    total, log = out.to(kind), lse.to(kind)
    for piece in torch.split(ids, _piece_pages(q, pages)):
        part, part_log = _attend_piece(q, pages, piece, scale, softcap)
        total = torch.lerp(total, part.to(kind), torch.sigmoid(part_log.to(kind) - log)[..., None])
        log = torch.logaddexp(log, part_log.to(kind))
    out.copy_(total)
    lse.copy_(log)


def _piece_pages(q: torch.Tensor, pages: KVPages) -> int:
    """Return how many pages form one piece of at most PIECE_BYTES."""
    _, block, kv_heads, dim = pages.k.shape
    size = accumulator_dtype(q).itemsize
    token_bytes = size * kv_heads * (dim + pages.v.shape[3]) + size * q.shape[0] * q.shape[1]
    return max(1, PIECE_BYTES // (block * token_bytes))


def _attend_piece(
    q: torch.Tensor, pages: KVPages, ids: torch.Tensor, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs and log-sum-exps of all queries over all tokens of the pages `ids`. Every query sees every
    token."""
    dense = (
        q.is_cuda
        and softcap is None
        and q.dtype in HALF_DTYPES
        and (q.shape[2], pages.v.shape[3]) in GATHERED_DIMS
    )
    kind = q.dtype if dense else accumulator_dtype(q)
    k = _tokens(pages.k, pages.k_scale, ids, q.device, kind)
    is_latent = pages.k.data_ptr() == pages.v.data_ptr() and pages.k.stride() == pages.v.stride()
    v = k[..., : pages.v.shape[3]] if is_latent else _tokens(pages.v, pages.v_scale, ids, q.device, kind)
    if dense:
        return attend_dense(q, k, v, [0, len(q)], [0, len(k)], causal=False, scale=scale)
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    asked = q.to(kind).view(len(q), kv_heads, group, -1).permute(1, 2, 0, 3).flatten(1, 2)
    scores = torch.bmm(asked * scale, k.permute(1, 2, 0))  # [kv heads, group * queries, tokens]
    if softcap is not None:
        scores = (scores / softcap).tanh_().mul_(softcap)
    log = scores.logsumexp(2)
    mixed = torch.bmm(scores.sub_(log[..., None]).exp_(), v.transpose(0, 1))

    def by_query(found: torch.Tensor) -> torch.Tensor:
        shaped = found.view(kv_heads, group, len(q), *found.shape[2:])
        return shaped.permute(2, 0, 1, *range(3, shaped.dim())).flatten(1, 2)

    return by_query(mixed), by_query(log)


def _tokens(
    pages: torch.Tensor,
    scales: torch.Tensor | None,
    ids: torch.Tensor,
    device: torch.device,
    kind: torch.dtype,
) -> torch.Tensor:
    """Return the tokens of the pages `ids` on `device`, multiplied by their scales: [tokens, kv heads, dim] with the
    dtype `kind`."""
    found = _gather(pages, ids).to(device).to(kind).flatten(0, 1)
    if scales is None:
        return found
    if scales.dim() < 3:  # one scale for each head
        return found.mul_(scales.to(device, kind).view(-1, 1))
    return found.mul_(_gather(scales, ids).to(device).to(kind).flatten(0, 1)[..., None])


def _gather(pages: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return a copy of the pages `ids`. fp8 pages are copied as bytes, because indexing may not support fp8."""
    if pages.dtype == torch.float8_e4m3fn:
        return pages.view(torch.uint8).index_select(0, ids).view(pages.dtype)
    return pages.index_select(0, ids)
