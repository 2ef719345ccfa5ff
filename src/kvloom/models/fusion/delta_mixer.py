"""Mixers with a gated delta rule (Qwen3-Next, Qwen3.5) in five calls.

The mixer's own forward launches about thirty small kernels. It sorts the outputs of its projections, repeats q and k
for each value head, and computes the gates one operation at a time. Here the kernels read the outputs where they are:

    product      q, k, v, z | b, a      weights of all input projections joined
    convolution  over q, k, v
    delta rule   its kernel also computes the gates from b and a
    gated norm   with gate z
    product      output projection

Modules are selected by a test, not by family name. Both forwards must compute the same result on random input.
"""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import torch

from kvloom.kernels.fused import gated_rms_norm
from kvloom.kernels.state import ColumnRuns, DeltaGates, StateRows, causal_conv, delta_rule
from kvloom.models.paged import PackedStates, StatePart, current_states, is_dense, run_scan

from .comparison import differ_by_rounding
from .product import Product, can_join

__all__ = ["FusedDeltaMixer", "fuse_delta_mixer"]

INTERLEAVED = ("in_proj_qkvz", "in_proj_ba")
SEPARATE = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
SMALLEST_RUN = 16
"""Smallest number of consecutive columns that a kernel can read at a computed place."""


class _Columns(NamedTuple):
    """The positions of the parts in a joined product: for each part, its first column, and the number of columns
    between two key heads.
    """

    runs: ColumnRuns | None
    z: tuple[int, int]
    b: tuple[int, int]
    a: tuple[int, int]


class FusedDeltaMixer:
    """The fused forward of a mixer. If it does not support a call, the mixer's own forward runs."""

    def __init__(self, module: Any, product: Product, columns: _Columns) -> None:
        self._module, self._own, self._product, self._columns = (
            module,
            module.packed_forward,
            product,
            columns,
        )

    def __call__(self, hidden_states: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        packed = current_states.get()
        if given or packed is None or len(hidden_states) != 1 or named.get("attention_mask") is not None:
            return self._own(hidden_states, *given, **named)  # type: ignore[no-any-return]
        module, tokens = self._module, hidden_states.shape[1]
        joined = self._product(hidden_states[0])
        mixed = self._mixed(packed, joined)
        y = self._scanned(packed, mixed, joined)
        norm, gate = module.norm, self._part(joined, self._columns.z, module.head_v_dim)
        y = gated_rms_norm(y.view(gate.shape), gate, norm.weight, norm.forward.eps, "last")
        return module.out_proj(y.view(1, tokens, -1))  # type: ignore[no-any-return]

    def _mixed(self, packed: PackedStates, joined: torch.Tensor) -> torch.Tensor:
        """Return q, k and v of all heads after the convolution, [tokens, channels]."""
        conv, runs = self._module.conv1d, self._columns.runs
        states, weight = packed.fields["conv"], conv.weight[:, 0]
        x = joined[:, : len(weight)] if runs is None else joined

        def kernel(rows: StateRows, out: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
            return causal_conv(x, weight, states, rows, conv.bias, True, runs, out)

        return run_scan(packed, kernel, x.new_empty(len(x), len(weight)), x)

    def _scanned(self, packed: PackedStates, mixed: torch.Tensor, joined: torch.Tensor) -> torch.Tensor:
        """Return the results of the delta rule, [tokens, value heads, value dim]."""
        module, states = self._module, packed.fields["recurrent"]
        gates = DeltaGates(module.A_log, module.dt_bias)
        keys, dim = module.num_k_heads * module.head_k_dim, module.head_k_dim
        b, a = (self._part(joined, part)[..., 0] for part in (self._columns.b, self._columns.a))

        def kernel(rows: StateRows, out: torch.Tensor | None, mixed: Any, b: Any, a: Any) -> torch.Tensor:
            query, key = (
                mixed[:, first : first + keys].view(-1, module.num_k_heads, dim) for first in (0, keys)
            )
            value = mixed[:, 2 * keys :].view(-1, module.num_v_heads, module.head_v_dim)
            return delta_rule(query, key, value, a, b, states, rows, normalise=True, gates=gates, out=out)

        out = mixed.new_empty(len(mixed), module.num_v_heads, module.head_v_dim)
        return run_scan(packed, kernel, out, mixed, b, a)

    def _part(self, joined: torch.Tensor, columns: tuple[int, int], dim: int = 1) -> torch.Tensor:
        """Return a view of one part of `joined`, [tokens, key heads, value heads per key head, dim]."""
        first, step = columns
        heads, each = self._module.num_k_heads, self._module.num_v_heads // self._module.num_k_heads
        shape, strides = (len(joined), heads, each, dim), (joined.stride(0), step, dim, 1)
        return joined.as_strided(shape, strides, joined.storage_offset() + first)


def fuse_delta_mixer(module: Any) -> bool:
    """Replace the forward of a mixer with a gated delta rule by a fused forward. Return whether it was replaced. The
    norm of the mixer must already be fused."""
    names = next((each for each in (INTERLEAVED, SEPARATE) if hasattr(module, each[0])), None)
    if names is None or not hasattr(module, "packed_forward") or getattr(module, "activation", "") != "silu":
        return False
    if getattr(getattr(getattr(module, "norm", None), "forward", None), "order", None) != "last":
        return False
    layers: list[Any] = [getattr(module, name, None) for name in names]
    if not all(is_dense(layer) for layer in (*layers, module.out_proj)):
        return False
    if any(layer.bias is not None or not can_join(layers[0], layer) for layer in layers):
        return False
    columns = _interleaved(module) if names is INTERLEAVED else _separate(module)
    if columns is None:
        return False
    product = Product(*layers)
    fused = FusedDeltaMixer(module, product, columns)
    if not _computes_same(module, fused, layers[0].in_features):
        return False
    product.register()
    module.packed_forward = fused
    return True


def _interleaved(module: Any) -> _Columns | None:
    """Return the columns of a module whose projection interleaves heads: q, k, v and z of the first key head, then
    those of the second key head, and so on. Return None if the runs of columns are too short for the kernels.
    """
    keys, each = module.num_k_heads, module.num_v_heads // module.num_k_heads
    dim, values = module.head_k_dim, each * module.head_v_dim
    step, size = 2 * (dim + values), gcd(dim, values)
    if size < SMALLEST_RUN or size & (size - 1):
        return None
    heads = torch.arange(keys) * step
    parts = ((0, dim), (dim, dim), (2 * dim, values))  # q, k, v: first column of a key head, and width
    first = [(heads[:, None] + begin + torch.arange(0, width, size)).flatten() for begin, width in parts]
    device = module.conv1d.weight.device
    runs = ColumnRuns(torch.cat(first).to(device, torch.int32), size)
    end = keys * step
    return _Columns(runs, (2 * dim + values, step), (end, 2 * each), (end + each, 2 * each))


def _separate(module: Any) -> _Columns:
    """Return the columns of a module that has four projections: qkv, z, b and a."""
    each = module.num_v_heads // module.num_k_heads
    z = 2 * module.num_k_heads * module.head_k_dim + module.num_v_heads * module.head_v_dim
    b = z + module.num_v_heads * module.head_v_dim
    return _Columns(None, (z, each * module.head_v_dim), (b, each), (b + module.num_v_heads, each))


def _computes_same(module: Any, fused: FusedDeltaMixer, width: int) -> bool:
    """Return whether the mixer and its fused form compute the same result and the same states on random input of
    `width` columns."""
    weight = module.out_proj.weight
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(1, 3, width, generator=draw).to(weight)
    slots = torch.ones(1, dtype=torch.int32, device=weight.device)
    rows = StateRows(torch.tensor([0, 3], dtype=torch.int32, device=weight.device), slots, slots, 3)
    channels, _, taps = module.conv1d.weight.shape
    shape = module.num_v_heads, module.head_k_dim, module.head_v_dim
    conv, recurrent = torch.randn(2, channels, taps, generator=draw), torch.randn(2, *shape, generator=draw)
    found = []
    for forward in (module.packed_forward, fused):
        fields = {"conv": conv.clone().to(weight), "recurrent": recurrent.clone().to(weight.device)}
        states = PackedStates(fields, (StatePart(rows),))
        token = current_states.set(states)
        try:
            found.append((forward(x, cache_params=states), *fields.values()))
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return False
        finally:
            current_states.reset(token)
    own, new = found
    return all(differ_by_rounding(a, b, 8e-4) for a, b in zip(own, new, strict=True))
