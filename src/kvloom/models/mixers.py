"""The seam into recurrent mixers: each finds the states of its rows in its cache argument, gathered from their pages.

A mixer is written for a batch of equal rows, so the packed row is taken apart for it: all single tokens that continue a
state run as one batch [rows, 1, hidden], every other row alone [1, tokens, hidden]. States are read from their pages before
the call and written back after it. Knows what a cache is asked for, not what a mixer computes; the one exception is
Mamba-1's scan, which has no initial state in transformers and is replaced by ours.
"""

from __future__ import annotations

import importlib
import inspect
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from kvloom.kernels.state import Rows, mamba1_scan
from kvloom.kernels.views import LayerView

from .batch import Batch

__all__ = ["States", "is_mixer", "replace_scans", "wrap"]

MAMBA1 = ("falcon_mamba", "jamba", "mamba")
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
        batch: Batch = pages.batch
        ids = batch.states[view.group][view.run]
        out = torch.empty_like(hidden_states)
        for rows, places, fresh in _parts(batch):
            states = States(view, ids[rows], fresh)
            token = _current.set(states)
            try:
                out[0, places] = inner(hidden_states[0, places], *args, **{**kwargs, argument: states})
            finally:
                _current.reset(token)
            states.keep()
        return out

    module.forward = forward


def _parts(batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor, bool]]:
    """Rows that run together: their numbers, the places of their tokens [rows, tokens], and whether they begin."""
    starts, fresh = batch.starts.tolist(), batch.fresh
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


def replace_scans() -> None:
    """Put a scan with an initial state in the place of transformers' for Mamba-1. Harmless to repeat."""
    for family in MAMBA1:
        modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        if hasattr(modeling, "mamba_selective_scan"):
            modeling.mamba_selective_scan = _scan  # type: ignore[attr-defined]


def _scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    D: torch.Tensor | None = None,  # noqa: N803  (its name at the call)
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    """`mamba_selective_scan` as modeling code calls it ([batch, channels, tokens]), from the state of its rows."""
    size, channels, tokens = x.shape

    def rows_of(part: torch.Tensor | None) -> torch.Tensor | None:
        return None if part is None else part.transpose(1, 2).reshape(size * tokens, -1)

    states = torch.zeros((size + 1, channels, a.shape[1]), dtype=torch.float32, device=x.device)
    current = _current.get()
    before = None if current is None else current.get_recurrent_state()
    if before is not None:
        states[1:] = before
    slots = torch.arange(1, size + 1, device=x.device)
    starts = torch.arange(size + 1, device=x.device) * tokens
    packed = [rows_of(part) for part in (x, dt, b, c, z)]
    assert packed[0] is not None
    assert packed[1] is not None
    assert packed[2] is not None
    assert packed[3] is not None
    y = mamba1_scan(
        packed[0], packed[1], a, packed[2], packed[3], states, Rows(starts, slots, slots, tokens), D, packed[4],
        delta_bias, delta_softplus,
    )  # fmt: skip
    y = y.view(size, tokens, channels).transpose(1, 2)
    return (y, states[1:]) if return_last_state else y
