"""Replaces functions of transformers that run over the tokens of one prompt. The replacements are kernels that
process all sequences of a step at once, with states in pages.

Recurrent mixers call functions of their modeling file by name. While a mixer runs on `PackedStates`, these
names call the kernels of `kernels.state`. Otherwise they call the original functions. Each function gets the
packed tokens of a step ([1, tokens, …] or [1, channels, tokens]), as if they were one new prompt.

| modeling code calls                                      | kernel        | families                             |
|----------------------------------------------------------|---------------|--------------------------------------|
| causal_conv1d_fn                                         | causal_conv   | all recurrent families               |
| mamba_selective_scan                                     | mamba1_scan   | Mamba, Falcon-Mamba, Jamba           |
| mamba2_chunk_scan                                        | mamba2_scan   | Mamba-2, Bamba, Falcon-H1, Granite 4 |
| torch_chunk_gated_delta_rule, chunk_kimi_delta_attention | delta_rule    | Qwen3-Next and 3.5, OLMo, Kimi       |
| nothing: `lightning_forward` replaces its forward        | mamba2_scan   | MiniMax                              |

`run_scan` calls a kernel once for each part of a step (`StatePart`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence as Many
from contextvars import ContextVar
from functools import wraps
from typing import Any, NamedTuple

import torch

from kvloom.kernels.state import StateRows, causal_conv, delta_rule, mamba1_scan, mamba2_scan

from .empty_cache import EmptyCache

__all__ = [
    "PackedStates",
    "StatePart",
    "current_states",
    "lightning_forward",
    "replace_functions",
    "run_scan",
    "takes_packed_rows",
]

current_states: ContextVar[PackedStates | None] = ContextVar("states of the running mixer", default=None)
SILU = {None: False, "silu": True, "swish": True}


class StatePart(NamedTuple):
    """A part of a step that a kernel computes in one call. `rows` describes its sequences. Their tokens are indexed in
    the whole step, or among the tokens `chosen` of the step."""

    rows: StateRows
    chosen: torch.Tensor | None = None


class PackedStates(EmptyCache):
    """The cache argument of a mixer. It behaves like an empty cache, and the kernels read the states from pages. The
    `parts` of the step are computed in order."""

    def __init__(self, fields: dict[str, torch.Tensor], parts: Many[StatePart]) -> None:
        self.fields, self.parts = fields, parts

    def update_conv_state(self, new: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return new

    def update_recurrent_state(self, new: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return new


def takes_packed_rows(module: Any) -> bool:
    """Return whether kernels can replace all functions of a mixer's modeling file that run over tokens."""
    names = vars(sys.modules[type(module).__module__])
    recurs = hasattr(module, "A_log")  # a mixer with a decay rate, which needs a scan
    return "causal_conv1d_fn" in names and (not recurs or any(name in names for name in _SCANS))


def replace_functions(module: Any) -> None:
    """Make the functions of a mixer's modeling file call kernels while the mixer runs on `PackedStates`. Repeated
    calls are allowed."""
    names = vars(sys.modules[type(module).__module__])
    for name, ours in {"causal_conv1d_fn": _conv, **_SCANS}.items():
        if name in names and not hasattr(names[name], "replaced"):
            names[name] = _dispatch(names[name], ours)


def _dispatch(theirs: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(theirs)
    def function(*args: Any, **kwargs: Any) -> Any:
        packed = current_states.get()
        return theirs(*args, **kwargs) if packed is None else ours(packed, *args, **kwargs)

    vars(function)["replaced"] = theirs
    return function


def run_scan(
    packed: PackedStates,
    kernel: Callable[..., torch.Tensor],
    out: torch.Tensor,
    *inputs: torch.Tensor | None,
) -> torch.Tensor:
    """Run `kernel(rows, out, *inputs)` on each part of the step, and return `out` [tokens, …], which has the results in
    the token order of the step. `inputs` are the kernel's arguments, each [tokens, …] or None."""
    for rows, chosen in packed.parts:
        if chosen is None:
            kernel(rows, out, *inputs)
        else:
            some = (None if x is None else x.index_select(0, chosen) for x in inputs)
            out.index_copy_(0, chosen, kernel(rows, None, *some))
    return out


# The functions below use the argument names of modeling code. They return no final state, because the kernel has
# already written this state to its page.


def _conv(
    packed: PackedStates,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    states, is_silu = packed.fields["conv"], SILU.get(activation, False)
    x = x[0].mT

    def kernel(rows: StateRows, out: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        return causal_conv(x, weight, states, rows, bias, is_silu, out=out)

    y = run_scan(packed, kernel, x.new_empty(x.shape), x).mT[None]
    if activation in SILU:
        return y
    from transformers.activations import ACT2FN

    found: torch.Tensor = ACT2FN[activation](y)
    return found


def _mamba1(
    packed: PackedStates,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    D: torch.Tensor | None = None,  # noqa: N803
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    """Run Mamba-1. Arguments are [1, channels, tokens], and b and c are [1, n, tokens]."""
    x, dt, b, c = (part[0].mT.contiguous() for part in (x, dt, b, c))
    gate = None if z is None else z[0].mT.contiguous()
    states = packed.fields["recurrent"]

    def kernel(rows: StateRows, out: Any, x: Any, dt: Any, b: Any, c: Any, gate: Any) -> torch.Tensor:
        return mamba1_scan(x, dt, a, b, c, states, rows, D, gate, delta_bias, delta_softplus, out)

    y = run_scan(packed, kernel, torch.empty_like(x), x, dt, b, c, gate).mT[None]
    return (y, y.new_empty(0)) if return_last_state else y


def _mamba2(
    packed: PackedStates,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,  # noqa: N803
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    """Run Mamba-2. x is [1, tokens, heads, p], dt is [1, tokens, heads], b and c are [1, tokens, groups, n]. Time
    steps are clamped for every token. transformers clamps them only in prompts."""
    x, dt, b, c = (part[0] for part in (x, dt, b, c))
    gate = None if z is None else z[0]
    limits = float(dt_limit[0]), float(dt_limit[1])
    states = packed.fields["recurrent"]

    def kernel(rows: StateRows, out: Any, x: Any, dt: Any, b: Any, c: Any, gate: Any) -> torch.Tensor:
        return mamba2_scan(x, dt, a, b, c, states, rows, D, gate, dt_bias, dt_softplus, limits, out)

    y = run_scan(packed, kernel, x.new_empty(x.shape), x, dt, b, c, gate)[None]
    return (y, y.new_empty(0)) if return_final_states else y


def _delta(
    packed: PackedStates,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the delta rule. Arguments are [1, tokens, heads, dim]. g is [1, tokens, heads] or has one decay per
    channel. beta is [1, tokens, heads].
    """
    query, key, value, g, beta = (part[0] for part in (query, key, value, g, beta))
    states = packed.fields["recurrent"]

    def kernel(
        rows: StateRows, out: Any, query: Any, key: Any, value: Any, g: Any, beta: Any
    ) -> torch.Tensor:
        normalise = use_qk_l2norm_in_kernel
        return delta_rule(query, key, value, g, beta, states, rows, normalise=normalise, out=out)

    y = run_scan(packed, kernel, value.new_empty(value.shape), query, key, value, g, beta)
    return y[None], y.new_empty(0)


_SCANS: dict[str, Callable[..., Any]] = {
    "mamba_selective_scan": _mamba1,
    "mamba2_chunk_scan": _mamba2,
    "torch_chunk_gated_delta_rule": _delta,
    "chunk_kimi_delta_attention": _delta,
}


def lightning_forward(
    module: Any, hidden: torch.Tensor, *_: Any, past_key_values: PackedStates, **__: Any
) -> tuple[torch.Tensor, None]:
    """The forward of a lightning-attention mixer, whose modeling code has no function that a kernel could replace.
    hidden is [1, tokens, hidden]. Each head has a fixed decay, and a state matrix of values by keys.
    """
    qkv = module.act_fn(module.qkv_proj(hidden[0])).view(len(hidden[0]), module.num_attention_heads, -1)
    query, key, value = (part.contiguous() for part in qkv.chunk(3, -1))
    states = past_key_values.fields["lightning"]
    rates = -module.slope_rate.flatten()

    def kernel(rows: StateRows, out: Any, value: Any, key: Any, query: Any) -> torch.Tensor:
        return mamba2_scan(value, None, rates, key, query, states, rows, out=out)

    y = run_scan(past_key_values, kernel, torch.empty_like(value), value, key, query)
    gate = torch.sigmoid(module.output_gate(hidden))
    return module.out_proj(gate * module.norm(y.flatten(1)[None])), None
