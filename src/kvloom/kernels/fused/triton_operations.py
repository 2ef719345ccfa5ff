"""Triton kernels of `operations.py`. They compute in float32 and round after the same operations as Hugging Face's
modeling code.

`enable_fp_fusion=False` prevents the compiler from fusing a product and a sum, which would skip one rounding. Every
kernel sums a row of 16-bit values in the same order, so all kernels give identical bits.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import (
    gdc_launch_dependents as launch_dependents,
    gdc_wait as wait_for_launcher,
)

from kvloom.kernels.device import pdl_options, supports_pdl

__all__ = ["act", "act_and_mul", "add_norm", "apply_rotary", "gated_rms_norm", "rms_norm", "rms_norms"]


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    x, weight, other_weight, out, heads, rows, s_token, s_head, eps,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr, GEMMA: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Normalise tensor rows. A row is one head of one token. If FIRST is not 0, `other_weight` applies to the heads
    from FIRST on."""
    if OVERLAP:
        launch_dependents()
        wait_for_launcher()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    there = (row < rows)[:, None] & (column < DIM)[None, :]
    at = x + (row // heads * s_token + row % heads * s_head)[:, None] + column[None, :]
    values = tl.load(at, mask=there, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=column < DIM, other=0.0).to(tl.float32)[None, :]
    if FIRST:
        others = tl.load(other_weight + column, mask=column < DIM, other=0.0).to(tl.float32)[None, :]
        w = tl.where((row % heads < FIRST)[:, None], w, others)
    root = tl.rsqrt(tl.sum(values * values, 1) / DIM + eps)
    values = _weighed(values * root[:, None], w, GEMMA, x.dtype.element_ty)
    tl.store(out + row[:, None] * DIM + column[None, :], values.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["rows"])
def _gated_norm_kernel(
    x, gate, weight, out, rows, outer, inner, s_token, s_outer, s_inner, eps,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, GROUPED: tl.constexpr, FIRST: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Normalise the dense rows of x with gates of shape [tokens, outer, inner, DIM]. If GROUPED is set, each of the
    `inner` rows has its own row of the weight."""
    if OVERLAP:
        launch_dependents()
        wait_for_launcher()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    there = (row < rows)[:, None] & (column < DIM)[None, :]
    values = tl.load(x + row[:, None] * DIM + column[None, :], mask=there, other=0.0).to(tl.float32)
    place = row // (outer * inner) * s_token + row // inner % outer * s_outer + row % inner * s_inner
    gates = tl.load(gate + place[:, None] + column[None, :], mask=there, other=0.0).to(tl.float32)
    if GROUPED:
        w = tl.load(weight + (row % inner)[:, None] * DIM + column[None, :], mask=there, other=0.0).to(
            tl.float32
        )
    else:
        w = tl.load(weight + column, mask=column < DIM, other=0.0).to(tl.float32)[None, :]
    acted = act(gates, False)
    if FIRST:
        values = values * acted
    values = values * tl.rsqrt(tl.sum(values * values, 1) / DIM + eps)[:, None]
    values = (values.to(x.dtype.element_ty).to(tl.float32) * w).to(x.dtype.element_ty)
    if not FIRST:
        values = values.to(tl.float32) * acted
    tl.store(out + row[:, None] * DIM + column[None, :], values.to(out.dtype.element_ty), mask=there)


@triton.jit
def _add_norm_kernel(
    x, y, post_weight, pre_weight, out, post_eps, pre_eps,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, POST_GEMMA: tl.constexpr, PRE: tl.constexpr, PRE_GEMMA: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        launch_dependents()
        wait_for_launcher()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    there = column < DIM
    kind = x.dtype.element_ty
    values = tl.load(y + row * DIM + column, mask=there, other=0.0).to(tl.float32)
    w = tl.load(post_weight + column, mask=there, other=0.0).to(tl.float32)
    values = _normed(values, w, post_eps, DIM, POST_GEMMA, kind)
    total = tl.load(x + row * DIM + column, mask=there, other=0.0).to(tl.float32)
    total = (total + values.to(kind).to(tl.float32)).to(kind)
    tl.store(x + row * DIM + column, total, mask=there)
    if PRE:
        w = tl.load(pre_weight + column, mask=there, other=0.0).to(tl.float32)
        values = _normed(total.to(tl.float32), w, pre_eps, DIM, PRE_GEMMA, kind)
        tl.store(out + row * DIM + column, values.to(kind), mask=there)


@triton.jit
def _normed(values, w, eps, DIM: tl.constexpr, GEMMA: tl.constexpr, kind: tl.constexpr):
    values = values * tl.rsqrt(tl.sum(values * values, 0) / DIM + eps)
    return _weighed(values, w, GEMMA, kind)


@triton.jit
def _weighed(values, w, GEMMA: tl.constexpr, kind: tl.constexpr):
    if GEMMA:
        values = values * (1.0 + w)
    else:
        values = values.to(kind).to(tl.float32) * w
    return values


@triton.jit
def _gated_kernel(
    x, out, DIM: tl.constexpr, COLUMNS: tl.constexpr, TANH: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    if OVERLAP:
        launch_dependents()
        wait_for_launcher()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < DIM
    gate = tl.load(x + row * (2 * DIM) + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(x + row * (2 * DIM) + DIM + column, mask=there, other=0.0).to(tl.float32)
    acted = act(gate, TANH).to(x.dtype.element_ty).to(tl.float32)
    tl.store(out + row * DIM + column, (acted * up).to(out.dtype.element_ty), mask=there)


@triton.jit
def act(gate, TANH: tl.constexpr):
    """Return SiLU, or GELU (tanh approximation) if TANH is set."""
    if TANH:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # tanh computed from the exponential of a non-positive value, which cannot overflow
        e = tl.exp(-2.0 * tl.abs(inner))
        t = (1.0 - e) / (1.0 + e)
        acted = 0.5 * gate * (1.0 + tl.where(inner < 0, -t, t))
    else:
        acted = gate / (1.0 + tl.exp(-gate))
    return acted


@triton.jit
def _rotate_kernel(
    q, k, cos, sin, q_out, k_out, sq_head, sq_token, sk_head, sk_token, s_angle,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        launch_dependents()
        wait_for_launcher()
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    there = column < HALF
    c0 = tl.load(cos + token * s_angle + column, mask=there, other=0.0).to(tl.float32)[None, :]
    c1 = tl.load(cos + token * s_angle + HALF + column, mask=there, other=0.0).to(tl.float32)[None, :]
    s0 = tl.load(sin + token * s_angle + column, mask=there, other=0.0).to(tl.float32)[None, :]
    s1 = tl.load(sin + token * s_angle + HALF + column, mask=there, other=0.0).to(tl.float32)[None, :]
    for first in tl.static_range(0, HEADS, ROWS):
        head = first + tl.arange(0, ROWS)
        _rotate(
            q + token * sq_token + head[:, None] * sq_head, q_out + (token * HEADS + head[:, None]) * (2 * HALF),
            (head < HEADS)[:, None] & there[None, :], column, c0, c1, s0, s1, HALF,
        )  # fmt: skip
    for first in tl.static_range(0, KV_HEADS, ROWS):
        head = first + tl.arange(0, ROWS)
        _rotate(
            k + token * sk_token + head[:, None] * sk_head, k_out + (token * KV_HEADS + head[:, None]) * (2 * HALF),
            (head < KV_HEADS)[:, None] & there[None, :], column, c0, c1, s0, s1, HALF,
        )  # fmt: skip


@triton.jit
def _rotate(source, target, mask, column, c0, c1, s0, s1, HALF: tl.constexpr):
    kind = source.dtype.element_ty
    low = tl.load(source + column[None, :], mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + HALF + column[None, :], mask=mask, other=0.0).to(tl.float32)
    a = (low * c0).to(kind).to(tl.float32) + (-high * s0).to(kind).to(tl.float32)
    b = (high * c1).to(kind).to(tl.float32) + (low * s1).to(kind).to(tl.float32)
    tl.store(target + column[None, :], a.to(kind), mask=mask)
    tl.store(target + HALF + column[None, :], b.to(kind), mask=mask)


@triton.jit
def _norm_rotate_kernel(
    q, k, cos, sin, q_weight, k_weight, q_out, k_out, sq_head, sq_token, sk_head, sk_token, s_angle, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    RUN: tl.constexpr, GEMMA: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate q and k. A tensor row is one head of one token, and is summed in the same order as in
    `_norm_kernel`.

    Rotation needs both members of a pair. The second member is loaded again, RUN dims at a time. This load hits the
    cache and is faster than an exchange between threads.
    """
    if OVERLAP:
        launch_dependents()
        wait_for_launcher()
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    there, low = column < DIM, column < DIM // 2
    other = tl.where(low, column + DIM // 2, column - DIM // 2)
    other = tl.max_contiguous(tl.multiple_of(other, RUN), RUN)
    c = tl.load(cos + token * s_angle + column, mask=there, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * s_angle + column, mask=there, other=0.0).to(tl.float32)
    s = tl.where(low, -s, s)[None, :]
    w = tl.load(q_weight + column, mask=there, other=0.0).to(tl.float32)[None, :]
    w_other = tl.load(q_weight + other, mask=there, other=0.0).to(tl.float32)[None, :]
    for first in tl.static_range(0, HEADS, ROWS):
        head = first + tl.arange(0, ROWS)
        _norm_turn(
            q + token * sq_token + head[:, None] * sq_head, q_out + (token * HEADS + head[:, None]) * DIM,
            (head < HEADS)[:, None] & there[None, :], column, other, c, s, w, w_other, eps, DIM, GEMMA,
        )  # fmt: skip
    w = tl.load(k_weight + column, mask=there, other=0.0).to(tl.float32)[None, :]
    w_other = tl.load(k_weight + other, mask=there, other=0.0).to(tl.float32)[None, :]
    for first in tl.static_range(0, KV_HEADS, ROWS):
        head = first + tl.arange(0, ROWS)
        _norm_turn(
            k + token * sk_token + head[:, None] * sk_head, k_out + (token * KV_HEADS + head[:, None]) * DIM,
            (head < KV_HEADS)[:, None] & there[None, :], column, other, c, s, w, w_other, eps, DIM, GEMMA,
        )  # fmt: skip


@triton.jit
def _norm_turn(
    source, target, mask, column, other, c, s, w, w_other, eps, DIM: tl.constexpr, GEMMA: tl.constexpr
):
    kind = source.dtype.element_ty
    one = tl.load(source + column[None, :], mask=mask, other=0.0).to(tl.float32)
    two = tl.load(source + other[None, :], mask=mask, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(one * one, 1) / DIM + eps)[:, None]
    one = _weighed(one * root, w, GEMMA, kind).to(kind).to(tl.float32)
    two = _weighed(two * root, w_other, GEMMA, kind).to(kind).to(tl.float32)
    turned = (one * c).to(kind).to(tl.float32) + (two * s).to(kind).to(tl.float32)
    tl.store(target + column[None, :], turned.to(kind), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, gemma: bool) -> torch.Tensor:
    """Triton version of `fused.rms_norm`. Copies x first if its strides do not allow a view as [tokens, heads, dim]."""
    tokens = _walk(x)
    if tokens is None:
        x = x.contiguous()
        tokens = _walk(x)
        assert tokens is not None
    return _norm_rows(x, (weight, weight), eps, gemma, 0, *tokens)


def rms_norms(x: torch.Tensor, first: int, norms: Any) -> torch.Tensor:
    """Triton version of `fused.rms_norms`. Both norms must have the same `eps` and the same `form` (see `NormForm`)."""
    weights, norm = (norms[0].weight, norms[1].weight), norms[0]
    return _norm_rows(x, weights, norm.eps, norm.form == "gemma", first, x.shape[1], *x.stride()[:2])


def _norm_rows(
    x: torch.Tensor, weights: tuple[torch.Tensor, torch.Tensor], eps: float, gemma: bool, first: int,
    heads: int, s_token: int, s_head: int,
) -> torch.Tensor:  # fmt: skip
    dim = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.numel() // dim
    columns = triton.next_power_of_2(dim)
    each = max(1, 1024 // columns)
    if rows:
        _norm_kernel[(triton.cdiv(rows, each),)](
            x, *weights, out, heads, rows, s_token, s_head, eps,
            DIM=dim, COLUMNS=columns, ROWS=each, FIRST=first, GEMMA=gemma, OVERLAP=supports_pdl(x.device),
            num_warps=min(16, max(1, columns * each // 512)), enable_fp_fusion=False, **pdl_options(x.device),
        )  # fmt: skip
    return out


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, first: bool
) -> torch.Tensor:
    """Triton version of `fused.gated_rms_norm`. x must be dense, and gates may have any strides but dense in their
    last dimension."""
    dim = x.shape[-1]
    out = torch.empty_like(x)
    leading = [*zip(gate.shape[:-1], gate.stride()[:-1], strict=True)]
    (_, s_token), (outer, s_outer), (inner, s_inner) = [*leading, (1, 0), (1, 0)][:3]
    if weight.dim() == 2 and len(leading) == 2:  # the groups are the innermost rows
        outer, s_outer, inner, s_inner = 1, 0, outer, s_outer
    rows, columns = x.numel() // dim, triton.next_power_of_2(dim)
    each = max(1, 1024 // columns)
    if rows:
        _gated_norm_kernel[(triton.cdiv(rows, each),)](
            x, gate, weight, out, rows, outer, inner, s_token, s_outer, s_inner, eps,
            DIM=dim, COLUMNS=columns, ROWS=each, GROUPED=weight.dim() == 2, FIRST=first,
            OVERLAP=supports_pdl(x.device), num_warps=min(16, max(1, columns * each // 512)),
            enable_fp_fusion=False, **pdl_options(x.device),
        )  # fmt: skip
    return out


def add_norm(x: torch.Tensor, y: torch.Tensor, post: Any, pre: Any) -> torch.Tensor | None:
    """Triton version of `fused.add_norm`. Both tensors must be dense."""
    dim = x.shape[-1]
    out = x if pre is None else torch.empty_like(x)
    columns = triton.next_power_of_2(dim)
    first = post if pre is None else pre
    if x.numel():
        _add_norm_kernel[(x.numel() // dim,)](
            x, y, post.weight, first.weight, out, post.eps, first.eps,
            DIM=dim, COLUMNS=columns, POST_GEMMA=post.form == "gemma", PRE=pre is not None, PRE_GEMMA=first.form == "gemma",
            OVERLAP=supports_pdl(x.device), num_warps=min(16, max(1, columns // 512)), enable_fp_fusion=False, **pdl_options(x.device),
        )  # fmt: skip
    return None if pre is None else out


def _walk(x: torch.Tensor) -> tuple[int, int, int] | None:
    """Return how x [..., dim] can be viewed as [tokens, heads, dim]: the number of heads, the stride of tokens and the
    stride of heads. Return None if the strides of x do not allow such a view."""
    shape, strides = x.shape[:-1], x.stride()[:-1]
    dims = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1]
    while len(dims) > 1 and dims[0][1] == dims[1][0] * dims[1][1]:  # all leading dimensions form one stride
        dims[:2] = [(dims[0][0] * dims[1][0], dims[1][1])]
    if len(dims) > 2:
        return None
    if len(dims) < 2:
        return 1, dims[0][1] if dims else x.shape[-1], 0
    return dims[1][0], dims[0][1], dims[1][1]


def act_and_mul(x: torch.Tensor, activation: Any) -> torch.Tensor:
    dim = x.shape[-1] // 2
    out = torch.empty((*x.shape[:-1], dim), dtype=x.dtype, device=x.device)
    rows, columns = out.numel() // max(dim, 1), min(2048, triton.next_power_of_2(dim))
    if rows:
        _gated_kernel[(rows, triton.cdiv(dim, columns))](
            x, out, DIM=dim, COLUMNS=columns, TANH=activation == "gelu_tanh", OVERLAP=supports_pdl(x.device),
            num_warps=max(1, columns // 512), **pdl_options(x.device),
        )  # fmt: skip
    return out


def apply_rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, norms: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Triton version of `fused.apply_rotary` for a batch of size 1, [1, heads, tokens, dim]. Outputs are stored as
    [tokens, heads, dim]. `norms`, if given, holds the norm of q and the norm of k. Both must have the same `eps`
    and the same `form` (see `NormForm`).
    """
    _, heads, tokens, dim = q.shape
    kv_heads, half = k.shape[1], dim // 2
    cos, sin = cos.reshape(-1, dim), sin.reshape(-1, dim)
    turned = [torch.empty((1, tokens, n, dim), dtype=q.dtype, device=q.device) for n in (heads, kv_heads)]
    strides = q.stride(1), q.stride(2), k.stride(1), k.stride(2), cos.stride(0)
    columns = triton.next_power_of_2(half)
    rows = min(triton.next_power_of_2(heads), max(1, 1024 // columns))
    if tokens and norms is None:
        _rotate_kernel[(tokens,)](
            q, k, cos, sin, *turned, *strides,
            HEADS=heads, KV_HEADS=kv_heads, HALF=half, COLUMNS=columns, ROWS=rows, OVERLAP=supports_pdl(q.device),
            num_warps=4, enable_fp_fusion=False, **pdl_options(q.device),
        )  # fmt: skip
    elif tokens:
        # otherwise a tensor row would have more threads than in `rms_norm`, and the sums would differ
        rows = max(rows, 512 // columns)
        _norm_rotate_kernel[(tokens,)](
            q, k, cos, sin, norms[0].weight, norms[1].weight, *turned, *strides, norms[0].eps,
            HEADS=heads, KV_HEADS=kv_heads, DIM=dim, COLUMNS=2 * columns, ROWS=rows, RUN=gcd(half, 8),
            GEMMA=norms[0].form == "gemma", OVERLAP=supports_pdl(q.device),
            num_warps=4, enable_fp_fusion=False, **pdl_options(q.device),
        )  # fmt: skip
    return turned[0].transpose(1, 2), turned[1].transpose(1, 2)
