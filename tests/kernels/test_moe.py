"""Mixtures of experts as grouped matrix products, against plain torch."""

from __future__ import annotations

import pytest
import torch

from kvloom.kernels.fused import Activation
from kvloom.kernels.moe import (
    Routing,
    Tile,
    choose_experts,
    choose_tile,
    fused_moe,
    interface as grouped,
    sum_outputs,
)

pytest.importorskip("triton", reason="the kernels are Triton's")
from kvloom.kernels.moe import triton_moe

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter computes no bf16 as a GPU does")
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=HALF)]
SMALL = Tile(16, 16, 16, 2, 4, described=False)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def mixture(
    tokens: int, count: int, picked: int, dim: int, inner: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    """x, index, weights, gate and up, down; the first experts are chosen more often than the last."""
    draw = torch.Generator().manual_seed(tokens)
    odds = torch.linspace(1, 0.05, count).expand(tokens, count)
    index = torch.multinomial(odds, picked, generator=draw).to(DEVICE)
    weights = torch.rand((tokens, picked), generator=draw).to(DEVICE, dtype)
    gate_up = randn(count, 2 * inner, dim, seed=1, dtype=dtype) / dim**0.5
    down = randn(count, dim, inner, seed=2, dtype=dtype) / inner**0.5
    return randn(tokens, dim, dtype=dtype), index, weights, gate_up, down


def one_by_one(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Pair after pair in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for expert, weight in zip(index[token].tolist(), weights[token].double().cpu(), strict=True):
            gate, up = (gate_up[expert].double().cpu() @ x[token].double().cpu()).chunk(2)
            out[token] += weight * (down[expert].double().cpu() @ (torch.nn.functional.silu(gate) * up))
    return out


def far(found: torch.Tensor, wanted: torch.Tensor) -> float:
    found, wanted = found.double().cpu(), wanted.double().cpu()
    return float((found - wanted).norm() / wanted.norm())


def launched(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor,
    activation: Activation = "silu", tile: Tile | None = None,
) -> torch.Tensor:  # fmt: skip
    """The result of the kernels, on any device."""
    return triton_moe.sum_parts(
        grouped.launch(x, index, gate_up, down, activation, tile), weights.contiguous()
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "count", "picked", "dim", "inner"),
    [(1, 4, 2, 32, 16), (7, 5, 2, 48, 24), (40, 3, 1, 33, 20), (30, 24, 8, 64, 32)],
)
@pytest.mark.few(1)
def test_tokens_go_through_the_experts_they_chose(
    tokens: int, count: int, picked: int, dim: int, inner: int, dtype: torch.dtype
) -> None:
    given = mixture(tokens, count, picked, dim, inner, dtype)
    exact = one_by_one(*given)
    bound = 2e-6 if dtype == torch.float32 else 2e-2
    assert far(fused_moe(*(part.cpu() for part in given)), exact) < bound
    found = launched(*given, tile=SMALL)
    assert found.dtype == dtype
    assert far(found, exact) < bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adds", [False, True])
def test_gated_outputs_of_shared_experts_are_part_of_the_sum(adds: bool, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(1)
    tokens, picked, dim = 5, 3, 72
    parts, shared, rest = (
        torch.randn(rows, dim, generator=draw).to(dtype) for rows in (tokens * picked, tokens, tokens)
    )
    weights, gates = (torch.randn(tokens, n, generator=draw).to(dtype) for n in (picked, 1))
    exact = (parts.double().view(tokens, picked, dim) * weights[..., None].double()).sum(1)
    exact += gates.double().sigmoid() * shared.double() + (rest.double() if adds else 0)
    bound = 2e-6 if dtype == torch.float32 else 2e-2
    into = rest.clone() if adds else None
    assert far(sum_outputs(parts, weights, dtype, into, (shared, gates)), exact) < bound
    into = rest.to(DEVICE) if adds else None
    moved = [part.to(DEVICE) for part in (parts, weights, shared, gates)]
    assert far(triton_moe.sum_parts(*moved[:2], into, (moved[2], moved[3])), exact) < bound
    with pytest.raises(ValueError, match="one per token"):
        sum_outputs(parts, weights, dtype, None, (shared, gates[1:]))


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize(("pairs", "chunk"), [(1, 16), (50, 64), (200, 32), (129, 16)])
def test_pairs_are_put_into_tiles_of_one_expert_each(pairs: int, chunk: int, rows: int) -> None:
    count = 6
    index = torch.randint(0, count - 1, (pairs,), generator=torch.Generator().manual_seed(pairs)).to(DEVICE)
    chunks = -(-pairs // chunk)
    counts = torch.full((chunks, 128), 99, dtype=torch.int32, device=DEVICE)
    most = pairs // rows + min(pairs, count)
    places = torch.full((most * rows,), 77777, dtype=torch.int32, device=DEVICE)
    owners = torch.full((most,), 77777, dtype=torch.int32, device=DEVICE)
    tiles = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    if chunks > 1:
        triton_moe.count_pairs(index, counts, chunk)
    triton_moe.order_pairs(index, counts, places, owners, tiles, count, chunk, rows)
    used = int(tiles)
    assert used == sum(-(-n // rows) for n in torch.bincount(index.cpu()).tolist()) <= most
    assert (owners[used:] == 77777).all(), "nothing is written beyond the tiles in use"
    found = []
    for tile in range(used):
        mine = places[tile * rows : (tile + 1) * rows]
        held = mine[mine >= 0].long()
        assert len(held)
        assert (index[held] == owners[tile]).all()
        found += held.tolist()
    assert sorted(found) == list(range(pairs))
    assert (places[used * rows :] == 77777).all()


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_and_weights_of_another_precision(activation: Activation) -> None:
    x, index, weights, gate_up, down = mixture(9, 4, 2, 32, 16)
    wanted = fused_moe(*(part.cpu() for part in (x, index, weights.double(), gate_up, down)), activation)
    found = launched(x, index, weights.double(), gate_up, down, activation, SMALL)
    assert wanted.dtype == found.dtype == torch.float32
    assert far(found, wanted) < 2e-6


def test_tensor_descriptors_read_the_same_weights() -> None:
    given = mixture(20, 4, 2, 64, 32)
    described = Tile(16, 16, 32, 2, 4, described=True)
    assert far(launched(*given, tile=described), launched(*given, tile=SMALL)) < 1e-6


def test_rows_that_lie_apart_and_no_rows_at_all() -> None:
    x, index, weights, gate_up, down = mixture(6, 4, 2, 32, 16)
    wanted = launched(x, index, weights, gate_up, down, tile=SMALL)
    wide = torch.zeros(6, 80, device=DEVICE)
    wide[:, 16:48] = x
    assert torch.equal(launched(wide[:, 16:48], index, weights, gate_up, down, tile=SMALL), wanted)
    turned = x.T.contiguous().T
    assert torch.equal(launched(turned, index, weights, gate_up, down, tile=SMALL), wanted)
    none = launched(x[:0], index[:0], weights[:0], gate_up, down)
    assert none.shape == (0, 32)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("tokens", "count", "picked"), [(1, 8, 2), (9, 20, 3), (5, 128, 8), (3, 4, 4)])
def test_the_experts_of_the_largest_odds_are_chosen(
    tokens: int, count: int, picked: int, shared: bool
) -> None:
    logits = randn(tokens, count, seed=3)
    routing = Routing(picked, normalised=shared)
    weights, index = choose_experts(logits.cpu(), routing, torch.float32)
    found, chosen = triton_moe.choose_experts(logits, routing, torch.float32, None)
    assert torch.equal(chosen.cpu(), index)
    torch.testing.assert_close(found.cpu(), weights)
    if shared:
        torch.testing.assert_close(found.sum(-1).cpu(), torch.ones(tokens))


def test_of_equal_odds_each_expert_is_chosen_once() -> None:
    even = torch.zeros(3, 6, device=DEVICE)
    _, chosen = triton_moe.choose_experts(even, Routing(4, normalised=True), torch.float32, None)
    assert chosen.tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize(("groups", "kept", "best"), [(1, 1, 1), (8, 4, 2), (4, 1, 1), (3, 2, 2)])
def test_experts_are_chosen_from_the_best_groups(sigmoid: bool, groups: int, kept: int, best: int) -> None:
    routing = Routing(3, sigmoid, groups, kept, best, normalised=True, eps=1e-20, factor=2.5)
    logits, bias = randn(9, 24, seed=4), randn(24, seed=5)
    weights, index = choose_experts(logits.cpu(), routing, torch.float32, bias.cpu())
    found, chosen = triton_moe.choose_experts(logits, routing, torch.float32, bias)
    assert torch.equal(chosen.cpu().sort(-1)[0], index.sort(-1)[0])
    assert all(len(set((row // (24 // groups)).tolist())) <= kept for row in index)
    torch.testing.assert_close(found.cpu().sort(-1)[0], weights.sort(-1)[0])
    torch.testing.assert_close(found.sum(-1).cpu(), torch.full((9,), 2.5))


def test_a_sum_is_added_to_a_tensor() -> None:
    x, index, weights, gate_up, down = mixture(5, 4, 2, 32, 16)
    outputs = grouped.launch(x, index, gate_up, down, tile=SMALL)
    into = randn(5, 32, seed=8).to(x.dtype)
    wanted = into + triton_moe.sum_parts(outputs, weights)
    assert triton_moe.sum_parts(outputs, weights, into) is into
    torch.testing.assert_close(into, wanted, rtol=1e-2, atol=1e-2)
    with pytest.raises(ValueError, match="must be contiguous"):
        sum_outputs(outputs, weights, x.dtype, into[:, ::2])


def test_tiles_are_higher_where_experts_have_more_to_do() -> None:
    heights = [choose_tile(tokens * 8, 128, torch.bfloat16).rows for tokens in (1, 64, 256, 512, 8192)]
    assert heights == sorted(heights)
    assert heights[0] == 16
    assert heights[-1] == 128
    assert all(
        (t.rows + 2 * t.columns) * t.depth * 2 * t.stages <= grouped.SHARED_MEMORY
        for t in (choose_tile(8 * tokens, 128, torch.bfloat16) for tokens in (1, 64, 256, 512, 8192))
    )


def test_what_does_not_fit_is_refused() -> None:
    x, index, weights, gate_up, down = mixture(3, 4, 2, 32, 16)
    with pytest.raises(ValueError, match="they must be"):
        fused_moe(x, index, weights, gate_up, down.transpose(1, 2))
    with pytest.raises(ValueError, match="must have one row for each"):
        fused_moe(x, index[:2], weights, gate_up, down)
    with pytest.raises(ValueError, match="at least 1, at most"):
        choose_experts(x, Routing(33), torch.float32)
