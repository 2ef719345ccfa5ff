"""Attention plans on a CPU. `ReferencePlan` runs the oracle (`reference`). `CpuPlan` adds faster paths for plain
float32 attention.

If no faster path supports a call, the oracle computes it. This module does not depend on the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from kvloom.core import Visibility
from kvloom.kernels import cpu

from . import reference
from .mask import FULL, Mask
from .shape import Shape

__all__ = ["CpuPlan", "ReferencePlan"]

Integers = torch.Tensor | Sequence[int] | npt.NDArray[np.int64]


class ReferencePlan:
    """A plan that runs the oracle. Used for CPU tensors, and for shapes that the GPU kernels do not support."""

    def __init__(self, shape: Shape, span: Visibility = FULL) -> None:
        self.shape, self.span = shape, span
        self._rows: tuple[torch.Tensor, torch.Tensor] | None = None

    def make(self, starts: Integers, lengths: Integers) -> None:
        self._rows = torch.as_tensor(starts), torch.as_tensor(lengths)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tables: torch.Tensor,
        mask: Mask | None = None,
        scale: float | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        new_k: torch.Tensor | None = None,
        new_v: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._rows is None:
            raise ValueError("no step is planned: call make(starts, lengths) before attend")
        mask = mask or Mask(self.span)
        if mask.span != self.span:
            raise ValueError(
                f"the plan is for {self.span}, the mask has {mask.span}: make a plan for the mask's span"
            )
        starts, lengths = (x.to(q.device) for x in self._rows)
        found = reference.attend(
            q, k, v, tables[: len(lengths)], starts, lengths, mask, scale, k_scale, v_scale
        )
        for given, result in ((out, found[0]), (lse, found[1])):
            if given is not None:
                given.copy_(result)
        return found[0] if out is None else out, found[1] if lse is None else lse


MAX_NATIVE_PRODUCTS = 1 << 21
"""A sequence that needs at most this many multiplications runs in native code, query by query. A larger one runs as
one torch call."""


class CpuPlan(ReferencePlan):
    """Runs the oracle, with faster paths for attention without sinks, trees, images or scales.

    | sequences                             | path                                             |
    |---------------------------------------|--------------------------------------------------|
    | few queries                           | one native call, query by query                  |
    | one query each, without native code   | one torch call over their gathered pages         |
    | longer prompts with full attention    | torch's CPU kernel, one sequence at a time       |

    Values that are the same for every layer are computed once per step.
    """

    def make(self, starts: Integers, lengths: Integers) -> None:
        super().make(starts, lengths)
        self._begins, self._lengths = np.asarray(starts, np.int64), np.asarray(lengths, np.int64)
        counts = np.diff(self._begins)
        self._single = bool((counts == 1).all() and self._lengths.all())
        self._sound = bool((counts <= self._lengths).all())
        products = counts * self._lengths * self.shape.heads * (self.shape.k_dim + self.shape.v_dim)
        few = (self._lengths > 0) & (
            (counts == 1) | ((counts > 0) & (products <= MAX_NATIVE_PRODUCTS) & cpu.IS_BUILT)
        )
        self._prompts = np.flatnonzero((counts > 1) & ~few)
        self._owners = few.nonzero()[0].repeat(counts[few])  # the sequence to which each native query belongs
        self._queries = np.flatnonzero(few.repeat(counts))
        self._seen: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._native: cpu.VisibleTokens | None = None
        if len(self._queries):
            ends = self._queries + 1 - self._begins[1:][self._owners] + self._lengths[self._owners]
            self._native = cpu.VisibleTokens(self.span.first_visible_each(ends - 1), ends)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tables: torch.Tensor,
        mask: Mask | None = None,
        scale: float | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        new_k: torch.Tensor | None = None,
        new_v: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        mask = mask or Mask(self.span)
        plain = mask == Mask(self.span) and not self.span.has_holes and q.dtype == k.dtype == torch.float32
        if plain and self._rows is not None and self._sound and out is None and lse is None:
            found = self._attend_plain(q, k, v, tables, q.shape[-1] ** -0.5 if scale is None else scale)
            if found is not None:
                return found, None
        return super().attend(q, k, v, tables, mask, scale, k_scale, v_scale, out, lse)

    def _attend_plain(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: torch.Tensor, scale: float
    ) -> torch.Tensor | None:
        """Compute the outputs by the fastest path that supports the call, and return them. Return None if only the
        oracle supports the call."""
        native, apart = cpu.supports(q, k, v), k.data_ptr() != v.data_ptr()
        if self._native is not None and native and not len(self._prompts) and len(self._queries) == len(q):
            rows = tables if self._single else tables[torch.from_numpy(self._owners)]
            return cpu.decode(q, k, v, rows, self._native, scale)
        if self._single:
            return self._attend_gathered(q, k, v, tables, scale) if apart else None
        whole = apart and not self.span.windowed and q.shape[2] == v.shape[3] and q.stride(2) == 1
        return (
            self._attend_mixed(q, k, v, tables, scale) if whole and (native or self._native is None) else None
        )

    def _attend_gathered(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Compute attention with one query per sequence, over a gathered copy of the visible pages."""
        if tables.data_ptr() not in self._seen:
            self._seen[tables.data_ptr()] = self._gather_plan(tables, k.shape[1])
        ids, hidden, unseen = self._seen[tables.data_ptr()]
        rows = len(self._lengths)

        def seen(pages: torch.Tensor) -> torch.Tensor:
            found = pages.index_select(0, ids).view(rows, -1, *pages.shape[2:])
            found.flatten(0, 1).index_fill_(0, unseen, 0.0)  # set to 0, because unwritten values may be NaN
            return found.transpose(1, 2)

        grouped = q.shape[1] != k.shape[2]
        result = functional.scaled_dot_product_attention(
            q[:, :, None], seen(k), seen(v), attn_mask=hidden, scale=scale, enable_gqa=grouped
        )
        return result[:, :, 0]

    def _attend_mixed(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Compute full attention of a step that has prompts. Prompts run in torch, one at a time. Sequences with
        few queries run in native code."""
        out = q.new_zeros(len(q), q.shape[1], v.shape[3])
        if self._native is not None:
            rows, at = torch.from_numpy(self._owners), torch.from_numpy(self._queries)
            out[at] = cpu.decode(q[at], k, v, tables[rows], self._native, scale)
        for row in self._prompts.tolist():
            begin, end, tokens = self._begins[row], self._begins[row + 1], int(self._lengths[row])
            ids = tables[row, : -(-tokens // k.shape[1])]
            keys, values = (pages.index_select(0, ids).flatten(0, 1)[:tokens] for pages in (k, v))
            out[begin:end] = _attend_causal(q[begin:end], keys, values, scale)
        return out

    def _gather_plan(
        self, tables: torch.Tensor, block: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return three tensors for gathered attention:

        - the page ids of the visible blocks of all sequences, padded to equal numbers per sequence,
        - the mask that is added to the scores,
        - the indices of gathered tokens that their sequence does not see."""
        last = self._lengths - 1
        first = self.span.first_visible_each(last)
        begin = first // block
        blocks = int((last // block - begin).max()) + 1
        column = begin[:, None] + np.arange(blocks)
        ids = tables.numpy()[np.arange(len(last))[:, None], np.minimum(column, (last // block)[:, None])]
        token = begin[:, None] * block + np.arange(blocks * block)
        unseen = (token < first[:, None]) | (token > last[:, None])
        hidden = torch.zeros(unseen.shape).masked_fill_(torch.from_numpy(unseen), -torch.inf)
        return (
            torch.from_numpy(ids.astype(np.int64)).flatten(),
            hidden[:, None, None],
            torch.from_numpy(np.flatnonzero(unseen)),
        )


def _attend_causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Return causal attention of q [queries, heads, dim] over k and v [tokens, kv_heads, dim]. The queries belong
    to the last tokens.

    Torch's CPU kernel assumes that the first query is the first token. The tokens before the queries therefore need
    a second call, and the two results are merged.
    """
    queries, tokens, kv_heads = len(q), *k.shape[:2]
    before, group = tokens - queries, q.shape[1] // kv_heads
    asked = q.reshape(queries, kv_heads, group, -1).permute(1, 2, 0, 3)
    keys, values = (x.transpose(0, 1)[:, None].expand(-1, group, -1, -1) for x in (k, v))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, log = flash(asked, keys[:, :, before:], values[:, :, before:], 0.0, True, scale=scale)
    if before:
        more, more_log = flash(asked, keys[:, :, :before], values[:, :, :before], 0.0, False, scale=scale)
        out = torch.lerp(out, more, torch.sigmoid(more_log - log)[..., None])
    found: torch.Tensor = out.permute(2, 0, 1, 3).flatten(1, 2)
    return found
