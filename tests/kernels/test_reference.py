"""The oracle itself, against dense attention; and pages of real bytes under a real cache."""

from __future__ import annotations

import math
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvloom.core import (
    ContextPart,
    Field,
    KVCache,
    LayerSpec,
    PoolLayout,
    Sequence,
    Visibility,
    attention_fields,
)
from kvloom.kernels.attention import Mask, Shape, attend, merge_many, reference
from kvloom.kernels.attention.shape import check_call
from kvloom.kernels.copy.reference import copy_pages
from kvloom.kernels.memory import LayerView, allocate, layer_views
from kvloom.kernels.write.reference import write

from .batches import random_trees

HEADS, KV, DIM, BLOCK = 4, 2, 16, 16
SPANS = [Visibility("full"), Visibility("sliding", 20), Visibility("chunked", 24)]


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    span: Visibility,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of the last queries over all keys, one query and head at a time, in float64."""
    out = torch.zeros(*q.shape[:2], v.shape[-1], dtype=torch.float64)
    for i in range(q.shape[0]):
        position = k.shape[0] - q.shape[0] + i
        for head in range(q.shape[1]):
            first = span.first_visible(position)
            kv = head * k.shape[1] // q.shape[1]
            scores = (k[first : position + 1, kv].double() @ q[i, head].double()) * q.shape[-1] ** -0.5
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            if sinks is not None:
                scores = torch.cat([scores, sinks[head : head + 1].double()])
            weights = scores.softmax(0)[: position + 1 - first]
            out[i, head] = weights @ v[first : position + 1, kv].double()
    return out


@dataclass
class Batch:
    """Rows of random K and V in pages of NaN: a read of unwritten tokens or of page 0 returns NaN."""

    k: torch.Tensor
    v: torch.Tensor
    tables: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    rows: list[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def build(
        cls, lengths: list[int], queries: list[int], span: Visibility, kv: int = KV, dim: int = DIM
    ) -> Batch:
        blocks = max([1, *(-(-length // BLOCK) for length in lengths)])
        k = torch.full((len(lengths) * blocks + 1, BLOCK, kv, dim), math.nan)
        v = k.clone()
        order = (torch.randperm(len(k) - 1) + 1).tolist()
        tables = torch.zeros(len(lengths), blocks, dtype=torch.int32)
        rows = []
        for row, length in enumerate(lengths):
            keys, values = torch.randn(2, length, kv, dim).unbind()
            rows.append((keys, values))
            first = span.first_visible(max(0, length - queries[row])) // BLOCK
            for block in range(first, -(-length // BLOCK)):
                page = order.pop()
                tables[row, block] = page
                part = slice(block * BLOCK, min(length, (block + 1) * BLOCK))
                k[page, : part.stop - part.start] = keys[part]
                v[page, : part.stop - part.start] = values[part]
        starts = torch.tensor([0, *np.cumsum(queries, dtype=np.int64)])
        return cls(k, v, tables, starts, torch.tensor(lengths, dtype=torch.long), rows)

    def queries(self, heads: int = HEADS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(int(self.starts[-1]), heads, self.k.shape[3], dtype=dtype)

    def attend(self, q: torch.Tensor, mask: Mask) -> tuple[torch.Tensor, torch.Tensor]:
        return attend(q, self.k, self.v, self.tables, self.starts, self.lengths, mask)


@pytest.mark.parametrize("span", SPANS, ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_packed_rows_equal_dense_attention(span: Visibility, softcap: float | None, with_sinks: bool) -> None:
    torch.manual_seed(0)
    batch = Batch.build([70, 1, 33, 16, 0], [1, 1, 33, 5, 0], span)
    q = batch.queries()
    sinks = torch.randn(HEADS) if with_sinks else None
    out, lse = batch.attend(q, Mask(span, softcap, sinks))
    assert torch.isfinite(out).all()
    for row, (keys, values) in enumerate(batch.rows):
        part = slice(int(batch.starts[row]), int(batch.starts[row + 1]))
        expected = dense(q[part], keys, values, span, softcap, sinks)
        torch.testing.assert_close(out[part].double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.isfinite(lse).all()


def seen_by(batch: Batch, row: int, mask: Mask) -> torch.Tensor:
    """[queries, tokens] of one row, asked one by one."""
    first, last = int(batch.starts[row]), int(batch.starts[row + 1])
    length = int(batch.lengths[row])
    own = length - (last - first)
    seen = torch.zeros(last - first, length, dtype=torch.bool)
    for i, query in enumerate(range(first, last)):
        position = own + i if mask.trees is None else own + int(mask.trees[query, i]) - 1
        for token in range(length):
            sees, place = token <= own + i, token
            if token >= own and mask.trees is not None:
                drawn = int(mask.trees[query, token - own])
                sees, place = drawn > 0, own + drawn - 1 if drawn else token
            if token >= own and mask.spans is not None and mask.spans[query] >= 0:
                sees |= bool(mask.spans[query] == mask.spans[first + token - own])
            seen[i, token] = sees and place >= mask.span.first_visible(position)
    return seen


def dense_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, mask: Mask
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one row under any mask, in float64, with its log-sum-exp."""
    share = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(share, 1) for t in (k, v))
    scores = torch.einsum("qhd,thd->qht", q.double(), k) * q.shape[-1] ** -0.5
    if mask.softcap is not None:
        scores = torch.tanh(scores / mask.softcap) * mask.softcap
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    sinks = torch.full(q.shape[1:2], -math.inf) if mask.sinks is None else mask.sinks
    scores = torch.cat([scores, sinks.double().expand(q.shape[0], -1)[..., None]], -1)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse[..., None].clamp_min(-1e300))[..., :-1]
    return torch.einsum("qht,thd->qhd", weights, v), lse


@pytest.mark.parametrize("seed", range(60))
def test_mixed_batches_equal_dense_attention(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Single queries, drafts, prefills and empty rows together, every mask; in one batch or in many pieces."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    monkeypatch.setattr(reference, "MAX_BATCH_BYTES", rng.choice([1, 1 << 15, 64 << 20]))
    monkeypatch.setattr(reference, "SMALL_PADDING_BYTES", rng.choice([0, 1 << 20]))
    monkeypatch.setattr(reference, "MIN_PIECE_QUERIES", rng.choice([1, 16]))
    span = rng.choice(
        [
            Visibility("full"),
            Visibility("sliding", rng.randint(1, 40)),
            Visibility("chunked", rng.randint(1, 40)),
        ]
    )
    lengths, queries = [], []
    for _ in range(rng.randint(0, 10)):
        length = rng.choice([0, rng.randint(1, 20), rng.randint(1, 100)])
        lengths.append(length)
        queries.append(min(length, rng.choice([0, 1, 1, 1, rng.randint(2, 8), length])))
    kv, heads = rng.choice([(1, 4), (2, 4), (3, 3)])
    batch = Batch.build(lengths, queries, span, kv, rng.choice([8, 24]))
    q = batch.queries(heads, rng.choice([torch.float32, torch.float64]))
    mask = Mask(
        span,
        softcap=rng.choice([None, 2.0]),
        sinks=rng.choice([None, torch.randn(heads)]),
        trees=rng.choice([None, None, random_trees(queries)]),
        spans=rng.choice([None, None, torch.randint(-1, 3, (len(q),))]),
    )
    out, lse = batch.attend(q, mask)
    assert out.dtype == lse.dtype == q.dtype
    for row, (keys, values) in enumerate(batch.rows):
        part = slice(int(batch.starts[row]), int(batch.starts[row + 1]))
        expected, its_lse = dense_row(q[part], keys, values, seen_by(batch, row, mask), mask)
        torch.testing.assert_close(out[part].double(), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[part].double(), its_lse, atol=1e-5, rtol=1e-5)


def test_queries_without_tokens_give_nothing() -> None:
    batch = Batch.build([0, 20], [0, 1], Visibility("full"))
    batch.starts = torch.tensor([0, 2, 3])  # a padded row: two queries, no tokens
    out, lse = batch.attend(batch.queries(), Mask())
    assert not out[:2].any()
    assert (lse[:2] == -math.inf).all()
    sinks = torch.randn(HEADS)
    out, lse = batch.attend(batch.queries(), Mask(sinks=sinks))
    assert not out[:2].any()
    assert torch.equal(lse[:2], sinks.expand(2, -1))
    assert torch.isfinite(out[2]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_latents_serve_as_keys_and_values(dtype: torch.dtype) -> None:
    """MLA: one head, and values that are the first dims of the keys, read from the same bytes."""
    torch.manual_seed(0)
    batch = Batch.build([50, 17, 40], [1, 3, 40], Visibility("full"), kv=1, dim=24)
    q, scales = batch.queries(), {}
    k, rows = batch.k, [keys for keys, _ in batch.rows]
    if dtype == torch.int8:
        k = (batch.k * 20).nan_to_num(99).round().clamp(-127, 127).to(dtype)
        scale = torch.where(batch.k[..., 0].isnan(), math.nan, 0.05)
        scales = {"k_scale": scale, "v_scale": scale}
        rows = [(keys * 20).round().clamp(-127, 127) * 0.05 for keys in rows]
    out, lse = attend(q, k, k[..., :16], batch.tables, batch.starts, batch.lengths, **scales)
    apart, same = attend(q, k, k[..., :16].clone(), batch.tables, batch.starts, batch.lengths, **scales)
    torch.testing.assert_close(out, apart)
    torch.testing.assert_close(lse, same)
    for row, keys in enumerate(rows):
        part = slice(int(batch.starts[row]), int(batch.starts[row + 1]))
        expected, _ = dense_row(q[part], keys, keys[..., :16], seen_by(batch, row, Mask()), Mask())
        torch.testing.assert_close(out[part].double(), expected, atol=1e-5, rtol=1e-5)


class Calls(TorchDispatchMode):
    """Counts what torch is asked to do, and the bytes of the largest tensor that is asked for anew."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in given:
            self.largest = max(self.largest, result.nbytes)
        return result


@pytest.mark.parametrize("span", SPANS, ids=str)
@pytest.mark.parametrize("queries", [1, 4])
def test_a_decode_step_costs_as_many_calls_for_many_rows_as_for_few(span: Visibility, queries: int) -> None:
    counts = []
    for rows in (2, 32, 100):
        lengths = [queries + 16 * (i % 4) for i in range(rows)]
        batch = Batch.build(lengths, [queries] * rows, span)
        q = batch.queries()
        batch.attend(q, Mask(span))  # the memory it keeps grows once
        with Calls() as calls:
            batch.attend(q, Mask(span))
        counts.append(calls.count)
    assert counts[1] == counts[2] <= counts[0] + 5
    assert counts[2] < 80


def test_scratch_memory_serves_every_mode_and_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_SCRATCH", reference._Scratch())
    batch = Batch.build([40, 20], [1, 1], Visibility("full"), kv=1)
    q = batch.queries()
    with torch.inference_mode():
        first, its_lse = batch.attend(q, Mask())
    kept, kept_lse = first.clone(), its_lse.clone()
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: batch.attend(q, Mask()), range(40)))
    batch.attend(q * 2, Mask())
    for out, lse in [(first, its_lse), *found]:  # results are not overwritten by later calls
        assert torch.equal(out, kept)
        assert torch.equal(lse, kept_lse)


def test_lengths_that_differ_widely_are_not_padded_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "SMALL_PADDING_BYTES", 0)
    monkeypatch.setattr(reference, "_SCRATCH", reference._Scratch())
    batch = Batch.build([4000] + [16] * 40, [1] * 41, Visibility("full"))
    q = batch.queries()
    with Calls() as calls:
        batch.attend(q, Mask())
    assert calls.largest <= 4000 * KV * DIM * 4


def test_a_long_prompt_is_scored_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(reference, "MAX_BATCH_BYTES", 1 << 20)
    monkeypatch.setattr(reference, "_SCRATCH", reference._Scratch())
    batch = Batch.build([1500], [1500], Visibility("full"))
    q = batch.queries()
    with Calls() as calls:
        out, lse = batch.attend(q, Mask())
    assert calls.largest <= 1 << 20 < 1500 * 1500 * HEADS * 4
    keys, values = batch.rows[0]
    causal = torch.ones(1500, 1500, dtype=torch.bool).tril()
    expected, its_lse = dense_row(q, keys, values, causal, Mask())
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), its_lse, atol=1e-5, rtol=1e-5)


def test_draft_trees_and_image_spans_are_masked() -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 2, BLOCK, KV, DIM).unbind()
    q = torch.randn(3, HEADS, DIM)
    table, starts, lengths = torch.tensor([[1]]), torch.tensor([0, 3]), torch.tensor([8])
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)  # two branches after the first
    out, _ = attend(q, k, v, table, starts, lengths, Mask(trees=tree))
    kept = [0, 1, 2, 3, 4, 5, 7]  # the last query does not see the second
    alone = dense(q[2:], k[1, kept], v[1, kept], Visibility("full"), None, None)
    torch.testing.assert_close(out[2:].double(), alone, atol=1e-5, rtol=1e-5)
    image, _ = attend(q, k, v, table, starts, lengths, Mask(spans=torch.tensor([7, 7, -1])))
    both = dense(q[:1], k[1, :7], v[1, :7], Visibility("full"), None, None)
    torch.testing.assert_close(image[:1].double(), both, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "bound"), [("int8", 0.012), ("fp8", 0.05)])
def test_quantised_pages_carry_their_scales(dtype: str, bound: float) -> None:
    torch.manual_seed(0)
    layout = PoolLayout.build({"a": LayerSpec("token", attention_fields(KV, DIM, dtype))})
    view = layer_views(allocate(layout, 4), layout)["a"]
    keys, values = torch.randn(40, KV, DIM), torch.randn(40, KV, DIM)
    slots = torch.arange(16, 56)
    write(view.fields["k"], slots, keys, view.fields["k_scale"])
    write(view.fields["v"], slots, values, view.fields["v_scale"])
    q = torch.randn(1, HEADS, DIM)
    table, starts, lengths = torch.tensor([[1, 2, 3]]), torch.tensor([0, 1]), torch.tensor([40])
    scales = {"k_scale": view.fields["k_scale"], "v_scale": view.fields["v_scale"]}
    out, _ = attend(q, view.fields["k"], view.fields["v"], table, starts, lengths, **scales)
    exact = dense(q, keys, values, Visibility("full"), None, None)
    assert (out.double() - exact).norm() / exact.norm() < bound


@pytest.mark.parametrize("shape", [(), (1,), (KV,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_static_scales_are_one_per_head_or_one(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    scales = torch.rand(2, *shape) * 0.02 + 0.01
    keys, values = torch.randn(2, 40, KV, DIM).unbind()
    fields = [torch.zeros(4, BLOCK, KV, DIM, dtype=dtype) for _ in range(2)]
    fields[0].view(torch.uint8)[3, 8:] = 0x7F  # NaN in fp8
    for pages, new, scale in zip(fields, (keys, values), scales, strict=True):
        write(pages, torch.arange(BLOCK, BLOCK + 40), new, scale)
    q = torch.randn(2, HEADS, DIM)
    table, starts, lengths = torch.tensor([[1, 2, 3]]), torch.tensor([0, 2]), torch.tensor([40])
    out, _ = attend(q, *fields, table, starts, lengths, k_scale=scales[0], v_scale=scales[1])
    back = [
        pages.float().flatten(0, 1)[BLOCK : BLOCK + 40] * scale.view(-1, 1)
        for pages, scale in zip(fields, scales, strict=True)
    ]
    exact = dense(q, *back, Visibility("full"), None, None)
    torch.testing.assert_close(out.double(), exact, atol=1e-5, rtol=1e-5)


LAYERS = {
    **{
        f"s{i}": LayerSpec("token", attention_fields(KV, DIM, "fp32"), Visibility("sliding", 20))
        for i in range(4)
    },
    **{f"f{i}": LayerSpec("token", attention_fields(KV, DIM, "fp32")) for i in range(2)},
    "m": LayerSpec("state", (Field("conv", (8,), "bf16"), Field("recurrent", (16, 16), "fp32"))),
}


def test_views_of_layers_and_fields_never_overlap() -> None:
    layout = PoolLayout.build(LAYERS)
    buffer = allocate(layout, 3)
    views = layer_views(buffer, layout)
    names = [(layer, field) for layer, view in views.items() for field in view.fields]
    for group in layout.groups:
        buffer.zero_()
        own = [(layer, field) for layer, field in names if views[layer].group == group.index]
        for mark, (layer, field) in enumerate(own, 1):
            run = views[layer].run
            views[layer].fields[field][run :: group.runs] = mark
        for mark, (layer, field) in enumerate(own, 1):
            run = views[layer].run
            assert (views[layer].fields[field][run :: group.runs] == mark).all()


def test_bad_shapes_are_refused_before_anything_runs() -> None:
    k = torch.zeros(2, BLOCK, KV, DIM)
    table, starts, lengths = torch.tensor([[1]]), torch.tensor([0, 1]), torch.tensor([1])
    with pytest.raises(ValueError, match="does not fit"):
        attend(torch.zeros(1, 3, DIM), k, k, table, starts, lengths)
    with pytest.raises(ValueError, match="starts end at 1"):
        attend(torch.zeros(2, HEADS, DIM), k, k, table, starts, lengths)
    with pytest.raises(ValueError, match="2 slots for 1 tokens"):
        write(k, torch.tensor([16, 17]), torch.zeros(1, KV, DIM))
    layout = PoolLayout.build(LAYERS)
    with pytest.raises(ValueError, match="whole number of slabs"):
        layer_views(torch.zeros(layout.slab_bytes + 1, dtype=torch.uint8), layout)


class Bytes:
    """A cache over a pool of real bytes, filled with NaN: what a token writes depends on the token alone."""

    def __init__(self, slabs: int) -> None:
        self.layout = PoolLayout.build({k: s for k, s in LAYERS.items() if s.unit == "token"})
        self.cache = KVCache(self.layout, slabs, max_tokens=512)
        self.buffer = allocate(self.layout, slabs)
        self.buffer.view(torch.float32).fill_(math.nan)
        self.views = layer_views(self.buffer, self.layout)

    def table(self, view: LayerView, seq: Sequence) -> torch.Tensor:
        return torch.from_numpy(self.cache.table(view.group)[view.run, seq.row][None].copy())

    def step(self, seq: Sequence, tokens: list[int]) -> None:
        assert seq.extend(len(tokens)) == 0
        for batch in self.cache.take_copies():
            copy_pages(
                self.buffer, batch.page_stride, torch.from_numpy(batch.source), torch.from_numpy(batch.target)
            )
        positions = torch.arange(seq.length, seq.length + len(tokens))
        for view in self.views.values():
            pages = self.table(view, seq)[0].long()
            slots = pages[positions // BLOCK] * BLOCK + positions % BLOCK
            for name in ("k", "v"):
                write(view.fields[name], slots, self.written(tokens, name))
        seq.commit(tokens)

    @staticmethod
    def written(tokens: list[int], name: str) -> torch.Tensor:
        ids = torch.tensor(tokens, dtype=torch.float32)[:, None, None]
        return torch.sin(ids * (1.7 if name == "k" else 2.3) + torch.arange(KV * DIM).view(KV, DIM))

    def check(self, seq: Sequence, tokens: list[int]) -> None:
        """The next query attends to exactly its own tokens in every layer."""
        q = torch.ones(1, HEADS, DIM)
        for name, view in self.views.items():
            span = LAYERS[name].visibility
            out, _ = attend(
                q,
                view.fields["k"],
                view.fields["v"],
                self.table(view, seq),
                torch.tensor([0, 1]),
                torch.tensor([len(tokens)]),
                Mask(span),
            )
            expected = dense(q, self.written(tokens, "k"), self.written(tokens, "v"), span, None, None)
            torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


def test_hits_forks_and_copies_read_the_right_bytes() -> None:
    world = Bytes(slabs=120)
    prompt = list(range(1, 71))
    first = world.cache.open(world.cache.match(prompt))
    world.step(first, prompt[:50])
    world.step(first, prompt[50:])
    world.check(first, prompt)
    other = first.fork()
    assert other is not None
    world.step(first, [100, 101])
    world.step(other, [200])
    world.check(first, [*prompt, 100, 101])
    world.check(other, [*prompt, 200])
    first.close()
    other.close()
    again = world.cache.open(world.cache.match([*prompt, 100, 5]))
    assert again.resumed == 71
    world.step(again, [5])
    world.check(again, [*prompt, 100, 5])


@pytest.mark.parametrize("count", [2, 4, 16])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("is_tree", [False, True])
def test_results_of_ranks_with_parts_of_the_tokens_merge_to_the_whole(
    is_tree: bool, count: int, softcap: float | None
) -> None:
    """A rank may have no token that a query sees. Sinks count once."""
    torch.manual_seed(count)
    queries = [1, 40, 3, 1, 17]
    batch = Batch.build([1, 40, 100, 65, 33], queries, SPANS[0])
    q, sinks, size = torch.randn(sum(queries), HEADS, DIM), torch.randn(HEADS), BLOCK // count
    where = batch.tables, batch.starts, batch.lengths
    trees = random_trees(queries) if is_tree else None
    wanted, _ = attend(q, batch.k, batch.v, *where, Mask(SPANS[0], softcap, sinks, trees))
    outs, lses = [], []
    for rank in range(count):
        own = slice(rank * size, (rank + 1) * size)
        mask = Mask(SPANS[0], softcap, None if rank else sinks, trees, part=ContextPart(rank, count))
        out, lse = attend(q, batch.k[:, own], batch.v[:, own], *where, mask)
        outs.append(out)
        lses.append(lse)
    torch.testing.assert_close(merge_many(torch.stack(outs), torch.stack(lses)), wanted)
    assert torch.stack(lses)[1:].isneginf().any()
    assert not torch.stack(lses).isneginf().all(0).any()


def test_parts_refuse_images() -> None:
    batch = Batch.build([5], [2], SPANS[0])
    mask = Mask(spans=torch.zeros(2, dtype=torch.int32), part=ContextPart(0, 2))
    with pytest.raises(ValueError, match="do not support images"):
        attend(torch.randn(2, HEADS, DIM), batch.k, batch.v, batch.tables, batch.starts, batch.lengths, mask)


def test_a_plan_must_be_for_the_part_of_each_block_in_the_mask() -> None:
    q, k = torch.zeros(1, 4, 64), torch.zeros(2, 16, 2, 64)
    call = Shape(4, 2, 64, 64, 16, torch.float32), q, k, k, torch.zeros(1, 1, dtype=torch.int32)
    check_call(*call, Mask(), None, None)
    with pytest.raises(ValueError, match="make a plan for the mask's part"):
        check_call(*call, Mask(part=ContextPart(1, 2)), None, None)
