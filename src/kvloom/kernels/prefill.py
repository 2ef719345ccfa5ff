"""Prefill on the GPU: a plan made once a step from lengths that the host knows, run by every layer.

    plan = PrefillPlan(Shape(heads=32, kv_heads=8, k_dim=128, v_dim=128))
    plan.make(starts, lengths)                     # host arrays; lists are laid out and sent when first needed
    out, lse = plan.attend(q, k, v, tables)        # every layer; the new tokens are in their pages already

Rows of any number of queries may be mixed, 1 and 0 among them. Which kernels run is `prefill_backends.choose`'s to say.
Does not know the cache. A call of `attend` can be captured in a CUDA graph once an equal one has run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from kvloom.core import Span

from . import prefill_launch as launch
from .dense import DEEP_TILE, GATHERED_TILE, cudnn_attend, cudnn_takes
from .prefill_backends import (
    SHORT,
    SMALL_ROWS,
    Backend,
    BlockTile,
    Group,
    Ints,
    Rows,
    block_list,
    choose,
    choose_tile,
    copy_list,
    groups_of,
    span_list,
)
from .reference import FULL, Mask
from .shapes import Shape, check_call, check_results, upload

__all__ = ["PrefillPlan"]


@dataclass(frozen=True, slots=True)
class _Blocks:
    """One launch over pages: blocks of one tile, and the memory of those that were cut."""

    tile: BlockTile
    blocks: torch.Tensor
    joins: torch.Tensor
    parts: torch.Tensor
    part_lse: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Batch:
    """One of cuDNN's batches: what is copied out of pages, and where its queries stand."""

    group: Group
    copies: torch.Tensor
    places: torch.Tensor
    longest: int
    first: int


@dataclass(frozen=True, slots=True)
class _Call:
    """One layer's call: what is read and where results go (None: wherever they come out)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tables: torch.Tensor
    mask: Mask
    scale: float
    out: torch.Tensor | None
    lse: torch.Tensor | None

    def placed(self) -> _Call:
        """The same call with somewhere to put its results."""
        out, lse = self.results()
        return replace(self, out=out, lse=lse)

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        q, out, lse = self.q, self.out, self.lse
        if out is None:
            out = torch.empty((*q.shape[:2], self.v.shape[-1]), dtype=q.dtype, device=q.device)
        if lse is None:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        return out, lse


class PrefillPlan:
    """Attention of packed rows under one span. `backend`, `tile` (over pages) and `gathered_tile` (over gathered K and
    V) replace the rules that choose them."""

    def __init__(
        self,
        shape: Shape,
        span: Span = FULL,
        device: torch.device | str = "cuda",
        backend: Backend | None = None,
        tile: BlockTile | None = None,
        gathered_tile: BlockTile | None = None,
    ) -> None:
        shape.check()
        self.shape, self.span, self.backend, self.tile = shape, span, backend, tile
        self.device = torch.device(device)
        self.gathered_tile = gathered_tile or (GATHERED_TILE if shape.k_dim <= 128 else DEEP_TILE)
        self._rows: Rows | None = None
        self._forget()

    def _forget(self) -> None:
        self._whole = False
        self._ids: torch.Tensor | None = None
        self._fetched: int | None = None
        self._reach: Ints | None = None
        self._pages: dict[tuple[torch.dtype, int], list[_Blocks]] = {}
        self._gathered: tuple[torch.Tensor, torch.Tensor, int] | None = None
        self._batches: dict[bool, list[_Batch]] = {}
        self._chosen: dict[tuple[torch.dtype, bool], tuple[Backend, Ints, Ints]] = {}

    def make(
        self,
        starts: Sequence[int] | Ints,
        lengths: Sequence[int] | Ints,
        spans: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Take the step's rows: `starts` ([rows + 1]) of their queries and `lengths` with those included, on the host.
        `spans` are the masks' image spans, if there are any; else `attend` fetches them, and waits for that."""
        self._forget()
        self._rows = Rows.of(starts, lengths)
        self._whole = self._rows.whole(self.span)
        if spans is not None:
            self._take_spans(np.asarray(spans), torch.from_numpy(np.asarray(spans, dtype=np.int32)))

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        tables: torch.Tensor,
        mask: Mask | None = None,
        scale: float | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        new_k: torch.Tensor | None = None,
        new_v: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`reference.attend` of the rows that `make` saw last, into `out` and `lse` where they are given.

        `new_k` and `new_v` ([tokens, kv_heads, dim], packed as q) are the new tokens' keys and values as they were
        written to the pages, where they still are at hand: that spares gathering them.
        """
        mask = mask or Mask(self.span)
        rows = self._check(q, mask, tables, scale)
        scales = check_call(self.shape, q, k, v, tables, mask, k_scale, v_scale)
        check_results(self.shape, q, out, lse)
        call = _Call(q, k, v, tables, mask, self.shape.k_dim**-0.5 if scale is None else scale, out, lse)
        if q.shape[0] == 0:
            return call.results()
        backend, short, long = self._choose(rows, call, k_scale is None)
        if backend == "cudnn" and not len(short):
            return self._over_batches(rows, long, call, new_k, new_v)
        call = call.placed()
        if len(short):
            self._over_pages(rows, short, call, k_scale, v_scale, scales)
        if backend == "cudnn":
            return self._over_batches(rows, long, call, new_k, new_v)
        if backend == "descriptors":
            return self._over_gathered(rows, long, call)
        return call.results()

    def _check(self, q: torch.Tensor, mask: Mask, tables: torch.Tensor, scale: float | None) -> Rows:
        rows = self._rows
        if rows is None:
            raise ValueError("call make(starts, lengths) before attend: there is no plan yet")
        if mask.span != self.span:
            raise ValueError(f"the plan was made for {self.span}, the mask says {mask.span}")
        if mask.trees is not None:
            raise ValueError("draft trees belong to decode; prefill rows have none")
        if scale is not None and not scale > 0:
            raise ValueError(f"scale {scale} must be positive")
        if q.shape[0] != rows.starts[-1]:
            raise ValueError(f"{q.shape[0]} queries, but the plan was made for {rows.starts[-1]}")
        if tables.shape[0] < len(rows.lengths):
            raise ValueError(f"{tables.shape[0]} table rows for {len(rows.lengths)} sequences")
        longest = int(rows.lengths.max(initial=0))
        if tables.shape[1] * self.shape.block_tokens < longest:
            raise ValueError(
                f"tables of {tables.shape[1]} blocks of {self.shape.block_tokens} tokens end before the "
                f"longest sequence of {longest}"
            )
        if mask.spans is not None and self._ids is None:
            self._take_spans(mask.spans.cpu().numpy(), mask.spans)
            self._fetched = mask.spans.data_ptr()
        elif mask.spans is not None and self._fetched not in (None, mask.spans.data_ptr()):
            raise ValueError("image spans are a step's, the same in every layer: call make again for others")
        return rows

    def _choose(self, rows: Rows, call: _Call, unscaled: bool) -> tuple[Backend, Ints, Ints]:
        """The backend, the rows that go over pages, and those that go the backend's way."""
        plain = self._whole and call.mask.softcap is None and call.mask.spans is None and unscaled
        if self.backend not in (None, "pages") and not plain:
            raise ValueError(
                f"{self.backend} takes causal attention only: no window, softcap, image or scale"
            )
        key = (call.q.dtype, plain)
        if key not in self._chosen:
            shape, queries = self.shape, rows.queries
            # A row may have more queries than tokens (padding); only the pages' kernel knows of queries without any.
            long = (rows.owns >= 0) & (queries >= (SHORT if self.backend is None else 1))
            backend = self.backend
            if backend is None:
                plain = plain and call.q.is_cuda
                cudnn = plain and cudnn_takes(
                    shape.heads, shape.kv_heads, shape.k_dim, shape.v_dim, call.q.dtype, call.q.device
                )
                backend = choose(shape, rows, np.flatnonzero(long), call.q.dtype, plain, cudnn)
            if backend == "pages":
                long[:] = False
            self._chosen[key] = backend, np.flatnonzero((queries > 0) & ~long), np.flatnonzero(long)
        return self._chosen[key]

    def _take_spans(self, host: npt.NDArray[np.int32], spans: torch.Tensor) -> None:
        """Keep the images' ids and, by query, the last token of its image: blocks end there."""
        rows = self._rows
        assert rows is not None
        ids = host.astype(np.int64)
        if ids.shape != (int(rows.starts[-1]),):
            raise ValueError(f"spans {ids.shape} are not one for each of {rows.starts[-1]} queries")
        of = np.arange(len(rows.lengths)).repeat(rows.queries)
        position = rows.owns[of] + np.arange(len(ids)) - rows.starts[of]
        _, image = np.unique(np.stack((of, ids), 1), axis=0, return_inverse=True)
        ends = np.full(len(ids), -1, dtype=np.int64)
        np.maximum.at(ends, image.reshape(-1), position)
        self._reach = np.where(ids >= 0, ends[image.reshape(-1)], -1)
        self._ids = spans.to(self.device, torch.int32).contiguous()
        self._pages.clear()

    def _over_pages(
        self,
        rows: Rows,
        chosen: Ints,
        call: _Call,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        scales: int,
    ) -> None:
        out, lse = call.results()
        key = (call.q.dtype, len(chosen))  # of a step's rows, all or the short ones
        if key not in self._pages:
            self._pages[key] = self._lay_out(rows, chosen, call.q.dtype)
        ids = None if call.mask.spans is None else self._ids
        for work in self._pages[key]:
            launch.attend_blocks(
                self.shape, work.tile, work.blocks, work.parts, work.part_lse, call.q, call.k, call.v, call.tables,
                call.mask, not self._whole, ids, call.scale, k_scale, v_scale, scales, out, lse,
            )  # fmt: skip
            if len(work.joins):
                launch.join_blocks(
                    self.shape, work.tile, work.joins, work.parts, work.part_lse, call.mask.sinks, out, lse
                )

    def _lay_out(self, rows: Rows, chosen: Ints, dtype: torch.dtype) -> list[_Blocks]:
        """The blocks of rows with few query rows, and those of the others."""
        shape, heights = self.shape, rows.queries[chosen] * self.shape.group
        found = []
        for mine in (heights <= SMALL_ROWS, heights > SMALL_ROWS):
            if not mine.any():
                continue
            tile = self.tile
            if tile is None or heights[mine].max() <= SMALL_ROWS < tile.rows:
                tile = choose_tile(shape, int(heights[mine].max()), dtype)
            programs = _processors(self.device) * tile.each
            blocks, joins, slots = block_list(
                rows, chosen[mine], shape.group, shape.kv_heads, self.span, tile, programs, self._reach
            )
            held = slots * shape.kv_heads * tile.rows
            found.append(
                _Blocks(
                    tile,
                    self._sent(blocks),
                    self._sent(joins),
                    torch.empty((max(held, 1), shape.v_dim), dtype=torch.float32, device=self.device),
                    torch.empty(max(held, 1), dtype=torch.float32, device=self.device),
                )
            )
        return found

    def _over_gathered(self, rows: Rows, some: Ints, call: _Call) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = call.results()
        shape, tile = self.shape, self.gathered_tile
        if self._gathered is None:
            lengths = rows.lengths[some]
            bases = np.cumsum(lengths) - lengths
            blocks = span_list(
                rows.queries[some],
                rows.starts[some],
                rows.owns[some],
                bases,
                lengths,
                shape.group,
                tile.rows,
                True,
            )
            copies = copy_list(some, np.zeros_like(some), lengths, bases, lengths)
            self._gathered = self._sent(copies), self._sent(blocks), int(lengths.sum())
        copies_, blocks_, tokens = self._gathered
        k, v = self._room(call.q, tokens)
        launch.gather(call.k, call.v, call.tables, copies_, k, v)
        launch.attend_gathered(tile, blocks_, call.q, k, v, call.scale, True, call.mask.sinks, out, lse)
        return out, lse

    def _over_batches(
        self, rows: Rows, chosen: Ints, call: _Call, new_k: torch.Tensor | None, new_v: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        at_hand = new_k is not None and new_v is not None
        if at_hand not in self._batches:
            self._batches[at_hand] = [self._batch(rows, group, at_hand) for group in groups_of(rows, chosen)]
        batches = self._batches[at_hand]
        out, lse = call.out, call.lse
        for batch in batches:
            group, number = batch.group, len(batch.group.rows)
            direct = group.exact and at_hand
            tokens = group.whole + (0 if direct else group.causal)
            k, v = (_split(x, number, tokens) for x in self._room(call.q, number * tokens))
            if tokens:
                launch.gather(call.k, call.v, call.tables, batch.copies, k, v)
            part = slice(batch.first, batch.first + number * group.causal)
            if group.exact:
                q = _split(call.q[part], number, group.causal)
            else:
                q = call.q.new_empty((number, group.causal, *call.q.shape[1:]))
                launch.place_queries(call.q, batch.places, batch.longest, q)
            if direct and new_k is not None and new_v is not None:
                own_k, own_v = (_split(x[part], number, group.causal) for x in (new_k, new_v))
            else:
                own_k, own_v = k[:, group.whole :], v[:, group.whole :]
            a, a_lse = _batched(q, own_k, own_v, True, call.scale)
            b = b_lse = None
            if group.whole:
                b, b_lse = _batched(q, k[:, : group.whole], v[:, : group.whole], False, call.scale)
            elif group.exact and call.mask.sinks is None:
                if out is None and lse is None and number * group.causal == call.q.shape[0]:
                    return a.flatten(0, 1), a_lse.flatten(0, 1)
                if out is None or lse is None:
                    out, lse = call.results()
                out[part].copy_(a.flatten(0, 1))
                lse[part].copy_(a_lse.flatten(0, 1))
                continue
            if out is None or lse is None:
                out, lse = call.results()
            launch.merge_parts(a, a_lse, b, b_lse, batch.places, batch.longest, call.mask.sinks, out, lse)
        assert out is not None
        assert lse is not None
        return out, lse

    def _batch(self, rows: Rows, group: Group, at_hand: bool) -> _Batch:
        tokens = group.whole + (0 if group.exact and at_hand else group.causal)
        number = np.arange(len(group.rows))
        size = np.full_like(number, tokens)
        ends = np.minimum(rows.lengths[group.rows], tokens)
        copies = copy_list(group.rows, np.zeros_like(number), ends, number * tokens, size)
        queries, firsts = rows.queries[group.rows], rows.starts[group.rows]
        places = np.stack((number, group.skips, queries, firsts), 1).astype(np.int32)
        return _Batch(group, self._sent(copies), self._sent(places), int(queries.max()), int(firsts[0]))

    def _room(self, q: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self.shape
        return q.new_empty((tokens, shape.kv_heads, shape.k_dim)), q.new_empty(
            (tokens, shape.kv_heads, shape.v_dim)
        )

    def _sent(self, listed: npt.NDArray[np.int32]) -> torch.Tensor:
        return upload(np.ascontiguousarray(listed), self.device)


def _batched(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """cuDNN over [batch, tokens, heads, dim], back in that order."""
    out, lse = cudnn_attend(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=causal, scale=scale
    )
    return out.transpose(1, 2), lse.transpose(1, 2)


def _split(x: torch.Tensor, number: int, tokens: int) -> torch.Tensor:
    """Packed tokens as a batch of equal rows; a view."""
    return x.view(number, tokens, *x.shape[1:])


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 16  # the interpreter: enough to cut what is long
    return torch.cuda.get_device_properties(device).multi_processor_count
