"""Prefill by cuDNN. Sequences of equal size form a batch, and their pages are gathered. One call computes causal
attention over the new tokens, and a second call attention over the context. The results are merged by log-sum-exp.

`prefill_backends.cudnn_batches` forms the batches. This module does not depend on plans or other backends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from kvloom.kernels.device import upload

from . import prefill_launch as launch
from .dense import cudnn_attend
from .mask import Mask
from .prefill_backends import CudnnBatch, Ints, QueryRows, copy_list, cudnn_batches
from .shape import Shape

__all__ = ["CudnnPrefill", "PrefillCall", "gather_buffers"]


@dataclass(frozen=True, slots=True)
class PrefillCall:
    """The inputs and output buffers of one layer's attention. A buffer that is None is allocated when needed."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tables: torch.Tensor
    mask: Mask
    scale: float
    out: torch.Tensor | None
    lse: torch.Tensor | None

    def with_outputs(self) -> PrefillCall:
        """Return a copy of this object in which both output buffers are allocated."""
        out, lse = self.outputs()
        return replace(self, out=out, lse=lse)

    def outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        q, out, lse = self.q, self.out, self.lse
        if out is None:
            out = torch.empty((*q.shape[:2], self.v.shape[-1]), dtype=q.dtype, device=q.device)
        if lse is None:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        return out, lse


@dataclass(frozen=True, slots=True)
class _Batch:
    """One batch of sequences of equal size. `triton_gathered` describes the fields of both lists.

    - `copies` lists the tokens to gather from pages.
    - `places` lists, for each sequence, where its queries are in the batch and in q.
    - `first` is the index in q of the batch's first query.
    """

    group: CudnnBatch
    copies: torch.Tensor
    places: torch.Tensor
    first: int


class CudnnPrefill:
    """Computes the attention of a step with cuDNN. The first call divides the sequences of the step into batches.
    Later layers reuse the batches."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self._batches: dict[bool, list[_Batch]] = {}

    def attend(
        self,
        rows: QueryRows,
        chosen: Ints,
        call: PrefillCall,
        new_k: torch.Tensor | None,
        new_v: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute attention of the `chosen` sequences. `new_k` and `new_v` are the keys and values of the new
        tokens, or None. If they are None, the new tokens are also gathered from pages."""
        at_hand = new_k is not None and new_v is not None
        if at_hand not in self._batches:
            groups = cudnn_batches(rows, chosen)
            if not groups:
                sizes = zip(rows.queries[chosen].tolist(), rows.context_lengths[chosen].tolist(), strict=True)
                shown = ", ".join(f"{new} after {own}" for new, own in list(sizes)[:4])
                raise ValueError(
                    f"the backend cudnn takes round sizes only, not {shown} tokens: use the backend descriptors"
                )
            self._batches[at_hand] = [self._batch(rows, group, at_hand) for group in groups]
        batches = self._batches[at_hand]
        out, lse = call.out, call.lse
        for batch in batches:
            group, number = batch.group, len(batch.group.rows)
            tokens = group.context + (0 if at_hand else group.queries)
            k, v = (_split(x, number, tokens) for x in gather_buffers(self.shape, call.q, number * tokens))
            if tokens:
                launch.gather(call.k, call.v, call.tables, batch.copies, k, v)
            part = slice(batch.first, batch.first + number * group.queries)
            q = _split(call.q[part], number, group.queries)
            if new_k is not None and new_v is not None:
                own_k, own_v = (_split(x[part], number, group.queries) for x in (new_k, new_v))
            else:
                own_k, own_v = k[:, group.context :], v[:, group.context :]
            a, a_lse = _batched(q, own_k, own_v, True, call.scale)
            b = b_lse = None
            if group.context:
                b, b_lse = _batched(q, k[:, : group.context], v[:, : group.context], False, call.scale)
            elif call.mask.sinks is None:
                if out is None and lse is None and number * group.queries == call.q.shape[0]:
                    return a.flatten(0, 1), a_lse.flatten(0, 1)
                if out is None or lse is None:
                    out, lse = call.outputs()
                out[part].copy_(a.flatten(0, 1))
                lse[part].copy_(a_lse.flatten(0, 1))
                continue
            if out is None or lse is None:
                out, lse = call.outputs()
            launch.merge_parts(a, a_lse, b, b_lse, batch.places, group.queries, call.mask.sinks, out, lse)
        assert out is not None
        assert lse is not None
        return out, lse

    def _batch(self, rows: QueryRows, group: CudnnBatch, at_hand: bool) -> _Batch:
        tokens = group.context + (0 if at_hand else group.queries)
        number = np.arange(len(group.rows))
        size = np.full_like(number, tokens)
        copies = copy_list(group.rows, np.zeros_like(number), size, number * tokens, size)
        firsts = rows.starts[group.rows]
        places = np.stack((number, np.zeros_like(number), np.full_like(number, group.queries), firsts), 1)
        return _Batch(
            group,
            upload(copies, self.device),
            upload(places.astype(np.int32), self.device),
            int(firsts[0]),
        )


def gather_buffers(shape: Shape, q: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate buffers for gathered keys and values of `tokens` tokens."""
    k, v = (tokens, shape.kv_heads, shape.k_dim), (tokens, shape.kv_heads, shape.v_dim)
    return q.new_empty(k), q.new_empty(v)


def _batched(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run cuDNN on q, k and v, each [batch, tokens, heads, dim]. Return the outputs in the same layout, and the
    log-sum-exps [batch, tokens, heads]."""
    out, lse = cudnn_attend(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=causal, scale=scale
    )
    return out.transpose(1, 2), lse.transpose(1, 2)


def _split(x: torch.Tensor, number: int, tokens: int) -> torch.Tensor:
    """View packed tokens as a batch of `number` sequences with `tokens` tokens each. Copies nothing."""
    return x.view(number, tokens, *x.shape[1:])
