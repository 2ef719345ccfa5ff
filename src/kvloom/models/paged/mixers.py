"""Recurrent mixers on pages. Each mixer runs once on the packed tokens of a step, with its states in pages.

A mixer is the recurrent part of a layer, such as Mamba. While a mixer runs, kernels (`scans`) replace
functions of its modeling file. The kernels split the tokens into sequences, and read and write states in
pages. The mixer of MiniMax has no function that a kernel could replace, so it gets a new forward. This file
handles the cache interface, not the arithmetic.
"""

from __future__ import annotations

import inspect
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from kvloom.kernels.device import upload
from kvloom.kernels.memory import LayerView
from kvloom.kernels.state import STEP_TOKENS, StateRows
from kvloom.models.specs import ModelError

from .batch import Batch, leading_singles
from .scans import (
    PackedStates,
    StatePart,
    current_states,
    lightning_forward,
    replace_functions,
    takes_packed_rows,
)

__all__ = ["MixerSteps", "is_mixer", "wrap_mixer"]

Ints = npt.NDArray[np.int64]


class _Part(NamedTuple):
    """The sequences of a part of a step, for all layers. `sequences` are their numbers in the step. The other fields are
    those of `StatePart` and `StateRows`."""

    sequences: slice
    starts: torch.Tensor
    longest: int
    chosen: torch.Tensor | None = None
    is_draft: bool = False


class MixerSteps:
    """Divides a step into parts for recurrent layers (mixers). The division is computed when the first layer needs it.
    All layers with the same block table share the division.

    | part          | sequences and tokens                                                | states           |
    |---------------|---------------------------------------------------------------------|------------------|
    | single tokens | the sequences at the start of the step that have one token          | stored           |
    | prompts       | all other sequences, without draft tokens                           | stored           |
    | drafts        | draft tokens, after the states that the other parts have stored     | not stored       |

    Kernels compute single tokens one after the other, and prompts in chunks. A single token takes longer in a chunk.
    """

    def __init__(self, batch: Batch, batch_invariant: bool = False) -> None:
        """With `batch_invariant`, the bits of a state do not depend on how a sequence is split into steps
        (`StateRows.batch_invariant`)."""
        self.batch, self.batch_invariant = batch, batch_invariant
        self._known: dict[tuple[int, int], list[StatePart]] = {}

    def parts(self, view: LayerView) -> list[StatePart]:
        """Return the parts of the step in the order in which they are computed, with their state pages in the block
        table of `view`."""
        of = view.group, view.run
        if of not in self._known:
            self._known[of] = self._replayed_parts(view) or [self._rows(view, part) for part in self._parts]
        return self._known[of]

    def _replayed_parts(self, view: LayerView) -> list[StatePart]:
        """Return the parts of a step with prompts that a CUDA graph replays: single tokens, and prompts. For other
        steps, return an empty list."""
        group, run = view.group, view.run
        return [
            StatePart(StateRows(part.starts, part.read[group][run], part.write[group][run], part.longest))
            for part in self.batch.state_inputs
        ]

    def _rows(self, view: LayerView, part: _Part) -> StatePart:
        ids = _aligned(self.batch.states[view.group][view.run], part.sequences)
        fresh = None
        if self._fresh is not None and not part.is_draft and any(self.batch.fresh[part.sequences]):
            fresh = _aligned(self._fresh, part.sequences)
        read, write = ids, torch.zeros_like(ids) if part.is_draft else ids
        # Set here once, instead of in the kernel of every layer.
        if self.batch_invariant and fresh is not None:
            read, fresh = ids.masked_fill(fresh, 0), None
        stored = self.batch.stored if self.batch.longest > 1 else None
        rows = StateRows(part.starts, read, write, part.longest, fresh, self.batch_invariant, stored)
        return StatePart(rows, part.chosen)

    @cached_property
    def _parts(self) -> list[_Part]:
        batch = self.batch
        if batch.replayed:
            return [_Part(slice(None), batch.starts, batch.longest)]
        counts = np.diff(batch.bounds)
        if batch.drafts:
            return self._parts_with_drafts(counts, np.array(batch.drafts))
        return [
            _Part(slice(a, b), _aligned(batch.starts, slice(a, b + 1)), int(counts[a:b].max()))
            for a, b in self._halves(counts)
        ]

    def _parts_with_drafts(self, counts: Ints, drafts: Ints) -> list[_Part]:
        is_draft, own = np.zeros(self.batch.bounds[-1], np.bool_), counts - drafts
        for end, count in zip(self.batch.bounds[1:], drafts.tolist(), strict=True):
            is_draft[end - count : end] = True
        certain, device = np.flatnonzero(~is_draft), self.batch.tokens.device
        parts = [
            (slice(a, b), own[a:b], certain[own[:a].sum() : own[:b].sum()], False)
            for a, b in self._halves(own)
        ]
        parts.append((slice(len(own)), drafts, np.flatnonzero(is_draft), True))
        return [
            _Part(sequences, upload(_starts(each), device), int(each.max()), upload(tokens, device), is_draft)
            for sequences, each, tokens, is_draft in parts
        ]

    def _halves(self, counts: Ints) -> list[tuple[int, int]]:
        """Return the ranges of the sequences with single tokens and of the prompts, or one range of all sequences. `counts`
        has the number of tokens of each sequence."""
        singles = leading_singles(counts)
        # Without long prompts, and in batch-invariant mode, all sequences are computed token by token.
        if not singles or self.batch_invariant or counts.max() <= STEP_TOKENS:
            return [(0, len(counts))]
        return [(0, singles), (singles, len(counts))]

    @cached_property
    def _fresh(self) -> torch.Tensor | None:
        if self.batch.replayed or not any(self.batch.fresh):
            return None
        return torch.tensor(self.batch.fresh).to(self.batch.tokens.device, non_blocking=True)


def _aligned(x: torch.Tensor, part: slice) -> torch.Tensor:
    """Return a part of `x`. The part is copied unless it begins where `x` begins, because Triton compiles a second
    kernel for addresses that are not aligned."""
    return x[part].clone() if part.start else x[part]


def _starts(counts: Ints) -> npt.NDArray[np.int32]:
    """Return the index of each sequence's first token, and the number of tokens."""
    return np.concatenate(([0], counts.cumsum())).astype(np.int32)


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
        states = PackedStates(view.fields, pages.steps.parts(view))
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
