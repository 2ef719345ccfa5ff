"""Prefill by tensor descriptors, which need contiguous tokens. The tokens of a sequence are therefore gathered
from pages first. If no sequence has context, the new tokens are read directly, without a copy.

    with context      |-- outside every window --|-- context, visible --|---- new ----|
    gathered                                     |------------- one copy -------------|

    without context   |---- new ----|            read directly

This module does not depend on plans or other backends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvloom.core import Visibility
from kvloom.kernels.device import upload

from . import prefill_launch as launch
from .prefill_backends import BlockTile, Ints, QueryRows, choose_gathered_tile, copy_list, span_list
from .prefill_cudnn import PrefillCall, gather_buffers
from .shape import Shape

__all__ = ["GatheredPrefill"]


@dataclass(frozen=True, slots=True)
class _GatherPlan:
    """The work lists of a gathered prefill: copy K and V out of the pages, then attend to the copies.

    `copies` lists the token ranges to copy, and `tokens` is their total length. `blocks` lists the blocks of the
    attention kernel. A block has `tile.rows` query rows of one sequence.
    """

    copies: torch.Tensor
    tokens: int
    blocks: torch.Tensor
    tile: BlockTile


class GatheredPrefill:
    """Computes prefill attention in one step, for all layers that have the visibility `span` (full attention or a
    window). `attend` is called once per layer. The call for the first layer makes the plan, and the calls for the other
    layers reuse it. `tile` overrides the chosen tile size."""

    def __init__(self, shape: Shape, span: Visibility, tile: BlockTile | None, device: torch.device) -> None:
        self.shape, self.span, self.tile, self.device = shape, span, tile, device
        self._listed: dict[bool, _GatherPlan] = {}
        self._fresh: bool | None = None  # whether no sequence has cached tokens

    def attend(
        self,
        rows: QueryRows,
        chosen: Ints,
        call: PrefillCall,
        new_k: torch.Tensor | None,
        new_v: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute attention of the `chosen` sequences. `new_k` and `new_v` are the keys and values of the new tokens,
        or None. They are read directly if no sequence has context and both satisfy `fits_descriptor`. Otherwise all
        tokens, new ones included, are gathered from pages."""
        out, lse = call.outputs()
        if self._fresh is None:
            self._fresh = not rows.context_lengths[chosen].any()
        k = v = None
        if self._fresh and new_k is not None and new_v is not None:
            if launch.fits_descriptor(new_k) and launch.fits_descriptor(new_v):
                k, v = new_k, new_v
        at_hand = k is not None
        if at_hand not in self._listed:
            self._listed[at_hand] = self._list(rows, chosen, at_hand)
        listed = self._listed[at_hand]
        if k is None or v is None:
            k, v = gather_buffers(self.shape, call.q, listed.tokens)
            launch.gather(call.k, call.v, call.tables, listed.copies, k, v)
        launch.attend_gathered(
            listed.tile, listed.blocks, call.q, k, v, call.scale, True, self.span, call.mask.sinks, out, lse
        )
        return out, lse

    def _list(self, rows: QueryRows, chosen: Ints, at_hand: bool) -> _GatherPlan:
        context_lengths, queries, starts = (
            rows.context_lengths[chosen],
            rows.queries[chosen],
            rows.starts[chosen],
        )
        begins = self.span.first_visible_each(context_lengths)
        sizes = rows.lengths[chosen] - begins
        bases = starts if at_hand else np.cumsum(sizes) - sizes
        copies = copy_list(chosen, begins, begins + sizes, bases, sizes)
        tile = self.tile or choose_gathered_tile(
            self.shape.k_dim, self.span, rows.mean_visible(self.span, chosen)
        )
        blocks = span_list(
            queries,
            starts,
            context_lengths - begins,
            bases,
            sizes,
            self.shape.group,
            tile.rows,
            True,
            self.span,
        )
        return _GatherPlan(upload(copies, self.device), int(sizes.sum()), upload(blocks, self.device), tile)
