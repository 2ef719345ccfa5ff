"""The native operations of a CPU under tensors that do not fit. Each call refuses them, or returns what torch returns.
`tests/test_sanitizers.py` runs this file with sanitizers, too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.nn import functional

from kvloom.kernels import cpu

pytestmark = pytest.mark.skipif(not cpu.IS_BUILT, reason="built without a compiler")
SIZES = st.sampled_from([0, 1, 2, 3, 4, 5, 8, 13])
SMALL = st.sampled_from([1, 2, 3, 4])
NUMBERS = st.sampled_from([0, 1, 2, -1, 7, 2**31, 2**62, -(2**63), 2**64, 1.5, None, "1", b"1"])
NAMES = ("rms_norm", "gated", "rotate", "put", "decode", "step", "multiply", "generate")


@st.composite
def floats(draw: st.DrawFn, *shape: int) -> torch.Tensor:
    """A tensor of this shape, or of a slightly different one. Some are not dense, and some are slices of others."""
    sizes = list(shape)
    change = draw(st.sampled_from(["none", "none", "none", "none", "size", "axis"]))
    if change == "size" and sizes:
        at = draw(st.integers(0, len(sizes) - 1))
        sizes[at] = max(0, sizes[at] + draw(st.sampled_from([-1, 1, 2])))
    elif change == "axis":
        sizes.append(draw(SMALL))
    form = draw(st.sampled_from(["dense", "dense", "gaps", "turned", "shifted"]))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    if form == "gaps" and sizes:
        return torch.randn([sizes[0], *sizes[1:-1], sizes[-1] + 3], generator=rng)[..., : sizes[-1]] if len(sizes) > 1 else torch.randn(2 * sizes[0], generator=rng)[::2]  # fmt: skip
    if form == "turned" and len(sizes) > 1:
        return torch.randn([sizes[1], sizes[0], *sizes[2:]], generator=rng).transpose(0, 1)
    if form == "shifted":
        count = int(np.prod(sizes))
        return torch.randn(count + 1, generator=rng)[1:].view(sizes)
    return torch.randn(sizes, generator=rng)


def checked(call: Callable[[], Any], wanted: Callable[[], Any], *tensors: torch.Tensor) -> None:
    """Call a native operation if it supports the tensors, as its callers do. It raises ValueError, or returns what torch
    returns."""
    if not cpu.supports(*tensors):
        return
    try:
        found = call()
    except (ValueError, IndexError):
        return
    torch.testing.assert_close(found, wanted(), rtol=1e-4, atol=1e-4)


@given(st.data(), SIZES, SIZES)
@settings(max_examples=50)
def test_norms_and_gates(data: st.DataObject, rows: int, dim: int) -> None:
    x, weight = data.draw(floats(rows, dim)), data.draw(floats(dim))
    if x.ndim and x.shape[-1]:
        norm = functional.rms_norm
        checked(
            lambda: cpu.rms_norm(x, weight, 1e-6, False),
            lambda: norm(x, (x.shape[-1],), weight.reshape(-1), 1e-6),
            x,
            weight,
        )
        gate = lambda: functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]  # noqa: E731
        checked(lambda: cpu.act_and_mul(x, False), gate, x)


@given(st.data(), SIZES, SIZES, SIZES, st.booleans())
@settings(max_examples=50)
def test_products(data: st.DataObject, rows: int, columns: int, dim: int, adds: bool) -> None:
    x, weight = data.draw(floats(rows, dim)), data.draw(floats(columns, dim))
    into = data.draw(floats(rows, columns)) if adds else None
    if weight.ndim != 2 or not cpu.multiplies(x, weight):
        return
    before = None if into is None else into.clone()

    def wanted() -> torch.Tensor:
        product = x @ weight.T
        return product if before is None else before + product.reshape(before.shape)

    checked(lambda: cpu.multiply(x, weight, into), wanted, x, weight, *([] if into is None else [into]))


@given(st.data(), SIZES, SMALL, SIZES)
@settings(max_examples=50)
def test_rotations(data: st.DataObject, tokens: int, heads: int, dim: int) -> None:
    x = data.draw(floats(tokens, heads, dim))
    cos, sin = data.draw(floats(tokens, dim)), data.draw(floats(tokens, dim))
    if x.ndim != 3 or not x.numel():
        return
    before = x.clone()

    def rotated() -> torch.Tensor:
        half = before.shape[-1] // 2
        turned = torch.cat([-before[..., half:], before[..., :half]], -1)
        a, b = (one.reshape(-1, before.shape[-1])[: len(before), None] for one in (cos, sin))
        return before * a + turned * b

    def call() -> torch.Tensor:
        cpu.rotate_(x, cos, sin)
        return x

    checked(call, rotated, x, cos, sin)


@given(st.data(), SIZES, SMALL, SMALL, SIZES)
@settings(max_examples=50)
def test_writes(data: st.DataObject, tokens: int, block: int, heads: int, dim: int) -> None:
    pages, new = data.draw(floats(5, block, heads, dim)), data.draw(floats(tokens, heads, dim))
    if pages.ndim != 4 or new.ndim != 3 or not pages.numel():
        return
    size = data.draw(st.sampled_from([len(new), len(new), len(new) + 1]))
    kind = data.draw(st.sampled_from([torch.int64, torch.int64, torch.int32]))
    order = np.arange(size) % (len(pages) * pages.shape[1])
    page, place = (torch.tensor(one, dtype=kind) for one in np.divmod(order, pages.shape[1]))
    if len(new) > len(pages) * pages.shape[1]:
        return
    before = pages.clone()

    def wanted() -> torch.Tensor:
        before[page, place] = new
        return before

    def call() -> torch.Tensor:
        cpu.write_tokens(pages, new, page, place)
        return pages

    checked(call, wanted, pages, new)


def attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: torch.Tensor, firsts: Any, lengths: Any
) -> torch.Tensor:
    found = []
    for row, (first, length) in enumerate(zip(firsts, lengths, strict=True)):
        keys, values = (one[tables[row].long()].flatten(0, 1)[first:length].transpose(0, 1) for one in (k, v))
        group = q.shape[1] // len(keys)
        keys, values = (one.repeat_interleave(group, 0) for one in (keys, values))
        found.append(((keys @ q[row][:, :, None])[..., 0].softmax(-1)[:, None] @ values)[:, 0])
    return torch.stack(found)


@given(st.data(), SMALL, SMALL, SMALL, SMALL, st.sampled_from([2, 3, 8]), SMALL)
@settings(max_examples=60)
def test_single_queries(
    data: st.DataObject, rows: int, kv: int, group: int, block: int, dim: int, blocks: int
) -> None:
    q = data.draw(floats(rows, kv * group, dim))
    k, v = data.draw(floats(6, block, kv, dim)), data.draw(floats(6, block, kv, dim))
    if q.ndim != 3 or k.ndim != 4 or v.ndim != 4 or not k.numel() or not q.numel() or not v.numel():
        return
    pages = min(len(k), len(v))
    tables = torch.arange(len(q) * blocks, dtype=torch.int32).reshape(len(q), blocks) % pages
    kind = data.draw(st.sampled_from([torch.int32, torch.int32, torch.int64]))
    longest = blocks * block + data.draw(st.sampled_from([0, 0, 0, 1, 9]))
    lengths = np.array([data.draw(st.integers(0, longest)) for _ in range(len(q))])
    firsts = np.array([data.draw(st.integers(-1, max(0, length))) for length in lengths])
    with contextlib.suppress(ValueError):
        seen = cpu.VisibleTokens(firsts, lengths)
        checked(
            lambda: cpu.decode(q, k, v, tables.to(kind), seen, 1.0),
            lambda: attended(q, k, v, tables, firsts, lengths),
            q,
            k,
            v,
        )


@given(st.data(), SMALL, SMALL, SMALL, st.sampled_from([2, 4]), SMALL)
@settings(max_examples=60)
def test_attention_steps(data: st.DataObject, rows: int, kv: int, group: int, dim: int, blocks: int) -> None:
    block, heads = 4, kv * group
    joined = data.draw(floats(rows, (heads + 2 * kv) * dim))
    cos, sin = data.draw(floats(rows, dim)), data.draw(floats(rows, dim))
    k, v = (
        data.draw(floats(rows * blocks + 1, block, kv, dim)),
        torch.randn(rows * blocks + 1, block, kv, dim),
    )
    if joined.ndim != 2 or k.ndim != 4 or not cpu.supports(joined, cos, sin, k, v):
        return
    count = min(len(k), len(v))
    tables = torch.arange(len(joined) * blocks, dtype=torch.int32).reshape(len(joined), blocks) % count
    lengths = np.array([data.draw(st.integers(1, blocks * block + 1)) for _ in range(len(joined))])
    lines = np.array([data.draw(st.integers(0, len(joined))) for _ in range(len(joined))])
    with contextlib.suppress(ValueError):
        seen = cpu.VisibleTokens(np.zeros_like(lengths), lengths)
        step_rows = cpu.SingleTokenRows(tables, seen, lines if data.draw(st.booleans()) else None)
        if step_rows.has_drafts:
            tables = tables[lines]
        found = cpu.attention_step(joined, cos, sin, heads, 1.0, cpu.LayerPages(k, v), step_rows)
        q = joined[:, : heads * dim].reshape(len(joined), heads, dim)
        if (
            len(joined) * blocks <= count and not step_rows.has_drafts
        ):  # otherwise rows share pages, and later rows overwrite them
            wanted = attended(q, k, v, tables, np.zeros_like(lengths), lengths)
            torch.testing.assert_close(found.view_as(wanted), wanted, rtol=1e-4, atol=1e-4)


@given(st.sampled_from(NAMES), st.lists(NUMBERS, max_size=7))
def test_native_functions_refuse_too_few_arguments_and_other_types(name: str, arguments: list[Any]) -> None:
    """Each of these lists has fewer arguments than the function takes, or one of another type."""
    wrong = arguments if name != "gated" else [*arguments[:3], None]
    if name == "gated" and len(wrong) == 5:
        wrong = wrong[:4]
    with pytest.raises((TypeError, OverflowError)):
        getattr(cpu._cpu, name)(*wrong[:4])
