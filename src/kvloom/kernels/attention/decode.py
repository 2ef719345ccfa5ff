"""Decode on the GPU. A plan is made once per step, and every layer runs it.

    plan = DecodePlan(Shape(heads=32, kv_heads=8, k_dim=128, v_dim=128), sequences=256)
    plan.make(starts, lengths)                     # one small launch; the host reads no length
    out, lse = plan.attend(q, k, v, tables)        # every layer

A CUDA graph can capture both calls, because the buffers are fixed and no grid depends on lengths. `cascade.SharedRuns`
describes pages that several sequences share. This module does not depend on the cache.
"""

from __future__ import annotations

import torch
import triton

from kvloom.core import WHOLE, ContextPart, Visibility

from .cascade import SharedRuns
from .mask import FULL, SPAN_NUMBERS, Mask
from .shape import Shape, check_call, check_outputs, check_part
from .triton_work_list import plan_rows, plan_segments, plan_sources, plan_visible_runs
from .work_list import LayerCall, Tile, WorkList, choose_tile, uses_single_tile_kernel

__all__ = ["MAX_QUERIES", "DecodePlan"]

MAX_QUERIES = 64
"""Largest number of queries of one sequence in one decode step, for example of a draft tree. Sequences with more
queries need prefill."""


class DecodePlan:
    """Attention of up to `sequences` sequences with up to `queries` query tokens each. `span` is the visibility
    rule of the layers.

    With `sharing`, pages that several sequences share are read only once. `make` reads the current shared runs from
    `sharing`. `tile` and `shared_tile` override the chosen tile sizes. `part` is the part of each block that the pages
    contain (context parallelism). It needs full attention, without `sharing`.
    """

    def __init__(
        self,
        shape: Shape,
        sequences: int,
        queries: int = 1,
        span: Visibility = FULL,
        device: torch.device | str = "cuda",
        sharing: SharedRuns | None = None,
        tile: Tile | None = None,
        shared_tile: Tile | None = None,
        part: ContextPart = WHOLE,
    ) -> None:
        shape.check()
        check_part(part, span)
        if not 1 <= queries <= MAX_QUERIES:
            raise ValueError(f"a decode row has 1 to {MAX_QUERIES} queries, got {queries}; longer is prefill")
        if sequences < 1:
            raise ValueError(f"a plan needs at least one sequence, got {sequences}")
        if sharing is not None and (sharing.sequences, sharing.queries) != (sequences, queries):
            raise ValueError(
                f"sharing is for {sharing.sequences} sequences of {sharing.queries} queries, "
                f"the plan for {sequences} of {queries}"
            )
        if sharing is not None and part != WHOLE:
            raise ValueError(
                "shared runs count the tokens of whole blocks: omit sharing for a part of each block"
            )
        self.shape, self.sequences, self.queries, self.span = shape, sequences, queries, span
        self.device, self.part = torch.device(device), part
        self.sharing = sharing
        rows = queries * shape.group
        plain = tile or choose_tile(shape, rows, self.device)
        self.plain = self._list(plain, sequences, sequences, rows)
        self._walks = (
            uses_single_tile_kernel(shape, plain.rows) and plain.rows >= rows and plain.overhead_units == 0
        )
        self.own, self.shared = self.plain, self.plain
        if sharing is not None:
            own = tile or choose_tile(shape, rows, self.device, beside=True)
            tall = shared_tile or choose_tile(shape, sequences * rows, self.device, beside=True)
            self.own = self._list(own, sequences, sequences, rows)
            self.shared = self._list(tall, sharing.segments, sharing.depth, sequences * rows)
            self._seen = torch.zeros_like(sharing.run_table) if span.windowed else sharing.run_table
        most = sequences * queries
        self.tokens = torch.zeros((most, 4), dtype=torch.int32, device=self.device)
        depth = 0 if sharing is None else sharing.depth
        self.sources = torch.zeros((most, 1 + depth, 4), dtype=torch.int32, device=self.device)
        self._starts: torch.Tensor | None = None
        self._shares = False

    def _list(self, tile: Tile, segments: int, times: int, rows: int) -> WorkList:
        return WorkList(
            tile, self.shape, segments, times * triton.cdiv(rows, tile.rows) + segments, self.device
        )

    def make(self, starts: torch.Tensor, lengths: torch.Tensor) -> None:
        """Plan a step. `starts` ([sequences + 1]) contains the index in q of each sequence's first query. `lengths`
        ([sequences]) contains the number of tokens of each sequence, including its queries. Both are int32 on the
        device. Does not wait for the device."""
        rows = lengths.numel()
        for name, tensor in (("starts", starts), ("lengths", lengths)):
            if tensor.dtype != torch.int32 or not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous int32, got {tensor.dtype} {tuple(tensor.shape)}")
            if tensor.device.type != self.device.type:
                raise ValueError(
                    f"{name} are on {tensor.device}, the plan is for {self.device}: move them there"
                )
        if rows > self.sequences or starts.numel() != rows + 1:
            raise ValueError(
                f"{rows} lengths and {starts.numel()} starts do not fit a plan for {self.sequences} sequences"
            )
        self._starts = starts
        sharing = self.sharing
        self._shares = sharing is not None and sharing.run_count > 0
        work = self.own if self._shares else self.plain
        plan_rows[(1,)](
            starts, lengths, sharing.begin if sharing is not None else lengths, *work.buffers, self.tokens, rows,
            SPAN=SPAN_NUMBERS[self.span.kind], SIZE=self.span.size, QUERIES=self.queries, ROOM=len(self.tokens), BEGIN=self._shares,
            RANK=self.part.rank, RANKS=self.part.count, num_warps=8, **work.constants(self.shape),
        )  # fmt: skip
        if sharing is not None and self._shares:
            if self.span.windowed:
                plan_visible_runs[(sharing.segments,)](
                    sharing.run_table, sharing.run_total, sharing.members, self.tokens, self._seen,
                    SPAN=SPAN_NUMBERS[self.span.kind], SIZE=self.span.size, BLOCK=128, num_warps=1,
                )  # fmt: skip
            plan_segments[(1,)](
                self._seen,
                sharing.run_total,
                *self.shared.buffers,
                num_warps=8,
                **self.shared.constants(self.shape),
            )
            plan_sources[(triton.cdiv(len(self.tokens), 128),)](
                self.own.segments, self.own.places, self.shared.segments, self.shared.places, sharing.levels,
                self.tokens, starts, self.sources, self.sequences, rows, len(self.tokens),
                DEPTH=sharing.depth, BLOCK=128,
            )  # fmt: skip

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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the same results as `reference.attend`, for the sequences of the last `make`. Writes to `out` and
        `lse` if they are given."""
        mask = mask or Mask(self.span)
        if mask.span != self.span:
            raise ValueError(
                f"the plan is for {self.span}, the mask has {mask.span}: make a plan for the mask's span"
            )
        if mask.spans is not None:
            raise ValueError("image ids (spans) belong to prefill: use a prefill plan")
        if self._starts is None:
            raise ValueError("no step is planned: call make(starts, lengths) before attend")
        if q.shape[0] > self.sequences * self.queries:
            raise ValueError(
                f"{q.shape[0]} queries, but the plan is for at most {self.sequences * self.queries}"
            )
        if tables.shape[0] < self._starts.numel() - 1:
            raise ValueError(f"{tables.shape[0]} table rows for {self._starts.numel() - 1} sequences")
        if mask.trees is not None and (self.queries == 1 or mask.trees.shape[1] < self.queries):
            raise ValueError(
                f"trees {tuple(mask.trees.shape)} for a plan of {self.queries} queries a row: a plan for drafts has "
                "more than one query per row, and trees need as many columns"
            )
        if mask.trees is not None and self.part != WHOLE:
            raise ValueError(
                "draft trees need whole blocks, and the plan is for a part of each block: omit trees"
            )
        scales = check_call(self.shape, q, k, v, tables, mask, k_scale, v_scale, self.part)
        check_outputs(self.shape, q, out, lse)
        if lse is not None and lse.stride(1) != 1:
            raise ValueError(f"lse has stride {lse.stride(1)} in its last dimension; it must be 1")
        if out is None:
            out = torch.empty((*q.shape[:2], v.shape[-1]), dtype=q.dtype, device=q.device)
        if lse is None:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        layer = LayerCall(
            self.shape, q, k, v, tables, self.tokens, mask, scale, k_scale, v_scale, scales, out, lse
        )
        # A single query sees its whole segment. Several queries of a sequence see up to different tokens. In windows,
        # they also see from different tokens on.
        several = self.queries > 1
        bounds = (3 if self.span.windowed else 1) if several else 0
        if self.sharing is None or not self._shares:
            if self._walks:
                layer.attend_single_tiles(self.plain, self.queries, bounds)
            else:
                layer.attend_tiles(self.plain, bounds, direct=True)
            layer.merge_split(self.plain, self._starts, self.queries)
        else:
            shared_bounds = 2 if self.span.windowed else 0
            layer.attend_tiles(self.shared, shared_bounds, direct=False, members=self.sharing.members)
            layer.attend_tiles(self.own, bounds, direct=False, beside=True)
            layer.merge_levels(self.own, self.shared, self.sources)
        return out, lse
