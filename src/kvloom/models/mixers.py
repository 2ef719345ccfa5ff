"""The seam into recurrent mixers: each runs once on a step's packed row, its states in their pages.

What a mixer does along the tokens are functions of its modeling file, which stand for our kernels meanwhile (`scans.py`): they
take the rows apart and read and write the pages. A mixer without such functions (MiniMax) is written for a batch of equal
rows, and gets them: all single tokens that continue a state as one batch [rows, 1, hidden], every other row alone [1, tokens,
hidden]. Knows what a cache is asked for, not what a mixer computes.
"""

from __future__ import annotations

import inspect
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from kvloom.kernels.state import Rows
from kvloom.kernels.views import LayerView

from .batch import Batch
from .scans import Packed, replace_functions, running, takes_packed_rows
from .void import Void

__all__ = ["Part", "States", "Steps", "is_mixer", "wrap"]

Part = tuple[torch.Tensor, torch.Tensor, bool]
"""Rows that run together: their numbers, the places of their tokens [rows, tokens], and whether they begin."""


class Steps:
    """How mixers see a step's row, worked out once for all of them when the first one asks."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def rows(self, ids: torch.Tensor) -> Rows:
        """The rows of the step, whose states are in the pages `ids`."""
        return Rows(self.batch.starts, ids, ids, self._longest, self._fresh)

    @cached_property
    def _longest(self) -> int:
        return 1 if self.batch.replayed else max(b - a for a, b in pairwise(self.batch.bounds))

    @cached_property
    def _fresh(self) -> torch.Tensor | None:
        if self.batch.replayed or not any(self.batch.fresh):
            return None
        return torch.tensor(self.batch.fresh).to(self.batch.tokens.device, non_blocking=True)

    @cached_property
    def parts(self) -> list[Part]:
        """The step's rows as batches of equal ones."""
        batch, device = self.batch, self.batch.tokens.device
        if batch.replayed:
            every = torch.arange(len(batch.sizes), device=device)
            return [(every, every[:, None], False)]
        starts, fresh = batch.bounds, batch.fresh
        single = [
            row for row, begins in enumerate(fresh) if starts[row + 1] - starts[row] == 1 and not begins
        ]
        parts = [[row] for row in range(len(fresh)) if row not in set(single)]
        if single:
            parts.insert(0, single)
        return [
            (
                torch.tensor(rows, device=device),
                torch.stack([torch.arange(starts[row], starts[row + 1], device=device) for row in rows]),
                fresh[rows[0]],
            )
            for rows in parts
        ]


class States(Void):
    """The recurrent state of some rows at one layer, as a mixer that we have no kernel for asks for it (MiniMax)."""

    def __init__(self, pages: torch.Tensor, ids: torch.Tensor, fresh: bool) -> None:
        self._pages, self._ids = pages, ids
        self._live = None if fresh else pages[ids]

    def get_linear_cache(self, _: int) -> torch.Tensor | None:
        return self._live

    def set_linear_cache(self, _: int, new: torch.Tensor) -> None:
        self._live = new

    def keep(self) -> None:
        """Put what the mixer left into the pages."""
        if self._live is not None:
            self._pages[self._ids] = self._live.to(self._pages.dtype)


def is_mixer(module: nn.Module) -> bool:
    """Whether a module is a recurrent mixer: it has a layer's number and a convolution over tokens, or a decay of old ones."""
    marks = ("conv1d", "conv", "key_decay")
    return hasattr(module, "layer_idx") and any(hasattr(module, mark) for mark in marks)


def wrap(module: Any) -> None:
    """Make a mixer take packed rows; harmless to repeat. It is told its states by the `Pages` in its cache argument."""
    if getattr(module, "takes_packed_rows", False):
        return
    module.takes_packed_rows = True
    inner = module.forward
    names = inspect.signature(inner).parameters
    argument = "cache_params" if "cache_params" in names else "past_key_values"
    layer = int(module.layer_idx)
    packed = takes_packed_rows(module)
    if packed:
        replace_functions(module)

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        pages = kwargs[argument]
        view: LayerView = pages.state_view(layer)
        ids = pages.batch.states[view.group][view.run]
        if not packed:
            return _in_parts(hidden_states, view, ids, pages.steps, args, kwargs)
        states = Packed(view.fields, pages.steps.rows(ids))
        token = running.set(states)
        try:
            return inner(hidden_states, *args, **{**kwargs, argument: states})
        finally:
            running.reset(token)

    def _in_parts(
        hidden_states: torch.Tensor, view: LayerView, ids: torch.Tensor, steps: Steps, args: Any, kwargs: Any
    ) -> Any:
        out, found = torch.empty_like(hidden_states), None
        for rows, places, fresh in steps.parts:
            states = States(view.fields["recurrent"], ids[rows], fresh)
            found = inner(hidden_states[0, places], *args, **{**kwargs, argument: states})
            out[0, places] = found[0] if isinstance(found, tuple) else found
            states.keep()
        return (out, *(None for _ in found[1:])) if isinstance(found, tuple) else out

    module.forward = forward
