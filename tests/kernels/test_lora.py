"""Low-rank terms of adapters: torch and the grouped products, against one token after the other in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvloom.kernels.lora import AdapterRows, LowRankWeights, add_low_rank

pytest.importorskip("triton", reason="the kernels are Triton's")
from kvloom.kernels.lora import triton_lora

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32] + ([torch.bfloat16, torch.float16] if DEVICE == "cuda" else [])
"""The interpreter computes no bf16 as a GPU does."""


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def stacked(
    slots: int, rank: int, inputs: int, outputs: list[int], dtype: torch.dtype = torch.float32
) -> LowRankWeights:
    """Weights of `slots` adapters. Every second adapter has a smaller rank, and the last one only the first part."""
    weights = LowRankWeights(slots, rank, inputs, outputs, torch.zeros(1, dtype=dtype, device=DEVICE))
    weights.blocks = torch.from_numpy(weights.column_blocks()).to(DEVICE)
    for slot in range(1, slots + 1):
        own = rank if slot % 2 else rank // 2 - 1
        for part, size in enumerate(outputs):
            if slot < slots or not part:
                seed = 100 * slot + part
                a, b = randn(own, inputs, seed=seed), randn(size, own, seed=seed + 50) / own
                weights.load(slot, part, a.to(dtype), b.to(dtype))
    return weights


def one_by_one(
    x: torch.Tensor, weights: LowRankWeights, slots: torch.Tensor, columns: slice = slice(None)
) -> torch.Tensor:
    """The terms of all tokens, in float64."""
    a, b, found = weights.a.double().cpu(), weights.b.double().cpu(), []
    for token, slot in zip(x.double().cpu(), slots.tolist(), strict=True):
        low = [a[slot - 1] @ token] if slot else [torch.zeros(a.shape[1], dtype=torch.float64)]
        parts = low[0].view(-1, weights.rank)
        each = [b[slot - 1, own] @ parts[place] for place, own in enumerate(weights.columns)]
        found.append(torch.cat(each) if slot else torch.zeros(b.shape[1], dtype=torch.float64))
    return torch.stack(found)[:, columns]


def random_slots(tokens: int, slots: int) -> torch.Tensor:
    return torch.randint(0, slots + 1, (tokens,), generator=torch.Generator().manual_seed(tokens))


def far(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double().cpu() - wanted).norm() / wanted.norm())


SHAPES = [
    (1, 1, 16, 48, [32]),
    (37, 3, 16, 96, [80, 32, 32]),
    (150, 5, 32, 600, [70, 70]),
    (20, 2, 128, 64, [64]),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "slots", "rank", "inputs", "outputs"), SHAPES)
@pytest.mark.few(1)
def test_grouped_products_add_the_term_of_each_token(
    tokens: int, slots: int, rank: int, inputs: int, outputs: list[int], dtype: torch.dtype
) -> None:
    weights, x = stacked(slots, rank, inputs, outputs, dtype), randn(tokens, inputs, seed=1, dtype=dtype)
    of = random_slots(tokens, slots) if tokens > 1 else torch.tensor([slots])
    before = randn(tokens, sum(outputs), seed=2, dtype=dtype)
    wanted = one_by_one(x, weights, of) + before.double().cpu()
    rows = AdapterRows.sorted_by_slot(of.to(DEVICE, torch.int32))
    for invariant in (False, True):
        out = before.clone()
        triton_lora.add_low_rank(out, x, weights, rows, invariant=invariant)
        assert far(out, wanted) < 16 * torch.finfo(dtype).eps
        assert torch.equal(out[of == 0], before[of == 0])  # bits of tokens without an adapter do not change


@pytest.mark.parametrize(("tokens", "slots", "rank", "inputs", "outputs"), SHAPES)
def test_torch_adds_the_term_of_each_token(
    tokens: int, slots: int, rank: int, inputs: int, outputs: list[int]
) -> None:
    weights, x = stacked(slots, rank, inputs, outputs), randn(tokens, inputs, seed=1)
    of = random_slots(tokens, slots)
    out = randn(1, tokens, sum(outputs), seed=2)
    wanted = one_by_one(x, weights, of) + out[0].double().cpu()
    if DEVICE == "cpu":
        add_low_rank(out, x[None], weights, AdapterRows.on_host(of.numpy()))
    else:
        add_low_rank(out, x[None], weights, AdapterRows.sorted_by_slot(of.to(DEVICE, torch.int32)))
    assert far(out[0], wanted) < 1e-6


def test_one_part_of_a_joined_product() -> None:
    weights, x, of = stacked(3, 16, 96, [80, 32, 48]), randn(30, 96), random_slots(30, 3)
    for part, columns in enumerate(weights.columns):
        wanted = one_by_one(x, weights, of, columns)
        out = torch.zeros(30, wanted.shape[1], device=DEVICE)
        rows = AdapterRows.sorted_by_slot(of.to(DEVICE, torch.int32))
        triton_lora.add_low_rank(out, x, weights, rows, part)
        assert far(out, wanted) < 1e-6
        if DEVICE == "cpu":
            again = torch.zeros_like(out)
            add_low_rank(again, x, weights, AdapterRows.on_host(of.numpy()), part)
            assert far(again, wanted) < 1e-6


@pytest.mark.slow
def test_the_result_of_a_token_does_not_depend_on_other_tokens() -> None:
    weights, x, of = stacked(4, 16, 200, [96]), randn(300, 200), random_slots(300, 4)
    of[7] = 2

    def result(chosen: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(len(chosen), 96, device=DEVICE)
        rows = AdapterRows.sorted_by_slot(of[chosen].to(DEVICE, torch.int32))
        triton_lora.add_low_rank(out, x[chosen.to(DEVICE)].contiguous(), weights, rows, invariant=True)
        return out[list(chosen).index(7)]

    assert torch.equal(result(torch.arange(300)), result(torch.tensor([7])))
    assert torch.equal(result(torch.arange(300)), result(torch.tensor([250, 3, 7, 9])))


def test_a_cleared_slot_adds_nothing() -> None:
    weights = stacked(2, 16, 32, [32])
    weights.clear(2)
    assert not weights.a[1].any()
    assert not weights.b[1].any()
    out = torch.zeros(3, 32, device=DEVICE)
    rows = AdapterRows.sorted_by_slot(torch.tensor([2, 2, 2], dtype=torch.int32, device=DEVICE))
    triton_lora.add_low_rank(out, randn(3, 32), weights, rows)
    assert not out.any()


def test_a_layer_that_gets_other_rows_is_refused() -> None:
    weights = stacked(1, 16, 32, [32])
    with pytest.raises(ValueError, match="got 5 rows in a step of 3 tokens"):
        add_low_rank(
            torch.zeros(5, 32), torch.zeros(5, 32), weights, AdapterRows.on_host(np.ones(3, np.int64))
        )
