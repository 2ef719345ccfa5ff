"""Recurrent layers over packed tokens. One call reads states from pages and writes the new states back.

Each function has three kinds of arguments: packed tokens ([tokens, …]), a view of the pages with this layer's
states ([pages, *shape], any page stride), and `StateRows`. `StateRows` has the tokens and pages of each sequence. A
function returns the outputs and writes the last state of each sequence to its page. With `out`, a tensor like the
result, only the outputs of the sequences are written there, and `out` is returned.

If every sequence of a call has at most STEP_TOKENS tokens, the call runs token by token, otherwise in chunks. The
caller passes the length of the longest sequence (`StateRows.longest`), so the host does not wait for the device.
Batch-invariant calls run in Triton. Other calls run in plain torch for CPU or float64 tensors, else in Triton.

| function    | update for one token                                       | state of a page             |
|-------------|------------------------------------------------------------|-----------------------------|
| causal_conv | y = sum of the last `taps` inputs, each times its weight   | [channels, columns]         |
| linear_scan | h = exp(log_decay) h + x;  y = h                           | [channels]                  |
| mamba1_scan | h = exp(dt a) h + dt x b;  y = h c + d x                   | [channels, n]               |
| mamba2_scan | h = exp(dt a) h + dt x bᵀ; y = h c + d x   (per head)      | [heads, p, n]               |
| delta_rule  | S = exp(g) S; S += beta k (v - Sᵀk)ᵀ; y = Sᵀq   (per head) | [value heads, k dim, v dim] |

Sums are in float32 (float64 for float64 inputs). A state is rounded to the dtype of its page once per call, or once
per token in batch-invariant calls. Lightning attention (linear attention with a fixed decay) is `mamba2_scan` with
x = v, b = k, c = q, dt = None and a = -slope. Its page is then [heads, v dim, k dim]. RG-LRU is `linear_scan` over
gated inputs.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from . import reference
from .rows import STEP_TOKENS, ColumnRuns, DeltaGates, StateRows, check_states, check_tokens

__all__ = [
    "STEP_TOKENS",
    "ColumnRuns",
    "DeltaGates",
    "StateRows",
    "causal_conv",
    "delta_rule",
    "linear_scan",
    "mamba1_scan",
    "mamba2_scan",
]

NO_LIMITS = (0.0, float("inf"))


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
    bias: torch.Tensor | None = None,
    silu: bool = False,
    runs: ColumnRuns | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute a depthwise convolution over the last inputs of each sequence. x is [tokens, channels], and weight is
    [channels, taps]. The result is [tokens, channels]. With `runs`, x may have more columns, and `runs` selects the
    column of each channel.

    A state contains the last inputs of a sequence, the newest in the last column. It has at least `taps - 1` columns
    (Hugging Face stores `taps`). Columns before the start of a sequence are zeros.
    """
    if x.dim() != 2 or weight.dim() != 2:
        raise ValueError(
            f"x is [tokens, channels] and weight [channels, taps], got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    channels, taps = x.shape[1] if runs is None else len(weight), weight.shape[1]
    columns = states.shape[-1]
    if columns < taps - 1 or columns < 1:
        raise ValueError(
            f"a state of {columns} columns for {taps} taps: pages must keep at least {max(taps - 1, 1)}"
        )
    check_states(states, (channels, columns), "convolution states")
    check_tokens(
        rows,
        x=(x, (x.shape[0], channels) if runs is None else tuple(x.shape)),
        weight=(weight, (channels, taps)),
        bias=(bias, (channels,)),
        states=_as_is(states),
    )
    if runs is not None and runs.first.numel() * runs.size != channels:
        raise ValueError(
            f"{runs.first.numel()} runs of {runs.size} columns do not have the {channels} channels of the weight"
        )
    if _plain(x, rows, states):
        if runs is not None:
            x = x[:, runs.columns()]
        return reference.causal_conv(x, weight, bias, silu, states, rows, out)
    from . import triton_conv

    return triton_conv.causal_conv(x, weight, bias, silu, states, rows, runs, out)


def linear_scan(
    x: torch.Tensor, log_decay: torch.Tensor, states: torch.Tensor, rows: StateRows
) -> torch.Tensor:
    """Compute h = exp(log_decay) h + x for every channel. x and log_decay are [tokens, channels]. Return h after
    every token.

    The last h of a sequence is written to its page. `log_decay` must be at most 0.
    """
    if x.dim() != 2:
        raise ValueError(f"x is [tokens, channels], got {tuple(x.shape)}")
    check_states(states, (x.shape[1],), "states")
    check_tokens(rows, x=(x, tuple(x.shape)), log_decay=(log_decay, tuple(x.shape)), states=_as_is(states))
    if _plain(x, rows, states):
        return reference.linear_scan(x, log_decay, states, rows)
    from . import triton_scan

    return triton_scan.linear_scan(x, log_decay, states, rows)


def mamba1_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
    d: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    softplus: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the selective scan of Mamba-1. x, dt and z are [tokens, channels], a is [channels, n], and b and c are
    [tokens, n]. The result has the shape of x.

    `a` is the rate itself, -exp(A_log), not A_log. b and c may be [tokens, groups, n]. Every group then applies to an
    equal number of consecutive channels. With `softplus`, the time step is softplus(dt + dt_bias). If `z` is given, y
    is multiplied by silu(z).
    """
    if x.dim() != 2 or a.dim() != 2:
        raise ValueError(
            f"x is [tokens, channels] and a [channels, n], got {tuple(x.shape)} and {tuple(a.shape)}"
        )
    (tokens, channels), size = x.shape, a.shape[1]
    b, c = (part[:, None] if part.dim() == 2 else part for part in (b, c))
    groups = b.shape[1]
    if channels % groups:
        raise ValueError(f"{channels} channels do not fall into {groups} groups of b: give a divisor")
    check_states(states, (channels, size), "states")
    check_tokens(
        rows,
        x=(x, (tokens, channels)),
        dt=(dt, (tokens, channels)),
        a=(a, (channels, size)),
        b=(b, (tokens, groups, size)),
        c=(c, (tokens, groups, size)),
        d=(d, (channels,)),
        z=(z, (tokens, channels)),
        dt_bias=(dt_bias, (channels,)),
        states=_as_is(states),
    )
    if _plain(x, rows, states):
        return reference.mamba1_scan(x, dt, a, b, c, d, z, dt_bias, softplus, states, rows, out)
    from . import triton_scan

    return triton_scan.mamba1_scan(x, dt, a, b, c, d, z, dt_bias, softplus, states, rows, out)


def mamba2_scan(
    x: torch.Tensor,
    dt: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
    d: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    softplus: bool = True,
    limits: tuple[float, float] = NO_LIMITS,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the scan of Mamba-2. x and z are [tokens, heads, p], dt is [tokens, heads], a, d and dt_bias are [heads],
    and b and c are [tokens, groups, n]. The result has the shape of x.

    `a` is the rate itself, -exp(A_log), and at most 0. Without `dt`, every time step is 1. `limits` clamp the time step
    after softplus (Hugging Face clamps only in prefill). If `z` is given, y is multiplied by silu(z). Do not pass `z`
    if the norm after the layer applies the gate.
    """
    if x.dim() != 3 or b.dim() != 3:
        raise ValueError(
            f"x is [tokens, heads, p] and b [tokens, groups, n], got {tuple(x.shape)} and {tuple(b.shape)}"
        )
    (tokens, heads, width), (_, groups, size) = x.shape, b.shape
    if heads % groups:
        raise ValueError(f"{heads} heads do not fall into {groups} groups of b: give a divisor")
    check_states(states, (heads, width, size), "states")
    check_tokens(
        rows,
        x=(x, (tokens, heads, width)),
        dt=(dt, (tokens, heads)),
        a=(a, (heads,)),
        b=(b, (tokens, groups, size)),
        c=(c, (tokens, groups, size)),
        d=(d, (heads,)),
        z=(z, (tokens, heads, width)),
        dt_bias=(dt_bias, (heads,)),
        states=_as_is(states),
    )
    if _plain(x, rows, states):
        return reference.mamba2_scan(x, dt, a, b, c, d, z, dt_bias, softplus, limits, states, rows, out)
    from . import triton_ssd

    return triton_ssd.mamba2_scan(x, dt, a, b, c, d, z, dt_bias, softplus, limits, states, rows, out)


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    states: torch.Tensor,
    rows: StateRows,
    scale: float | None = None,
    normalise: bool = False,
    gates: DeltaGates | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the gated delta rule. q and k are [tokens, key heads, dk], v is [tokens, value heads, dv], and g and beta
    are [tokens, value heads]. The result has the shape of v. Value head h belongs to key head h // (value heads / key
    heads).

    - `g` is the log of the decay, at most 0. It has one value per head, or one per channel ([tokens, value heads, dk],
      Kimi). None means no decay.
    - `beta` is 1 by default.
    - `normalise` divides each vector of q and k by its Euclidean norm. Then q is multiplied by `scale` (default dk **
      -0.5).
    - With `gates`, g and beta are the inputs of the gates, [tokens, key heads, value heads per key head].
    """
    if q.dim() != 3 or v.dim() != 3:
        raise ValueError(
            f"q is [tokens, key heads, dk] and v [tokens, value heads, dv], got {tuple(q.shape)} and {tuple(v.shape)}"
        )
    (tokens, key_heads, dk), (_, heads, dv) = q.shape, v.shape
    if heads % key_heads:
        raise ValueError(f"{heads} value heads do not fall to {key_heads} key heads: give a multiple")
    check_states(states, (heads, dk, dv), "states")
    decays = (tokens, heads, dk) if g is not None and g.dim() == 3 else (tokens, heads)
    strengths: tuple[int, ...] = (tokens, heads)
    if gates is not None:
        if g is None or beta is None:
            raise ValueError("gates need their inputs g and beta: give both, or no gates")
        decays = strengths = (tokens, key_heads, heads // key_heads)
        check_tokens(rows, a_log=(gates.a_log, (heads,)), dt_bias=(gates.dt_bias, (heads,)))
    check_tokens(
        rows,
        q=(q, (tokens, key_heads, dk)),
        k=(k, (tokens, key_heads, dk)),
        v=(v, (tokens, heads, dv)),
        g=(g, decays),
        beta=(beta, strengths),
        states=_as_is(states),
    )
    scale = dk**-0.5 if scale is None else scale
    if _plain(v, rows, states):
        if gates is not None and g is not None and beta is not None:
            g, beta = reference.delta_gates(g, beta, gates)
        return reference.delta_rule(q, k, v, g, beta, scale, normalise, states, rows, out)
    from . import triton_delta

    return triton_delta.delta_rule(q, k, v, g, beta, scale, normalise, states, rows, gates, out)


def _as_is(states: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return the tensor `states` with its own shape, as an argument of `check_tokens`, which then checks only the
    device and dtype. `check_states` has already checked the shape."""
    return states, tuple(states.shape)


def _plain(x: torch.Tensor, rows: StateRows, states: torch.Tensor) -> bool:
    """Return whether plain torch computes this call, instead of a Triton kernel. On a CPU, also check the values of
    `rows`. A GPU would have to wait for this check.
    """
    if x.device.type == "cpu":
        _check_values(x.shape[0], rows, states.shape[0])
        if rows.stored is not None:
            raise ValueError("rows with `stored` need the GPU kernels: split them into two calls")
    if rows.batch_invariant:
        if x.dtype == torch.float64:
            raise ValueError(
                "batch-invariant rows are computed in float32 at most, not in float64: convert them"
            )
        return False
    return x.device.type != "cuda" or x.dtype == torch.float64


def _check_values(tokens: int, rows: StateRows, pages: int) -> None:
    starts = rows.starts.tolist()
    if starts[0] < 0 or starts[-1] > tokens or any(b < a for a, b in pairwise(starts)):
        raise ValueError(f"starts {starts} must rise from 0 or more to at most {tokens} tokens")
    longest = max(b - a for a, b in pairwise(starts))
    if longest > rows.longest:
        raise ValueError(f"a row has {longest} tokens, but `longest` is {rows.longest}: raise it")
    for name, slots in (("read", rows.read), ("write", rows.write)):
        low, high = int(slots.min()), int(slots.max())
        if low < 0 or high >= pages:
            raise ValueError(f"{name} slots from {low} to {high} must lie in 0 (no page) to {pages - 1}")
