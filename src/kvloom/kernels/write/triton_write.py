# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator,import-untyped"

"""The kernel that writes K and V to pages. One launch rotates, quantises and stores K and V, and also rotates q.

A tensor row is one head of one token. A program processes `ROWS` rows of K or V, or `Q_ROWS` rows of q, in memory
order:

    programs   | K rows …       | V rows …       | q rows …       |      each part: cdiv(tokens * heads, rows)
    a row      | rotated: a, b of each pair (WIDE lanes) | the rest unchanged (REST lanes) |  (`tail`: reversed)

A lane is one element of a Triton vector. WIDE and REST are rounded up to powers of two, so some lanes may be padding.
The host reads no value, so a captured graph works for any slots. The caller checks shapes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import (
    gdc_launch_dependents as launch_dependents,
    gdc_wait as wait_for_launcher,
)

from kvloom.kernels.device import pdl_options, supports_pdl
from kvloom.kernels.dtypes import quantised_max
from kvloom.kernels.fused import RMSNorm

from .reference import SMALLEST_SCALE, Rotary

__all__ = ["write"]

MAGIC: tl.constexpr = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds half to even
SMALLEST: tl.constexpr = tl.constexpr(SMALLEST_SCALE)

TILE = 4096
"""Number of elements that a program processes if there are many tensor rows. In bf16, each thread then has four
loads of 16 bytes."""
SMALL_TILE = 1024
PROGRAMS = 512
"""Number of programs that fill the device. If large tiles give fewer programs, smaller tiles are faster."""


@triton.jit
def _load_pairs(x, kept, PAIRS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, ADJACENT: tl.constexpr):
    """Return both members of every rotated pair in float32. Adjacent pairs are read together and split in
    registers."""
    if ADJACENT:
        both_lane = tl.arange(0, 2 * WIDE)[None, :]
        both = tl.load(x[:, None] + both_lane, mask=kept[:, None] & (both_lane < 2 * PAIRS), other=0.0)
        a, b = tl.split(tl.reshape(both, [ROWS, WIDE, 2]))
    else:
        lane = tl.arange(0, WIDE)[None, :]
        mask = kept[:, None] & (lane < PAIRS)
        a = tl.load(x[:, None] + lane, mask=mask, other=0.0)
        b = tl.load(x[:, None] + lane + PAIRS, mask=mask, other=0.0)
    return a.to(tl.float32), b.to(tl.float32)


@triton.jit
def _rotate(
    a,
    b,
    token,
    kept,
    cos,
    sin,
    cos_token,
    cos_pair,
    sin_token,
    sin_pair,
    PAIRS: tl.constexpr,
    WIDE: tl.constexpr,
    ROUNDED: tl.constexpr,
    KIND: tl.constexpr,
):
    lane = tl.arange(0, WIDE)[None, :]
    mask = kept[:, None] & (lane < PAIRS)
    token = token[:, None].to(tl.int64)
    c = tl.load(cos + token * cos_token + lane * cos_pair, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + token * sin_token + lane * sin_pair, mask=mask, other=0.0).to(tl.float32)
    if ROUNDED:
        low = (a * c).to(KIND).to(tl.float32) - (b * s).to(KIND).to(tl.float32)
        high = (b * c).to(KIND).to(tl.float32) + (a * s).to(KIND).to(tl.float32)
        return low, high
    else:
        return a * c - b * s, b * c + a * s


@triton.jit
def _stored(x, inverse, pages, MOST: tl.constexpr):
    """Return the values in the dtype of the pages. If MOST is 0 they are only converted, otherwise quantised with
    the inverse scale `inverse`."""
    if MOST > 0:
        x = x * inverse[:, None]
        x = tl.minimum(tl.maximum(x, -MOST), MOST)
        if pages.dtype.element_ty == tl.int8:
            x = (x + MAGIC) - MAGIC
    return x.to(pages.dtype.element_ty)


@triton.jit
def _store_pairs(
    y, kept, a, b, PAIRS: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, ADJACENT: tl.constexpr
):
    if ADJACENT:
        both_lane = tl.arange(0, 2 * WIDE)[None, :]
        both = tl.reshape(tl.join(a, b), [ROWS, 2 * WIDE])
        tl.store(y[:, None] + both_lane, both, mask=kept[:, None] & (both_lane < 2 * PAIRS))
    else:
        lane = tl.arange(0, WIDE)[None, :]
        mask = kept[:, None] & (lane < PAIRS)
        tl.store(y[:, None] + lane, a, mask=mask)
        tl.store(y[:, None] + lane + PAIRS, b, mask=mask)


@triton.jit
def _append(
    row,
    tokens,
    slots,
    slot_stride,
    new,
    new_token,
    new_head,
    pages,
    page_stride,
    page_token,
    page_head,
    page_column,
    scale,
    scale_page,
    scale_token,
    scale_head,
    cos,
    sin,
    cos_token,
    cos_pair,
    sin_token,
    sin_pair,
    norm,
    eps,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDE: tl.constexpr,
    REST: tl.constexpr,
    ADJACENT_IN: tl.constexpr,
    ADJACENT_OUT: tl.constexpr,
    TAIL: tl.constexpr,
    MOST: tl.constexpr,
    SCALES: tl.constexpr,
    ROUNDED: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
):
    """Write K or V of some heads and tokens to their pages. SCALES is 0 for pages without scales, 1 for one scale
    per head, and 2 for one scale per token and head. With 2, the scale is stored in the page. NORM is 0 without
    a norm. With 1 or 2, the dims that are not rotated are normalised, and multiplied by weight (1) or 1 +
    weight (2)."""
    token, head = row // HEADS, row % HEADS
    slot = tl.load(slots + token.to(tl.int64) * slot_stride, mask=token < tokens, other=-1).to(tl.int64)
    kept = slot >= 0
    page, place = slot // BLOCK, slot % BLOCK
    x = new + token.to(tl.int64) * new_token + head * new_head
    y = pages + page * page_stride + place * page_token + head * page_head
    turned_at: tl.constexpr = DIM - 2 * PAIRS if TAIL else 0
    rest_at: tl.constexpr = 0 if TAIL else 2 * PAIRS
    lane = tl.arange(0, REST)[None, :]
    rest_mask = kept[:, None] & (lane < DIM - 2 * PAIRS)
    if DIM > 2 * PAIRS:
        rest = tl.load(x[:, None] + rest_at + lane, mask=rest_mask, other=0.0).to(tl.float32)
        if NORM > 0:
            w = tl.load(norm + lane, mask=lane < DIM - 2 * PAIRS, other=0.0).to(tl.float32)
            rest = rest * tl.rsqrt(tl.sum(rest * rest, 1) / (DIM - 2 * PAIRS) + eps)[:, None]
            if NORM == 2:
                rest = rest * (1.0 + w)
            else:
                rest = rest.to(new.dtype.element_ty).to(tl.float32) * w
            rest = rest.to(new.dtype.element_ty).to(tl.float32)
    if PAIRS > 0:
        a, b = _load_pairs(x + turned_at, kept, PAIRS, WIDE, ROWS, ADJACENT_IN)
        a, b = _rotate(
            a, b, token, kept, cos, sin, cos_token, cos_pair, sin_token, sin_pair, PAIRS, WIDE, ROUNDED, new.dtype.element_ty
        )  # fmt: skip
        # Round as if K had been rotated before the call, so that fusing the two operations does not change stored
        # values.
        a = a.to(new.dtype.element_ty).to(tl.float32)
        b = b.to(new.dtype.element_ty).to(tl.float32)
    inverse = tl.full([ROWS], 1.0, tl.float32)
    if SCALES == 1:
        inverse = tl.div_rn(inverse, tl.load(scale + head * scale_head).to(tl.float32))
    if SCALES == 2:
        top = tl.zeros([ROWS], tl.float32)
        if DIM > 2 * PAIRS:
            top = tl.maximum(top, tl.max(tl.abs(rest), 1))
        if PAIRS > 0:
            top = tl.maximum(top, tl.max(tl.maximum(tl.abs(a), tl.abs(b)), 1))
        size = tl.maximum(top * (1.0 / MOST), SMALLEST)
        tl.store(scale + page * scale_page + place * scale_token + head * scale_head, size, mask=kept)
        inverse = tl.div_rn(inverse, size)
    if DIM > 2 * PAIRS:
        into = y[:, None] + (rest_at + lane) * page_column
        tl.store(into, _stored(rest, inverse, pages, MOST), mask=rest_mask)
    if PAIRS > 0:
        a, b = _stored(a, inverse, pages, MOST), _stored(b, inverse, pages, MOST)
        _store_pairs(y + turned_at, kept, a, b, PAIRS, WIDE, ROWS, ADJACENT_OUT)


@triton.jit
def _rotate_rows(
    row,
    tokens,
    q,
    q_token,
    q_head,
    out,
    out_token,
    out_head,
    cos,
    sin,
    cos_token,
    cos_pair,
    sin_token,
    sin_pair,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDE: tl.constexpr,
    REST: tl.constexpr,
    ADJACENT_IN: tl.constexpr,
    ADJACENT_OUT: tl.constexpr,
    TAIL: tl.constexpr,
    IN_PLACE: tl.constexpr,
    ROUNDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    token, head = row // HEADS, row % HEADS
    kept = token < tokens
    x = q + token.to(tl.int64) * q_token + head * q_head
    y = out + token.to(tl.int64) * out_token + head * out_head
    turned_at: tl.constexpr = DIM - 2 * PAIRS if TAIL else 0
    rest_at: tl.constexpr = 0 if TAIL else 2 * PAIRS
    if not IN_PLACE and DIM > 2 * PAIRS:
        lane = tl.arange(0, REST)[None, :]
        mask = kept[:, None] & (lane < DIM - 2 * PAIRS)
        tl.store(y[:, None] + rest_at + lane, tl.load(x[:, None] + rest_at + lane, mask=mask), mask=mask)
    a, b = _load_pairs(x + turned_at, kept, PAIRS, WIDE, ROWS, ADJACENT_IN)
    a, b = _rotate(
        a, b, token, kept, cos, sin, cos_token, cos_pair, sin_token, sin_pair, PAIRS, WIDE, ROUNDED, q.dtype.element_ty
    )  # fmt: skip
    if IN_PLACE:
        # a thread may also read other threads' elements, so all are read before any is overwritten
        tl.debug_barrier()
    a, b = a.to(out.dtype.element_ty), b.to(out.dtype.element_ty)
    _store_pairs(y + turned_at, kept, a, b, PAIRS, WIDE, ROWS, ADJACENT_OUT)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["slots"])
def _write_kernel(
    tokens,
    slots,
    k,
    v,
    q,
    q_out,
    k_pages,
    v_pages,
    k_scale,
    v_scale,
    cos,
    sin,
    slot_stride,
    k_token,
    k_head,
    v_token,
    v_head,
    q_token,
    q_head,
    out_token,
    out_head,
    k_page_stride,
    k_page_token,
    k_page_head,
    v_page_stride,
    v_page_token,
    v_page_head,
    v_page_column,
    k_scale_page,
    k_scale_token,
    k_scale_head,
    v_scale_page,
    v_scale_token,
    v_scale_head,
    cos_token,
    cos_pair,
    sin_token,
    sin_pair,
    norm,
    eps,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    Q_DIM: tl.constexpr,
    Q_HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDE: tl.constexpr,
    K_REST: tl.constexpr,
    V_REST: tl.constexpr,
    Q_REST: tl.constexpr,
    ADJACENT_IN: tl.constexpr,
    ADJACENT_OUT: tl.constexpr,
    TAIL: tl.constexpr,
    IN_PLACE: tl.constexpr,
    K_MOST: tl.constexpr,
    V_MOST: tl.constexpr,
    K_SCALES: tl.constexpr,
    V_SCALES: tl.constexpr,
    ROUNDED: tl.constexpr,
    ROWS: tl.constexpr,
    Q_ROWS: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        launch_dependents()
        wait_for_launcher()
    program = tl.program_id(0)
    each = tl.cdiv(tokens * HEADS, ROWS)
    lane = tl.arange(0, ROWS)
    # fmt: off
    if program < each:
        _append(program * ROWS + lane, tokens, slots, slot_stride, k, k_token, k_head,
                k_pages, k_page_stride, k_page_token, k_page_head, 1,
                k_scale, k_scale_page, k_scale_token, k_scale_head,
                cos, sin, cos_token, cos_pair, sin_token, sin_pair, norm, eps,
                HEADS, BLOCK, K_DIM, PAIRS, WIDE, K_REST, ADJACENT_IN, ADJACENT_OUT, TAIL, K_MOST, K_SCALES, ROUNDED, ROWS,
                NORM)
    else:
        program -= each
        if V_DIM > 0 and program < each:
            _append(program * ROWS + lane, tokens, slots, slot_stride, v, v_token, v_head,
                    v_pages, v_page_stride, v_page_token, v_page_head, v_page_column,
                    v_scale, v_scale_page, v_scale_token, v_scale_head,
                    cos, sin, cos_token, cos_pair, sin_token, sin_pair, norm, eps,
                    HEADS, BLOCK, V_DIM, 0, WIDE, V_REST, False, False, False, V_MOST, V_SCALES, False, ROWS, 0)
        if Q_DIM > 0:
            if V_DIM > 0:
                program -= each
            if program >= 0:
                _rotate_rows(program * Q_ROWS + tl.arange(0, Q_ROWS), tokens, q, q_token, q_head, q_out, out_token, out_head,
                           cos, sin, cos_token, cos_pair, sin_token, sin_pair,
                           Q_HEADS, Q_DIM, PAIRS, WIDE, Q_REST, ADJACENT_IN, ADJACENT_OUT, TAIL, IN_PLACE, ROUNDED, Q_ROWS)
    # fmt: on


def write(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor | None,
    slots: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    rotary: Rotary | None = None,
    q: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
    norm: RMSNorm | None = None,
) -> None:
    """Launch the kernel. `kvloom.kernels.write.write` has checked the arguments."""
    tokens, heads, k_dim = k.shape
    if tokens == 0:
        return
    v_dim, q_heads, q_dim = 0, 0, 0
    if v is not None:
        v_dim = v.shape[2]
    if q is not None:
        q_heads, q_dim = q.shape[1:]
    pairs = 0 if rotary is None else rotary.cos.shape[1]
    form = "halves" if rotary is None else rotary.form
    parts = 2 if v_dim else 1
    in_place = q_out is None or (q is not None and q_out.data_ptr() == q.data_ptr())
    k_width, q_width = _width(max(k_dim, v_dim)), _width(2 * pairs if in_place else q_dim)
    much = tokens * (parts * heads * k_width + q_heads * q_width) >= PROGRAMS * TILE
    tile, warps = (TILE, 4) if much else (SMALL_TILE, 2)
    rows, q_rows = max(1, tile // k_width), max(1, tile // q_width)
    programs = triton.cdiv(tokens * heads, rows) * parts + triton.cdiv(tokens * q_heads, q_rows)
    # The kernel never reads absent tensors, so any tensor can be passed for them.
    v, v_pages = (k, k_pages) if v is None or v_pages is None else (v, v_pages)
    q_out = q if q_out is None else q_out
    q, q_out = (k, k) if q is None or q_out is None else (q, q_out)
    cos, sin = (k[:, 0], k[:, 0]) if rotary is None else (rotary.cos, rotary.sin)
    _write_kernel[(programs,)](
        tokens,
        slots,
        k,
        v,
        q,
        q_out,
        k_pages,
        v_pages,
        k if k_scale is None else k_scale,
        k if v_scale is None else v_scale,
        cos,
        sin,
        slots.stride(0),
        *k.stride()[:2],
        *v.stride()[:2],
        *q.stride()[:2],
        *q_out.stride()[:2],
        *k_pages.stride()[:3],
        *v_pages.stride(),
        *_scale_strides(k_scale),
        *_scale_strides(v_scale),
        *cos.stride(),
        *sin.stride(),
        k if norm is None else norm.weight,
        0.0 if norm is None else norm.eps,
        HEADS=heads,
        BLOCK=k_pages.shape[1],
        K_DIM=k_dim,
        V_DIM=v_dim,
        Q_DIM=q_dim,
        Q_HEADS=q_heads,
        PAIRS=pairs,
        WIDE=_width(pairs),
        K_REST=_width(k_dim - 2 * pairs),
        V_REST=_width(v_dim),
        Q_REST=_width(q_dim - 2 * pairs),
        ADJACENT_IN=form != "halves",
        ADJACENT_OUT=form == "pairs",
        TAIL=rotary is not None and rotary.tail,
        IN_PLACE=in_place,
        K_MOST=_quantised_max_of(k_pages, k),
        V_MOST=_quantised_max_of(v_pages, v),
        K_SCALES=_scale_kind(k_scale),
        V_SCALES=_scale_kind(v_scale),
        ROUNDED=rotary is not None and rotary.rounded,
        ROWS=rows,
        Q_ROWS=q_rows,
        NORM=0 if norm is None else 2 if norm.form == "gemma" else 1,
        OVERLAP=supports_pdl(k.device),
        num_warps=warps,
        enable_fp_fusion=False,  # products and sums are rounded separately, as torch rounds them
        **pdl_options(k.device),
    )


def _width(size: int) -> int:
    return int(triton.next_power_of_2(max(size, 1)))


def _quantised_max_of(pages: torch.Tensor, new: torch.Tensor) -> float:
    return 0.0 if pages.dtype == new.dtype else quantised_max(pages.dtype) or 0.0


def _scale_kind(scale: torch.Tensor | None) -> int:
    return 0 if scale is None else 2 if scale.dim() == 3 else 1


def _scale_strides(scale: torch.Tensor | None) -> tuple[Any, ...]:
    if scale is None:
        return (0, 0, 0)
    return scale.stride() if scale.dim() == 3 else (0, 0, scale.stride(0) if scale.numel() > 1 else 0)
