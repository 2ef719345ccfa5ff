"""The seam into recurrent mixers: each runs once on a step's packed row, its states in their pages.

What a mixer does along the tokens are functions of its modeling file, which stand for our kernels meanwhile (`scans.py`): they
take the rows apart and read and write the pages. A mixer without such functions (MiniMax) has a forward of ours. Knows what a
cache is asked for, not what a mixer computes.
"""

from __future__ import annotations

import inspect
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from kvloom.kernels.memory import LayerView
from kvloom.kernels.state import StateRows
from kvloom.models.specs import ModelError

from .batch import Batch
from .scans import PackedStates, current_states, lightning_forward, replace_functions, takes_packed_rows

__all__ = ["MixerSteps", "is_mixer", "wrap_mixer"]


class MixerSteps:
    """How mixers see a step's row, worked out once for all of them when the first one asks."""

    def __init__(self, batch: Batch, batch_invariant: bool = False) -> None:
        """`batch_invariant`: a sequence's states are the same bits however it was cut into steps (`StateRows.batch_invariant`)."""
        self.batch, self.batch_invariant = batch, batch_invariant
        self._known: dict[tuple[int, int], StateRows] = {}

    def rows(self, view: LayerView) -> StateRows:
        """The rows of the step, as layers in pages like `view`'s find their states."""
        of = view.group, view.run
        if of not in self._known:
            ids, fresh = self.batch.states[view.group][view.run], self._fresh
            read = ids
            if self.batch_invariant and fresh is not None:  # said once, not by every layer's kernel
                read, fresh = ids.masked_fill(fresh, 0), None
            self._known[of] = StateRows(
                self.batch.starts, read, ids, self._longest, fresh, self.batch_invariant
            )
        return self._known[of]

    @cached_property
    def _longest(self) -> int:
        return 1 if self.batch.replayed else max(b - a for a, b in pairwise(self.batch.bounds))

    @cached_property
    def _fresh(self) -> torch.Tensor | None:
        if self.batch.replayed or not any(self.batch.fresh):
            return None
        return torch.tensor(self.batch.fresh).to(self.batch.tokens.device, non_blocking=True)


def is_mixer(module: nn.Module) -> bool:
    """Whether a module is a recurrent mixer: it has a layer's number and a convolution over tokens, or a decay of old ones."""
    marks = ("conv1d", "conv", "key_decay")
    return hasattr(module, "layer_idx") and any(hasattr(module, mark) for mark in marks)


def wrap_mixer(module: Any) -> None:
    """Make a mixer take packed rows; harmless to repeat. It is told its states by the `Pages` in its cache argument. Raises
    ModelError for one that is of no known kind."""
    if getattr(module, "takes_packed_rows", False):
        return
    names = inspect.signature(module.forward).parameters
    argument = "cache_params" if "cache_params" in names else "past_key_values"
    layer = int(module.layer_idx)
    if takes_packed_rows(module):
        replace_functions(module)
        inner = module.forward
    elif hasattr(module, "key_decay"):
        inner = partial(lightning_forward, module)
    else:
        raise ModelError(
            f"layer {layer} is a {type(module).__name__}, a recurrent mixer of no known kind: docs/models.md has those that run"
        )
    module.takes_packed_rows = True

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        pages = kwargs[argument]
        view: LayerView = pages.state_view(layer)
        states = PackedStates(view.fields, pages.steps.rows(view))
        token = current_states.set(states)
        try:
            return inner(hidden_states, *args, **{**kwargs, argument: states})
        finally:
            current_states.reset(token)

    module.forward = forward
