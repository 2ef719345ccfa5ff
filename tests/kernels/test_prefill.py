"""Prefill over pages and over dense K and V, against the oracle in float64: shapes, spans, masks, dtypes, backends."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvloom.core import Visibility
from kvloom.kernels.attention import Mask, QueryRows, Shape, attend_dense, merge_outputs, prefill_backends
from kvloom.kernels.attention.prefill_backends import (
    MANY_VISIBLE_TOKENS,
    BlockTile,
    block_list,
    choose_gathered_tile,
    cudnn_batches,
)

triton = pytest.importorskip("triton", reason="Triton is not installed")
from kvloom.kernels.attention import (  # noqa: E402
    PrefillPlan,
    prefill,
    prefill_cudnn,
    prefill_launch,
)

from .batches import DEVICE, TOLERANCE, Batch, relative  # noqa: E402

FULL = Visibility("full")
GPU = DEVICE == "cuda"
TINY = BlockTile(16, 16, 4, 2)
HALF = torch.bfloat16 if GPU else torch.float16  # Triton's interpreter multiplies the raw bits of bfloat16


def run(batch: Batch, mask: Mask, scale: float | None = None, new: bool = False, **options):  # type: ignore[no-untyped-def]
    plan = PrefillPlan(batch.shape, batch.span, DEVICE, **options)
    plan.make(batch.starts.tolist(), batch.lengths)
    out = torch.full((*batch.q.shape[:2], batch.shape.v_dim), math.nan, dtype=batch.q.dtype, device=DEVICE)
    lse = torch.full(batch.q.shape[:2], math.nan, device=DEVICE)
    own = new_tokens(batch) if new else (None, None)
    plan.attend(
        batch.q, batch.k, batch.v, batch.tables, mask, scale, batch.k_scale, batch.v_scale, out, lse, *own
    )
    return out, lse


def new_tokens(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of the queries' tokens, packed."""
    found: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for row, (length, count) in enumerate(zip(batch.lengths, batch.queries, strict=True)):
        for pages, into in zip((batch.k, batch.v), found, strict=True):
            into.append(pages[batch.tables[row].long()].flatten(0, 1)[length - count : length])
    return torch.cat(found[0]), torch.cat(found[1])


def check(
    batch: Batch, mask: Mask | None = None, scale: float | None = None, tolerance: float = 0, **options
) -> None:  # type: ignore[no-untyped-def]
    mask = mask or Mask(batch.span)
    if "backend" not in options and "tile" not in options and not GPU:
        options["tile"] = TINY
    agree(
        run(batch, mask, scale, **options), batch.expected(mask, scale), tolerance or TOLERANCE[batch.q.dtype]
    )


def agree(
    found: tuple[torch.Tensor, torch.Tensor], exact: tuple[torch.Tensor, torch.Tensor], tolerance: float
) -> None:
    assert relative(found[0], exact[0]) < tolerance
    lse, exact_lse = found[1].double().cpu(), exact[1].double().cpu()
    assert not torch.isnan(lse).any()
    torch.testing.assert_close(lse.isinf(), exact_lse.isinf())
    torch.testing.assert_close(lse[~lse.isinf()], exact_lse[~lse.isinf()], atol=2e-2, rtol=2e-3)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192, 256])
def test_head_sizes(dim: int) -> None:
    shape = Shape(4, 2, dim, dim, dtype=torch.float32)
    check(Batch(shape, [20, 41], [20, 9], order="HND" if dim % 64 else "NHD", seed=dim))


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_page_sizes(block: int) -> None:
    shape = Shape(2, 1, 64, 64, page_tokens=block, dtype=torch.float32)
    check(Batch(shape, [1, block, block + 11], [1, 5, 12]))


def test_half_precision() -> None:
    check(Batch(Shape(8, 2, 128, 128, dtype=HALF), [50, 3], [21, 3], dtype=HALF))


@pytest.mark.parametrize(
    "span", [Visibility("sliding", 20), Visibility("sliding", 200), Visibility("chunked", 24)], ids=str
)
def test_windows_and_chunks(span: Visibility) -> None:
    check(Batch(Shape(4, 2, 64, 64, dtype=torch.float32), [90, 1, 51], [40, 1, 51], span))


def test_softcap_sinks_and_scale_together() -> None:
    shape = Shape(6, 2, 64, 64, dtype=torch.float32)
    batch = Batch(shape, [70, 9, 33], [12, 9, 3])
    sinks = torch.randn(6).to(DEVICE)
    check(batch, Mask(FULL, 5.0, sinks), scale=0.3)
    check(batch, Mask(FULL, None, sinks))


@pytest.mark.parametrize("span", [FULL, Visibility("sliding", 12)], ids=str)
def test_queries_of_one_image_see_each_other(span: Visibility) -> None:
    shape = Shape(4, 2, 64, 64, dtype=torch.float32)
    batch = Batch(shape, [60, 30, 9], [50, 30, 9], span)
    spans = torch.full((89,), -1, dtype=torch.int32)
    spans[3:35] = 0  # longer than the window
    spans[35:40] = 1
    spans[48:56] = 2  # across two rows: each sees its own part
    spans[80:89] = 7
    check(batch, Mask(span, spans=spans.to(DEVICE)))
    if span == FULL and not GPU:
        return
    plan = PrefillPlan(shape, span, DEVICE, tile=TINY)
    plan.make(batch.starts.tolist(), batch.lengths, spans.numpy())
    mask = Mask(span, spans=spans.to(DEVICE))
    agree(plan.attend(batch.q, batch.k, batch.v, batch.tables, mask), batch.expected(mask), 2e-5)


def test_rows_without_queries_tokens_or_both() -> None:
    shape = Shape(4, 2, 64, 64, dtype=torch.float32)
    batch = Batch(shape, [0, 17, 0, 33, 40], [3, 1, 0, 0, 20])
    sinks = torch.randn(4).to(DEVICE)
    out, lse = run(batch, Mask(FULL, sinks=sinks), tile=TINY)
    assert not out[:3].any()
    torch.testing.assert_close(lse[:3], sinks.expand(3, 4))
    check(batch)


@pytest.mark.parametrize("heads", [(3, 3), (7, 1), (40, 1)], ids=str)
def test_groups_of_any_size(heads: tuple[int, int]) -> None:
    check(Batch(Shape(*heads, 64, 64, dtype=torch.float32), [25, 20], [6, 1]))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize("order", ["NHD", "HND", "HDN"])
def test_quantised_pages_with_their_scales(dtype: torch.dtype, order: str) -> None:
    if dtype == torch.float8_e4m3fn and not GPU:
        pytest.skip("Triton's interpreter has no float8")
    batch = Batch(Shape(8, 2, 128, 128, dtype=dtype), [60, 16], [25, 2], dtype=HALF, order=order)
    check(batch, tolerance=5e-3)
    static = torch.rand(2).add(0.5).to(DEVICE)
    batch.k_scale, batch.v_scale = static * 0.01, static * 0.02
    check(batch)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize("window", [8, 24])
def test_quantised_pages_under_windows(dtype: torch.dtype, window: int, static: bool) -> None:
    if dtype == torch.float8_e4m3fn and not GPU:
        pytest.skip("Triton's interpreter has no float8")
    span = Visibility("sliding", window)
    batch = Batch(Shape(4, 2, 64, 64, dtype=dtype), [24, 41, 13, 40], [24, 17, 5, 1], span, "HDN", HALF)
    if static:
        batch.k_scale = batch.v_scale = torch.tensor([0.015, 0.02], device=DEVICE)
    check(batch, tolerance=5e-3)


@pytest.mark.parametrize("kind", ["full", "window", "int8 window", "sinks"])
@pytest.mark.few(1)
def test_leading_single_queries_run_on_decode_kernels(kind: str) -> None:
    span = Visibility("sliding", 21) if "window" in kind else FULL
    dtype = torch.int8 if "int8" in kind else HALF
    shape = Shape(4, 2, 64, 64, dtype=dtype)
    batch = Batch(
        shape, [24, 41, 1, 30, 40, 50], [1, 1, 1, 12, 1, 40], span, "HDN" if "int8" in kind else "NHD", HALF
    )
    sinks = torch.randn(4).to(DEVICE) if kind == "sinks" else None
    mask = Mask(span, sinks=sinks)
    plan = PrefillPlan(shape, span, DEVICE, min_decode_rows=2, **({} if GPU else {"tile": TINY}))
    taken = []
    for _ in range(2):  # another step of the same plan
        plan.make(batch.starts.tolist(), batch.lengths)
        found = plan.attend(batch.q, batch.k, batch.v, batch.tables, mask, None, batch.k_scale, batch.v_scale)
        agree(found, batch.expected(mask), TOLERANCE[HALF])
        assert plan._decode is not None
        taken.append(plan._decode[0])
    assert taken == [3, 3]
    many = PrefillPlan(shape, span, DEVICE, min_decode_rows=4, **({} if GPU else {"tile": TINY}))
    many.make(batch.starts.tolist(), batch.lengths)
    many.attend(batch.q, batch.k, batch.v, batch.tables, mask, None, batch.k_scale, batch.v_scale)
    assert many._decode == (0, None)


def test_latent_pages_are_keys_and_values() -> None:
    check(Batch(Shape(20, 1, 576, 512, dtype=torch.float32), [33, 20], [3, 1]), scale=0.07)


def test_random_batches() -> None:
    """Lengths, queries, heads and spans at random; tiles small enough that most blocks are cut."""
    for seed in range(24 if GPU else 4):
        gen = torch.Generator().manual_seed(seed)

        def pick(*values: int, gen: torch.Generator = gen) -> int:
            return values[int(torch.randint(len(values), (), generator=gen))]

        kv = pick(1, 2, 3)
        shape = Shape(kv * pick(1, 2, 5), kv, 64, pick(64, 80), page_tokens=pick(16, 32), dtype=torch.float32)
        queries = [pick(0, 1, 2, 17, 40) for _ in range(pick(1, 3, 5))]
        lengths = [count + pick(0, 1, 16, 50, 133) for count in queries]
        if sum(queries):
            span = (FULL, Visibility("sliding", 30), Visibility("chunked", 32))[seed % 3]
            check(Batch(shape, lengths, queries, span, seed=seed), tile=TINY)


@pytest.mark.parametrize("span", [FULL, Visibility("sliding", 210)], ids=str)
@pytest.mark.few(1)
def test_few_queries_after_much_are_cut_and_joined(span: Visibility) -> None:
    batch = Batch(Shape(4, 2, 64, 80, dtype=torch.float32), [500, 30, 411], [3, 2, 9], span)
    sinks = torch.randn(4).to(DEVICE)
    batch.q[3:] *= 3  # peaks that differ from piece to piece
    check(batch, Mask(span, sinks=sinks), tile=TINY)
    rows = QueryRows.from_lists(batch.starts.tolist(), batch.lengths)
    blocks, joins, slots = block_list(rows, np.arange(3), 2, 2, span, TINY, 32, None)
    assert len(joins) >= 2
    assert slots == joins[:, 1].sum() == (blocks[:, 7] >= 0).sum()


def test_gathering_keeps_order_and_fills_with_zeros() -> None:
    batch = Batch(Shape(2, 2, 64, 64, dtype=torch.float32), [70, 5], [1, 1], order="HND")
    copies = torch.tensor([[1, 0, 5, 3, 64], [0, 3, 60, 67, 60]], dtype=torch.int32, device=DEVICE)
    k, v = (torch.full((130, 2, 64), math.nan, device=DEVICE) for _ in range(2))
    prefill_launch.gather(batch.k, batch.v, batch.tables, copies, k, v)
    for pages, found in ((batch.k, k), (batch.v, v)):
        rows = pages[batch.tables.long()].flatten(1, 2)
        torch.testing.assert_close(found[3:8], rows[1, :5])
        torch.testing.assert_close(found[67:127], rows[0, 3:63])
        assert not found[8:67].any()
        assert found[:3].isnan().all()
        assert found[127:].isnan().all()


def test_descriptors() -> None:
    for dims, queries in (((64, 64), [20, 1, 9]), ((192, 128), [5, 0, 18])):
        batch = Batch(Shape(4, 2, *dims, dtype=HALF), [50, 1, 23], queries, dtype=HALF)
        sinks = torch.randn(4).to(DEVICE)
        for mask in (Mask(FULL), Mask(FULL, sinks=sinks)):
            tile = BlockTile(64, 32, 4, 2) if GPU else BlockTile(16, 16, 4, 2)
            check(batch, mask, backend="descriptors", gathered_tile=tile)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("kind", ["full", "sliding", "chunked"])
@pytest.mark.few(3)
def test_random_rows_by_descriptors(
    dims: tuple[int, int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tile of the rule on a GPU, a small one in the interpreter; rows that begin in the middle of pages and tiles."""
    for seed in range(6 if GPU else 2):
        rng = np.random.default_rng([seed, *dims, len(kind)])
        monkeypatch.setattr(prefill_launch, "FEW_TILES", (0, 4)[seed % 2])  # loops of both kinds
        scale = 8 if GPU else 1
        queries = [int(n) * (scale if n > 1 else 1) for n in rng.choice([0, 1, 2, 13, 29, 40], 4)] + [21]
        cached = [int(n) * scale for n in rng.choice([0, 1, 16, 50, 75], 5)]
        lengths = [a + b for a, b in zip(queries, cached, strict=True)]
        # From less than a tile's tokens to more than most rows have.
        span = Visibility(kind, 0 if kind == "full" else int(rng.choice([1, 7, 16, 30, 61])) * scale)
        shape = Shape(*((2, 1), (4, 2), (6, 2))[seed % 3], *dims, dtype=HALF)
        batch = Batch(shape, lengths, queries, span, order=("NHD", "HND")[seed % 2], dtype=HALF, seed=seed)
        sinks = torch.randn(shape.heads).to(DEVICE) if rng.random() < 0.5 else None
        tile = None if GPU else TINY
        check(batch, Mask(span, sinks=sinks), backend="descriptors", gathered_tile=tile)


@pytest.mark.skipif(not GPU, reason="needs a GPU: rows as long are hours in the interpreter")
def test_small_heads_over_many_tokens_by_descriptors() -> None:
    batch = Batch(Shape(8, 2, 64, 64, dtype=HALF), [6001, 300, 4097], [4003, 300, 513], dtype=HALF)
    sinks = torch.randn(8).to(DEVICE)
    for mask in (Mask(FULL), Mask(FULL, sinks=sinks)):
        check(batch, mask, backend="descriptors")


@pytest.mark.parametrize("span", [FULL, Visibility("sliding", 20), Visibility("chunked", 24)], ids=str)
@pytest.mark.few(1)
def test_new_tokens_at_hand_are_read_where_they_lie(
    span: Visibility, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered = []
    gather = prefill_launch.gather
    monkeypatch.setattr(prefill_launch, "gather", lambda *args: gathered.append(gather(*args)))
    shape = Shape(4, 2, 64, 64, dtype=HALF)
    prompts = Batch(shape, [37, 0, 1, 52], [37, 0, 1, 52], span, dtype=HALF)
    after = Batch(shape, [37, 60], [37, 52], span, dtype=HALF)  # cached tokens are in pages alone
    for batch, new, copies in ((prompts, True, 0), (prompts, False, 1), (after, True, 1)):
        gathered.clear()
        check(batch, backend="descriptors", gathered_tile=None if GPU else TINY, new=new)
        assert len(gathered) == copies


def test_new_tokens_may_be_part_of_something_wider() -> None:
    batch = Batch(Shape(4, 2, 64, 64, dtype=HALF), [37, 52], [37, 52], dtype=HALF)
    plan = PrefillPlan(batch.shape, FULL, DEVICE, backend="descriptors", gathered_tile=None if GPU else TINY)
    plan.make(batch.starts.tolist(), batch.lengths)
    wide = torch.full(
        (89, 6, 64), math.nan, dtype=HALF, device=DEVICE
    )  # as one product for q, k and v leaves them
    views = [wide[:, 2:4], wide[:, 4:]]
    for view, new in zip(views, new_tokens(batch), strict=True):
        view.copy_(new)
    batch.k.fill_(math.nan)  # no query sees it
    expected = attend_dense(*(x.double().cpu() for x in (batch.q, *views)), batch.starts.tolist())
    found = plan.attend(batch.q, batch.k, batch.v, batch.tables, new_k=views[0], new_v=views[1])
    agree(found, expected, TOLERANCE[HALF])
    assert not prefill_launch.fits_descriptor(wide[:, :, :32])  # heads apart
    assert not prefill_launch.fits_descriptor(wide[:, 1:3, 4:])
    assert not prefill_launch.fits_descriptor(
        wide.view(89, -1)[:, 3:131].view(89, 2, 64)
    )  # no multiple of 16 bytes


def test_a_row_of_nans_does_not_spoil_the_one_before_it_in_a_window() -> None:
    span = Visibility("sliding", 30)
    batch = Batch(Shape(2, 1, 64, 64, dtype=HALF), [70, 45], [41, 45], span, dtype=HALF)
    pages = batch.tables[1].long()
    tile = None if GPU else TINY
    exact = batch.expected(Mask(span))
    batch.k[pages[pages > 0]], batch.v[pages[pages > 0]] = math.nan, math.inf
    out, lse = run(batch, Mask(span), backend="descriptors", gathered_tile=tile)
    agree((out[:41], lse[:41]), (exact[0][:41], exact[1][:41]), TOLERANCE[HALF])


@pytest.fixture
def batched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """On a CPU torch plays cuDNN's part; the sizes that it was called with."""
    sizes = []

    def attend(  # type: ignore[no-untyped-def]
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
    ):
        sizes.append((q.shape[0], q.shape[2], k.shape[2]))
        if GPU:
            return actual(q, k, v, causal=causal, scale=scale)
        group = q.shape[1] // k.shape[1]
        scores = q.float() @ k.float().repeat_interleave(group, 1).transpose(2, 3) * scale
        if causal:
            scores += torch.full(scores.shape[2:], -math.inf).triu(1)
        out = scores.softmax(3) @ v.float().repeat_interleave(group, 1)
        return out.to(q.dtype).transpose(1, 2).contiguous().transpose(1, 2), scores.logsumexp(3)

    actual = prefill_cudnn.cudnn_attend
    monkeypatch.setattr(prefill_cudnn, "cudnn_attend", attend)
    return sizes


@pytest.mark.parametrize("new", [False, True], ids=["gathered", "at hand"])
def test_batches_of_even_size(batched: list[tuple[int, ...]], new: bool) -> None:
    shape = Shape(2, 1, 64, 64, dtype=HALF)
    equal = Batch(shape, [384, 384], [128, 128], dtype=HALF)
    check(equal, backend="cudnn", new=new)
    assert batched == [(2, 128, 128), (2, 128, 256)]
    batched.clear()
    mixed = Batch(shape, [384, 128, 256], [128, 128, 128], dtype=HALF)
    check(mixed, backend="cudnn", new=new)
    check(mixed, Mask(FULL, sinks=torch.randn(2).to(DEVICE)), backend="cudnn", new=new)
    assert batched == [(1, 128, 128), (1, 128, 256), (1, 128, 128), (1, 128, 128), (1, 128, 128)] * 2
    with pytest.raises(ValueError, match="round sizes only"):
        check(Batch(shape, [300], [40], dtype=HALF), backend="cudnn", new=new)


def test_a_batch_without_context_is_returned_unmerged(batched: list[tuple[int, ...]]) -> None:
    batch = Batch(Shape(2, 1, 64, 64, dtype=HALF), [128, 128], [128, 128], dtype=HALF)
    plan = PrefillPlan(batch.shape, FULL, DEVICE, backend="cudnn")
    plan.make(batch.starts.tolist(), batch.lengths)
    found = plan.attend(batch.q, batch.k, batch.v, batch.tables)
    agree(found, batch.expected(Mask(FULL)), TOLERANCE[HALF])
    assert found[1].shape == (256, 2)
    assert batched == [(2, 128, 128)]


def test_even_rows_are_batched_as_they_follow_each_other() -> None:
    queries, context_lengths = np.array([512, 512, 512, 1024, 1024]), np.array([0, 0, 4096, 8192, 8192])
    rows = QueryRows.from_lists([0, *np.cumsum(queries)], queries + context_lengths)
    groups = cudnn_batches(rows, np.array([0, 1, 2, 3, 4]))
    assert [(g.rows.tolist(), g.context, g.queries) for g in groups] == [
        ([0, 1], 0, 512),
        ([2], 4096, 512),
        ([3, 4], 8192, 1024),
    ]
    assert [g.rows.tolist() for g in cudnn_batches(rows, np.array([0, 2, 3]))] == [[0], [2], [3]]
    for odd in ([512, 500], [512, 8192 + 128]):
        assert not cudnn_batches(
            QueryRows.from_lists([0, *np.cumsum(odd)], np.array(odd) + 4096), np.arange(2)
        )
    assert not cudnn_batches(QueryRows.from_lists([0, 512], [512 + 4096 + 16]), np.arange(1))


def test_the_rule_follows_what_backends_take() -> None:
    shape = Shape(32, 8, 128, 128)
    half, all_rows, one = torch.bfloat16, np.arange(8), np.arange(1)

    def choose_backend(*args: object, span: Visibility = FULL) -> str:
        return prefill_backends.choose_backend(*args[:4], span, *args[4:])  # type: ignore[arg-type]

    long = QueryRows.from_lists([0, 8192], [8192])
    assert choose_backend(shape, long, one, half, True, True) == "cudnn"
    assert choose_backend(shape, QueryRows.from_lists([0, 8192], [24576]), one, half, True, True) == "cudnn"
    assert (
        choose_backend(shape, QueryRows.from_lists([0, 8192], [8208]), one, half, True, True) == "descriptors"
    )  # comes once
    assert (
        choose_backend(shape, QueryRows.from_lists([0, 3152], [11344]), one, half, True, True)
        == "descriptors"
    )
    assert choose_backend(shape, long, one, half, True, False) == "descriptors"
    assert choose_backend(shape, long, one, half, False, True) == "pages"
    assert choose_backend(shape, long, one[:0], half, True, True) == "pages"
    assert choose_backend(shape, long, one, torch.float32, True, True) == "pages"
    assert choose_backend(Shape(32, 8, 80, 80), long, one, half, True, True) == "pages"
    window = Visibility("sliding", 4096)
    assert choose_backend(shape, long, one, half, True, True, span=window) == "descriptors"
    assert choose_backend(shape, long, one, half, False, True, span=window) == "pages"
    assert (
        choose_backend(shape, long, one, half, True, True, span=Visibility("sliding", 128)) == "pages"
    )  # few pairs
    assert choose_backend(shape, long, one, half, True, True, span=Visibility("chunked", 128)) == "pages"
    thin = Shape(32, 8, 64, 64)
    assert choose_backend(thin, long, one, half, True, True) == "descriptors"  # many tokens, small heads
    assert (
        choose_backend(
            thin, QueryRows.from_lists(np.arange(9) * 1024, [1024] * 8), all_rows, half, True, True
        )
        == "cudnn"
    )
    deep, prompts = Shape(16, 8, 256, 256), QueryRows.from_lists(np.arange(9) * 1024, [1024] * 8)
    assert choose_backend(deep, prompts, all_rows, half, True, True) == "cudnn"
    uneven = QueryRows.from_lists(np.arange(9) * 1000, [1000] * 8)
    assert choose_backend(deep, uneven, all_rows, half, True, True) == "descriptors"
    assert choose_backend(deep, QueryRows.from_lists([0, 256], [256]), one, half, True, True) == "pages"
    assert choose_backend(shape, QueryRows.from_lists([0, 64], [64]), one, half, True, True) == "pages"
    mixed = QueryRows.from_lists(np.arange(9) * 700, np.arange(8) * 1000 + 700)
    assert choose_backend(shape, mixed, all_rows, half, True, True) == "descriptors"
    assert QueryRows.from_lists([0, 4], [1024]).sees_all_context(Visibility("sliding", 1024))
    assert not QueryRows.from_lists([0, 4], [1025]).sees_all_context(Visibility("sliding", 1024))


@pytest.mark.parametrize("span", [FULL, Visibility("sliding", 5), Visibility("chunked", 6)], ids=str)
def test_counted_pairs_are_the_visible_ones(span: Visibility) -> None:
    rows = QueryRows.from_lists([0, 3, 3, 20, 21], [9, 4, 17, 100])
    each = [
        sum(p + 1 - span.first_visible(p) for p in range(length - count, length))
        for length, count in zip(rows.lengths.tolist(), rows.queries.tolist(), strict=True)
    ]
    assert rows.count_pairs(span) == sum(each)
    assert rows.count_pairs(span, np.array([0, 2])) == each[0] + each[2]
    assert rows.mean_visible(span, np.array([0, 2])) == (each[0] + each[2]) / 20


def test_gathered_tiles_follow_heads_windows_and_visible_tokens() -> None:
    few, many = (
        choose_gathered_tile(64, FULL, MANY_VISIBLE_TOKENS - 1),
        choose_gathered_tile(64, FULL, MANY_VISIBLE_TOKENS),
    )
    assert few.tokens < many.tokens
    assert many.registers is not None
    assert choose_gathered_tile(64, Visibility("sliding", 128)).tokens < few.tokens
    assert choose_gathered_tile(64, Visibility("sliding", 4096), MANY_VISIBLE_TOKENS) == many
    assert choose_gathered_tile(128, FULL, MANY_VISIBLE_TOKENS) == choose_gathered_tile(128, FULL)


def test_short_rows_go_over_pages_beside_the_others(
    batched: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = Batch(Shape(2, 1, 64, 64, dtype=HALF), [300, 0, 128, 128], [1, 2, 128, 128], dtype=HALF)
    for backend in ("cudnn", "descriptors", "pages"):
        monkeypatch.setattr(prefill, "choose_backend", lambda *_, chosen=backend: chosen)
        check(batch, gathered_tile=BlockTile(64, 32, 4, 2), tile=TINY)
    assert batched == [(2, 128, 128)]


@pytest.mark.parametrize("dims", [(64, 64), (192, 128)], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "whole"])
def test_dense_and_merged(dims: tuple[int, int], causal: bool) -> None:
    torch.manual_seed(0)
    starts, k_starts = [0, 7, 7, 40], [0, 12, 15, 60]
    sizes = ((40, 4, dims[0]), (60, 2, dims[0]), (60, 2, dims[1]))
    q, k, v = (torch.randn(size).to(HALF).float() for size in sizes)
    exact = attend_dense(q.double(), k.double(), v.double(), starts, k_starts, causal)
    kind = HALF if GPU else torch.float32
    q, k, v = (x.to(DEVICE, kind) for x in (q, k, v))
    agree(attend_dense(q, k, v, starts, k_starts, causal), exact, TOLERANCE[kind])
    half = [x.to(HALF) for x in (q, k, v)]
    found = (
        torch.full((40, 4, dims[1]), math.nan, dtype=HALF, device=DEVICE),
        torch.full((40, 4), math.nan, device=DEVICE),
    )
    attend_dense(*half, starts, k_starts, causal, out=found[0], lse=found[1], backend="descriptors")
    agree(found, exact, TOLERANCE[HALF])


def test_a_sequence_does_not_spoil_the_one_before_it() -> None:
    q, k, v = (torch.randn(40, 2, 64).to(DEVICE, HALF) for _ in range(3))
    k[21:], v[21:] = math.nan, math.inf
    for causal in (True, False):
        exact = attend_dense(*(x[:21].double().cpu() for x in (q, k, v)), [0, 21], causal=causal)
        out, lse = attend_dense(q, k, v, [0, 21, 40], causal=causal, backend="descriptors")
        agree((out[:21], lse[:21]), exact, TOLERANCE[HALF])


def test_parts_merge_to_the_whole() -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(9, 4, 64), torch.randn(30, 4, 64), torch.randn(30, 4, 96)
    whole = attend_dense(q.double(), k.double(), v.double(), [0, 9], [0, 30], causal=False)
    parts = [
        attend_dense(q, k[i], v[i], [0, 9], [0, len(k[i])], causal=False) for i in (slice(11), slice(11, 30))
    ]
    nothing = torch.zeros(9, 4, 96), torch.full((9, 4), -math.inf)
    agree(merge_outputs(*parts[0], *parts[1]), whole, 2e-6)
    agree(merge_outputs(*merge_outputs(*parts[0], *nothing), *parts[1]), whole, 2e-6)
    agree(merge_outputs(*nothing, *nothing), (nothing[0].double() + 1e-9, nothing[1]), 2)
    # The kernel, on a GPU as `merge` calls it and in the interpreter by hand.
    places = torch.tensor([[0, 0, 9, 0]], dtype=torch.int32, device=DEVICE)
    (a, a_lse), (b, b_lse) = (tuple(x.to(DEVICE)[None] for x in part) for part in parts)
    out, lse = torch.full((9, 4, 96), math.nan, device=DEVICE), torch.full((9, 4), math.nan, device=DEVICE)
    prefill_launch.merge_parts(a, a_lse, b, b_lse, places, 9, None, out, lse)
    agree((out, lse), whole, 2e-6)


def test_what_cannot_run_is_refused_before_any_launch() -> None:
    shape = Shape(4, 2, 64, 64, dtype=torch.float32)
    batch = Batch(shape, [20], [4])
    plan = PrefillPlan(shape, device=DEVICE)
    call = (batch.q, batch.k, batch.v, batch.tables)
    with pytest.raises(ValueError, match="call make"):
        plan.attend(*call)
    with pytest.raises(ValueError, match="one more"):
        plan.make([0, 4], [20, 20])
    with pytest.raises(ValueError, match="never fall"):
        plan.make([0, 4, 2], [20, 20])
    plan.make([0, 3], [20])
    with pytest.raises(ValueError, match="the plan was made for 3"):
        plan.attend(*call)
    plan.make([0, 4], [20])
    with pytest.raises(ValueError, match="the plan is for full"):
        plan.attend(*call, Mask(Visibility("sliding", 8)))
    with pytest.raises(ValueError, match="belong to decode"):
        plan.attend(*call, Mask(trees=torch.ones(4, 4, dtype=torch.bool)))
    with pytest.raises(ValueError, match="must be positive"):
        plan.attend(*call, scale=0.0)
    plan.make([0, 4], [200])
    with pytest.raises(ValueError, match="end before the longest"):
        plan.attend(*call)
    plan = PrefillPlan(shape, Visibility("sliding", 8), device=DEVICE, backend="descriptors")
    plan.make([0, 4], [20])
    with pytest.raises(ValueError, match="descriptors takes no softcap"):
        plan.attend(*call, Mask(Visibility("sliding", 8), 5.0))
    plan = PrefillPlan(shape, Visibility("sliding", 8), device=DEVICE, backend="cudnn")
    plan.make([0, 4], [20])
    with pytest.raises(ValueError, match="cudnn takes full attention only, not sliding 8"):
        plan.attend(*call, Mask(Visibility("sliding", 8)))
    with pytest.raises(ValueError, match="starts end at 3"):
        attend_dense(batch.q, batch.q, batch.q, [0, 3])
    with pytest.raises(ValueError, match="one size"):
        merge_outputs(batch.q, batch.q[..., 0], batch.q[:2], batch.q[..., 0])


def test_queries_before_any_key_see_nothing() -> None:
    """More queries than keys: the first ones stand before them, and another row's keys are not theirs."""
    torch.manual_seed(2)
    starts, k_starts = [0, 5, 155], [0, 5, 15]
    q, k, v = (torch.randn(size, 2, 64).to(DEVICE, HALF) for size in (155, 15, 15))
    exact = attend_dense(*(x.double().cpu() for x in (q, k, v)), starts, k_starts)
    out, lse = attend_dense(q, k, v, starts, k_starts, backend="descriptors")
    agree((out, lse), exact, TOLERANCE[HALF])
    assert not out[5:145].any()
    assert lse[5:145].isneginf().all()
