"""The attention part of `kvloom bench kernels`: decode, quantised pages, shared prefixes, prefill and MLA latents.

Unless a line of the report states otherwise, it measures one layer with 32 query heads over 8 KV heads of 128 dims. The
pages are bf16, have 16 tokens and are in random order. `gpu_timing` times the calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from kvloom.core import Visibility

from .gpu_peers import Call, decode_peers, prefill_peers, shared_peers
from .gpu_timing import FLOP_RATE, READ_RATE, Row, agreement, timed

__all__ = [
    "decode_rows",
    "latent_rows",
    "layer_pool",
    "prefill_rows",
    "quantised_rows",
    "shared_floor",
    "shared_rows",
]

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
LAYERS = 4
"""Number of layers in a page. As in a model, a call reads only one of them, so the bytes that it reads from
neighbouring pages are not adjacent.
"""

DECODE = (
    (1, 640),
    (16, 512),
    (256, 315),
    (1, 32768),
    (8, 8192),
    (64, 4096),
    (256, 1024),
    (128, 8192),
    (16, 131072),
)
SHARED = ((64, 8192, 256), (256, 4096, 128), (32, 32768, 512))
LATENT = ((32, 4096), (128, 2048))
LATENT_HEADS, LATENT_DIM, LATENT_VALUES = 128, 576, 512
"""Attention of DeepSeek-V3. All heads read the same values of a token: a latent with 512 values, and 64 values that
encode the position.
"""


@dataclass(frozen=True, slots=True)
class Prompts:
    """A prefill step of `batch` sequences. Each has `new` tokens to compute after `cached` cached tokens. The other
    fields describe the layer."""

    batch: int
    new: int
    cached: int
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    dim: int = DIM
    window: int | None = None

    @property
    def span(self) -> Visibility:
        return Visibility("full") if self.window is None else Visibility("sliding", self.window)

    def __str__(self) -> str:
        work = f"{self.batch} x {self.new} after {self.cached}"
        if (self.heads, self.kv_heads, self.dim) != (HEADS, KV_HEADS, DIM):
            work += f", {self.heads} over {self.kv_heads} heads of {self.dim}"
        return work if self.window is None else f"{work}, window {self.window}"


PREFILL = (
    Prompts(1, 8192, 0),
    Prompts(1, 16384, 0),
    Prompts(4, 2048, 6144),
    Prompts(16, 512, 4096),
    Prompts(1, 8192, 8192, window=4096),
    Prompts(8, 1024, 0, 16, 8, 256),
    Prompts(1, 8192, 8192, 16, 8, 256, 1024),
    Prompts(1, 8192, 8192, 64, 8, 64, 128),
)
"""The prefill steps that are measured. The shapes are the heads of Llama-3.1-8B, the window of Mistral-7B, and the
windowed layers of Gemma-3-12B and gpt-oss."""


def layer_pool(pages: int, kv_heads: int = KV_HEADS, dim: int = DIM) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of one layer, as views [pages, tokens, heads, dim] of pages with random content."""
    pool = torch.empty((pages, LAYERS, 2, BLOCK, kv_heads, dim), dtype=torch.bfloat16, device="cuda")
    for part in torch.split(pool, 4096):
        part.normal_()
    return pool[:, 0, 0], pool[:, 0, 1]


def _tables(lengths: Sequence[int], block: int = BLOCK) -> tuple[torch.Tensor, int]:
    blocks = [-(-length // block) for length in lengths]
    ids = torch.split((torch.randperm(sum(blocks)) + 1).int(), blocks)
    tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
    for row, mine in enumerate(ids):
        tables[row, : len(mine)] = mine
    return tables.cuda(), sum(blocks) + 1


def _queries(rows: int, heads: int = HEADS, dim: int = DIM) -> torch.Tensor:
    return torch.randn(rows, heads, dim, dtype=torch.bfloat16, device="cuda")


def _ints(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device="cuda")


def _mixed_lengths() -> list[int]:
    spread = np.random.default_rng(0).uniform(math.log(128), math.log(32768), 64)
    return [int(length) for length in np.exp(spread)]


def decode_rows(rounds: int) -> Iterator[Row]:
    from kvloom.kernels.attention import DecodePlan, Shape

    shape = Shape(HEADS, KV_HEADS, DIM, DIM, BLOCK)
    works: list[tuple[str, list[int], int | None]] = [
        (f"{batch} x {length}", [length] * batch, None) for batch, length in DECODE
    ]
    works.append(("64, lengths log-uniform 128 to 32768", _mixed_lengths(), None))
    works.append(("64 x 16384, window 1024", [16384] * 64, 1024))
    for work, lengths, window in works:
        tables, pages = _tables(lengths)
        k, v = layer_pool(pages)
        q, starts = _queries(len(lengths)), _ints(range(len(lengths) + 1))
        span = Visibility("full") if window is None else Visibility("sliding", window)
        plan = DecodePlan(shape, len(lengths), span=span)
        plan.make(starts, _ints(lengths))
        calls: dict[str, Call] = {"kvloom": partial(plan.attend, q, k, v, tables)}
        calls |= decode_peers(q, k, v, tables, starts, lengths, window)
        read = sum(min(length, window or length) for length in lengths) * KV_HEADS * DIM * 4
        yield Row("decode", work, read / READ_RATE * 1e6, timed(calls, rounds), agreement(calls))
        del k, v, calls


def quantised_rows(rounds: int, batch: int = 128, length: int = 8192) -> Iterator[Row]:
    from kvloom.kernels.attention import DecodePlan, Shape

    lengths = [length] * batch
    tables, pages = _tables(lengths)
    q, starts = _queries(batch), _ints(range(batch + 1))
    k, v = layer_pool(pages)
    plain = DecodePlan(Shape(HEADS, KV_HEADS, DIM, DIM, BLOCK), batch)
    plain.make(starts, _ints(lengths))
    exact = plain.attend(q, k, v, tables)[0].float()
    for name, dtype in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
        for block in (16, 64):
            ids, keys, values, sizes = _quantised(k, v, tables, block, dtype)
            plan = DecodePlan(Shape(HEADS, KV_HEADS, DIM, DIM, block, dtype), batch)
            plan.make(starts, _ints(lengths))
            attend = partial(plan.attend, q, keys, values, ids, k_scale=sizes[:, 0], v_scale=sizes[:, 1])
            us = timed({"kvloom": attend, "kvloom, bf16": partial(plain.attend, q, k, v, tables)}, rounds)
            found = attend()[0].float()
            row = ids[0].long()
            same = _dense(
                q[:1].double(),
                *(
                    (x[row].double() * sizes[row, i][..., None]).reshape(-1, KV_HEADS, DIM)
                    for i, x in enumerate((keys, values))
                ),
            )
            note = (
                f"{us['kvloom, bf16'] / us['kvloom']:.2f} times as fast as bf16; error "
                f"{float((found[0] - same).norm() / same.norm()):.2%} of what the pages say, "
                f"{float((found - exact).norm() / exact.norm()):.2%} of exact"
            )
            read = batch * length * KV_HEADS * (2 * DIM + 8)
            work = f"{name}, pages of {block}, {batch} x {length}"
            yield Row("quantised", work, read / READ_RATE * 1e6, us, note)
            del keys, values, sizes, attend


def _quantised(
    k: torch.Tensor, v: torch.Tensor, tables: torch.Tensor, block: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `k` and `v` as 8-bit pages: their block tables, keys, values and scales."""
    from kvloom.kernels.write import write

    rows, length = tables.shape[0], tables.shape[1] * BLOCK
    ids, pages = _tables([length] * rows, block)
    store = torch.empty((pages, LAYERS, 2, KV_HEADS, block, DIM), dtype=dtype, device="cuda")
    sizes = torch.empty((pages, LAYERS, 2, KV_HEADS, block), device="cuda")[:, 0].transpose(-1, -2)
    keys = store[:, 0, 0].transpose(1, 2)
    shape, strides = (pages, block, KV_HEADS, DIM), (store.stride(0), 1, block * DIM, block)
    values = store[:, 0, 1].as_strided(shape, strides)
    place = torch.arange(block, device="cuda")
    for row in range(rows):
        slots = (ids[row].long()[:, None] * block + place).reshape(-1)
        new = (x[tables[row].long()].reshape(-1, KV_HEADS, DIM) for x in (k, v))
        write(keys, values, slots, *new, k_scale=sizes[:, 0], v_scale=sizes[:, 1])
    return ids, keys, values, sizes


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return the attention of one query over all keys, [heads, dim]."""
    grouped = q.view(KV_HEADS, HEADS // KV_HEADS, DIM)
    scores = torch.einsum("hgd,nhd->hgn", grouped, k) / math.sqrt(DIM)
    return torch.einsum("hgn,nhd->hgd", scores.softmax(-1), v).reshape(HEADS, DIM)


def shared_rows(rounds: int) -> Iterator[Row]:
    from kvloom.kernels.attention import DecodePlan, Shape, SharedRuns, find_shared_runs

    shape = Shape(HEADS, KV_HEADS, DIM, DIM, BLOCK)
    for batch, prefix, own in SHARED:
        ids = (torch.randperm((prefix + batch * own) // BLOCK) + 1).int().cuda()
        shared, rest = ids[: prefix // BLOCK], ids[prefix // BLOCK :].view(batch, -1)
        tables = torch.cat([shared[None].expand(batch, -1), rest], 1).contiguous()
        k, v = layer_pool(len(ids) + 1)
        q, starts, lengths = _queries(batch), _ints(range(batch + 1)), _ints([prefix + own] * batch)
        sharing = SharedRuns(batch)
        settled = np.full(batch, prefix + own - 1)
        sharing.set_runs(find_shared_runs(tables.cpu().numpy(), settled, BLOCK), np.arange(batch + 1))
        plan, plain = DecodePlan(shape, batch, sharing=sharing), DecodePlan(shape, batch)
        plan.make(starts, lengths)
        plain.make(starts, lengths)
        calls: dict[str, Call] = {"kvloom": partial(plan.attend, q, k, v, tables)}
        calls |= shared_peers(q, k, v, shared, rest)
        calls["kvloom, plain"] = partial(plain.attend, q, k, v, tables)
        note = agreement({"kvloom": calls["kvloom"], "plain": calls["kvloom, plain"]})
        work = f"{batch} rows, {prefix} shared, {own} own"
        yield Row("shared prefix", work, shared_floor(batch, prefix, own), timed(calls, rounds), note)
        del k, v, calls


def shared_floor(batch: int, prefix: int, own: int) -> float:
    """Return a lower bound, in microseconds, for one decode step of `batch` sequences that share a prefix of `prefix`
    tokens. Each sequence also has `own` tokens that no other sequence has. The bound is the sum of the times for the
    prefix and for the other tokens. Each of these two times is the time to read bytes or the time to compute FLOPs,
    whichever is longer.
    """

    def part(tokens_read: int, pairs: int) -> float:
        return max(tokens_read * KV_HEADS * DIM * 4 / READ_RATE, pairs * HEADS * DIM * 4 / FLOP_RATE) * 1e6

    return part(prefix, batch * prefix) + part(batch * own, batch * own)


def prefill_rows(rounds: int) -> Iterator[Row]:
    from kvloom.kernels.attention import PrefillPlan, QueryRows, Shape, installed_libraries

    for work in PREFILL:
        heads, kv_heads, dim = work.heads, work.kv_heads, work.dim
        shape = Shape(heads, kv_heads, dim, dim, BLOCK)
        lengths = [work.new + work.cached] * work.batch
        starts = [row * work.new for row in range(work.batch + 1)]
        tables, pages = _tables(lengths)
        k, v = layer_pool(pages, kv_heads, dim)
        q = _queries(work.batch * work.new, heads, dim)
        calls: dict[str, Call] = {}
        ways: dict[str, dict[str, Any]] = {
            "kvloom": {},
            "kvloom, alone": {"libraries": ()},
            "kvloom, pages": {"backend": "pages"},
            "kvloom, descriptors": {"backend": "descriptors"},
        }
        if not installed_libraries():
            del ways["kvloom, alone"]
        for label, options in ways.items():
            plan = PrefillPlan(shape, work.span, **options)
            plan.make(starts, lengths)
            calls[label] = partial(plan.attend, q, k, v, tables)
        peers = prefill_peers(q, k, v, tables, starts, lengths, work.window)
        flops = 4 * heads * dim * QueryRows.from_lists(starts, lengths).count_pairs(work.span)
        us = timed(calls | peers, rounds, 3)
        note = ", ".join(f"{name} {flops / took / 1e6:.0f} TFLOP/s" for name, took in us.items())
        if peers:
            note += "; " + agreement({"kvloom": calls["kvloom"], **peers})
        yield Row("prefill", str(work), flops / FLOP_RATE * 1e6, us, note)
        del k, v, calls, peers


def latent_rows(rounds: int) -> Iterator[Row]:
    """Yield the report lines for decode over MLA latents. The queries are already projected to the size of a latent.
    Many heads read the same few bytes, so the time of the FLOPs is about as long as the time of the reads.
    """
    from kvloom.kernels.attention import DecodePlan, Shape

    shape = Shape(LATENT_HEADS, 1, LATENT_DIM, LATENT_VALUES, BLOCK)
    for batch, length in LATENT:
        tables, pages = _tables([length] * batch)
        pool = torch.randn((pages, LAYERS, BLOCK, 1, LATENT_DIM), dtype=torch.bfloat16, device="cuda")
        k = pool[:, 0]
        q = torch.randn(batch, LATENT_HEADS, LATENT_DIM, dtype=torch.bfloat16, device="cuda")
        plan = DecodePlan(shape, batch)
        plan.make(_ints(range(batch + 1)), _ints([length] * batch))
        us = timed({"kvloom": partial(plan.attend, q, k, k[..., :LATENT_VALUES], tables)}, rounds)
        read = batch * length * LATENT_DIM * 2
        flops = 2 * batch * length * LATENT_HEADS * (LATENT_DIM + LATENT_VALUES)
        note = f"{read / us['kvloom'] / 1e6:.2f} TB/s, {flops / us['kvloom'] / 1e6:.0f} TFLOP/s"
        yield Row("latents", f"{batch} x {length}", max(read / READ_RATE, flops / FLOP_RATE) * 1e6, us, note)
        del pool, k
