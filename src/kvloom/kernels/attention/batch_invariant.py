"""Batch-invariant attention. The results of a sequence are bit-identical in any batch. The plans run Triton kernels
on CUDA tensors.

| plan                        | sequences                            | a result depends only on                       |
|-----------------------------|--------------------------------------|------------------------------------------------|
| `BatchInvariantPrefillPlan` | with any number of queries           | the query and the tokens that the query sees   |
| `BatchInvariantDecodePlan`  | with one query each, in CUDA graphs  | the query and the tokens that the query sees   |

Both plans compute the same bits, because both sum tokens in pieces of `piece` tokens. They are slower than other
plans, because they do not split work to fill the device. This module does not depend on models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton

from kvloom.core import Visibility
from kvloom.kernels.device import upload

from . import triton_batch_invariant as kernels
from .mask import FULL, SPAN_NUMBERS, Mask
from .prefill_backends import BlockTile, choose_tile
from .shape import Shape, check_call, check_outputs, split_dim

__all__ = ["BatchInvariantDecodePlan", "BatchInvariantPrefillPlan"]

LANES = 8
"""Largest number of lanes per multiprocessor, over all KV heads. A lane is a program that computes several pieces, one
after another."""


class _BatchInvariantPlan:
    """The common part of both plans: shape, visibility rule (`span`) and checks. Each piece of `piece` tokens is
    summed separately. The sums of the pieces are then added in order."""

    def __init__(
        self,
        shape: Shape,
        piece: int,
        span: Visibility = FULL,
        device: torch.device | str = "cuda",
        tile: BlockTile | None = None,
    ) -> None:
        shape.check()
        query = shape.dtype if shape.dtype.is_floating_point and shape.dtype.itemsize > 1 else torch.bfloat16
        self.tile = tile or choose_tile(shape, 1, query)
        if piece < 1 or piece % self.tile.tokens:
            raise ValueError(f"a piece of {piece} tokens must be a multiple of {self.tile.tokens}")
        self.shape, self.piece, self.span, self.device = shape, piece, span, torch.device(device)

    def _check(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tables: torch.Tensor,
        mask: Mask,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
    ) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Check the arguments of `attend`. Return the kind of page scales (0, 1 or 2, see `check_call`) and the
        output buffers."""
        if mask.span != self.span:
            raise ValueError(
                f"the plan is for {self.span}, the mask has {mask.span}: make a plan for the mask's span"
            )
        if mask.trees is not None:
            raise ValueError("batch-invariant attention does not support draft trees: use another plan")
        scales = check_call(self.shape, q, k, v, tables, mask, k_scale, v_scale)
        check_outputs(self.shape, q, out, lse)
        if out is None:
            out = torch.empty((*q.shape[:2], v.shape[-1]), dtype=q.dtype, device=q.device)
        if lse is None:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        return scales, out, lse

    def _constants(self, q: torch.Tensor, v: torch.Tensor, mask: Mask, scales: int) -> dict[str, Any]:
        shape, tile = self.shape, self.tile
        dk0, dk1 = split_dim(shape.k_dim)
        dv0, dv1 = split_dim(shape.v_dim)
        # Fused multiply-add is disabled, so that the compiler cannot change the rounding.
        exactly = {"enable_fp_fusion": False} if q.is_cuda else {}
        return {
            "HEADS": shape.kv_heads, "GROUP": shape.group, "DK0": dk0, "DK1": dk1, "DV0": dv0, "DV1": dv1,
            "PAGE": shape.page_tokens, "BM": tile.rows, "BN": tile.tokens, "PIECE": self.piece,
            "SPAN": SPAN_NUMBERS[self.span.kind], "SIZE": self.span.size, "SOFTCAP": mask.softcap is not None, "SCALES": scales,
            "LATENT": shape.latent, "TURNED": v.stride(3) != 1, "EXACT": q.dtype == torch.float32,
            "HALF": shape.dtype == torch.float8_e4m3fn, "STAGES": tile.stages, "num_warps": tile.warps, **exactly,
        }  # fmt: skip


class BatchInvariantPrefillPlan(_BatchInvariantPlan):
    """Attention of sequences with any number of queries. One program computes one block of query rows over all
    visible tokens.
    """

    _items: torch.Tensor | None = None

    def make(self, starts: Sequence[int], lengths: Sequence[int]) -> None:
        """Set the sequences of the step, from host arrays (see `Plan.make`)."""
        begin, ends = np.asarray(starts, dtype=np.int64), np.asarray(lengths, dtype=np.int64)
        queries = np.diff(begin)
        blocks = -(-queries * self.shape.group // self.tile.rows)
        of = np.arange(len(queries)).repeat(blocks)
        within = np.arange(len(of)) - (np.cumsum(blocks) - blocks).repeat(blocks)
        items = np.stack(
            (of, within * self.tile.rows, begin[of], queries[of], (ends - queries)[of]), 1
        )  # fmt: skip
        seen = items[:, 4] + items[:, 1] // self.shape.group
        order = np.argsort(-seen, kind="stable")  # blocks that see the most tokens first
        self._items = upload(np.ascontiguousarray(items[order].astype(np.int32)), self.device)

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
        mask = mask or Mask(self.span)
        if self._items is None:
            raise ValueError("no step is planned: call make(starts, lengths) before attend")
        scales, out, lse = self._check(q, k, v, tables, mask, k_scale, v_scale, out, lse)
        items = self._items
        if len(items):
            kernels.attend_by_piece[(len(items) * self.shape.kv_heads,)](
                q, k, v, q if k_scale is None else k_scale, q if v_scale is None else v_scale, out, lse, items, tables,
                q if mask.sinks is None else mask.sinks, items if mask.spans is None else mask.spans,
                q.stride(0), q.stride(1), *k.stride()[:3], *v.stride(), *_strides(k_scale), *_strides(v_scale),
                out.stride(0), out.stride(1), *lse.stride(), tables.stride(0),
                self.shape.k_dim**-0.5 if scale is None else scale, mask.softcap or 1.0,
                IMAGES=mask.spans is not None, SINK=mask.sinks is not None, **self._constants(q, v, mask, scales),
            )  # fmt: skip
        return out, lse


class BatchInvariantDecodePlan(_BatchInvariantPlan):
    """Attention of up to `rows` sequences with one query each, over up to `longest` tokens. Different programs
    compute the pieces of a sequence in parallel. Can be captured in a CUDA graph."""

    def __init__(
        self,
        shape: Shape,
        piece: int,
        rows: int,
        longest: int,
        span: Visibility = FULL,
        device: torch.device | str = "cuda",
        tile: BlockTile | None = None,
    ) -> None:
        super().__init__(shape, piece, span, device, tile)
        seen = min(longest, span.size + piece) if span.windowed else longest
        most = rows * (-(-seen // piece) + 1)
        self.rows, self._lengths = rows, torch.zeros(0, dtype=torch.int32)
        self._ends = torch.zeros(triton.next_power_of_2(rows), dtype=torch.int32, device=self.device)
        self._parts = torch.empty((most, shape.heads, shape.v_dim), dtype=torch.float32, device=self.device)
        self._sums = torch.empty((most, shape.heads, 2), dtype=torch.float32, device=self.device)
        self._lanes = max(1, min(most, LANES * _processors(self.device) // shape.kv_heads))

    def make(self, starts: torch.Tensor, lengths: torch.Tensor) -> None:
        """Set the number of tokens of each sequence (`lengths`, int32 on the device). Every sequence has one query,
        so `starts` is not used."""
        if len(lengths) > self.rows:
            raise ValueError(f"{len(lengths)} rows do not fit a plan for {self.rows}")
        self._lengths = lengths
        kernels.plan_pieces[(1,)](
            lengths, self._ends, len(lengths), PIECE=self.piece, SPAN=SPAN_NUMBERS[self.span.kind], SIZE=self.span.size,
            CAPACITY=len(self._ends),
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
        mask = mask or Mask(self.span)
        rows = len(self._lengths)
        if not rows or len(q) != rows:
            raise ValueError(f"{len(q)} queries, but make(starts, lengths) saw {rows} rows of one each")
        if mask.spans is not None:
            raise ValueError("image ids (spans) belong to prefill: use a prefill plan")
        scales, out, lse = self._check(q, k, v, tables, mask, k_scale, v_scale, out, lse)
        shape, constants = self.shape, self._constants(q, v, mask, scales)
        blocks = triton.cdiv(shape.group, self.tile.rows)
        kernels.attend_pieces[(self._lanes, shape.kv_heads, blocks)](
            q, k, v, q if k_scale is None else k_scale, q if v_scale is None else v_scale, self._parts, self._sums,
            self._ends, self._lengths, tables, rows,
            q.stride(0), q.stride(1), *k.stride()[:3], *v.stride(), *_strides(k_scale), *_strides(v_scale),
            tables.stride(0), shape.k_dim**-0.5 if scale is None else scale, mask.softcap or 1.0,
            ROUNDS=len(self._ends).bit_length(), **constants,
        )  # fmt: skip
        shared = ("HEADS", "GROUP", "DV0", "DV1", "SCALES", *(("enable_fp_fusion",) if q.is_cuda else ()))
        kernels.join_pieces[(rows, shape.heads)](
            out, lse, self._parts, self._sums, self._ends, q if mask.sinks is None else mask.sinks,
            q if v_scale is None else v_scale, _strides(v_scale)[2], out.stride(0), out.stride(1), *lse.stride(),
            SINK=mask.sinks is not None, num_warps=1, **{name: constants[name] for name in shared},
        )  # fmt: skip
        return out, lse


def _strides(scale: torch.Tensor | None) -> tuple[int, int, int]:
    """Return three strides of a scale tensor: per page, per token and per head. If there is only one scale per
    head, the first two are 0."""
    if scale is None:
        return 0, 0, 0
    return (
        (0, 0, scale.stride(0)) if scale.dim() == 1 else (scale.stride(0), scale.stride(1), scale.stride(2))
    )


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter: few programs, each of which computes several pieces
    return torch.cuda.get_device_properties(device).multi_processor_count
