"""Low-rank terms of LoRA adapters. Each token of a batch has an adapter slot, and slot 0 means no adapter.

    out[token] += b[slot] @ (a[slot] @ x[token])        for every token with a slot above 0

Linear layers with the same input, such as the projections to Q, K and V, may be joined into one matrix product. Each
joined layer is one part of the product. Parts are numbered from 0. A slot of `a` has the rows of all parts, one after
the other.

CPU tensors run in torch, one adapter after the other (the oracle). CUDA tensors run in Triton as two grouped products,
without waiting for the device, so that graphs can capture the call.
"""

from __future__ import annotations

import torch

from .stacked_weights import AdapterRows, LowRankWeights, SlotViews

__all__ = ["add_low_rank"]


def add_low_rank(
    out: torch.Tensor,
    x: torch.Tensor,
    weights: LowRankWeights,
    rows: AdapterRows,
    part: int | None = None,
    invariant: bool = False,
) -> None:
    """Compute the low-rank term of each token's adapter, and add it to `out` in place. `x` [..., inputs] is the input
    of a linear layer, and `out` [..., outputs] is its output. If several linear layers are joined, `out` has the
    columns of all of them. With `part`, `out` has only the columns of the joined layer with this number.

    With `invariant`, the bits of a token's result do not depend on the other tokens of the step. A CPU ignores this
    option.
    """
    flat, found = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    if len(flat) != rows.count or len(found) != rows.count:
        raise ValueError(
            f"a layer with adapters got {len(flat)} rows in a step of {rows.count} tokens: the adapter must not "
            "target this layer"
        )
    if out.is_cuda:
        from . import triton_lora

        triton_lora.add_low_rank(found, flat, weights, rows, part, invariant)
        return
    for slot, at in rows.groups:
        views = weights.views.get(slot)
        if views is not None:
            _add_one(found, flat, weights, views, at, part)


def _add_one(
    out: torch.Tensor,
    x: torch.Tensor,
    weights: LowRankWeights,
    views: SlotViews,
    at: slice | torch.Tensor,
    part: int | None,
) -> None:
    """Add the low-rank term of one adapter to the rows of `out` whose indexes are `at`. `views` has the weights of the
    adapter. `part` is that of `add_low_rank`."""
    own, rank = x[at], weights.rank
    low = own @ views.a
    for place, b in views.b.items():
        if part not in (None, place):
            continue
        into = out[:, weights.columns[place]] if part is None else out
        mine = low[:, place * rank : (place + 1) * rank]
        if isinstance(at, slice):
            into[at].addmm_(mine, b)
        else:
            into.index_add_(0, at, mine @ b)
