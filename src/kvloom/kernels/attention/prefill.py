"""Prefill on the GPU. A plan is made once per step from lengths on the host, and every layer runs it.

    plan = PrefillPlan(Shape(heads=32, kv_heads=8, k_dim=128, v_dim=128))
    plan.make(starts, lengths)                     # host arrays; work lists are built and uploaded when first needed
    out, lse = plan.attend(q, k, v, tables)        # every layer; the new tokens are in their pages already

The sequences of a step may have any number of queries, including 1 and 0. `prefill_backends.choose_backend` selects
the kernels. If a step begins with many sequences of one query, the decode kernels compute them. The first call of
`attend` prepares the step. Later calls with equal arguments can be captured in a CUDA graph. This module does not
depend on the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from kvloom.core import WHOLE, ContextPart, Visibility
from kvloom.kernels.device import upload

from . import prefill_launch as launch
from .decode import DecodePlan
from .dense import cudnn_supports
from .mask import FULL, Mask
from .prefill_backends import (
    MIN_GATHERED_PAIRS,
    MIN_GATHERED_QUERIES,
    SMALL_ROWS,
    Backend,
    BlockTile,
    Ints,
    QueryRows,
    block_list,
    choose_backend,
    choose_tile,
)
from .prefill_cudnn import CudnnPrefill, PrefillCall
from .prefill_gathered import GatheredPrefill
from .prefill_libraries import (
    Library,
    LibraryStep,
    PagedCall,
    Result,
    installed_libraries,
    measure_fastest,
    size_class,
)
from .shape import PLAN_CAPACITIES, Shape, check_call, check_outputs, check_part, plan_capacity

__all__ = ["PrefillPlan"]

MIN_LIBRARY_PAIRS = MIN_GATHERED_PAIRS
"""Smallest number of query-key pairs of a step, over all heads, for which attention libraries are timed."""


MIN_DECODE_ROWS = 16
"""If a step begins with at least this many sequences of one query, the decode kernels compute them. In a mixed
step, the decoding sequences come first."""


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The arguments of one launch of the attention kernel over pages. A block is a group of `tile.rows` query rows,
    and `blocks` lists the blocks. The K and V tokens that a block reads may be split over several programs. Each
    program then writes a partial result to `parts` and `part_lse`. `joins` lists which partial results to merge."""

    tile: BlockTile
    blocks: torch.Tensor
    joins: torch.Tensor
    parts: torch.Tensor
    part_lse: torch.Tensor


class PrefillPlan:
    """Computes attention of packed queries under one visibility rule (`span`). By default, the plan chooses a backend
    and a tile for each step.

    - `backend` overrides the choice of the backend.
    - `tile` overrides the tile for attention over pages, and `gathered_tile` the tile for attention over contiguous
      copies of K and V.
    - `libraries` are external attention libraries. The plan times these libraries and our kernels, and the fastest
      computes the step. The default is all installed libraries, or none if a backend or tile is given.
    """

    def __init__(
        self,
        shape: Shape,
        span: Visibility = FULL,
        device: torch.device | str = "cuda",
        backend: Backend | None = None,
        tile: BlockTile | None = None,
        gathered_tile: BlockTile | None = None,
        libraries: Sequence[Library] | None = None,
        min_decode_rows: int | None = None,
        part: ContextPart = WHOLE,
    ) -> None:
        """`min_decode_rows` replaces `MIN_DECODE_ROWS`. With 0, the decode kernels are not used. `part` is the part of
        each block that the pages contain (context parallelism). It needs full attention, over pages."""
        shape.check()
        check_part(part, span)
        if part != WHOLE:
            if backend not in (None, "pages") or libraries:
                raise ValueError(
                    f"{backend or 'a library'} reads whole blocks: use pages for a part of each block"
                )
            libraries = ()
        self.part = part
        self.shape, self.span, self.backend, self.tile = shape, span, backend, tile
        self.device = torch.device(device)
        self.gathered_tile = gathered_tile
        if libraries is None:
            free = self.device.type == "cuda" and not (backend or tile or gathered_tile)
            libraries = installed_libraries() if free else ()
        self.libraries = tuple(libraries)
        if min_decode_rows is None:
            min_decode_rows = (
                MIN_DECODE_ROWS
                if self.device.type == "cuda" and not (backend or tile or gathered_tile)
                else 0
            )
        self._min_decode_rows = min_decode_rows
        self._decode_plans: dict[int, DecodePlan] = {}
        self._rows: QueryRows | None = None
        self._span = span  # full attention if no sequence of the step is longer than the window
        self._reset()

    def _reset(self) -> None:
        self._decode: tuple[int, DecodePlan | None] | None = None
        self._ids: torch.Tensor | None = None
        self._fetched: int | None = None
        self._reach: Ints | None = None
        self._pages: dict[tuple[torch.dtype, int], list[_Blocks]] = {}
        self._batches = CudnnPrefill(self.shape, self.device)
        self._runs = GatheredPrefill(self.shape, self._span, self.gathered_tile, self.device)
        self._step: LibraryStep | None = None
        self._chosen_libraries: dict[tuple[torch.dtype, float | None], Library | None] = {}
        self._chosen: dict[tuple[torch.dtype, bool], tuple[Backend, Ints, Ints]] = {}

    def make(
        self,
        starts: Sequence[int] | Ints,
        lengths: Sequence[int] | Ints,
        spans: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Set the sequences of the step from host arrays. `starts` ([sequences + 1]) contains the index in q of
        each sequence's first query. `lengths` ([sequences]) is the number of tokens of each sequence, including its
        queries.

        `spans` are the image ids of the queries, if there are images. Without `spans`, `attend` must copy the ids
        from the device and wait.
        """
        rows = self._rows = QueryRows.from_lists(starts, lengths)
        self._span = FULL if rows.sees_all_context(self.span) else self.span
        self._reset()
        if spans is not None:
            self._set_image_spans(np.asarray(spans), torch.from_numpy(np.asarray(spans, dtype=np.int32)))

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
        """Compute the same results as `reference.attend`, for the sequences of the last `make`. Writes to `out` and
        `lse` if they are given.

        `new_k` and `new_v` ([tokens, kv_heads, dim], packed like q) are the keys and values of the new tokens. If
        they are given, some backends gather only the cached tokens from pages.
        """
        mask = mask or Mask(self.span)
        rows = self._check(q, mask, tables, scale)
        scales = check_call(self.shape, q, k, v, tables, mask, k_scale, v_scale, self.part)
        check_outputs(self.shape, q, out, lse)
        call = PrefillCall(
            q, k, v, tables, mask, self.shape.k_dim**-0.5 if scale is None else scale, out, lse
        )
        if q.shape[0] == 0:
            return call.outputs()
        ours = partial(self._run_kernels, rows, call, k_scale, v_scale, scales, new_k, new_v)
        library = self._choose_library(rows, call, ours) if scales == 0 else None
        return ours() if library is None else self._run_library(library, rows, call)

    def _choose_library(
        self, rows: QueryRows, call: PrefillCall, ours: Callable[[], Result]
    ) -> Library | None:
        """Return the library that computes this layer in this step, or None for our own kernels. `ours` computes the
        layer with our kernels, so that both can be timed."""
        mask, dtype = call.mask, call.q.dtype
        if not self.libraries or mask.sinks is not None or mask.spans is not None or self.shape.latent:
            return None
        key = dtype, mask.softcap
        if key not in self._chosen_libraries:
            self._chosen_libraries[key] = self._measure_libraries(rows, call, ours)
        return self._chosen_libraries[key]

    def _measure_libraries(
        self, rows: QueryRows, call: PrefillCall, ours: Callable[[], Result]
    ) -> Library | None:
        """Return the fastest library for this step. Return None if our kernels are faster, if no library supports the
        step, or if the step is too small to measure."""
        shape, dtype, softcap = self.shape, call.q.dtype, call.mask.softcap
        if rows.count_pairs(self._span) < MIN_LIBRARY_PAIRS / shape.heads:
            return None
        if (
            rows.context_lengths < 0
        ).any():  # only the kernel over pages supports sequences with more queries than tokens
            return None
        able = {x.name: x for x in self.libraries if x.supports(shape, dtype, self._span, softcap)}
        if not able:
            return None
        candidates = {name: partial(self._run_library, library, rows, call) for name, library in able.items()}
        sizes = size_class(shape, dtype, self._span, softcap, rows)
        return able.get(measure_fastest(sizes, {"kvloom": ours, **candidates}, self.device))

    def _run_library(
        self, library: Library, rows: QueryRows, call: PrefillCall
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._step is None:
            self._step = LibraryStep(rows, self.device)
        softcap = call.mask.softcap
        paged = PagedCall(call.q, call.k, call.v, call.tables, call.scale, self._span, softcap, call.out)
        out, lse = library.attend(self._step, paged)
        return out, lse if call.lse is None else call.lse.copy_(lse)

    def _run_kernels(
        self,
        rows: QueryRows,
        call: PrefillCall,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        scales: int,
        new_k: torch.Tensor | None,
        new_v: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        backend, short, long = self._choose(rows, call, k_scale is None)
        if backend == "cudnn" and not len(short):
            return self._batches.attend(rows, long, call, new_k, new_v)
        call = call.with_outputs()
        short = short[self._decode_leading_rows(rows, call, k_scale, v_scale) :]
        if len(short):
            self._attend_pages(rows, short, call, k_scale, v_scale, scales)
        if backend == "cudnn":
            return self._batches.attend(rows, long, call, new_k, new_v)
        if backend == "descriptors":
            return self._runs.attend(rows, long, call, new_k, new_v)
        return call.outputs()

    def _check(self, q: torch.Tensor, mask: Mask, tables: torch.Tensor, scale: float | None) -> QueryRows:
        rows = self._rows
        if rows is None:
            raise ValueError("no step is planned: call make(starts, lengths) before attend")
        if mask.span != self.span:
            raise ValueError(
                f"the plan is for {self.span}, the mask has {mask.span}: make a plan for the mask's span"
            )
        if mask.trees is not None:
            raise ValueError("draft trees belong to decode: use a decode plan")
        if scale is not None and not scale > 0:
            raise ValueError(f"scale {scale} must be positive")
        if q.shape[0] != rows.starts[-1]:
            raise ValueError(f"{q.shape[0]} queries, but the plan was made for {rows.starts[-1]}")
        if tables.shape[0] < len(rows.lengths):
            raise ValueError(f"{tables.shape[0]} table rows for {len(rows.lengths)} sequences")
        longest, block = int(rows.lengths.max(initial=0)), self.shape.page_tokens * self.part.count
        if tables.shape[1] * block < longest:
            raise ValueError(
                f"tables of {tables.shape[1]} blocks of {block} tokens end before the "
                f"longest sequence of {longest}"
            )
        if mask.spans is not None and self._ids is None:
            self._set_image_spans(mask.spans.cpu().numpy(), mask.spans)
            self._fetched = mask.spans.data_ptr()
        elif mask.spans is not None and self._fetched not in (None, mask.spans.data_ptr()):
            raise ValueError(
                "image ids (spans) must be equal in all layers of a step: call make again for others"
            )
        return rows

    def _choose(self, rows: QueryRows, call: PrefillCall, unscaled: bool) -> tuple[Backend, Ints, Ints]:
        """Return three values: a backend, the sequences that the kernel over pages computes, and the sequences that the
        backend computes. If the backend is "pages", the last list is empty. `unscaled` states that pages have no
        scales."""
        plain = call.mask.softcap is None and call.mask.spans is None and unscaled
        if self.backend not in (None, "pages") and not plain:
            raise ValueError(f"the backend {self.backend} takes no softcap, image or scale: use pages")
        if self.backend == "cudnn" and self._span.windowed:
            raise ValueError(f"cudnn takes full attention only, not {self._span}: use descriptors or pages")
        key = (call.q.dtype, plain)
        if key not in self._chosen:
            shape, queries = self.shape, rows.queries
            # A padded sequence may have more queries than tokens. Only the kernel over pages supports such sequences.
            long = (rows.context_lengths >= 0) & (
                queries >= (MIN_GATHERED_QUERIES if self.backend is None else 1)
            )
            backend = self.backend
            if backend is None:
                plain = plain and call.q.is_cuda and self.part == WHOLE
                whole = plain and not self._span.windowed
                cudnn = whole and cudnn_supports(
                    shape.heads, shape.kv_heads, shape.k_dim, shape.v_dim, call.q.dtype, call.q.device
                )
                backend = choose_backend(
                    shape, rows, np.flatnonzero(long), call.q.dtype, self._span, plain, cudnn
                )
            if backend == "pages":
                long[:] = False
            self._chosen[key] = backend, np.flatnonzero((queries > 0) & ~long), np.flatnonzero(long)
        return self._chosen[key]

    def _set_image_spans(self, host: npt.NDArray[np.int32], spans: torch.Tensor) -> None:
        """Copy the image ids `spans` to the device. `host` has the same ids on the host. Also compute `_reach`: for
        each query of an image, the position of the image's last token, which is also the last token that the query
        sees."""
        rows = self._rows
        assert rows is not None
        ids = host.astype(np.int64)
        if ids.shape != (int(rows.starts[-1]),):
            raise ValueError(
                f"spans {ids.shape} must have one image id for each of {rows.starts[-1]} queries"
            )
        of = np.arange(len(rows.lengths)).repeat(rows.queries)
        position = rows.context_lengths[of] + np.arange(len(ids)) - rows.starts[of]
        _, image = np.unique(np.stack((of, ids), 1), axis=0, return_inverse=True)
        ends = np.full(len(ids), -1, dtype=np.int64)
        np.maximum.at(ends, image.reshape(-1), position)
        self._reach = np.where(ids >= 0, ends[image.reshape(-1)], -1)
        self._ids = spans.to(self.device, torch.int32).contiguous()
        self._pages.clear()

    def _attend_pages(
        self,
        rows: QueryRows,
        chosen: Ints,
        call: PrefillCall,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        scales: int,
    ) -> None:
        out, lse = call.outputs()
        key = (call.q.dtype, len(chosen))  # all sequences of the step, or those with few queries
        if key not in self._pages:
            self._pages[key] = self._plan_blocks(rows, chosen, call.q.dtype)
        ids = None if call.mask.spans is None else self._ids
        for work in self._pages[key]:
            launch.attend_blocks(
                self.shape, work.tile, work.blocks, work.parts, work.part_lse, call.q, call.k, call.v, call.tables,
                call.mask, self._span, ids, call.scale, k_scale, v_scale, scales, out, lse,
            )  # fmt: skip
            if len(work.joins):
                launch.join_blocks(
                    self.shape, work.tile, work.joins, work.parts, work.part_lse, call.mask.sinks, out, lse
                )

    def _decode_leading_rows(
        self, rows: QueryRows, call: PrefillCall, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None
    ) -> int:
        """If the step begins with many sequences of one query, compute them with the decode kernels. Return their
        number, or 0."""
        if call.mask.spans is not None:
            return 0
        if self._decode is None:
            count = int(np.append((rows.queries != 1) | (rows.context_lengths < 0), True).argmax())
            self._decode = 0, None
            if 0 < self._min_decode_rows <= count <= PLAN_CAPACITIES[-1]:
                capacity = plan_capacity(count)
                if capacity not in self._decode_plans:
                    self._decode_plans[capacity] = DecodePlan(
                        self.shape, capacity, 1, self.span, self.device, part=self.part
                    )
                self._decode = count, self._decode_plans[capacity]
                at = -(-(count + 1) // 4) * 4  # aligned, as the compiled kernel expects
                ends = np.zeros(at + count, np.int32)
                ends[: count + 1], ends[at:] = np.arange(count + 1), rows.lengths[:count]
                sent = self._upload(ends)
                self._decode_plans[capacity].make(sent[: count + 1], sent[at:])
        count, plan = self._decode
        if plan is not None:
            out, lse = call.outputs()
            plan.attend(
                call.q[:count], call.k, call.v, call.tables, call.mask, call.scale, k_scale, v_scale,
                out[:count], lse[:count],
            )  # fmt: skip
        return count

    def _plan_blocks(self, rows: QueryRows, chosen: Ints, dtype: torch.dtype) -> list[_Blocks]:
        """Return the launches over pages: one with small tiles for sequences with few query rows, and one for all
        other sequences. A launch without sequences is left out."""
        shape, heights = self.shape, rows.queries[chosen] * self.shape.group
        found = []
        for mine in (heights <= SMALL_ROWS, heights > SMALL_ROWS):
            if not mine.any():
                continue
            tile = self.tile
            if tile is None or heights[mine].max() <= SMALL_ROWS < tile.rows:
                tile = choose_tile(shape, int(heights[mine].max()), dtype)
            programs = _processors(self.device) * tile.programs_per_processor
            blocks, joins, slots = block_list(
                rows, chosen[mine], shape.group, shape.kv_heads, self.span, tile, programs, self._reach,
                self.part, shape.page_tokens,
            )  # fmt: skip
            partial_rows = slots * shape.kv_heads * tile.rows
            found.append(
                _Blocks(
                    tile,
                    self._upload(blocks),
                    self._upload(joins),
                    torch.empty((max(partial_rows, 1), shape.v_dim), dtype=torch.float32, device=self.device),
                    torch.empty(max(partial_rows, 1), dtype=torch.float32, device=self.device),
                )
            )
        return found

    def _upload(self, listed: npt.NDArray[np.int32]) -> torch.Tensor:
        return upload(np.ascontiguousarray(listed), self.device)


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 16  # Triton's interpreter: enough programs that long blocks are split
    return torch.cuda.get_device_properties(device).multi_processor_count
