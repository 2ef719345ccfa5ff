"""Low-rank terms of LoRA adapters. Each token of a batch has an adapter slot, and slot 0 means no adapter.

    out[token] += b[slot] @ (a[slot] @ x[token])        for every token with a slot above 0

Linear layers with the same input may be joined into one product. The term of such a product has several parts: one
for each layer. A slot of `a` has the rows of all parts, one after the other.

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
    """Add the low-rank terms of the adapters to `out` [..., outputs], in place. `x` [..., inputs] is the input of the
    product. With `part`, `out` has only the columns of this part, which is one of the joined layers.

    With `invariant`, the bits of a token's result do not depend on the other tokens (CUDA only). On a CPU, a step
    without adapters computes nothing.
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
    """Add the term of one adapter to the tokens `at`."""
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
