"""Recurrent mixers on pages. Each mixer runs once on the packed tokens of a step, with its states in pages.

A mixer is the recurrent part of a layer, such as Mamba. While a mixer runs, kernels (`scans`) replace
functions of its modeling file. The kernels split the tokens into sequences, and read and write states in
pages. The mixer of MiniMax has no function that a kernel could replace, so it gets a new forward. This file
handles the cache interface, not the arithmetic.
"""

from __future__ import annotations

import inspect
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from kvloom.kernels.device import upload
from kvloom.kernels.memory import LayerView
from kvloom.kernels.state import StateRows
from kvloom.models.specs import ModelError

from .batch import Batch
from .scans import (
    DraftRows,
    PackedStates,
    current_states,
    lightning_forward,
    replace_functions,
    takes_packed_rows,
)

__all__ = ["MixerSteps", "is_mixer", "wrap_mixer"]


class _Part(NamedTuple):
    tokens: torch.Tensor
    starts: torch.Tensor
    longest: int


class MixerSteps:
    """Divides a step into sequences for recurrent layers (mixers). The division is computed when the first layer
    needs it. All layers with the same block table share it."""

    def __init__(self, batch: Batch, batch_invariant: bool = False) -> None:
        """With `batch_invariant`, the bits of a state do not depend on how a sequence is split into steps
        (`StateRows.batch_invariant`)."""
        self.batch, self.batch_invariant = batch, batch_invariant
        self._known: dict[tuple[int, int], StateRows] = {}
        self._split: dict[tuple[int, int], DraftRows] = {}

    def rows(self, view: LayerView) -> StateRows:
        """Return the sequences of the step, with their state pages in the block table of `view`."""
        of = view.group, view.run
        if of not in self._known:
            ids, fresh = self.batch.states[view.group][view.run], self._fresh
            read = ids
            # Set here once, instead of in the kernel of every layer.
            if self.batch_invariant and fresh is not None:
                read, fresh = ids.masked_fill(fresh, 0), None
            stored = self.batch.stored if self.batch.longest > 1 else None
            self._known[of] = StateRows(
                self.batch.starts, read, ids, self._longest, fresh, self.batch_invariant, stored
            )
        return self._known[of]

    def draft_rows(self, view: LayerView) -> DraftRows | None:
        """Return the tokens of the step in two parts: tokens that are not drafts, and drafts. Return None if there are
        no drafts. The states after the first part are stored. The second part starts from these states, and no state
        is stored after it."""
        batch, of = self.batch, (view.group, view.run)
        if not batch.drafts:
            return None
        if of not in self._split:
            ids = batch.states[view.group][view.run]
            certain, drafts = self._places
            first, second = (
                StateRows(part.starts, ids, write, part.longest, fresh, self.batch_invariant)
                for part, write, fresh in (
                    (certain, ids, self._fresh),
                    (drafts, torch.zeros_like(ids), None),
                )
            )
            self._split[of] = DraftRows(certain.tokens, first, drafts.tokens, second)
        return self._split[of]

    @cached_property
    def _places(self) -> tuple[_Part, _Part]:
        """The tokens of the step in two parts: tokens that are not drafts, and drafts. Each part has the packed
        indexes of its tokens, and the index of each sequence's first token in the part."""
        bounds, drafts = np.array(self.batch.bounds), np.array(self.batch.drafts)
        is_draft = np.zeros(bounds[-1], np.bool_)
        for end, count in zip(bounds[1:].tolist(), drafts.tolist(), strict=True):
            is_draft[end - count : end] = True
        parts = []
        for chosen, counts in ((~is_draft, np.diff(bounds) - drafts), (is_draft, drafts)):
            starts = np.concatenate(([0], counts.cumsum())).astype(np.int32)
            device = self.batch.tokens.device
            parts.append(
                _Part(upload(np.flatnonzero(chosen), device), upload(starts, device), int(counts.max()))
            )
        return parts[0], parts[1]

    @cached_property
    def _longest(self) -> int:
        return (
            self.batch.longest if self.batch.replayed else max(b - a for a, b in pairwise(self.batch.bounds))
        )

    @cached_property
    def _fresh(self) -> torch.Tensor | None:
        if self.batch.replayed or not any(self.batch.fresh):
            return None
        return torch.tensor(self.batch.fresh).to(self.batch.tokens.device, non_blocking=True)


def is_mixer(module: nn.Module) -> bool:
    """Return whether a module is a recurrent mixer. A mixer has a layer index, and either a convolution over tokens
    or a decay.
    """
    marks = ("conv1d", "conv", "key_decay")
    return hasattr(module, "layer_idx") and any(hasattr(module, mark) for mark in marks)


def wrap_mixer(module: Any) -> None:
    """Make a mixer accept packed tokens. The mixer gets its states from the `Pages` in its cache argument. Repeated
    calls are allowed. Raises ModelError for an unknown kind of mixer.

    The new forward calls `module.packed_forward` with `PackedStates` as cache argument. `models/fusion` may replace
    this attribute.
    """
    if getattr(module, "takes_packed_rows", False):
        return
    names = inspect.signature(module.forward).parameters
    argument = "cache_params" if "cache_params" in names else "past_key_values"
    layer = int(module.layer_idx)
    if takes_packed_rows(module):
        replace_functions(module)
        module.packed_forward = module.forward
    elif hasattr(module, "key_decay"):
        module.packed_forward = partial(lightning_forward, module)
    else:
        raise ModelError(
            f"layer {layer} is a {type(module).__name__}, a recurrent mixer of an unknown kind: docs/models.md lists the supported kinds"
        )
    module.takes_packed_rows = True

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        pages = kwargs[argument]
        view: LayerView = pages.state_view(layer)
        drafts = pages.steps.draft_rows(view)
        rows = pages.steps.rows(view) if drafts is None else drafts.rows
        states = PackedStates(view.fields, rows, drafts)
        token = current_states.set(states)
        try:
            if pages.divided is None:
                return module.packed_forward(hidden_states, *args, **{**kwargs, argument: states})
            (every,) = pages.divided.join(hidden_states[0])
            found = module.packed_forward(every[None], *args, **{**kwargs, argument: states})
            if isinstance(found, tuple):
                return pages.divided.own(found[0], 1), *found[1:]
            return pages.divided.own(found, 1)
        finally:
            current_states.reset(token)

    module.forward = forward
