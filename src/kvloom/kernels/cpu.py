"""Native CPU versions of small operations, one call each. They exist if the package was built with a compiler
(`_cpu.c`).

In a small model, the overhead of torch calls takes most of a step. Each function here replaces five to ten torch
calls, and attention reads pages in place. Only float32 is supported (see `supports`). Other tensors run in torch,
with results equal up to rounding. Callers call `supports` first. Each function checks the shapes, because native code
would otherwise read or write wrong memory. Page ids are trusted: they come from the page pool.

| function         | takes                                           | returns                               |
|------------------|-------------------------------------------------|---------------------------------------|
| `rms_norm`       | x [..., dim]                                    | the same shape, dense                 |
| `act_and_mul`    | x [..., 2 * dim]                                | [..., dim]                            |
| `rotate_`        | x [tokens, heads, dim], cos, sin [tokens, dim]  | x, rotated in place                   |
| `write_tokens`   | pages [pages, block, heads, dim], new [tokens,  | nothing: writes the tokens to pages   |
|                  | heads, dim]                                     |                                       |
| `decode`         | q [queries, heads, dim], pages, tables, visible | [queries, heads, dim of v]            |
|                  | tokens                                          |                                       |
| `attention_step` | q, k and v of each new token in one tensor row  | [tokens, heads, dim of v]: the result |
|                  |                                                 | of `rotate_`, then `write_tokens`,    |
|                  |                                                 | then `decode`                         |
| `multiply`       | x [rows, dim], weight [columns, dim]            | [rows, columns]; with `into`, `into`  |
|                  |                                                 | plus the product, in place            |
| `SmallModel`     | the known tokens of several sequences           | logits, or next tokens: runs a whole  |
|                  |                                                 | model                                 |
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence as Many
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

try:
    from . import _cpu

    IS_BUILT = hasattr(_cpu, "compute")  # false for a build of an earlier version
except ImportError:  # the package was built without a compiler
    IS_BUILT = False

__all__ = [
    "LayerPages",
    "SingleTokenRows",
    "SmallLayer",
    "SmallModel",
    "SmallStep",
    "VisibleTokens",
    "act_and_mul",
    "attention_step",
    "decode",
    "multiplies",
    "multiply",
    "rms_norm",
    "rotate_",
    "supports",
    "write_tokens",
]

Ints = npt.NDArray[np.int64]
MIN_THREAD_PRODUCTS = 1 << 22
"""Attention uses several threads if each thread has at least this many multiplications. One thread computes this
many in about a millisecond."""
MIN_ROWS, MAX_ROWS = 2, 32 if platform.machine() in ("aarch64", "arm64") else 16
"""Smallest and largest number of tensor rows of x for which `multiply` is used. In this range it is up to three
times as fast as BLAS, because BLAS copies the weight first."""
MAX_THREADED_ROWS = 8
"""`SmallModel` computes at most this many tokens in a step if torch has several threads, because it has only one."""


def supports(*tensors: torch.Tensor) -> bool:
    """Return whether native code supports these tensors. They must be float32, on a CPU, and dense in their last
    dimension."""
    return IS_BUILT and all(x.is_cpu and x.dtype == torch.float32 and x.stride(-1) == 1 for x in tensors)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, gemma: bool) -> torch.Tensor:
    """Native version of `fused.rms_norm`."""
    if not x.is_contiguous():
        x = x.contiguous()
    out, dim = torch.empty_like(x), x.shape[-1]
    if weight.numel() != dim or not weight.is_contiguous():
        raise _unequal("rms_norm", x, weight)
    rows = x.numel() // max(dim, 1)
    _cpu.rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, dim, dim, eps, float(gemma))
    return out


def act_and_mul(x: torch.Tensor, tanh: bool) -> torch.Tensor:
    """Native version of `fused.act_and_mul`."""
    if not x.is_contiguous():
        x = x.contiguous()
    dim, odd = divmod(x.shape[-1], 2)
    if odd:
        raise _unequal("act_and_mul", x)
    out = x.new_empty((*x.shape[:-1], dim))
    _cpu.gated(x.data_ptr(), out.data_ptr(), out.numel() // max(dim, 1), dim, tanh)
    return out


def multiplies(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether `multiply` supports x [..., dim] and the weight [columns, dim], and is faster than BLAS for
    them."""
    return (
        IS_BUILT
        and MIN_ROWS * x.shape[-1] <= x.numel() <= MAX_ROWS * x.shape[-1]
        and x.is_contiguous()
        and weight.is_contiguous()
        and x.is_cpu
        and x.dtype == weight.dtype == torch.float32
    )


def multiply(x: torch.Tensor, weight: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
    """Return x [..., dim] times the transposed weight [columns, dim]. If a dense `into` is given, add the product
    to `into` in place."""
    columns, dim = weight.shape
    if x.shape[-1] != dim or not dim:
        raise _unequal("multiply", x, weight)
    rows = x.numel() // dim
    out = x.new_empty((*x.shape[:-1], columns)) if into is None else into
    if into is not None and (into.numel() != rows * columns or not into.is_contiguous()):
        raise _unequal("multiply", x, weight, into)
    given = x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows
    count = min(torch.get_num_threads(), rows * columns * dim // MIN_THREAD_PRODUCTS)
    each = columns if count < 2 else -(-columns // (4 * count)) * 4
    bounds = [*range(0, columns, each), columns]
    _run_in_threads(
        bounds, lambda begin, end: _cpu.multiply(*given, begin, end, dim, columns, into is not None)
    )
    return out


def _unequal(name: str, *tensors: torch.Tensor) -> ValueError:
    """Return the error for tensors whose shapes do not fit together, or that are not dense where they must be."""
    shapes = ", ".join(f"{tuple(x.shape)} with strides {x.stride()}" for x in tensors)
    return ValueError(f"{name}: tensors {shapes} do not fit together")


def _dense(ids: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the ids as a contiguous tensor. Raises ValueError if they do not have this dtype and shape, because
    native code would read wrong memory."""
    if ids.dtype != dtype or ids.shape != shape:
        raise ValueError(f"ids {tuple(ids.shape)} of {ids.dtype} must be {shape} of {dtype}")
    return ids if ids.is_contiguous() else ids.contiguous()


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate x [tokens, heads, dim] in place, like `fused.apply_rotary`. `cos` and `sin` must be dense."""
    tokens, heads, dim = x.shape
    if dim % 2 or not _has_rows(cos, tokens, dim) or not _has_rows(sin, tokens, dim):
        raise _unequal("rotate_", x, cos, sin)
    _cpu.rotate(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), tokens, heads, dim // 2, x.stride(0), x.stride(1)
    )


def _has_rows(x: torch.Tensor, rows: int, dim: int) -> bool:
    """Whether x is dense and has `rows` rows of `dim` items, or more rows."""
    return x.shape[-1] == dim and x.numel() >= rows * dim and x.is_contiguous()


def write_tokens(pages: torch.Tensor, new: torch.Tensor, page: torch.Tensor, place: torch.Tensor) -> None:
    """Write the tokens `new` to their pages: `pages[page, place] = new`. `page` and `place` (the offset in the
    page) are int64, one value per token."""
    tokens, heads, dim = new.shape
    if pages.shape[2:] != new.shape[1:]:
        raise _unequal("write_tokens", pages, new)
    page, place = (_dense(ids, torch.int64, (tokens,)) for ids in (page, place))
    _cpu.put(
        pages.data_ptr(), new.data_ptr(), page.data_ptr(), place.data_ptr(), tokens, heads, dim,
        *pages.stride()[:3], *new.stride()[:2],
    )  # fmt: skip


class VisibleTokens:
    """The tokens that each query sees. Query i sees the tokens [firsts[i], lengths[i]), at least one. Built once per
    step."""

    def __init__(self, firsts: Ints, lengths: Ints) -> None:
        self.firsts, self.lengths = (np.ascontiguousarray(x, dtype=np.int64) for x in (firsts, lengths))
        self.counts = self.lengths - self.firsts
        if self.counts.ndim != 1 or not len(self.counts) or self.counts.min() < 1 or self.firsts.min() < 0:
            raise ValueError(f"ranges from {firsts} to {lengths} must have at least one token for each query")
        self.longest, self.total = int(self.counts.max()), int(self.counts.sum())
        self.end = int(self.lengths.max())
        self.at = self.firsts.ctypes.data, self.lengths.ctypes.data

    def parts(self, heads: int, products: int) -> list[int]:
        """Divide the heads of all queries between threads, with equal work for each thread. Return the bounds of
        the parts as head numbers. Head h of query r has the number r * heads + h. `products` is the number of
        multiplications per token and head."""
        units = len(self.counts) * heads
        count = min(torch.get_num_threads(), units, self.total * products // MIN_THREAD_PRODUCTS)
        if count < 2:
            return [0, units]
        done = self.counts.repeat(heads).cumsum()
        inner = np.searchsorted(done, done[-1] * np.arange(1, count) / count) + 1
        return [0, *(int(bound) for bound in inner if bound < units), units]


def decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: torch.Tensor, seen: VisibleTokens, scale: float
) -> torch.Tensor:
    """Return attention of each query over its visible tokens (`seen`). `tables` (int32) has one line of page ids per
    query, with a page for each visible block."""
    rows, heads, dim = q.shape
    kv_heads, v_dim = k.shape[2], v.shape[3]
    if k.shape[3] != dim or v.shape[:3] != k.shape[:3] or not kv_heads or heads % kv_heads:
        raise _unequal("decode", q, k, v)
    tables = _dense(tables[:rows], torch.int32, (len(seen.counts), tables.shape[1]))
    if seen.end > tables.shape[1] * k.shape[1]:
        raise ValueError(
            f"rows of {seen.end} tokens do not fit tables of {tables.shape[1]} blocks of {k.shape[1]}"
        )
    out = q.new_empty((rows, heads, v_dim))
    given = q.data_ptr(), k.data_ptr(), v.data_ptr(), tables.data_ptr(), *seen.at, out.data_ptr()
    shape = heads, kv_heads, dim, v_dim, k.shape[1]
    strides = q.stride()[:2], k.stride()[:3], v.stride()[:3], tables.stride(0)

    _run_in_threads(
        seen.parts(kv_heads, heads * (dim + v_dim)),
        lambda begin, end: _cpu.decode(*given, begin, end, *shape, *strides, seen.longest, scale),
    )
    return out


class LayerPages:
    """The K and V pages of a layer ([pages, block, heads, dim], float32). Built once, because their addresses do not
    change between steps."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        _, self.block, self.heads, self.dim = k.shape
        if v.shape != k.shape:
            raise _unequal("LayerPages", k, v)
        self._kept = k, v  # keeps the memory alive, so that the addresses stay valid
        self.at = (
            k.data_ptr(),
            v.data_ptr(),
            self.heads,
            self.dim,
            self.block,
            *k.stride()[:3],
            *v.stride()[:3],
        )


class SingleTokenRows:
    """The tokens of a step, one per row of the tensors. Each token has the page ids of its sequence ([rows,
    blocks], int32) and its visible tokens.

    With `lines`, row i has a token of the sequence whose page ids are `tables[lines[i]]`. The rows of a sequence follow
    one another, and see the rows before them. Without `lines`, row i has the only token of the sequence with `tables[i]`.
    """

    def __init__(self, tables: torch.Tensor, seen: VisibleTokens, lines: Ints | None = None) -> None:
        count = len(seen.counts)
        self.has_drafts = lines is not None
        if lines is None:
            lines = np.arange(count)
        lines = np.ascontiguousarray(lines, dtype=np.int64)
        if len(lines) != count or lines.min() < 0 or lines.max() >= len(tables):
            raise ValueError(f"lines {lines} of {count} rows do not fit {len(tables)} block tables")
        if (np.diff(seen.lengths)[np.diff(lines) == 0] != 1).any():
            raise ValueError(
                f"rows of one sequence that see up to {seen.lengths} tokens do not follow one another"
            )
        tables = _dense(tables, torch.int32, tuple(tables.shape))
        self.seen, self._kept, self.blocks = seen, (tables, lines), tables.shape[1]
        self.at = tables.data_ptr(), tables.stride(0), lines.ctypes.data, *seen.at, seen.longest


def attention_step(
    joined: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    scale: float,
    pages: LayerPages,
    rows: SingleTokenRows,
) -> torch.Tensor:
    """Rotate q and k, write k and v to pages, and compute attention of q, all in one native call. Return the
    outputs [rows, heads, dim of v].

    `joined` [rows, (heads + 2 * KV heads) * dim] must be dense. Each row contains q, k and v of one token. The call
    modifies `joined`.
    """
    count, dim = len(joined), pages.dim
    width = (heads + 2 * pages.heads) * dim
    if heads % pages.heads or dim % 2 or joined.numel() != count * width or not joined.is_contiguous():
        raise ValueError(
            f"attention_step: {tuple(joined.shape)} must be dense rows of {width} items: q, k and v of {heads} and "
            f"{pages.heads} heads"
        )
    if not _has_rows(cos, count, dim) or not _has_rows(sin, count, dim):
        raise _unequal("attention_step", joined, cos, sin)
    if rows.seen.end > rows.blocks * pages.block or count != len(rows.seen.counts):
        raise ValueError(
            f"{count} rows of up to {rows.seen.end} tokens do not fit tables of {rows.blocks} blocks of {pages.block}"
        )
    out = joined.new_empty((count, heads * dim))
    given = joined.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr()
    bounds = [0, count] if rows.has_drafts else rows.seen.parts(1, 2 * heads * dim)
    if len(bounds) == 2:
        _cpu.step(*given, 0, count, heads, scale, pages.at, rows.at)
    else:
        _run_in_threads(
            bounds, lambda begin, end: _cpu.step(*given, begin, end, heads, scale, pages.at, rows.at)
        )
    return out


@dataclass(frozen=True, slots=True)
class SmallLayer:
    """The weights of a decoder layer and its pages. `norm` and `mlp_norm` are [hidden]. The matrices are
    [outputs, inputs]: `qkv` is q, k and v joined, and `gate_up` is the gate and up projections joined."""

    norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    pages: LayerPages


class SmallStep:
    """The tokens that a `SmallModel` computes in a step. Raises ValueError if the arguments do not fit together.

    | field     | meaning                                                                                             |
    |-----------|-----------------------------------------------------------------------------------------------------|
    | `starts`  | the index of the first token of each sequence, and the number of all tokens                         |
    | `lengths` | the number of tokens that each token sees: its position + 1                                         |
    | `numbers` | [3, tokens]: each token's id, its sequence, and its length                                          |
    | `tables`  | the page ids [sequences, blocks] for each layer of the model                                        |
    """

    # Steps are small, and lists of a few numbers take less time than arrays.
    __slots__ = ("lengths", "most", "numbers", "starts", "tables")

    def __init__(
        self, tokens: Many[Many[int]], firsts: Many[int], tables: Many[npt.NDArray[np.int32]]
    ) -> None:
        """`tokens` are the tokens of each sequence, at least one, and `firsts` the positions of the first ones."""
        ids: list[int] = []
        lines: list[int] = []
        self.lengths: list[int] = []
        self.starts = [0]
        for line, (own, first) in enumerate(zip(tokens, firsts, strict=True)):
            if not len(own) or first < 0:
                raise ValueError(f"tokens {own} from position {first} are not a part of a step")
            ids += own
            lines += [line] * len(own)
            self.lengths += range(first + 1, first + len(own) + 1)
            self.starts.append(len(ids))
        if not ids or min(ids) < 0:
            raise ValueError(f"tokens {ids} are not a step")
        self.most = max(ids)
        self.numbers = np.array((ids, lines, self.lengths), dtype=np.int64)
        dense = {id(table): np.ascontiguousarray(table, dtype=np.int32) for table in tables}
        self.tables = [dense[id(table)] for table in tables]

    def ordered(self, order: list[int]) -> SmallStep:
        """Return the same step with its sequences in another order."""
        if order == list(range(len(order))):
            return self
        ids = self.numbers[0].tolist()
        parts = [ids[self.starts[i] : self.starts[i + 1]] for i in order]
        tables = {id(table): table[order] for table in self.tables}
        firsts = [self.lengths[self.starts[i]] - 1 for i in order]
        return SmallStep(parts, firsts, [tables[id(one)] for one in self.tables])


class SmallModel:
    """A decoder of plain layers, which computes a step in one native call, in one thread. Raises ValueError
    if the shapes of the weights do not fit together, or if a weight is not dense float32 on a CPU.

    `embeddings` and `head` are [vocabulary, hidden], `norm` is the last norm. `cos` and `sin` [positions, dim] are the
    rotary angles of all positions.
    """

    def __init__(
        self,
        layers: list[SmallLayer],
        embeddings: torch.Tensor,
        norm: torch.Tensor,
        head: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *,
        heads: int,
        scale: float,
        eps: float,
        gemma: bool,
        tanh: bool,
    ) -> None:
        vocabulary, hidden = embeddings.shape
        pages, inner = layers[0].pages, layers[0].down.shape[1]
        width, attended = (heads + 2 * pages.heads) * pages.dim, heads * pages.dim
        wanted = [
            (embeddings, (vocabulary, hidden)), (head, (vocabulary, hidden)), (norm, (hidden,)),
            (cos, (len(cos), pages.dim)), (sin, (len(cos), pages.dim)),
        ]  # fmt: skip
        for one in layers:
            wanted += [
                (one.norm, (hidden,)), (one.qkv, (width, hidden)), (one.output, (hidden, attended)),
                (one.mlp_norm, (hidden,)), (one.gate_up, (2 * inner, hidden)), (one.down, (hidden, inner)),
            ]  # fmt: skip
        for weight, shape in wanted:
            if weight.shape != shape or not weight.is_contiguous() or not supports(weight):
                raise ValueError(f"a weight {tuple(weight.shape)} must be {shape}, dense float32 on a CPU")
        same = {(one.pages.heads, one.pages.dim, one.pages.block) for one in layers}
        if len(same) > 1 or heads % pages.heads or pages.dim % 2:
            raise ValueError(f"layers with {same} (KV heads, dim, block) do not fit {heads} heads")
        self.layers, self.positions = len(layers), len(cos)
        self.vocabulary, self._block = vocabulary, pages.block
        self._kept = wanted, layers  # keeps the memory alive, so that the addresses stay valid
        weights = ("norm", "qkv", "output", "mlp_norm", "gate_up", "down")
        # The struct `Layer` of `_cpu.c`. The last two columns, address and stride of block tables, are set by each call.
        self._layers = np.array(
            [
                [
                    *(getattr(one, name).data_ptr() for name in weights),
                    *one.pages.at[:2],
                    *one.pages.at[5:],
                    0,
                    0,
                ]
                for one in layers
            ],
            dtype=np.int64,
        )
        self._at = (
            *(x.data_ptr() for x in (embeddings, head, norm, cos, sin)), self._layers.ctypes.data, len(layers),
            vocabulary, hidden, inner, heads, pages.heads, pages.dim, pages.block, eps, float(gemma), scale, tanh,
        )  # fmt: skip

    @property
    def max_tokens(self) -> int:
        """The number of tokens up to which a step takes less time here than in torch."""
        return MAX_ROWS if torch.get_num_threads() == 1 else MAX_THREADED_ROWS

    def compute(self, step: SmallStep, places: Many[int]) -> torch.Tensor:
        """Compute the tokens of a step, and write their K and V. Return the logits after the tokens `places`, which are
        indices in the step's tokens, all different."""
        longest = max(step.lengths)
        given = self._arguments(step, longest)
        wanted = np.array(places, dtype=np.int64)
        if len(places) and not (0 <= min(places) and max(places) < len(step.lengths) >= len(places)):
            raise ValueError(f"places {places} do not fit {len(step.lengths)} tokens")
        logits = torch.empty((len(places), self.vocabulary))
        _cpu.compute(self._at, (*given, wanted.ctypes.data, len(places), logits.data_ptr(), longest))
        return logits

    def generate(self, step: SmallStep, wanted: Many[int], computed: int) -> Ints:
        """Compute the tokens of a step. Then choose the most likely next tokens of each sequence, `wanted[i]` in all, one
        after the other. Return the chosen tokens [sequences, longest]. K and V of all tokens but the last chosen token
        are written. With `computed` = 1, those of the last token are written too. All pages must be reserved.
        """
        count = len(step.starts) - 1
        if len(wanted) != count or min(wanted) < 1:
            raise ValueError(f"{wanted} wanted tokens do not fit {count} sequences: each must be at least 1")
        order = sorted(range(count), key=lambda i: -wanted[i])
        step = step.ordered(order)
        most = [wanted[i] for i in order]
        ends = [end - 1 for end in step.starts[1:]]
        longest = max(step.lengths[end] + n for end, n in zip(ends, most, strict=True)) + computed - 1
        given = self._arguments(step, longest)
        numbers = np.array((ends, most, [n + computed - 1 for n in most]), dtype=np.int64)
        steps, at = most[0] + computed, numbers.ctypes.data
        chosen = np.zeros((steps, count), np.int64)
        _cpu.generate(
            self._at, (*given, at, count, at + 8 * count, at + 16 * count, chosen.ctypes.data, steps, longest)
        )
        found = np.empty((count, most[0]), np.int64)
        found[order] = chosen[: most[0]].T
        return found

    def _arguments(self, step: SmallStep, longest: int) -> tuple[int, ...]:
        """Set the block tables of a step. Return the addresses of its tokens, for native code. Sequences will have up to
        `longest` tokens. Raises ValueError if tokens or block tables do not fit the model."""
        if step.most >= self.vocabulary:
            raise ValueError(f"token {step.most} exceeds {self.vocabulary} entries")
        if longest > self.positions or len(step.tables) != self.layers:
            raise ValueError(f"sequences of {longest} tokens do not fit {self.positions} positions")
        blocks, lines = -(-longest // self._block), len(step.starts) - 1
        found: dict[int, tuple[int, int]] = {}  # address and row size of each table
        for table in step.tables:
            if id(table) not in found:
                if table.shape[0] != lines or table.shape[1] < blocks:
                    raise ValueError(f"block tables {table.shape} do not fit {lines} rows of {blocks} blocks")
                found[id(table)] = table.ctypes.data, table.shape[1]
        self._layers[:, -2:] = [found[id(table)] for table in step.tables]
        at, count = step.numbers.ctypes.data, len(step.lengths)
        return at, at + 8 * count, at + 16 * count, count


def _run_in_threads(bounds: list[int], part: Callable[[int, int], None]) -> None:
    """Call `part` for every range between two neighbouring `bounds`. The first range runs in this thread, the
    others in worker threads."""
    later = [_threads().submit(part, *both) for both in pairwise(bounds[1:])]
    part(bounds[0], bounds[1])
    for each in later:
        each.result()


_POOL: list[ThreadPoolExecutor] = []


def _threads() -> ThreadPoolExecutor:
    if not _POOL:
        _POOL.append(ThreadPoolExecutor(max(1, torch.get_num_threads() - 1), "kvloom-attention"))
    return _POOL[0]
