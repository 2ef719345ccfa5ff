"""The oracle itself, against dense attention; and pages of real bytes under a real cache."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvloom.core import Field, KVCache, LayerSpec, PoolLayout, Sequence, Span, attention_fields
from kvloom.kernels.reference import Mask, attend, copy_pages, write
from kvloom.kernels.views import LayerView, allocate, layer_views

HEADS, KV, DIM, BLOCK = 4, 2, 16, 16
SPANS = [Span("full"), Span("sliding", 20), Span("chunked", 24)]


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    span: Span,
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


@pytest.mark.parametrize("span", SPANS, ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_packed_rows_equal_dense_attention(span: Span, softcap: float | None, with_sinks: bool) -> None:
    torch.manual_seed(0)
    lengths, queries = [70, 1, 33, 16, 0], [1, 1, 33, 5, 0]
    k = torch.full((40, BLOCK, KV, DIM), math.nan)
    v = k.clone()
    order = (torch.randperm(39) + 1).tolist()
    tables = torch.zeros(len(lengths), 5, dtype=torch.int32)
    rows = []
    for row, length in enumerate(lengths):
        keys, values = torch.randn(length, KV, DIM), torch.randn(length, KV, DIM)
        rows.append((keys, values))
        for block in range(-(-length // BLOCK)):
            page = order.pop()
            first = span.first_visible(max(0, length - queries[row])) // BLOCK
            tables[row, block] = page if block >= first else 0
            part = slice(block * BLOCK, min(length, (block + 1) * BLOCK))
            k[page, : part.stop - part.start] = keys[part]
            v[page, : part.stop - part.start] = values[part]
    starts = torch.tensor([0, *np.cumsum(queries)])
    q = torch.randn(int(starts[-1]), HEADS, DIM)
    sinks = torch.randn(HEADS) if with_sinks else None
    out, lse = attend(q, k, v, tables, starts, torch.tensor(lengths), Mask(span, softcap, sinks))
    assert torch.isfinite(out).all()
    for row, (keys, values) in enumerate(rows):
        part = slice(int(starts[row]), int(starts[row + 1]))
        expected = dense(q[part], keys, values, span, softcap, sinks)
        torch.testing.assert_close(out[part].double(), expected, atol=1e-5, rtol=1e-5)
    assert torch.isfinite(lse).all()


def test_draft_trees_and_image_spans_are_masked_as_told() -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 2, BLOCK, KV, DIM).unbind()
    q = torch.randn(3, HEADS, DIM)
    table, starts, lengths = torch.tensor([[1]]), torch.tensor([0, 3]), torch.tensor([8])
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)  # two branches after the first
    out, _ = attend(q, k, v, table, starts, lengths, Mask(trees=tree))
    kept = [0, 1, 2, 3, 4, 5, 7]  # the last query does not see the second
    alone = dense(q[2:], k[1, kept], v[1, kept], Span("full"), None, None)
    torch.testing.assert_close(out[2:].double(), alone, atol=1e-5, rtol=1e-5)
    image, _ = attend(q, k, v, table, starts, lengths, Mask(spans=torch.tensor([7, 7, -1])))
    both = dense(q[:1], k[1, :7], v[1, :7], Span("full"), None, None)
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
    exact = dense(q, keys, values, Span("full"), None, None)
    assert (out.double() - exact).norm() / exact.norm() < bound


LAYERS = {
    **{f"s{i}": LayerSpec("token", attention_fields(KV, DIM, "fp32"), Span("sliding", 20)) for i in range(4)},
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
            span = LAYERS[name].span
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
