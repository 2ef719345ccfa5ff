"""Recurrent layers over packed tokens in plain torch. This is the oracle (in float64) and the CPU path.

The kernels must compute the same results. `interface` checks shapes. A loop over time is used only if a
recurrence needs it. The loop collects the states of many tokens, and then computes their outputs together. All
other work is one operation over sequences, heads and channels.

    sequences of similar length → one dense batch [sequences, longest, …]; padding tokens change no state
    sequences of very different length → one sequence at a time
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from kvloom.kernels.dtypes import accumulator_dtype

from .rows import DeltaGates, StateRows

__all__ = ["causal_conv", "delta_rule", "linear_scan", "mamba1_scan", "mamba2_scan", "time_steps"]

CHUNK = 64
"""Number of tokens that the chunked forms process at once."""

_CHANNEL_CHUNK = 16
"""Like CHUNK, for layers with one decay per channel. The number is smaller, because each pair of tokens then needs
a whole vector of decays."""

_BLOCK_ELEMENTS = 1 << 21
"""Number of state elements that a loop over time collects before it computes their outputs together."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """The sequences of one dense batch. `rows` [b] are their indices in the call. `tokens` [b, longest] are token
    indices, and `real` [b, longest] is False for padding.

    If the batch has all sequences, `rows` is a slice, so no copy is needed.
    """

    rows: torch.Tensor | slice
    tokens: torch.Tensor
    real: torch.Tensor

    def take(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the packed tensor [tokens, …] as [b, longest, …], with zeros after the end of each sequence."""
        dense = packed[self.tokens].to(dtype)
        mask = self.real.view(*self.real.shape, *[1] * (dense.dim() - 2))
        return torch.where(mask, dense, torch.zeros((), dtype=dtype, device=dense.device))

    def put(self, packed: torch.Tensor, dense: torch.Tensor) -> None:
        packed[self.tokens[self.real]] = dense[self.real].to(packed.dtype)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
    states: torch.Tensor,
    rows: StateRows,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Torch version of `state.causal_conv`."""
    dtype = accumulator_dtype(x)
    starts, old = rows.starts.long(), _initial(rows, states, dtype)
    first, end = int(starts[0]), int(starts[-1])
    lengths, starts = starts.diff(), starts - first
    tokens, columns, taps = end - first, states.shape[2], weight.shape[1]
    row = torch.repeat_interleave(torch.arange(rows.sequences, device=x.device), lengths)
    place = torch.arange(tokens, device=x.device) - starts[row]
    own, weights = x[first:end].to(dtype), weight.to(dtype)
    acc = own * weights[:, -1]
    for shift in range(1, taps):
        tap = weights[:, taps - 1 - shift]
        inside = (place >= shift).nonzero()[:, 0]
        acc[inside] += own[inside - shift] * tap
        before = (place < shift).nonzero()[:, 0]
        acc[before] += old[row[before], :, columns + place[before] - shift] * tap
    if bias is not None:
        acc += bias.to(dtype)
    # Column c of the new state is the input at `length - columns + c`. A negative index is a column of the
    # old state.
    at = lengths[:, None] - columns + torch.arange(columns, device=x.device)
    new = old.gather(2, (at + columns).clamp(max=columns - 1)[:, None].expand_as(old))
    if tokens:
        new = torch.where(
            (at >= 0)[:, None], own[(starts[:-1, None] + at).clamp(0, tokens - 1)].transpose(1, 2), new
        )
    _finish(rows, states, new)
    out = torch.zeros_like(x) if out is None else out
    out[first:end] = (functional.silu(acc) if silu else acc).to(x.dtype)
    return out


def linear_scan(
    x: torch.Tensor, log_decay: torch.Tensor, states: torch.Tensor, rows: StateRows
) -> torch.Tensor:
    """Torch version of `state.linear_scan`."""
    dtype, out = accumulator_dtype(x), torch.zeros_like(x)
    last = _initial(rows, states, dtype)
    for batch in _batches(rows):
        inputs, decay = batch.take(x, dtype), batch.take(log_decay, dtype).exp()
        hidden = torch.empty_like(inputs)
        last[batch.rows] = _recur(decay, inputs, last[batch.rows], hidden)
        batch.put(out, hidden)
    _finish(rows, states, last)
    return out


def mamba1_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    softplus: bool,
    states: torch.Tensor,
    rows: StateRows,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Torch version of `state.mamba1_scan`. b and c are [tokens, groups, n]."""
    dtype = accumulator_dtype(x)
    out = torch.zeros_like(x) if out is None else out
    last = _initial(rows, states, dtype)
    rates, (channels, size) = a.to(dtype), a.shape
    groups = b.shape[1]
    for batch in _batches(rows):
        inputs = batch.take(x, dtype)
        # The time step of a padding token is 0 after softplus and bias. Its decay is then 1 and its input 0, so it changes no state.
        step = time_steps(dt[batch.tokens].to(dtype), dt_bias, softplus) * batch.real[..., None]
        into, read = batch.take(b, dtype), batch.take(c, dtype)
        width, length = inputs.shape[:2]
        state, y = last[batch.rows], torch.empty_like(inputs)
        block = max(1, min(length, _BLOCK_ELEMENTS // (width * channels * size)))
        hidden = inputs.new_empty(width, block, channels, size)
        for first in range(0, length, block):
            part = slice(first, min(first + block, length))
            decay = torch.exp(step[:, part, :, None] * rates)
            drive = (step[:, part] * inputs[:, part]).reshape(width, -1, groups, channels // groups, 1)
            drive = (drive * into[:, part, :, None]).flatten(2, 3)
            seen = hidden[:, : part.stop - part.start]
            state = _recur(decay, drive, state, seen)
            grouped = seen.reshape(width, -1, groups, channels // groups, size)
            y[:, part] = torch.einsum("blgpn,blgn->blgp", grouped, read[:, part]).flatten(2)
        last[batch.rows] = state
        batch.put(out, _skip_and_gate(y, inputs, d, None if z is None else batch.take(z, dtype)))
    _finish(rows, states, last)
    return out


def mamba2_scan(
    x: torch.Tensor,
    dt: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    softplus: bool,
    limits: tuple[float, float],
    states: torch.Tensor,
    rows: StateRows,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Torch version of `state.mamba2_scan`."""
    dtype = accumulator_dtype(x)
    out = torch.zeros_like(x) if out is None else out
    last = _initial(rows, states, dtype)
    heads, groups = x.shape[1], b.shape[1]
    for batch in _batches(rows):
        inputs = batch.take(x, dtype)
        real = batch.real[..., None].to(dtype)
        step = real.expand(*batch.real.shape, heads)
        if dt is not None:
            step = time_steps(dt[batch.tokens].to(dtype), dt_bias, softplus, limits) * real
        into, read = (_heads_first(batch.take(part, dtype), heads // groups) for part in (b, c))
        state = last[batch.rows]
        y = _chunked_scan(inputs, step, a.to(dtype), into, read, state)
        last[batch.rows] = state
        batch.put(out, _skip_and_gate(y, inputs, d, None if z is None else batch.take(z, dtype)))
    _finish(rows, states, last)
    return out


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor | None,
    beta: torch.Tensor | None,
    scale: float,
    normalise: bool,
    states: torch.Tensor,
    rows: StateRows,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Torch version of `state.delta_rule`."""
    dtype = accumulator_dtype(v)
    out = torch.zeros_like(v) if out is None else out
    last = _initial(rows, states, dtype)
    repeat = v.shape[1] // k.shape[1]
    for batch in _batches(rows):
        query, key = batch.take(q, dtype), batch.take(k, dtype)
        if normalise:
            query, key = (
                part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (query, key)
            )
        query, key, value = (
            _heads_first(query * scale, repeat),
            _heads_first(key, repeat),
            _heads_first(batch.take(v, dtype)),
        )
        # A padding token has decay 1 and beta 0.
        strength = batch.real[..., None].to(dtype).expand(*batch.real.shape, v.shape[1])
        strength = _heads_first(strength if beta is None else batch.take(beta, dtype))
        decay = torch.zeros_like(strength) if g is None else _heads_first(batch.take(g, dtype))
        state = last[batch.rows]
        y = _chunked_delta(query, key, value, decay, strength, state)
        last[batch.rows] = state
        batch.put(out, y.transpose(1, 2))
    _finish(rows, states, last)
    return out


def delta_gates(g: torch.Tensor, beta: torch.Tensor, gates: DeltaGates) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log decay and beta of each token and value head, [tokens, value heads], from the inputs of the
    gates."""
    dtype = accumulator_dtype(g)
    rates = -gates.a_log.to(dtype).exp()
    return rates * functional.softplus(g.flatten(1).to(dtype) + gates.dt_bias), beta.flatten(1).sigmoid()


def time_steps(
    dt: torch.Tensor,
    bias: torch.Tensor | None,
    softplus: bool,
    limits: tuple[float, float] = (0.0, float("inf")),
) -> torch.Tensor:
    """Return the time step of each token: dt plus bias, after softplus and clamping."""
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    if softplus:
        dt = functional.softplus(dt)
    return dt if limits == (0.0, float("inf")) else dt.clamp(*limits)


def _recur(decay: torch.Tensor, drive: torch.Tensor, state: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Compute state = decay * state + drive for one token after the other (dimension 1). Writes every state to `seen`
    and returns the last state."""
    for t in range(seen.shape[1]):
        state = torch.addcmul(drive[:, t], decay[:, t], state, out=seen[:, t])
    return state.clone()


def _chunked_scan(
    x: torch.Tensor,
    step: torch.Tensor,
    a: torch.Tensor,
    into: torch.Tensor,
    read: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Compute Mamba-2 on x [b, length, heads, p]. `into` and `read` are b and c of the equations, [b, heads, length,
    n]. Return the outputs and updates `state`."""
    y = torch.empty_like(x)
    for first in range(0, x.shape[1], CHUNK):
        part = slice(first, first + CHUNK)
        cum = (step[:, part] * a).cumsum(1).transpose(1, 2)
        scaled = (x[:, part] * step[:, part, :, None]).transpose(1, 2)
        pairs = read[:, :, part] @ into[:, :, part].transpose(2, 3) * _decay_between(cum)
        seen = pairs @ scaled + cum.exp()[..., None] * (read[:, :, part] @ state.transpose(2, 3))
        y[:, part] = seen.transpose(1, 2)
        left = (cum[..., -1:] - cum).exp()[..., None]
        _decay_and_add(
            state, cum[..., -1, None, None].exp(), (scaled * left).transpose(2, 3), into[:, :, part]
        )
    return y


def _chunked_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """Compute the delta rule and update `state`. Return the outputs. All arguments are [b, heads, length, …].

    Tokens are processed in chunks. Inside a chunk, let D be the decay between tokens. The corrected values u solve a
    unit lower triangular system: (1 + strictly lower(beta k kᵀ D)) u = beta (v - decayed k S).
    """
    y = torch.empty_like(v)
    single = g.dim() == 3
    chunk = CHUNK if single else _CHANNEL_CHUNK
    for first in range(0, v.shape[2], chunk):
        part = slice(first, first + chunk)
        query, key, strength = q[:, :, part], k[:, :, part], beta[:, :, part, None]
        cum = g[:, :, part].cumsum(2)
        if single:
            between = _decay_between(cum)
            qk, kk = (left @ key.transpose(2, 3) * between for left in (query, key))
            cum = cum[..., None]
        else:
            between = (cum[:, :, :, None] - cum[:, :, None]).clamp(max=0).exp() * key[:, :, None]
            qk, kk = ((between @ left[..., None])[..., 0].tril() for left in (query, key))
        system = (strength * kk).tril(-1)
        known = strength * (v[:, :, part] - (key * cum.exp()) @ state)
        u = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
        y[:, :, part] = (query * cum.exp()) @ state + qk @ u
        end = cum[:, :, -1:]
        _decay_and_add(state, end.exp().transpose(2, 3), (key * (end - cum).exp()).transpose(2, 3), u)
    return y


def _decay_and_add(state: torch.Tensor, decay: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Compute state = decay * state + left @ right in place, in a single pass over the state."""
    state.mul_(decay)
    state.flatten(0, 1).baddbmm_(left.flatten(0, 1), right.flatten(0, 1))


def _decay_between(cum: torch.Tensor) -> torch.Tensor:
    """Return exp(cum_i - cum_j) for j <= i, else 0. The mask is applied before the exponential, which could
    overflow for masked entries."""
    gap = cum[..., :, None] - cum[..., None, :]
    above = torch.ones(gap.shape[-2:], dtype=torch.bool, device=gap.device).triu(1)
    return gap.masked_fill(above, -torch.inf).exp()


def _heads_first(part: torch.Tensor, repeat: int = 1) -> torch.Tensor:
    """Return [b, length, heads, …] as [b, heads * repeat, length, …]. Each head is repeated `repeat` times."""
    turned = part.transpose(1, 2)
    return turned if repeat == 1 else turned.repeat_interleave(repeat, 1)


def _skip_and_gate(
    y: torch.Tensor, x: torch.Tensor, d: torch.Tensor | None, z: torch.Tensor | None
) -> torch.Tensor:
    if d is not None:
        y = y + x * d.to(x.dtype).view(*d.shape, *[1] * (x.dim() - 2 - d.dim()))
    return y if z is None else y * functional.silu(z)


def _initial(rows: StateRows, states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of the first state of every sequence. The state of a fresh sequence is set to zeros. The state is
    not multiplied by zero, because an unwritten page may contain NaN."""
    blank = rows.read == 0
    if rows.fresh is not None:
        blank = blank | rows.fresh.bool()
    found = states[rows.read.long()].to(dtype)
    found[blank] = 0
    return found


def _finish(rows: StateRows, states: torch.Tensor, last: torch.Tensor) -> None:
    kept = rows.write > 0
    states[rows.write[kept].long()] = last[kept].to(states.dtype)


def _batches(rows: StateRows) -> Iterator[_Batch]:
    """Yield dense batches that contain every sequence with tokens. At most half of a batch is padding."""
    starts = rows.starts.long()
    lengths = starts.diff()
    filled = (lengths > 0).nonzero()[:, 0]
    if not filled.numel():
        return
    together = int(lengths.max()) * filled.numel() <= 2 * int(starts[-1] - starts[0])
    for group in (filled,) if together else filled[:, None]:
        place = torch.arange(int(lengths[group].max()), device=starts.device)
        real = place < lengths[group, None]
        all_rows = group.numel() == rows.sequences
        yield _Batch(
            slice(None) if all_rows else group, torch.where(real, starts[group, None] + place, 0), real
        )
