"""The same bits for a row alone, among others, in chunks and as a single token; and right against the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvloom.core import Visibility
from kvloom.kernels.attention import Mask, Shape
from kvloom.kernels.attention.prefill_backends import BlockTile

pytest.importorskip("triton", reason="Triton is not installed")
from kvloom.kernels.attention import BatchInvariantDecodePlan, BatchInvariantPrefillPlan
from kvloom.kernels.batch_invariant import BatchInvariant, grouped_product, product, row_cumsum, row_sum

from .batches import DEVICE, TOLERANCE, Batch, relative

GPU = DEVICE == "cuda"
HALF = torch.bfloat16 if GPU else torch.float16  # Triton's interpreter multiplies the raw bits of bfloat16
TILE = None if GPU else BlockTile(16, 16, 4, 2)
PIECE = 1024 if GPU else 32
FULL = Visibility("full")


def whole(batch: Batch, mask: Mask) -> tuple[torch.Tensor, torch.Tensor]:
    plan = BatchInvariantPrefillPlan(batch.shape, PIECE, batch.span, DEVICE, TILE)
    plan.make(batch.starts.tolist(), batch.lengths)
    return plan.attend(batch.q, batch.k, batch.v, batch.tables, mask, None, batch.k_scale, batch.v_scale)


def single(batch: Batch, mask: Mask, row: int, position: int, beside: int = 0) -> torch.Tensor:
    """The query of a row's token at `position` as if it were decoded now, with `beside` others of any length."""
    plan = BatchInvariantDecodePlan(batch.shape, PIECE, beside + 2, 4096, batch.span, DEVICE, TILE)
    order = [row] * (beside + 1)
    lengths = [1 + (7 * i) % batch.lengths[row] for i in range(beside)]
    if batch.span.windowed:  # pages that a shorter row would see are not there
        lengths = [position + 1] * beside
    lengths.insert(beside // 2, position + 1)
    own = int(batch.starts[row]) + position - (batch.lengths[row] - batch.queries[row])
    q = batch.q[[own] * len(order)]
    lengths_ = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    plan.make(torch.arange(len(order) + 1, dtype=torch.int32, device=DEVICE), lengths_)
    out, _ = plan.attend(q, batch.k, batch.v, batch.tables[order], mask, None, batch.k_scale, batch.v_scale)
    return out[beside // 2]


KINDS: dict[str, tuple[Shape, Visibility, dict[str, Any]]] = {
    "grouped": (Shape(8, 2, 64, 64, dtype=HALF), FULL, {}),
    "float32": (Shape(4, 2, 80, 80, dtype=torch.float32), FULL, {}),
    "windows": (Shape(4, 2, 64, 64, dtype=HALF), Visibility("sliding", 24), {}),
    "chunks": (Shape(4, 2, 64, 64, dtype=HALF), Visibility("chunked", 40), {}),
    "softcap": (Shape(4, 4, 64, 64, dtype=HALF), FULL, {"softcap": 20.0}),
    "latents": (Shape(20, 1, 576, 512, dtype=HALF), FULL, {}),
    "int8": (Shape(4, 2, 64, 64, dtype=torch.int8), FULL, {}),
    "int8 under windows": (Shape(2, 1, 64, 64, dtype=torch.int8), Visibility("sliding", 21), {}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.few(2)
def test_a_token_attends_alike_in_a_chunk_alone_and_among_others(kind: str) -> None:
    shape, span, extra = KINDS[kind]
    dtype = shape.dtype if shape.dtype.itemsize > 1 else HALF
    batch = Batch(shape, [66, 5], [14, 5], span, "HDN" if shape.dtype == torch.int8 else "NHD", dtype)
    mask = Mask(span, **extra)
    out, lse = whole(batch, mask)
    exact, exact_lse = batch.expected(mask)
    assert relative(out, exact) < TOLERANCE[dtype]
    torch.testing.assert_close(lse.double(), exact_lse.double().to(lse.device), atol=2e-2, rtol=2e-3)
    for position, beside in ((63, 0), (64, 2)):  # the last token of a piece, and the first of the next
        assert torch.equal(single(batch, mask, 0, position, beside), out[position - 52])
    assert torch.equal(single(batch, mask, 0, 64), out[64 - 52])


def test_sinks_and_static_scales_join_alike() -> None:
    shape = Shape(4, 2, 64, 64, dtype=torch.float32)
    batch = Batch(shape, [66], [4], FULL, "NHD", torch.float32)
    mask = Mask(FULL, sinks=torch.randn(4, device=DEVICE))
    out, _ = whole(batch, mask)
    assert relative(out, batch.expected(mask)[0]) < TOLERANCE[torch.float32]
    assert torch.equal(single(batch, mask, 0, 65), out[3])
    batch.k_scale, batch.v_scale = torch.rand(2, device=DEVICE) + 0.5, torch.rand(2, device=DEVICE) + 0.5
    out, _ = whole(batch, Mask(FULL))
    assert torch.equal(single(batch, Mask(FULL), 0, 65), out[3])


def test_chunks_cut_anywhere_give_the_same() -> None:
    shape = Shape(8, 2, 64, 64, dtype=HALF)
    batch = Batch(shape, [40], [40], FULL, "NHD", HALF)
    together, _ = whole(batch, Mask(FULL))
    for cut in (1, 31):
        last = replace(batch, queries=[40 - cut])
        last.q, last.k, last.v, last.tables = batch.q[cut:], batch.k, batch.v, batch.tables
        later, _ = whole(last, Mask(FULL))
        assert torch.equal(later, together[cut:])


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_row_of_a_product_is_the_same_in_any_batch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows, k, n = (5000, 2048, 3072) if GPU else (70, 96, 40)
    a = torch.randn(rows, k, generator=generator).to(DEVICE, dtype)
    weight = torch.randn(n, k, generator=generator).to(DEVICE, dtype)
    bias = torch.randn(n, generator=generator).to(DEVICE, dtype)
    many = product(a, weight.T, bias)
    exact = a.double() @ weight.double().T + bias.double()
    assert relative(many, exact.cpu()) < TOLERANCE[dtype]
    for row in (0, 1, rows // 2, rows - 1):
        assert torch.equal(product(a[row : row + 1], weight.T, bias)[0], many[row])
    assert torch.equal(product(a[3:50], weight.T, bias), many[3:50])


def test_products_of_batches_and_of_one_column() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(3, *size, generator=generator).to(DEVICE) for size in ((20, 24), (24, 17)))
    torch.testing.assert_close(product(a, b), a @ b)
    assert torch.equal(product(a[:, 4:5], b), product(a, b)[:, 4:5])
    thin = torch.randn(3, 20, 1, device=DEVICE), torch.randn(3, 1, 9, device=DEVICE)
    assert torch.equal(product(*thin), thin[0] * thin[1])
    with pytest.raises(ValueError, match="cannot be multiplied"):
        product(a[0], b)


def test_groups_of_rows_have_weights_of_their_own() -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(90, 40, generator=generator).to(DEVICE)
    b = torch.randn(5, 24, 40, generator=generator).to(DEVICE).transpose(1, 2)
    ends = [3, 3, 70, 88, 88]
    found = grouped_product(a, b, torch.tensor(ends, dtype=torch.int32, device=DEVICE))
    for group, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        torch.testing.assert_close(found[begin:end], a[begin:end] @ b[group])
        if end > begin:
            assert torch.equal(product(a[begin : begin + 1], b[group])[0], found[begin])


def test_sums_along_rows() -> None:
    x = torch.randn(6, 2500, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    torch.testing.assert_close(row_sum(x), x.sum(-1), atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(row_cumsum(x), x.cumsum(-1), atol=1e-3, rtol=1e-4)
    assert torch.equal(row_sum(x)[3:4], row_sum(x[3:4]))
    assert torch.equal(row_cumsum(x)[3:4], row_cumsum(x[3:4]))


def test_torch_operations_are_replaced_or_refused() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(40, 24), torch.nn.GELU(), torch.nn.Linear(24, 40, bias=False)
    ).to(DEVICE)
    x = torch.randn(1, 19, 40, device=DEVICE)
    with torch.inference_mode():
        wanted = model(x).pow(2)
        with BatchInvariant():
            found = model(x).pow(2)
            mean, total = found.mean(-1, keepdim=True), found.logsumexp(-1)
            alone = model(x[:, 7:8]).pow(2)
            assert torch.equal(found[:, 7:8], alone)
            assert torch.equal(mean[:, 7:8], alone.mean(-1, keepdim=True))
            assert torch.equal(total[:, 7:8], alone.logsumexp(-1))
            ran = found.cumsum(-1), torch.einsum("btd,hd->bth", x, x[0, :3])
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(mean, wanted.mean(-1, keepdim=True))
        torch.testing.assert_close(total, wanted.logsumexp(-1))
        torch.testing.assert_close(ran[0], wanted.cumsum(-1), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ran[1], torch.einsum("btd,hd->bth", x, x[0, :3]))
        with (
            BatchInvariant(),
            pytest.raises(ValueError, match=r"convolution.* which is not known to be batch-invariant"),
        ):
            torch.nn.functional.conv1d(x, torch.ones(2, 19, 3, device=DEVICE))
