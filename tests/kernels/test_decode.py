"""Decode over pages by the work list, against the oracle in float64: every shape, span, mask and dtype."""

from __future__ import annotations

import math

import pytest
import torch

from kvloom.core import Visibility
from kvloom.kernels.attention import Mask, Shape

triton = pytest.importorskip("triton", reason="Triton is not installed")
from kvloom.kernels.attention import DecodePlan  # noqa: E402
from kvloom.kernels.attention.work_list import Tile  # noqa: E402

from .batches import DEVICE, TOLERANCE, Batch, random_trees, relative  # noqa: E402

FULL = Visibility("full")


def run(
    batch: Batch, mask: Mask, queries: int, scale: float | None = None, tile: Tile | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    plan = DecodePlan(batch.shape, len(batch.lengths) + 2, queries, batch.span, DEVICE, tile=tile)
    plan.make(batch.starts, batch.lengths_)
    out = torch.full((*batch.q.shape[:2], batch.shape.v_dim), math.nan, dtype=batch.q.dtype, device=DEVICE)
    lse = torch.full(batch.q.shape[:2], math.nan, device=DEVICE)
    plan.attend(batch.q, batch.k, batch.v, batch.tables, mask, scale, batch.k_scale, batch.v_scale, out, lse)
    return out, lse


def check(
    batch: Batch,
    mask: Mask | None = None,
    queries: int = 1,
    scale: float | None = None,
    tile: Tile | None = None,
) -> None:
    mask = mask or Mask(batch.span)
    out, lse = run(batch, mask, queries, scale, tile)
    exact, exact_lse = batch.expected(mask, scale)
    assert relative(out, exact) < TOLERANCE[batch.q.dtype]
    assert not torch.isnan(lse).any()
    found = lse.double().cpu()
    torch.testing.assert_close(found.isinf(), exact_lse.isinf())
    torch.testing.assert_close(found[~found.isinf()], exact_lse[~found.isinf()], atol=2e-2, rtol=2e-3)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.few(2)
def test_head_sizes(dim: int, order: str) -> None:
    shape = Shape(4, 2, dim, dim, dtype=torch.float32)
    check(Batch(shape, [1, 37, 130, 16], [1, 1, 1, 1], order=order, seed=dim))


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_page_sizes(block: int) -> None:
    shape = Shape(2, 1, 64, 64, page_tokens=block, dtype=torch.float32)
    check(Batch(shape, [1, block, block + 1, 3 * block - 1], [1] * 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and DEVICE == "cpu":
        pytest.skip("Triton's interpreter multiplies the raw bits of bfloat16")
    shape = Shape(8, 2, 128, 128, dtype=dtype)
    check(Batch(shape, [200, 3, 64], [1] * 3, dtype=dtype))


@pytest.mark.parametrize(
    "span",
    [Visibility("sliding", 20), Visibility("sliding", 200), Visibility("chunked", 48)],
    ids=lambda span: f"{span}",
)
@pytest.mark.parametrize("queries", [[1, 1, 1], [3, 1, 8]], ids=["one", "several"])
@pytest.mark.few(1)
def test_windows_and_chunks(span: Visibility, queries: list[int]) -> None:
    shape = Shape(4, 2, 64, 64, dtype=torch.float32)
    check(Batch(shape, [100, 1, 51], queries, span), queries=max(queries))


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.few(1)
def test_softcap_sinks_and_scale_together(queries: int) -> None:
    shape = Shape(6, 2, 64, 64, dtype=torch.float32)
    batch = Batch(shape, [70, 9, 33], [queries] * 3)
    sinks = torch.randn(6).to(DEVICE)
    check(batch, Mask(FULL, 5.0, sinks), queries, scale=0.3)
    check(batch, Mask(FULL, None, sinks), queries)
    check(batch, Mask(FULL, 2.0), queries)


@pytest.mark.parametrize("toll", [0, 1], ids=["walked", "one by one"])
@pytest.mark.parametrize("dim", [64, 80, 96, 128] if DEVICE == "cuda" else [80])
@pytest.mark.few(1)
def test_both_kernels_over_the_work_list_in_half_precision(toll: int, dim: int) -> None:
    """Tiles walked in one loop, and begun one by one; long and short stretches, so that tiles are cut or many follow."""
    half = torch.bfloat16 if DEVICE == "cuda" and dim % 64 == 0 else torch.float16
    shape = Shape(4, 2 if DEVICE == "cuda" else 1, dim, dim, dtype=half)
    rng = torch.Generator().manual_seed(dim)
    for span, queries, programs in (
        (Visibility("full"), 1, 4),
        (Visibility("sliding", 24), 4, 16),
        (Visibility("full"), 4, 8),
    ):
        lengths = [*torch.randint(1, 150 if DEVICE == "cuda" else 70, (3,), generator=rng).tolist(), 0, 16]
        counts = [min(queries, n) if queries > 1 else 1 for n in lengths]
        batch = Batch(shape, lengths, counts, span, order="HND" if dim < 96 else "NHD", dtype=half, seed=dim)
        mask = Mask(span)
        if span.windowed:
            mask = Mask(span, softcap=4.0, sinks=torch.randn(4, generator=rng).to(DEVICE))
        elif queries > 1:  # drafts that see the first of them and themselves
            trees = torch.zeros(batch.q.shape[0], queries, dtype=torch.bool, device=DEVICE)
            trees[:, 0] = True
            own = torch.cat([torch.arange(n) for n in counts]).to(DEVICE)
            trees[torch.arange(len(own), device=DEVICE), own] = True
            mask = Mask(span, trees=trees)
        tile = Tile(16, 32 if DEVICE == "cpu" else 64, 4, 3, programs, 1, toll)
        check(batch, mask, queries, tile=tile)


def test_drafts_see_only_their_branch() -> None:
    torch.manual_seed(0)
    shape = Shape(4, 2, 64, 64, dtype=torch.float32)
    batch = Batch(shape, [40, 23, 70], [8, 1, 5])
    trees = torch.zeros(14, 8, dtype=torch.bool)
    for first, count in ((0, 8), (8, 1), (9, 5)):
        trees[first : first + count, :count] = (
            torch.rand(count, count).tril().gt(0.5) | torch.eye(count).bool()
        )
    check(batch, Mask(FULL, trees=trees.to(DEVICE)), queries=8)


@pytest.mark.parametrize(
    "span", [Visibility("sliding", 5), Visibility("sliding", 20), Visibility("chunked", 7)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.few(2)
def test_windows_count_positions_in_trees(span: Visibility, dtype: torch.dtype) -> None:
    """A branch has smaller positions than the slots of its tokens, so its window begins earlier."""
    torch.manual_seed(2)
    shape = Shape(4, 2, 64, 64, dtype=dtype)
    counts = [8, 1, 5, 16]
    order = "HDN" if dtype == torch.int8 else "HND"
    batch = Batch(
        shape,
        [40, 23, 7, 16],
        counts,
        span,
        order=order,
        dtype=torch.float16 if dtype == torch.int8 else dtype,
    )
    trees = random_trees(counts)
    check(batch, Mask(span, trees=trees.to(DEVICE)), queries=16)


@pytest.mark.slow
def test_draft_trees_of_many_rows_take_several_tiles() -> None:
    torch.manual_seed(1)
    shape = Shape(8, 2, 64, 64, dtype=torch.float32)
    batch = Batch(shape, [90, 40], [40, 33])
    trees = torch.rand(73, 40).gt(0.5)
    for first, count in ((0, 40), (40, 33)):
        trees[first : first + count, :count] |= torch.eye(count).bool()
        trees[first : first + count, count:] = False
    check(batch, Mask(FULL, trees=trees.to(DEVICE)), queries=40)


def test_sinks_may_be_nothing_and_sizes_zero() -> None:
    shape = Shape(4, 2, 64, 64, dtype=torch.float32)
    batch = Batch(shape, [0, 17, 40], [1, 1, 1])
    sinks = torch.tensor([-math.inf, 0.5, -math.inf, -2.0]).to(DEVICE)
    check(batch, Mask(FULL, sinks=sinks))
    shape = Shape(4, 2, 64, 64, dtype=torch.int8)
    batch = Batch(shape, [40], [1], dtype=torch.float16, order="HDN")
    assert batch.v_scale is not None
    batch.v_scale[:, ::3] = 0.0
    check(batch)


def test_a_row_of_more_queries_than_the_plan_writes_nowhere_else() -> None:
    shape = Shape(4, 2, 64, 64, dtype=torch.float32)
    batch = Batch(shape, [30, 40], [1, 5])
    plan = DecodePlan(shape, 2, 2, device=DEVICE)
    guarded = torch.zeros(6, 4, dtype=torch.int32, device=DEVICE)
    plan.tokens = guarded[:4]
    plan.make(batch.starts, batch.lengths_)
    assert not guarded[4:].any()


def test_empty_rows_and_padding() -> None:
    shape = Shape(4, 2, 64, 64, dtype=torch.float32)
    batch = Batch(shape, [0, 17, 0, 5], [1, 1, 0, 1])
    out, lse = run(batch, Mask(FULL), 1)
    assert not out[0].any()
    assert lse[0].isneginf().all()
    check(batch)
    sinks = torch.randn(4).to(DEVICE)
    out, lse = run(batch, Mask(FULL, sinks=sinks), 1)
    assert not out[0].any()
    torch.testing.assert_close(lse[0], sinks)


@pytest.mark.parametrize("heads", [(3, 3), (7, 1), (10, 2), (32, 1), (40, 1)], ids=str)
@pytest.mark.few(1)
def test_groups_of_any_size(heads: tuple[int, int]) -> None:
    shape = Shape(*heads, 64, 64, dtype=torch.float32)
    check(Batch(shape, [50, 20], [2, 1]), queries=2)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize("order", ["NHD", "HND", "HDN"])
@pytest.mark.few(1)
def test_quantised_pages_with_their_scales(dtype: torch.dtype, order: str) -> None:
    if dtype == torch.float8_e4m3fn and DEVICE == "cpu":
        pytest.skip("Triton's interpreter has no float8")
    shape = Shape(8, 2, 128, 128, dtype=dtype)
    half = torch.float16 if DEVICE == "cpu" else torch.bfloat16
    batch = Batch(shape, [150, 16, 1], [1, 2, 1], dtype=half, order=order)
    out, _ = run(batch, Mask(FULL), 2)
    exact, _ = batch.expected(Mask(FULL))
    assert relative(out, exact) < 5e-3
    static = torch.rand(2).add(0.5).to(DEVICE)
    batch.k_scale, batch.v_scale = static * 0.01, static * 0.02
    check(batch, queries=2)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize("window", [8, 24])
def test_quantised_pages_under_windows(dtype: torch.dtype, window: int, static: bool) -> None:
    if dtype == torch.float8_e4m3fn and DEVICE == "cpu":
        pytest.skip("Triton's interpreter has no float8")
    half = torch.float16 if DEVICE == "cpu" else torch.bfloat16
    span = Visibility("sliding", window)
    batch = Batch(Shape(4, 2, 64, 64, dtype=dtype), [24, 41, 13], [1, 1, 1], span, "HDN", half)
    if static:
        batch.k_scale = batch.v_scale = torch.tensor([0.015, 0.02], device=DEVICE)
    out, _ = run(batch, Mask(span), 1)
    assert relative(out, batch.expected(Mask(span))[0]) < 5e-3


@pytest.mark.parametrize("case", [(64, 64), (80, 16)], ids=["long pages", "turned to 16 bits"])
def test_a_window_that_begins_inside_a_page_of_8_bits(case: tuple[int, int]) -> None:
    """Values are loaded 16 tokens at once, those before the window among them."""
    (dim, block), span = case, Visibility("sliding", 21)
    shape = Shape(2, 1, dim, dim, block, torch.int8)
    batch = Batch(shape, [90, 30], [1, 1], span, "HDN", torch.float16)
    out, _ = run(batch, Mask(span), 1)
    assert relative(out, batch.expected(Mask(span))[0]) < 5e-3


@pytest.mark.slow
def test_latent_pages_are_keys_and_values() -> None:
    shape = Shape(16, 1, 576, 512, dtype=torch.float32)
    check(Batch(shape, [70, 1], [1, 1]), scale=0.07)
    shape = Shape(40, 1, 576, 512, dtype=torch.float32)
    check(Batch(shape, [33, 20], [2, 1]), queries=2, scale=0.07)


@pytest.mark.slow
def test_random_batches() -> None:
    """Lengths, queries, heads and spans at random, all of them cut at other places."""
    for seed in range(8):
        gen = torch.Generator().manual_seed(seed)

        def pick(*values: int, gen: torch.Generator = gen) -> int:
            return values[int(torch.randint(len(values), (), generator=gen))]

        kv = pick(1, 2, 3)
        shape = Shape(kv * pick(1, 2, 5), kv, 64, pick(64, 80), page_tokens=pick(16, 32), dtype=torch.float32)
        rows = pick(1, 3, 6)
        queries = [pick(0, 1, 2, 5) for _ in range(rows)]
        lengths = [count + pick(0, 1, 15, 16, 40, 133) for count in queries]
        if not sum(queries):
            continue
        span = (FULL, Visibility("sliding", 30), Visibility("chunked", 32))[seed % 3]
        check(Batch(shape, lengths, queries, span, seed=seed), queries=5)


def test_what_cannot_run_is_refused_before_any_launch() -> None:
    shape = Shape(4, 2, 64, 64, dtype=torch.float32)
    batch = Batch(shape, [20], [1])
    plan = DecodePlan(shape, 1, device=DEVICE)
    with pytest.raises(ValueError, match="call make"):
        plan.attend(batch.q, batch.k, batch.v, batch.tables)
    plan.make(batch.starts, batch.lengths_)
    with pytest.raises(ValueError, match="float64 are not supported"):
        plan.attend(batch.q.double(), batch.k, batch.v, batch.tables)
    with pytest.raises(ValueError, match="they must agree"):
        plan.attend(batch.q.half(), batch.k, batch.v, batch.tables)
    with pytest.raises(ValueError, match="last dimension"):
        plan.attend(batch.q, batch.k.transpose(1, 3).contiguous().transpose(1, 3), batch.v, batch.tables)
    with pytest.raises(ValueError, match="is not \\[pages, 16, 2, 64\\]"):
        plan.attend(batch.q, batch.k[:, :8], batch.v, batch.tables)
    with pytest.raises(ValueError, match="the plan is for full"):
        plan.attend(batch.q, batch.k, batch.v, batch.tables, Mask(Visibility("sliding", 8)))
    with pytest.raises(ValueError, match="int32"):
        plan.attend(batch.q, batch.k, batch.v, batch.tables.long())
    with pytest.raises(ValueError, match="do not fit a plan for 1 sequences"):
        plan.make(*(torch.zeros(n, dtype=torch.int32, device=DEVICE) for n in (3, 2)))
    quantised = DecodePlan(Shape(4, 2, 64, 64, dtype=torch.int8), 1, device=DEVICE)
    quantised.make(batch.starts, batch.lengths_)
    with pytest.raises(ValueError, match="need k_scale"):
        quantised.attend(batch.q.half(), batch.k.char(), batch.v.char(), batch.tables)
    good = {"q": batch.q, "k": batch.k, "v": batch.v, "tables": batch.tables}
    with pytest.raises(ValueError, match="out must be floating"):
        plan.attend(**good, out=torch.empty(0, 4, 64, device=DEVICE))
    with pytest.raises(ValueError, match="out must be floating"):
        plan.attend(**good, out=torch.empty(1, 64, 4, device=DEVICE).transpose(1, 2))
    with pytest.raises(ValueError, match="lse must be float32"):
        plan.attend(**good, lse=torch.empty(1, 4, dtype=torch.float16, device=DEVICE))
    with pytest.raises(ValueError, match="0 table rows for 1 sequences"):
        plan.attend(batch.q, batch.k, batch.v, batch.tables[:0])
    with pytest.raises(ValueError, match="a plan for drafts has more than one"):
        plan.attend(**good, mask=Mask(FULL, trees=torch.ones(1, 1, dtype=torch.bool, device=DEVICE)))
    with pytest.raises(ValueError, match="side by side"):
        plan.attend(**good, mask=Mask(FULL, sinks=torch.zeros(8, device=DEVICE)[::2]))
    with pytest.raises(ValueError, match="they must be floating"):
        plan.attend(**good, mask=Mask(FULL, sinks=torch.zeros(4, dtype=torch.int64, device=DEVICE)))
    with pytest.raises(ValueError, match="tables is on meta, the queries are on"):
        plan.attend(batch.q, batch.k, batch.v, batch.tables.to("meta"))
    with pytest.raises(ValueError, match="lengths are on meta, the plan is for"):
        plan.make(batch.starts, batch.lengths_.to("meta"))
    halves = torch.ones(batch.k.shape[:3], dtype=torch.float16, device=DEVICE)
    with pytest.raises(ValueError, match="they must be float32"):
        plan.attend(**good, k_scale=halves, v_scale=halves)
    with pytest.raises(ValueError, match="values of 576 in latents"):
        DecodePlan(Shape(4, 1, 576, 576), 1, device=DEVICE)
    with pytest.raises(ValueError, match="k_dim 72 is not supported"):
        DecodePlan(Shape(4, 2, 72, 64), 1, device=DEVICE)
    with pytest.raises(ValueError, match="pages of 8 tokens"):
        DecodePlan(Shape(4, 2, 64, 64, page_tokens=8), 1, device=DEVICE)
    with pytest.raises(ValueError, match="4 heads do not divide over 3"):
        Shape(4, 3, 64, 64)
    with pytest.raises(ValueError, match="longer is prefill"):
        DecodePlan(shape, 1, queries=65, device=DEVICE)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="a captured graph needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_one_captured_graph_serves_any_lengths(dtype: torch.dtype) -> None:
    shape = Shape(8, 2, 128, 128, dtype=dtype)
    order = "HDN" if dtype == torch.int8 else "HND"
    batches = [
        Batch(shape, lengths, [1, 1, 1, 1], order=order, dtype=torch.bfloat16, seed=seed)
        for seed, lengths in enumerate([[300, 5, 1000, 40], [1, 2000, 0, 17], [64, 64, 64, 64]])
    ]
    pages = max(len(batch.k) for batch in batches)
    blocks = max(batch.tables.shape[1] for batch in batches)
    first = batches[0]
    plan = DecodePlan(shape, 4, device=DEVICE)
    lengths = first.lengths_.clone()
    tables = torch.zeros(4, blocks, dtype=torch.int32, device=DEVICE)
    q, out = first.q.clone(), torch.empty_like(first.q)
    kept = [_room_for(x, pages) for x in (first.k, first.v, first.k_scale, first.v_scale)]

    def step() -> None:
        plan.make(first.starts, lengths)
        plan.attend(q, kept[0], kept[1], tables, k_scale=kept[2], v_scale=kept[3], out=out)  # type: ignore[arg-type]

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for batch in batches:
        lengths.copy_(batch.lengths_)
        tables.zero_()[:, : batch.tables.shape[1]] = batch.tables
        q.copy_(batch.q)
        for room, given in zip(kept, (batch.k, batch.v, batch.k_scale, batch.v_scale), strict=True):
            if room is not None and given is not None:
                room[: len(given)] = given
        out.fill_(math.nan)
        graph.replay()
        assert relative(out, batch.expected(Mask(FULL))[0]) < TOLERANCE[torch.bfloat16]


def _room_for(like: torch.Tensor | None, pages: int) -> torch.Tensor | None:
    """An empty tensor of `pages` pages in the order of `like`."""
    if like is None:
        return None
    order = sorted(range(1, like.dim()), key=like.stride, reverse=True)
    room = torch.zeros((pages, *(like.shape[axis] for axis in order)), dtype=like.dtype, device=like.device)
    back = [0, *(1 + order.index(axis) for axis in range(1, like.dim()))]
    return room.permute(back)
