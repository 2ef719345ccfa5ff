"""The recurrent layers of `kvloom bench kernels`: causal conv, Mamba-1, Mamba-2 and the gated delta rule, in the sizes
of real models.

| layer  | size as in      | shape                                                  |
|--------|-----------------|--------------------------------------------------------|
| conv   | Qwen3-Next      | 8192 channels, 4 taps                                  |
| mamba1 | Falcon-Mamba 7B | 8192 channels, 16 states                               |
| mamba2 | Mamba-2 2.7B    | 80 heads of 64 dims, 128 states                        |
| delta  | Qwen3-Next      | 32 value heads over 16 key heads, states of 128 by 128 |

The lower bound is the time to move every input, output and state once, at the rate of a memory copy. `gpu_timing`
measures the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from kvloom.kernels import state
from kvloom.kernels.state import StateRows

from .gpu_timing import COPY_RATE, Row, timed

__all__ = ["state_rows"]

SIZES = ((8, 2048), (256, 1))
"""The measured steps, as (sequences, tokens per sequence): prompts, and one decode step."""
DEVICE = "cuda"
Run = Callable[[torch.Tensor, StateRows], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Recurrence:
    """One recurrent layer to be timed. `inputs` are its tensors, `shape` and `dtype` describe its state, and `run`
    calls it."""

    inputs: tuple[torch.Tensor, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    run: Run


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def _conv(tokens: int) -> Recurrence:
    x, weight = _random(tokens, 8192), _random(8192, 4)
    return Recurrence(
        (x, weight), (8192, 4), x.dtype, lambda s, rows: state.causal_conv(x, weight, s, rows, silu=True)
    )


def _mamba1(tokens: int) -> Recurrence:
    x, dt, z = (_random(tokens, 8192) for _ in range(3))
    b, c = _random(tokens, 16), _random(tokens, 16)
    a, d, bias = -torch.exp(_random(8192, 16).float()), _random(8192).float(), _random(8192).float() - 3

    def run(states: torch.Tensor, rows: StateRows) -> torch.Tensor:
        return state.mamba1_scan(x, dt, a, b, c, states, rows, d=d, z=z, dt_bias=bias)

    return Recurrence((x, dt, z, a, b, c), (8192, 16), torch.float32, run)


def _mamba2(tokens: int) -> Recurrence:
    x, dt, b, c = (
        _random(tokens, 80, 64),
        _random(tokens, 80),
        _random(tokens, 1, 128),
        _random(tokens, 1, 128),
    )
    a, d, bias = -torch.exp(_random(80).float()), _random(80).float(), _random(80).float() - 3

    def run(states: torch.Tensor, rows: StateRows) -> torch.Tensor:
        return state.mamba2_scan(x, dt, a, b, c, states, rows, d=d, dt_bias=bias)

    return Recurrence((x, dt, b, c), (80, 64, 128), torch.float32, run)


def _delta(tokens: int) -> Recurrence:
    q, k, v = _random(tokens, 16, 128), _random(tokens, 16, 128), _random(tokens, 32, 128)
    g, beta = -torch.rand(tokens, 32, device=DEVICE) * 0.5, torch.rand(tokens, 32, device=DEVICE).to(q.dtype)

    def run(states: torch.Tensor, rows: StateRows) -> torch.Tensor:
        return state.delta_rule(q, k, v, g, beta, states, rows, normalise=True)

    return Recurrence((q, k, v, g, beta), (32, 128, 128), torch.float32, run)


LAYERS: dict[str, Callable[[int], Recurrence]] = {
    "conv": _conv,
    "mamba1": _mamba1,
    "mamba2": _mamba2,
    "delta": _delta,
}


def state_rows(rounds: int) -> Iterator[Row]:
    for name, make in LAYERS.items():
        for sequences, length in SIZES:
            layer = make(sequences * length)
            states = torch.randn((sequences + 1, *layer.shape), device=DEVICE).to(layer.dtype)
            slots = torch.arange(1, sequences + 1, dtype=torch.int32, device=DEVICE)
            starts = torch.arange(0, sequences * length + 1, length, dtype=torch.int32, device=DEVICE)
            rows = StateRows(starts, slots, slots, length)
            out = layer.run(states, rows)
            moved = sum(x.numel() * x.element_size() for x in (*layer.inputs, out, states[1:], states[1:]))
            us = timed({"kvloom": partial(layer.run, states, rows)}, rounds)
            note = f"{moved / us['kvloom'] / 1e6:.2f} TB/s"
            yield Row("states", f"{name}, {sequences} x {length}", moved / COPY_RATE * 1e6, us, note)
            del layer, states, out
