"""Attention over pages, writing to pages and copying pages, in plain torch: the oracle and the CPU path.

Every function takes pages as strided views ([pages, tokens, heads, dim]) and tables of page ids, and says
what a kernel must compute, in the dtype of its inputs or in float64 for tests. Rows are packed: query `i`
belongs to the sequence whose range of `starts` holds it, and is its last query but so many.

| argument   | shape               | meaning                                                              |
|------------|---------------------|----------------------------------------------------------------------|
| q          | [queries, heads, d] | packed queries of all sequences                                      |
| k, v       | [pages, b, kv, d]   | pages of this layer, new tokens already written                      |
| tables     | [sequences, blocks] | page ids, 0 where nothing is visible                                 |
| starts     | [sequences + 1]     | where each sequence's queries begin in q; equal bounds: an empty row |
| lengths    | [sequences]         | tokens of each sequence, its queries included                        |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvloom.core import Span

FULL = Span("full")

__all__ = ["Mask", "attend", "copy_pages", "write"]


@dataclass(frozen=True, slots=True)
class Mask:
    """What a query sees and how its scores are shaped.

    `sinks` ([heads]) are logits that take part in the softmax and carry no value. `trees` ([queries, longest])
    allows the draft tokens each query may see among its sequence's own queries, for draft trees. `spans`
    ([queries]) joins the queries of one image, which see each other both ways: equal ids, -1 for text.
    """

    span: Span = FULL
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    trees: torch.Tensor | None = None
    spans: torch.Tensor | None = None


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    mask: Mask | None = None,
    scale: float | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of packed queries over their pages: outputs [queries, heads, dim of v] and the natural
    log-sum-exp of each query's scores [queries, heads] (minus infinity where nothing is seen, output 0).

    `k_scale` and `v_scale` are pages of scales ([pages, b, kv], dynamic) or one per head ([kv], static).
    """
    mask = mask or Mask()
    _check(q, k, v, tables, starts, lengths)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = q.new_zeros((*q.shape[:2], v.shape[-1]))
    lse = torch.full(q.shape[:2], -math.inf, dtype=_accumulator(q), device=q.device)
    bounds = starts.tolist()
    for row, length in enumerate(lengths.tolist()):
        first, last = bounds[row], bounds[row + 1]
        if first == last or length == 0:
            continue
        keys, begin = _gather(k, tables[row], k_scale, mask.span, length, last - first, q)
        values, _ = _gather(v, tables[row], v_scale, mask.span, length, last - first, q)
        seen = _visible(mask, first, last, begin, length, q.device)
        part = slice(first, last)
        out[part], lse[part] = _softmax(q[part], keys, values, seen, mask, scale)
    return out, lse


def write(
    pages: torch.Tensor, slots: torch.Tensor, new: torch.Tensor, scales: torch.Tensor | None = None
) -> None:
    """Put `new` ([tokens, heads, dim]) at `slots` ([tokens]: page * tokens of a page + place; negative: skip).

    With `scales` ([pages, b, heads]) the page is quantised: each token and head is scaled by its largest
    value, and the scale goes into the page with it.
    """
    if slots.shape[0] != new.shape[0]:
        raise ValueError(f"{slots.shape[0]} slots for {new.shape[0]} tokens")
    keep = slots >= 0
    page, place = slots[keep] // pages.shape[1], slots[keep] % pages.shape[1]
    new = new[keep]
    if scales is None:
        pages[page, place] = new.to(pages.dtype)
        return
    most = 127.0 if pages.dtype == torch.int8 else torch.finfo(pages.dtype).max
    size = new.float().abs().amax(-1) / most
    size = torch.where(size == 0, torch.ones_like(size), size)
    exact = new.float() / size[..., None]
    pages[page, place] = (exact.round() if pages.dtype == torch.int8 else exact).to(pages.dtype)
    scales[page, place] = size.to(scales.dtype)


def copy_pages(buffer: torch.Tensor, page_stride: int, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy whole pages inside the pool; no page is both a source and a target."""
    pages = buffer[: buffer.numel() // page_stride * page_stride].view(-1, page_stride)
    pages[target.long()] = pages[source.long()]


def _gather(
    pages: torch.Tensor,
    table: torch.Tensor,
    scales: torch.Tensor | None,
    span: Span,
    length: int,
    queries: int,
    like: torch.Tensor,
) -> tuple[torch.Tensor, int]:
    """The tokens that any of the last `queries` may see, [tokens, kv, dim], and the first one's position."""
    block = pages.shape[1]
    first = span.first_visible(length - queries) // block
    ids = table[first : -(-length // block)].long()
    found = pages[ids].to(_accumulator(like)).flatten(0, 1)
    if scales is not None:
        paged = scales[ids].flatten(0, 1) if scales.dim() == 3 else scales[None]
        found = found * paged.to(found.dtype)[..., None]
    begin = first * block
    return found[: length - begin], begin


def _visible(
    mask: Mask, first: int, last: int, begin: int, length: int, device: torch.device
) -> torch.Tensor:
    """[queries, tokens]: what each query of one sequence sees of the tokens from `begin` on."""
    queries = last - first
    position = torch.arange(length - queries, length, device=device)[:, None]
    token = torch.arange(begin, length, device=device)[None]
    seen = token <= position
    own = length - queries - begin
    if mask.trees is not None:
        seen[:, own:] = mask.trees[first:last, :queries]
    if mask.spans is not None:
        ids = mask.spans[first:last]
        seen[:, own:] |= (ids[:, None] == ids[None]) & (ids >= 0)[:, None]
    first_seen = torch.tensor([mask.span.first_visible(p) for p in position[:, 0].tolist()], device=device)
    return seen & (token >= first_seen[:, None])


def _softmax(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, mask: Mask, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    kv_heads = k.shape[1]
    grouped = q.to(k.dtype).reshape(q.shape[0], kv_heads, -1, q.shape[2])
    scores = torch.einsum("qhgd,thd->hgqt", grouped, k).flatten(0, 1) * scale
    if mask.softcap is not None:
        scores = torch.tanh(scores / mask.softcap) * mask.softcap
    # Masked values are put aside by selection, so that what an unwritten slot holds cannot leak in.
    scores = torch.where(seen[None], scores, -math.inf)
    lse = torch.logsumexp(scores, -1)
    if mask.sinks is not None:
        lse = torch.logaddexp(lse, mask.sinks.to(lse.dtype)[:, None])
    weights = torch.where(seen[None], torch.exp(scores - lse[..., None]), 0.0)
    weights = torch.nan_to_num(weights).view(kv_heads, -1, *weights.shape[1:])
    used = seen.any(0)
    values = torch.where(used[:, None, None], v, 0.0)
    out = torch.einsum("hgqt,thd->qhgd", weights, values).flatten(1, 2)
    return out.to(q.dtype), lse.T


def _accumulator(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    if q.dim() != 3 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(
            f"q, k, v need 3, 4, 4 dimensions, got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if q.shape[1] % k.shape[2] or k.shape[:3] != v.shape[:3] or q.shape[2] != k.shape[3]:
        raise ValueError(f"q {tuple(q.shape)} does not fit k {tuple(k.shape)} and v {tuple(v.shape)}")
    if starts.numel() != lengths.numel() + 1 or tables.shape[0] != lengths.numel():
        raise ValueError(f"{lengths.numel()} lengths, {starts.numel()} starts, {tables.shape[0]} table rows")
    if int(starts[-1]) != q.shape[0]:
        raise ValueError(f"starts end at {int(starts[-1])}, but there are {q.shape[0]} queries")
