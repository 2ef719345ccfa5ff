"""The native operations of a CPU give what torch gives, up to rounding."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.nn import functional

from kvloom.core import Visibility
from kvloom.kernels import cpu
from kvloom.kernels.attention import Mask, Shape, reference
from kvloom.kernels.attention.cpu_plan import CpuPlan
from kvloom.kernels.fused import operations as fused

pytestmark = pytest.mark.skipif(not cpu.IS_BUILT, reason="built without a compiler")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """However small, the work is shared among so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    monkeypatch.setattr(cpu, "MIN_THREAD_PRODUCTS", 1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("form", ["llama", "gemma"])
@pytest.mark.parametrize("shape", [(3, 64), (1, 5, 96), (2, 3, 7), (0, 8)])
def test_norms(shape: tuple[int, ...], form: fused.NormForm) -> None:
    x, weight = randn(*shape), randn(shape[-1], seed=1)
    wanted = functional.rms_norm(x, weight.shape, weight + (form == "gemma"), 1e-6)
    torch.testing.assert_close(cpu.rms_norm(x, weight, 1e-6, form == "gemma"), wanted)
    apart = randn(6, 2 * shape[-1])[:, : shape[-1]]
    wanted = functional.rms_norm(apart, weight.shape, weight + (form == "gemma"), 1e-6)
    torch.testing.assert_close(fused.rms_norm(apart, weight, 1e-6, form), wanted)


@pytest.mark.parametrize("size", [1.0, 30.0, 300.0])
@pytest.mark.parametrize("shape", [(3, 64), (1, 5, 96), (2, 14), (0, 8)])
def test_gates(shape: tuple[int, ...], size: float) -> None:
    x = size * randn(*shape)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(cpu.act_and_mul(x, False), functional.silu(gate) * up, rtol=1e-5, atol=1e-5)
    wanted = functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(cpu.act_and_mul(x, True), wanted, rtol=1e-5, atol=1e-5 * size * size)


@pytest.mark.parametrize(("heads", "dim"), [(1, 8), (5, 64), (3, 30)])
def test_rotations_are_in_place(heads: int, dim: int) -> None:
    joined = randn(4, heads + 2, dim)
    cos, sin = randn(4, dim, seed=1), randn(4, dim, seed=2)
    part = joined[:, :heads]
    kept = joined[:, heads:].clone()
    as_heads = part.transpose(0, 1)[None]
    wanted, _ = fused.apply_rotary(as_heads, as_heads, cos[None], sin[None])
    cpu.rotate_(part, cos, sin)
    torch.testing.assert_close(part, wanted[0].transpose(0, 1))
    assert torch.equal(joined[:, heads:], kept)


def test_new_tokens_go_to_their_places() -> None:
    pages = torch.zeros(5, 3, 4, 2, 8)[:, 1]
    new, page, place = randn(3, 2, 8), torch.tensor([4, 1, 4]), torch.tensor([0, 3, 2])
    wanted = pages.clone()
    wanted[page, place] = new
    cpu.write_tokens(pages, new, page, place)
    assert torch.equal(pages, wanted)
    apart = randn(2, 3, 8, seed=1).transpose(0, 1)
    wanted[page, place] = apart
    cpu.write_tokens(pages, apart, page, place)
    assert torch.equal(pages, wanted)


LENGTHS = [1, 5, 16, 17, 70, 33]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("span", [Visibility("full"), Visibility("sliding", 9), Visibility("chunked", 16)])
@pytest.mark.parametrize(("heads", "kv", "dim", "v_dim"), [(4, 2, 16, 16), (3, 1, 24, 8), (2, 2, 7, 7)])
def test_single_queries_over_pages(span: Visibility, heads: int, kv: int, dim: int, v_dim: int) -> None:
    rows, block = len(LENGTHS), 4
    tables = torch.zeros(rows, 18, dtype=torch.int32)
    tables[:] = (torch.randperm(rows * 18) + 1).int().view(rows, 18)
    # A page holds other layers, and what was never written may be anything.
    k, v = (torch.full((rows * 18 + 1, 3, block, kv, d), torch.nan)[:, 1] for d in (dim, v_dim))
    for row, length in enumerate(LENGTHS):
        for token in range(length):
            page = int(tables[row, token // block])
            k[page, token % block] = randn(kv, dim, seed=100 * row + token)
            v[page, token % block] = randn(kv, v_dim, seed=100 * row + token + 50)
    q = randn(rows, heads + 1, dim)[:, 1:]
    plan = CpuPlan(Shape(heads, kv, dim, v_dim, block, torch.float32), span)
    plan.make(range(rows + 1), LENGTHS)
    found, _ = plan.attend(q, k, v, tables, Mask(span), 0.3)
    starts, lengths = torch.arange(rows + 1), torch.tensor(LENGTHS)
    wanted, _ = reference.attend(q, k, v, tables, starts, lengths, Mask(span), 0.3)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("span", [Visibility("full"), Visibility("sliding", 9)])
def test_a_layers_step_is_its_three_parts_in_one(span: Visibility) -> None:
    heads, kv, dim, block, rows = 4, 2, 16, 4, len(LENGTHS)
    k, v = (randn(200, block, kv, dim, seed=seed) for seed in (1, 2))
    tables = (torch.randperm(rows * 18) + 1).int().view(rows, 18)
    lengths = np.array(LENGTHS)
    seen = cpu.VisibleTokens(span.first_visible_each(lengths - 1), lengths)
    joined = randn(rows, (heads + 2 * kv) * dim)
    cos, sin = randn(1, rows, dim, seed=3), randn(1, rows, dim, seed=4)

    apart = joined.clone().view(rows, heads + 2 * kv, dim)
    own_k, own_v = k.clone(), v.clone()
    cpu.rotate_(apart[:, : heads + kv], cos, sin)
    last = torch.from_numpy(lengths - 1)
    at = tables[torch.arange(rows), last // block].long(), last % block
    cpu.write_tokens(own_k, apart[:, heads : heads + kv], *at)
    cpu.write_tokens(own_v, apart[:, heads + kv :], *at)
    wanted = cpu.decode(apart[:, :heads], own_k, own_v, tables, seen, 0.25)

    found = cpu.attention_step(
        joined, cos, sin, heads, 0.25, cpu.LayerPages(k, v), cpu.SingleTokenRows(tables, seen)
    )
    assert torch.equal(k, own_k)
    assert torch.equal(v, own_v)
    assert torch.equal(found.view(rows, heads, dim), wanted)


@pytest.mark.parametrize("span", [Visibility("full"), Visibility("sliding", 9), Visibility("chunked", 8)])
@pytest.mark.parametrize(("heads", "kv", "dim"), [(4, 2, 64), (3, 1, 20), (5, 5, 6)])
def test_rows_of_one_sequence_give_what_each_row_gives_alone(
    heads: int, kv: int, dim: int, span: Visibility
) -> None:
    """Ten rows of one sequence, one of another, and three of a third. No row sees the tokens after it."""
    block, lines = 4, np.array([0] * 10 + [1] + [2] * 3)
    lengths = np.array([*range(7, 17), 5, *range(30, 33)])
    k, v = (randn(30, block, kv, dim, seed=seed) for seed in (1, 2))
    tables = (torch.randperm(29) + 1).int()[:24].view(3, 8)
    joined = randn(len(lines), (heads + 2 * kv) * dim)
    cos, sin = randn(1, len(lines), dim, seed=3), randn(1, len(lines), dim, seed=4)
    wanted, pages = [], cpu.LayerPages(k.clone(), v.clone())
    for i, line in enumerate(lines):
        seen = cpu.VisibleTokens(span.first_visible_each(lengths[i : i + 1] - 1), lengths[i : i + 1])
        one = cpu.SingleTokenRows(tables[line, None], seen)
        angles = cos[:, i : i + 1], sin[:, i : i + 1]
        wanted.append(cpu.attention_step(joined[i : i + 1].clone(), *angles, heads, 0.3, pages, one))
    rows = cpu.SingleTokenRows(
        tables, cpu.VisibleTokens(span.first_visible_each(lengths - 1), lengths), lines
    )
    found = cpu.attention_step(joined, cos, sin, heads, 0.3, cpu.LayerPages(k, v), rows)
    torch.testing.assert_close(found, torch.cat(wanted), rtol=1e-5, atol=1e-5)


def test_rows_that_do_not_follow_one_another_are_refused() -> None:
    tables, lengths = torch.ones(2, 2, dtype=torch.int32), np.array([1, 3])
    seen = cpu.VisibleTokens(np.zeros_like(lengths), lengths)
    with pytest.raises(ValueError, match="do not follow one another"):
        cpu.SingleTokenRows(tables, seen, np.array([1, 1]))
    with pytest.raises(ValueError, match="do not fit 2 block tables"):
        cpu.SingleTokenRows(tables, seen, np.array([0, 2]))


def test_what_is_not_taken() -> None:
    x = randn(4, 6)
    assert cpu.supports(x, x[:, 1:])
    assert not cpu.supports(x, x.double())
    assert not cpu.supports(x.T)
    assert not cpu.supports(x.to("meta"))


def test_what_would_be_a_wrong_address_is_refused() -> None:
    k = randn(4, 4, 2, 16)
    tables, seen = torch.ones(1, 2, dtype=torch.int32), cpu.VisibleTokens(np.array([0]), np.array([9]))
    with pytest.raises(ValueError, match="do not fit tables of 2 blocks of 4"):
        cpu.decode(randn(1, 4, 16), k, k, tables, seen, 1.0)
    rows = cpu.SingleTokenRows(tables, seen)
    with pytest.raises(ValueError, match="do not fit tables of 2 blocks of 4"):
        cpu.attention_step(
            randn(1, 8 * 16), randn(1, 16), randn(1, 16), 4, 1.0, cpu.LayerPages(k, k.clone()), rows
        )
    with pytest.raises(ValueError, match="must be"):
        cpu.write_tokens(
            k, randn(1, 2, 16), torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
        )


def test_page_ids_that_lie_apart_are_read_as_they_are_meant() -> None:
    pages, new = torch.zeros(6, 4, 2, 8), randn(3, 2, 8)
    page, place = torch.tensor([[4, 9], [1, 9], [5, 9]])[:, 0], torch.tensor([0, 3, 2])
    cpu.write_tokens(pages, new, page, place)
    assert torch.equal(pages[page, place], new)
    assert int((pages != 0).any(-1).any(-1).sum()) == 3


@pytest.mark.parametrize("dim", [3, 64, 321])
@pytest.mark.parametrize("columns", [1, 6, 129])
def test_products_of_a_few_rows(dim: int, columns: int) -> None:
    torch.manual_seed(dim)
    weight = torch.randn(columns, dim)
    rows = [torch.randn(count, dim) for count in (1, 2, 3, 5, 8, 17, 32)]
    for x in rows:
        wanted, into = x.double() @ weight.double().t(), torch.randn(len(x), columns)
        torch.testing.assert_close(cpu.multiply(x, weight).double(), wanted, rtol=1e-5, atol=1e-4)
        added = into.double() + wanted
        assert cpu.multiply(x, weight, into) is into
        torch.testing.assert_close(into.double(), added, rtol=1e-5, atol=1e-4)
    assert not cpu.multiplies(rows[0], weight)  # BLAS is faster
    assert cpu.multiplies(rows[1], weight)
    assert not cpu.multiplies(rows[1].double(), weight.double())
    assert not cpu.multiplies(torch.randn(33, dim), weight)
    # A row's bits do not depend on the other rows.
    assert torch.equal(cpu.multiply(rows[-1], weight)[:5], cpu.multiply(rows[-1][:5].clone(), weight))


HEADS, KV, DIM, BLOCK, HIDDEN, INNER, WORDS = 4, 2, 8, 4, 24, 20, 50


def small_model(layers: int = 2) -> tuple[cpu.SmallModel, list[cpu.SmallLayer], list[torch.Tensor]]:
    """A model of random weights with pages for 13 blocks. Also returns its layers, and its other weights."""
    shapes = [(HIDDEN,), ((HEADS + 2 * KV) * DIM, HIDDEN), (HIDDEN, HEADS * DIM), (HIDDEN,), (2 * INNER, HIDDEN), (HIDDEN, INNER)]  # fmt: skip
    made = []
    for i in range(layers):
        weights = [randn(*shape, seed=10 * i + j) / len(shape) for j, shape in enumerate(shapes)]
        pages = torch.zeros(2, 13, BLOCK, KV, DIM)
        made.append(cpu.SmallLayer(*weights, cpu.LayerPages(*pages)))
    angles = torch.arange(40)[:, None] / 10 ** torch.linspace(0, 2, DIM // 2)
    angles = torch.cat((angles, angles), -1)
    others = [randn(WORDS, HIDDEN, seed=5), randn(HIDDEN, seed=6), randn(WORDS, HIDDEN, seed=7), angles.cos(), angles.sin()]  # fmt: skip
    return (
        cpu.SmallModel(made, *others, heads=HEADS, scale=0.3, eps=1e-6, gemma=False, tanh=False),
        made,
        others,
    )


def logits_of(tokens: list[int], layers: list[cpu.SmallLayer], others: list[torch.Tensor]) -> torch.Tensor:
    """The logits after each token, without pages."""
    embeddings, norm, head, cos, sin = others
    x, count = embeddings[tokens], len(tokens)

    def turned(y: torch.Tensor) -> torch.Tensor:
        half = torch.cat((-y[..., DIM // 2 :], y[..., : DIM // 2]), -1)
        return y * cos[:count, None] + half * sin[:count, None]

    for one in layers:
        qkv = functional.rms_norm(x, (HIDDEN,), one.norm, 1e-6) @ one.qkv.T
        q, k, v = qkv.view(count, -1, DIM).split([HEADS, KV, KV], 1)
        q, k, v = (y.transpose(0, 1) for y in (turned(q), turned(k), v))
        out = functional.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, scale=0.3, enable_gqa=True
        )
        x = x + out[0].transpose(0, 1).reshape(count, -1) @ one.output.T
        gate, up = (functional.rms_norm(x, (HIDDEN,), one.mlp_norm, 1e-6) @ one.gate_up.T).chunk(2, -1)
        x = x + (functional.silu(gate) * up) @ one.down.T
    return functional.rms_norm(x, (HIDDEN,), norm, 1e-6) @ head.T


def test_small_models_generate_what_torch_does() -> None:
    model, layers, others = small_model()
    tables = [np.array([[3, 1, 7, 10], [2, 9, 5, 11], [8, 4, 6, 12]], np.int32)] * len(layers)
    prompts, counts = [[7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [9, 2]], np.array([4, 2, 6])
    step = cpu.SmallStep(prompts, [0, 0, 0], tables)
    found = model.generate(step, counts.tolist(), 1)
    for row, (ids, count) in enumerate(zip(prompts, counts, strict=True)):
        wanted = list(ids)
        for _ in range(count):
            after = logits_of(wanted, layers, others)[-1]
            wanted.append(int(after.argmax()))
        assert found[row, :count].tolist() == wanted[len(ids) :]
    # The pages have every token, so each sequence can be continued.
    ends = np.array([len(ids) + count for ids, count in zip(prompts, counts, strict=True)])
    more = [[11], [12, 13, 14, 15], [21, 22]]
    step = cpu.SmallStep(more, ends.tolist(), tables)
    places = [len(step.lengths) - 1, *range(len(step.lengths) - 1)]
    logits = model.compute(step, places)
    wanted = [
        logits_of([*ids, *found[row, : counts[row]].tolist(), *more[row]], layers, others)[-len(more[row]) :]
        for row, ids in enumerate(prompts)
    ]
    torch.testing.assert_close(logits, torch.cat(wanted)[places], rtol=1e-4, atol=1e-4)


def test_small_models_refuse_wrong_input() -> None:
    model, layers, others = small_model()
    table = np.array([[1, 2]], np.int32)
    for tokens, start, count, pages in [
        ([WORDS], 0, 1, table),
        ([-1], 0, 1, table),
        ([], 0, 1, table),
        ([1], -1, 1, table),
        ([1], 8, 1, table),
        ([1], 0, 9, table),
        ([1], 0, 0, table),
        ([1], 0, 1, table[:0]),
    ]:
        with pytest.raises(ValueError, match=r"fit|exceed|not a"):
            model.generate(cpu.SmallStep([tokens], [start], [pages] * 2), [count], 0)
    options = {"heads": HEADS, "scale": 0.3, "eps": 1e-6, "gemma": False, "tanh": False}
    for place in range(len(others)):
        for bad in (
            others[place][:, :-1] if others[place].ndim > 1 else others[place][:-1],
            others[place].double(),
        ):
            with pytest.raises(ValueError, match="must be"):
                cpu.SmallModel(layers, *others[:place], bad, *others[place + 1 :], **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must be|fit"):
        cpu.SmallModel(layers, *others, **options | {"heads": 3})  # type: ignore[arg-type]
