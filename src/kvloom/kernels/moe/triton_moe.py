"""Triton kernels of `interface.py`. They sort pairs by expert, multiply by the experts' weights in two grouped
products, sum the results of each token, and compute top-k routing.

A pair is a token and one of the `picked` experts that it selected: pair = token * picked + j. A tile has M rows,
each with one pair, and all pairs of a tile have the same expert. The tiles of an expert start at tile
first[expert].

    order   rows[first[expert] * M + rank] = pair      rank: number of earlier pairs that selected the expert
    up      hidden[row] = act(x[token] @ gate.T) * (x[token] @ up.T)
    down    parts[pair] = hidden[row] @ down.T
    sum     out[token] = sum over j of parts[pair] * weights[pair]

A program of `up` computes N columns of one tile, from N columns of gate and N columns of up. Grids depend on the
number of pairs, not on the selected experts. Programs of unused tiles return at once. All sums are in float32, and
results are rounded after the same operations as in Hugging Face's modeling code.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

__all__ = ["choose_experts", "count_pairs", "down", "gate_up", "order_pairs", "sum_parts"]


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(index, counts, pairs, CHUNK: tl.constexpr, BINS: tl.constexpr):
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    there = at < pairs
    ids = tl.load(index + at, mask=there, other=0).to(tl.int32)
    bins = tl.arange(0, BINS)
    tl.store(counts + tl.program_id(0) * BINS + bins, tl.histogram(ids, BINS, mask=there))


@triton.jit(do_not_specialize=["pairs", "chunks"])
def _order_kernel(
    index, counts, rows, owners, tiles, pairs, chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, BINS: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Each program handles one expert and one chunk of pairs. It writes the pairs of the chunk that have this expert
    to the tile rows of the expert, in the same order. Grid: (expert, chunk)."""
    expert, chunk = tl.program_id(0), tl.program_id(1)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    there = at < pairs
    ids = tl.load(index + at, mask=there, other=-1).to(tl.int32)
    bins = tl.arange(0, BINS)
    if CHUNKS == 1:
        total = tl.histogram(ids, BINS, mask=there)
        before = 0
    else:
        part = tl.arange(0, CHUNKS)
        each = tl.load(counts + part[:, None] * BINS + bins[None, :], mask=(part < chunks)[:, None], other=0)
        total = tl.sum(each, 0)
        earlier = (part < chunk)[:, None] & (bins == expert)[None, :]
        before = tl.sum(tl.sum(tl.where(earlier, each, 0), 1), 0)
    needed = (total + M - 1) // M
    first = tl.sum(tl.where(bins < expert, needed, 0), 0)
    mine = tl.sum(tl.where(bins == expert, total, 0), 0)
    chose = ids == expert
    place = first * M + before + tl.cumsum(chose.to(tl.int32), 0) - 1
    tl.store(rows + place, at, mask=chose)
    if chunk == 0:
        own = (mine + M - 1) // M
        free = mine + tl.arange(0, M)
        tl.store(rows + first * M + free, tl.full((M,), -1, tl.int32), mask=free < own * M)
        for tile in range(0, own, 64):
            more = tile + tl.arange(0, 64)
            tl.store(owners + first + more, tl.zeros((64,), tl.int32) + expert, mask=more < own)
        if expert == tl.num_programs(0) - 1:
            tl.store(tiles, first + own)


@triton.jit
def _weight_tile(
    weight, row, rows_left, depth,
    K_DIM: tl.constexpr, N: tl.constexpr, K: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Load a tile of the weights: rows `row` to row + N and columns `depth` to depth + K. Return the tile transposed,
    [K, N]. With DESCRIBED, `weight` is a tensor descriptor, else a pointer. With a pointer, only the first `rows_left`
    rows are loaded, and the other rows are 0."""
    if DESCRIBED:
        tile = weight.load([row, depth]).T
    else:
        line, column = tl.arange(0, N), depth + tl.arange(0, K)
        at = weight + (row.to(tl.int64) + line)[None, :] * K_DIM + column[:, None]
        there = (line < rows_left)[None, :]
        if K_DIM % K:
            there = there & (column < K_DIM)[:, None]
        tile = tl.load(at, mask=there, other=0.0)
    return tile


@triton.jit
def _gate_up_kernel(
    x, weight, rows, owners, tiles, out, s_x,
    PICKED: tl.constexpr, DIM: tl.constexpr, INNER: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    DESCRIBED: tl.constexpr, TANH: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    ACROSS: tl.constexpr = (INNER + N - 1) // N
    tile, side = tl.program_id(0) // ACROSS, tl.program_id(0) % ACROSS
    if tile >= tl.load(tiles):
        return
    expert = tl.load(owners + tile)
    row = tile * M + tl.arange(0, M)
    token = tl.maximum(tl.load(rows + row), 0) // PICKED  # the result of an empty row is not read
    column, depth = side * N + tl.arange(0, N), tl.arange(0, K)
    lines = x + token.to(tl.int64)[:, None] * s_x
    gate = tl.zeros((M, N), tl.float32)
    up = tl.zeros((M, N), tl.float32)
    begin = expert * (2 * INNER) + side * N
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    for k in range(0, DIM, K):
        if DIM % K == 0:
            part = tl.load(lines + (k + depth)[None, :])
        else:
            part = tl.load(lines + (k + depth)[None, :], mask=(k + depth < DIM)[None, :], other=0.0)
        left = _weight_tile(weight, begin, INNER - side * N, k, DIM, N, K, DESCRIBED)
        right = _weight_tile(weight, begin + INNER, INNER - side * N, k, DIM, N, K, DESCRIBED)
        gate = tl.dot(part, left, gate, input_precision=precision)
        up = tl.dot(part, right, up, input_precision=precision)
    kind = out.dtype.element_ty
    gate = gate.to(kind).to(tl.float32)
    if TANH:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # tanh computed from the exponential of a non-positive value, which cannot overflow
        e = tl.exp(-2.0 * tl.abs(inner))
        t = (1.0 - e) / (1.0 + e)
        acted = 0.5 * gate * (1.0 + tl.where(inner < 0, -t, t))
    else:
        acted = gate / (1.0 + tl.exp(-gate))
    value = acted.to(kind).to(tl.float32) * up.to(kind).to(tl.float32)
    at = out + row.to(tl.int64)[:, None] * INNER + column[None, :]
    tl.store(at, value.to(kind), mask=(column < INNER)[None, :])


@triton.jit
def _down_kernel(
    hidden, weight, rows, owners, tiles, out,
    DIM: tl.constexpr, INNER: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    DESCRIBED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    ACROSS: tl.constexpr = (DIM + N - 1) // N
    tile, side = tl.program_id(0) // ACROSS, tl.program_id(0) % ACROSS
    if tile >= tl.load(tiles):
        return
    expert = tl.load(owners + tile)
    row = tile * M + tl.arange(0, M)
    column, depth = side * N + tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros((M, N), tl.float32)
    begin = expert * DIM + side * N
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    for k in range(0, INNER, K):
        if DESCRIBED:
            part = hidden.load([tile * M, k])
        else:
            at = hidden + row.to(tl.int64)[:, None] * INNER + (k + depth)[None, :]
            if INNER % K == 0:
                part = tl.load(at)
            else:
                part = tl.load(at, mask=(k + depth < INNER)[None, :], other=0.0)
        total = tl.dot(
            part, _weight_tile(weight, begin, DIM - side * N, k, INNER, N, K, DESCRIBED), total,
            input_precision=precision,
        )  # fmt: skip
    pair = tl.load(rows + row)
    tl.store(
        out + pair.to(tl.int64)[:, None] * DIM + column[None, :], total.to(out.dtype.element_ty),
        mask=(pair >= 0)[:, None] & (column < DIM)[None, :],
    )  # fmt: skip


@triton.jit
def _sum_kernel(
    parts, weights, shared, gates, out, PICKED: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
    ROUNDED: tl.constexpr, SHARED: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < DIM
    total = tl.zeros((COLUMNS,), tl.float32)
    for j in tl.static_range(PICKED):
        pair = token * PICKED + j
        weight = tl.load(weights + pair).to(tl.float32)
        value = tl.load(parts + pair * DIM + column, mask=there, other=0.0).to(tl.float32) * weight
        if ROUNDED:
            value = value.to(out.dtype.element_ty).to(tl.float32)
        total += value
    if SHARED:
        kind = out.dtype.element_ty
        weight = (1.0 / (1.0 + tl.exp(-tl.load(gates + token).to(tl.float32)))).to(kind).to(tl.float32)
        value = tl.load(shared + token * DIM + column, mask=there, other=0.0).to(tl.float32) * weight
        total += value.to(kind).to(tl.float32)
    if ADDS:
        total += tl.load(out + token * DIM + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out + token * DIM + column, total.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["tokens"])
def _choose_kernel(
    logits, bias, weights, index, tokens, factor, eps, EXPERTS: tl.constexpr, BINS: tl.constexpr, PICKED: tl.constexpr,
    SLOTS: tl.constexpr, ROWS: tl.constexpr, SIGMOID: tl.constexpr, BIASED: tl.constexpr, GROUPS: tl.constexpr,
    GROUP_BINS: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr, NORMALISED: tl.constexpr,
):  # fmt: skip
    """Select the experts of ROWS tokens (see `Routing`). `choice` has the scores that the selection compares. The score
    is -inf for padding, for experts that are already selected, and for experts of groups that are not selected."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert, slot = tl.arange(0, BINS), tl.arange(0, SLOTS)
    real = (expert < EXPERTS)[None, :]
    there = (token < tokens)[:, None] & real
    left = tl.load(logits + token[:, None] * EXPERTS + expert[None, :], mask=there, other=0.0).to(tl.float32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-left))
    else:
        left = tl.where(real, left, -float("inf"))
        score = tl.exp(left - tl.max(left, 1)[:, None])
        score = score / tl.sum(score, 1)[:, None]
    choice = score
    if BIASED:
        choice += tl.load(bias + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)[None, :]
    choice = tl.where(real, choice, -float("inf"))
    if GROUPS > 1:
        group = tl.arange(0, GROUP_BINS)
        total = tl.full((ROWS, GROUP_BINS), -float("inf"), tl.float32)
        for g in tl.static_range(GROUPS):
            mine = tl.where((expert // (EXPERTS // GROUPS) == g)[None, :], choice, -float("inf"))
            best = tl.max(mine, 1)
            if BEST == 2:
                first = tl.argmax(mine, 1)
                best += tl.max(tl.where(expert[None, :] == first[:, None], -float("inf"), mine), 1)
            total = tl.where((group == g)[None, :], best[:, None], total)
        allowed = tl.zeros((ROWS, BINS), tl.int32)
        for _ in tl.static_range(KEPT):
            first = tl.argmax(total, 1)
            allowed = tl.where((expert[None, :] // (EXPERTS // GROUPS)) == first[:, None], 1, allowed)
            total = tl.where(group[None, :] == first[:, None], -float("inf"), total)
        choice = tl.where(allowed > 0, choice, -float("inf"))
    chosen = tl.zeros((ROWS, SLOTS), tl.int64)
    weight = tl.zeros((ROWS, SLOTS), tl.float32)
    for j in tl.static_range(PICKED):
        winner = tl.argmax(choice, 1)
        won = expert[None, :] == winner[:, None]
        mine = (slot == j)[None, :]
        chosen = tl.where(mine, winner[:, None].to(tl.int64), chosen)
        weight = tl.where(mine, tl.sum(tl.where(won, score, 0.0), 1)[:, None], weight)
        choice = tl.where(won, -float("inf"), choice)
    if NORMALISED:
        weight = weight / (tl.sum(weight, 1)[:, None] + eps)
    weight = weight * factor
    at = token[:, None] * PICKED + slot[None, :]
    kept = (token < tokens)[:, None] & (slot < PICKED)[None, :]
    tl.store(index + at, chosen, mask=kept)
    tl.store(weights + at, weight.to(weights.dtype.element_ty), mask=kept)


# -- launches ---------------------------------------------------------------------------------------


def count_pairs(index: torch.Tensor, counts: torch.Tensor, chunk: int) -> None:
    """Count how often each expert was selected. `index` is divided into chunks of `chunk` consecutive pairs, and
    each chunk is counted separately. Writes the counts to `counts` [chunks, bins], where bin i is expert i."""
    chunks, bins = counts.shape
    _count_kernel[(chunks,)](index, counts, index.numel(), CHUNK=chunk, BINS=bins, num_warps=4)


def order_pairs(
    index: torch.Tensor, counts: torch.Tensor, rows: torch.Tensor, owners: torch.Tensor, tiles: torch.Tensor,
    experts: int, chunk: int, tile_rows: int,
) -> None:  # fmt: skip
    """Sort the pairs into tiles of one expert each. `counts` is the result of `count_pairs` for the same `chunk`.
    Writes three results: `rows` has the pair of each tile row (-1 for an unused row), `owners` the expert of each tile,
    and `tiles` the number of tiles."""
    chunks, bins = counts.shape
    _order_kernel[(experts, chunks)](
        index, counts, rows, owners, tiles, index.numel(), chunks,
        CHUNK=chunk, CHUNKS=1 if chunks == 1 else max(16, triton.next_power_of_2(chunks)), BINS=bins, M=tile_rows, num_warps=4,
    )  # fmt: skip


def _described(flat: torch.Tensor, tile: Any, rows: int) -> Any:
    if not tile.described:
        return flat
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [rows, tile.depth])


def gate_up(
    x: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, owners: torch.Tensor, tiles: torch.Tensor,
    picked: int, activation: Any, tile: Any,
) -> torch.Tensor:  # fmt: skip
    """Return act(gate) * up for every row of every tile, [rows, inner]. `rows` has the pair of each tile row, and
    `owners` the expert of each tile."""
    _, both, dim = weight.shape
    inner = both // 2
    out = torch.empty((len(rows), inner), dtype=x.dtype, device=x.device)
    _gate_up_kernel[(len(owners) * triton.cdiv(inner, tile.columns),)](
        x, _described(weight.view(-1, dim), tile, tile.columns), rows, owners, tiles, out, x.stride(0),
        PICKED=picked, DIM=dim, INNER=inner, M=tile.rows, N=tile.columns, K=tile.depth, DESCRIBED=tile.described,
        TANH=activation == "gelu_tanh", EXACT=x.dtype == torch.float32,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def down(
    hidden: torch.Tensor, weight: torch.Tensor, rows: torch.Tensor, owners: torch.Tensor, tiles: torch.Tensor,
    pairs: int, tile: Any,
) -> torch.Tensor:  # fmt: skip
    """Return the down projection of every pair: [pairs, dim]. Row i belongs to pair i."""
    _, dim, inner = weight.shape
    out = torch.empty((pairs, dim), dtype=hidden.dtype, device=hidden.device)
    _down_kernel[(len(owners) * triton.cdiv(dim, tile.columns),)](
        _described(hidden, tile, tile.rows), _described(weight.view(-1, inner), tile, tile.columns),
        rows, owners, tiles, out,
        DIM=dim, INNER=inner, M=tile.rows, N=tile.columns, K=tile.depth, DESCRIBED=tile.described,
        EXACT=hidden.dtype == torch.float32, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def sum_parts(
    parts: torch.Tensor,
    weights: torch.Tensor,
    into: torch.Tensor | None = None,
    shared: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Triton version of `moe.sum_outputs`."""
    tokens, picked = weights.shape
    dim = parts.shape[1]
    out = torch.empty((tokens, dim), dtype=parts.dtype, device=parts.device) if into is None else into
    columns = min(1024, triton.next_power_of_2(dim))
    if not tokens:
        return out
    _sum_kernel[(tokens, triton.cdiv(dim, columns))](
        parts, weights, *((parts, weights) if shared is None else shared), out,
        PICKED=picked, DIM=dim, COLUMNS=columns, ROUNDED=weights.dtype == parts.dtype,
        SHARED=shared is not None, ADDS=into is not None,
        num_warps=max(1, columns // 256),
    )  # fmt: skip
    return out


def choose_experts(
    logits: torch.Tensor, routing: Any, dtype: torch.dtype, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the routing of `interface.choose_experts`, which has checked the arguments."""
    tokens, experts = logits.shape
    weights = torch.empty((tokens, routing.picked), dtype=dtype, device=logits.device)
    index = torch.empty((tokens, routing.picked), dtype=torch.int64, device=logits.device)
    bins, rows = max(16, triton.next_power_of_2(experts)), 4
    if tokens:
        _choose_kernel[(triton.cdiv(tokens, rows),)](
            logits, logits if bias is None else bias, weights, index, tokens, routing.factor, routing.eps,
            EXPERTS=experts, BINS=bins, PICKED=routing.picked, SLOTS=triton.next_power_of_2(routing.picked), ROWS=rows,
            SIGMOID=routing.sigmoid, BIASED=bias is not None, GROUPS=routing.groups,
            GROUP_BINS=triton.next_power_of_2(routing.groups), KEPT=routing.kept, BEST=routing.best,
            NORMALISED=routing.normalised, num_warps=rows,
        )  # fmt: skip
    return weights, index
