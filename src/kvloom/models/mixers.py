"""The seam into recurrent mixers: each finds the states of its rows in its cache argument, gathered from their pages.

A mixer is written for a batch of equal rows, so the packed row is taken apart for it: all single tokens that continue a
state run as one batch [rows, 1, hidden], every other row alone [1, tokens, hidden]. States are read from their pages before
the call and written back after it. Knows what a cache is asked for, not what a mixer computes.
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from kvloom.kernels.views import LayerView

from .batch import Batch

__all__ = ["Part", "States", "is_mixer", "parts_of", "running", "wrap"]

Part = tuple[torch.Tensor, torch.Tensor, bool]
_current: ContextVar[States | None] = ContextVar("the states a mixer is running on", default=None)


class States:
    """Convolution and recurrent state of some rows at one layer, as mixers ask for them."""

    def __init__(self, view: LayerView, ids: torch.Tensor, fresh: bool) -> None:
        self._pages, self._ids, self._fresh = view.fields, ids, fresh
        self._live: dict[str, torch.Tensor] = {}

    def _get(self, name: str) -> torch.Tensor | None:
        if name not in self._live:
            if self._fresh or name not in self._pages:
                return None
            self._live[name] = self._pages[name][self._ids]
        return self._live[name]

    def get_conv_state(self, *_: Any, **__: Any) -> torch.Tensor | None:
        return self._get("conv")

    def get_recurrent_state(self, *_: Any, **__: Any) -> torch.Tensor | None:
        return self._get("recurrent")

    def update_conv_state(self, new: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """The inputs that a convolution over `new` ([rows, channels, tokens]) sees: those kept, then the new ones."""
        before, columns = self._get("conv"), self._pages["conv"].shape[-1]
        seen = new if before is None else torch.cat((before, new), -1)
        seen = pad(seen, (max(0, columns - seen.shape[-1]), 0))
        self._live["conv"] = seen[..., -columns:]
        return seen

    def update_recurrent_state(self, new: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        self._live["recurrent"] = new
        return new

    def has_previous_state(self, *_: Any) -> bool:
        return not self._fresh

    def is_recording_past(self, *_: Any) -> bool:
        return False

    def keep(self) -> None:
        """Put what the mixer left into the pages."""
        for name, state in self._live.items():
            self._pages[name][self._ids] = state.to(self._pages[name].dtype)


def is_mixer(module: nn.Module) -> bool:
    """Whether a module is a recurrent mixer: it has a layer's number and a convolution over tokens."""
    return hasattr(module, "layer_idx") and (hasattr(module, "conv1d") or hasattr(module, "conv"))


def wrap(module: Any) -> None:
    """Make a mixer take packed rows; harmless to repeat. It is told its states by the `Pages` in its cache argument."""
    if getattr(module, "takes_packed_rows", False):
        return
    module.takes_packed_rows = True
    inner = module.forward
    names = inspect.signature(inner).parameters
    argument = "cache_params" if "cache_params" in names else "past_key_values"
    layer = int(module.layer_idx)

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        pages = kwargs[argument]
        view: LayerView = pages.state_view(layer)
        ids = pages.batch.states[view.group][view.run]
        out = torch.empty_like(hidden_states)
        for rows, places, fresh in pages.parts:
            states = States(view, ids[rows], fresh)
            token = _current.set(states)
            try:
                out[0, places] = inner(hidden_states[0, places], *args, **{**kwargs, argument: states})
            finally:
                _current.reset(token)
            states.keep()
        return out

    module.forward = forward


def running() -> States | None:
    """The states that the mixer now running was given."""
    return _current.get()


def parts_of(batch: Batch) -> list[Part]:
    """Rows that run together: their numbers, the places of their tokens [rows, tokens], and whether they begin."""
    starts, fresh = batch.bounds, batch.fresh
    single = [row for row, begins in enumerate(fresh) if starts[row + 1] - starts[row] == 1 and not begins]
    parts = [[row] for row in range(len(fresh)) if row not in set(single)]
    if single:
        parts.insert(0, single)
    device = batch.tokens.device
    return [
        (
            torch.tensor(rows, device=device),
            torch.stack([torch.arange(starts[row], starts[row + 1], device=device) for row in rows]),
            fresh[rows[0]],
        )
        for rows in parts
    ]
