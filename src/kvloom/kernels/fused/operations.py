"""Small operations between the matrix products of a model: norms, gated activations, rotary embedding. Each is one
launch.

Results are bit-identical to Hugging Face's modeling code, because values are rounded after the same operations. CPU
tensors run in torch (the oracle) or in native code (`cpu`). CUDA tensors run in Triton. `models/fusion` replaces
modules by these functions.

| function         | takes                                       | returns                                    |
|------------------|---------------------------------------------|--------------------------------------------|
| `rms_norm`       | x [..., dim], any strides but dense in dim  | the same shape, dense                      |
| `rms_norms`      | x [tokens, heads, dim], two norms           | the same shape, dense                      |
| `gated_rms_norm` | x [..., dim], dense; gates of its shape     | the same shape, dense                      |
| `act_and_mul`    | x [tokens, 2 * dim]: gates, gated values    | [tokens, dim]                              |
| `add_norm`       | x, y [..., dim], dense                      | first adds a norm of y to x in place, then |
|                  |                                             | returns a norm of x                        |
| `linear`         | x [..., in], weight [out, in], bias or into | [..., out]                                 |
| `linear_float32` | x [tokens, in], weight [out, in]            | [tokens, out] in float32                   |
| `apply_rotary`   | q, k [batch, heads, tokens, dim],           | q and k, normalised first (with `norms`),  |
|                  | cos, sin [batch, tokens, dim]               | then rotated; stored token by token        |

`linear` is torch's matrix product, except for a single token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode

from kvloom.kernels import cpu

__all__ = [
    "Activation",
    "GateOrder",
    "NormForm",
    "RMSNorm",
    "act_and_mul",
    "add_norm",
    "apply_rotary",
    "gated_rms_norm",
    "linear",
    "linear_float32",
    "rms_norm",
    "rms_norms",
]

NormForm = Literal["llama", "gemma"]
"""How a norm applies its weight. `llama` rounds the normalised values, and then multiplies them by the weight.
`gemma` multiplies by 1 + weight in float32, and then rounds."""
Activation = Literal["silu", "gelu_tanh"]
GateOrder = Literal["first", "last"]
"""Whether a gated norm multiplies by the gate before the norm (`first`, Mamba-2) or after it (`last`, Qwen3-Next)."""


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """The parameters of an RMS norm. A call applies the norm to a tensor."""

    weight: torch.Tensor
    eps: float
    form: NormForm = "llama"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, self.form)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, form: NormForm = "llama") -> torch.Tensor:
    """Return x divided by its root mean square along the last dimension, times the weight."""
    if x.shape[-1:] != weight.shape:
        raise ValueError(
            f"a weight of {tuple(weight.shape)} does not fit x {tuple(x.shape)} in its last dimension"
        )
    if x.is_cuda and x.stride(-1) == 1:
        from . import triton_operations

        return triton_operations.rms_norm(x, weight, eps, form == "gemma")
    if cpu.supports(x, weight):
        return cpu.rms_norm(x, weight, eps, form == "gemma")
    if x.dtype == torch.float32:  # no intermediate rounding
        return functional.rms_norm(x, weight.shape, weight if form == "llama" else 1.0 + weight, eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if form == "gemma":
        return (wide * (1.0 + weight.float())).type_as(x)
    return weight * wide.to(x.dtype)


def rms_norms(x: torch.Tensor, first: int, norms: tuple[RMSNorm, RMSNorm]) -> torch.Tensor:
    """Apply the first norm to the `first` heads of x, and the second norm to the other heads."""
    if x.is_cuda and x.stride(-1) == 1 and _fuse_in_one_launch(norms, x):
        from . import triton_operations

        return triton_operations.rms_norms(x, first, norms)
    return torch.cat((norms[0](x[:, :first]), norms[1](x[:, first:])), 1)


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, order: GateOrder
) -> torch.Tensor:
    """Return the RMS norm of x with a gate: norm(x * silu(gate)) * weight, or norm(x) * weight * silu(gate).

    x and gate are [..., dim]. The weight is [dim], or [groups, dim] for x of [..., groups, dim]."""
    if x.shape != gate.shape or weight.shape not in (x.shape[-1:], x.shape[-2:]):
        raise ValueError(
            f"x {tuple(x.shape)}, gates {tuple(gate.shape)} and a weight of {tuple(weight.shape)} do not fit together"
        )
    if x.is_cuda and x.is_contiguous() and gate.stride(-1) == 1 and gate.dim() <= 4:
        from . import triton_operations

        return triton_operations.gated_rms_norm(x, gate, weight, eps, order == "first")
    wide, acted = x.float(), functional.silu(gate.float())
    if order == "first":
        wide = wide * acted
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    wide = weight * wide.to(x.dtype)
    return wide if order == "first" else (wide * acted).to(x.dtype)


def _fuse_in_one_launch(norms: tuple[RMSNorm, RMSNorm], x: torch.Tensor) -> bool:
    """Return whether one launch can compute both norms of x."""
    a, b = norms
    return a.eps == b.eps and a.form == b.form and a.weight.shape == b.weight.shape == x.shape[-1:]


def act_and_mul(x: torch.Tensor, activation: Activation = "silu") -> torch.Tensor:
    """Apply the activation to the first half of each row, and multiply the result by the second half."""
    if x.shape[-1] % 2:
        raise ValueError(f"rows of {x.shape[-1]} have no halves: give an even number of values")
    if x.is_cuda and x.is_contiguous():
        from . import triton_operations

        return triton_operations.act_and_mul(x, activation)
    if cpu.supports(x):
        return cpu.act_and_mul(x, activation == "gelu_tanh")
    gate, up = x.chunk(2, -1)
    acted = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    return acted * up


def add_norm(
    x: torch.Tensor, y: torch.Tensor, post: RMSNorm, pre: RMSNorm | None = None
) -> torch.Tensor | None:
    """Apply the norm `post` to y, and add the result to x in place. Return the norm `pre` of the new x, or None if
    `pre` is None."""
    if x.shape != y.shape or x.shape[-1:] != post.weight.shape:
        raise ValueError(
            f"x {tuple(x.shape)}, y {tuple(y.shape)} and a weight of {tuple(post.weight.shape)} do not fit together"
        )
    if x.is_cuda and x.is_contiguous() and y.is_contiguous():
        from . import triton_operations

        return triton_operations.add_norm(x, y, post, pre)
    x += post(y)
    return None if pre is None else pre(x)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x times the transposed weight, plus `bias` if given. With `into`, add the product to `into` in place
    and return `into`. Sums are rounded once."""
    if into is not None and bias is not None:
        raise ValueError("a product with a bias cannot be added to another tensor: give either bias or into")
    if _get_current_dispatch_mode() is not None:  # a dispatch mode must see every torch operation
        found = functional.linear(x, weight, bias)
        return found if into is None else into.add_(found)
    alone = x.is_cuda and x.numel() == x.shape[-1] and x.dtype == weight.dtype != torch.float32
    if alone and bias is None and weight.stride(1) == 1 and x.stride(-1) == 1:
        from . import triton_linear

        flat = None if into is None else into.view(1, -1)
        return triton_linear.row_linear(x.view(1, -1), weight, flat).view(*x.shape[:-1], -1)
    if bias is None and cpu.multiplies(x, weight) and (into is None or into.is_contiguous()):
        return cpu.multiply(x, weight, into)
    if into is None:
        return functional.linear(x, weight, bias)
    into.view(-1, into.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), weight.t())
    return into


def linear_float32(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x times the transposed weight in float32. Sums are not rounded to the dtype of x."""
    plain = x.is_cuda and x.dtype == weight.dtype != torch.float32 and _get_current_dispatch_mode() is None
    if plain:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return functional.linear(x.float(), weight.float())


def apply_rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: tuple[RMSNorm, RMSNorm] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k, rotated by the angles of their tokens. With `norms`, q and k are normalised first.

    The two members of a rotated pair are half a head apart. `cos` and `sin` have one value per dim.
    """
    if cos.shape != sin.shape or cos.shape[-1] != q.shape[-1] or cos.shape[-2] != q.shape[-2]:
        raise ValueError(
            f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} do not fit q {tuple(q.shape)}: one angle for each "
            "token and dim"
        )
    launched = q.is_cuda and q.stride(-1) == k.stride(-1) == 1 and q.shape[0] == 1
    if norms is not None and not (launched and _fuse_in_one_launch(norms, q)):
        q, k, norms = norms[0](q), norms[1](k), None
    if launched:
        from . import triton_operations

        return triton_operations.apply_rotary(q, k, cos, sin, norms)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + _rotate_half(q) * sin, k * cos + _rotate_half(k) * sin


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((-high, low), -1)
