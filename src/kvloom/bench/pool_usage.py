"""Measures the waste of the pages in use, and how many requests fit into a pool. Needs no model and no page bytes.

waste     fraction of the bytes in use that running sequences do not need: the unused end of the last block of a
          sequence, tokens before its window in the first block of the window, and padding
capacity  the number of sequences that fit: sequences are opened and extended until one does not fit
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.core import KVCache, LayerSpec, PoolLayout, Visibility
from kvloom.models.specs import ModelSpec

__all__ = ["Capacity", "PeakUsage", "capacity", "measure_capacity", "waste"]

Ids = npt.NDArray[np.int32]


def waste(cache: KVCache) -> tuple[int, float]:
    """Return the bytes in use, and the wasted fraction of them (see the module docstring).

    Free pages in occupied slabs do not count as in use. A page that several sequences use counts once.
    O(sequences and their blocks)."""
    rows = np.flatnonzero(cache.reserved_blocks)
    layout = cache.layout
    in_use = cache.inspect.bytes_in_use
    if not in_use or not rows.size:
        return in_use, 0.0
    lengths = cache.lengths[rows]
    unneeded = padding = mapped = 0.0
    padded = any(layout.waste(group) for group in layout.groups)
    for group in layout.groups:
        if group.spec.unit == "state":
            pages = rows.size
        elif group.spec.axis == "text":
            table = cache.table(group.index)[0, :, : int(cache.reserved_blocks[rows].max())]
            unneeded += (
                _unneeded_tokens(table, rows, lengths, group.spec.visibility, layout.block_tokens)
                * group.unit_bytes
            )
            pages = int(np.count_nonzero(table[rows])) if padded else 0
        else:
            continue
        mapped += pages * group.runs * group.page_stride
        padding += pages * group.runs * group.page_stride * layout.waste(group)
    return in_use, float(unneeded / in_use + (padding / mapped if padded else 0.0))


def _unneeded_tokens(
    table: Ids, rows: npt.NDArray[np.intp], lengths: npt.NDArray[np.int64], span: Visibility, block: int
) -> int:
    """Return how many token slots are wasted in the pages of some sequences. A slot is wasted if no sequence can read
    it from its last token.

    - `table` is the block table of a layer group [rows, blocks].
    - `rows` are the rows of the sequences in it, and `lengths` are their numbers of tokens.
    - `block` is the number of tokens of a block.
    """
    last = np.maximum(lengths - 1, 0)
    first = np.where(lengths > 0, span.first_visible_each(last), 0)
    low, high = first // block, -(-lengths // block)  # blocks [low, high) are needed
    before, from_ = int(low.max()), int(high.min())
    outside = np.count_nonzero(table[rows, :before][np.arange(before) < low[:, None]])
    outside += np.count_nonzero(table[rows, from_:][np.arange(from_, table.shape[1]) >= high[:, None]])
    some = np.flatnonzero(lengths)
    unneeded = outside * block + _sum_once(
        table[rows[some], high[some] - 1], high[some] * block - lengths[some]
    )
    if span.windowed:
        unneeded += _sum_once(table[rows[some], low[some]], first[some] - low[some] * block)
    return int(unneeded)


def _sum_once(pages: Ids, tokens: npt.NDArray[np.int64]) -> int:
    """Return the sum of `tokens[i]` over all distinct pages, where `tokens[i]` belongs to `pages[i]`. If a page occurs
    several times, its smallest number counts. Page 0 (no page) does not count."""
    unique, place = np.unique(pages, return_inverse=True)
    least = np.full(unique.size, np.iinfo(np.int64).max)
    np.minimum.at(least, place, tokens)
    return int(least[unique > 0].sum())


class PeakUsage:
    """Measures the waste when the most pages are in use. The waste changes a lot if many blocks become full in the
    same step. The result is therefore the mean of several samples around this moment.
    """

    SHARE = 0.01
    """Largest share of the run time that samples may take."""
    NEAR = 0.95

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._running = 0
        self._seen: list[tuple[int, float]] = []
        self._next = 0.0

    def sample(self) -> None:
        """Take a sample of the waste, unless samples would take more than SHARE of the run time."""
        begin = time.perf_counter()
        if begin < self._next:
            return
        self._running = max(self._running, int(np.count_nonzero(self._cache.reserved_blocks)))
        self._seen.append(waste(self._cache))
        end = time.perf_counter()
        self._next = end + (end - begin) / self.SHARE

    def figures(self) -> dict[str, float]:
        most = max((in_use for in_use, _ in self._seen), default=0)
        near = [share for in_use, share in self._seen if in_use >= self.NEAR * most]
        mean = sum(near) / len(near) if near else 0.0
        pool = (self._cache.usable_slabs + 1) * self._cache.layout.slab_bytes
        wasted = max((in_use * share for in_use, share in self._seen), default=0.0)
        return {
            "peak_running": self._running,
            "peak_bytes": most,
            "waste": mean,
            "pool_waste": wasted / pool,
        }


@dataclass(frozen=True, slots=True)
class Capacity:
    """The number of requests of `tokens` tokens that fit into a pool together: as measured (`kvloom`, `uniform`), and
    as planned by `kvloom plan` (`planned`, `planned_uniform`).

    `kvloom` frees the pages that a layer can no longer read. `uniform` keeps all pages of all layers, as if every layer
    had full attention.
    """

    model: str
    tokens: int
    pool_bytes: int
    kvloom: int
    uniform: int
    planned: int
    planned_uniform: int

    @property
    def ratio(self) -> float:
        return self.kvloom / self.uniform if self.uniform else float("inf")

    @property
    def agrees(self) -> bool:
        return (self.kvloom, self.uniform) == (self.planned, self.planned_uniform)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio if self.uniform else None, "agrees": self.agrees}


def measure_capacity(layers: Mapping[str, LayerSpec], tokens: int, pool_bytes: int, chunk: int = 2048) -> int:
    """Return how many distinct sequences of `tokens` tokens fit into a pool together.

    Each sequence is extended in chunks, as in an engine, so that pages outside windows are freed. If pages are missing
    for a chunk, a smaller chunk is tried."""
    layout = PoolLayout.build(layers)
    most = pool_bytes // layout.slab_bytes_for(tokens) + 2
    # Slab 0 is reserved for the engine.
    cache = KVCache(layout, layout.slabs_in(pool_bytes) + 1, max_sequences=most, max_tokens=tokens)
    for count in range(most):
        prompt = np.arange(tokens, dtype=np.int32) % 4096 + 4096 * (count + 1)
        sequence = cache.open(cache.match(prompt))
        size = chunk
        while sequence.length < tokens:
            part = prompt[sequence.length :][:size]
            if sequence.next_checkpoint is not None:
                part = part[: sequence.next_checkpoint - sequence.length]
            if not sequence.extend(len(part)):
                cache.take_copies()
                sequence.commit(part)
            elif size > 1:
                size //= 2  # windows free pages for the next tokens
            else:
                return count
    raise AssertionError(f"more than {most} sequences fit: the estimate is wrong")


def capacity(spec: ModelSpec, tokens: int, pool_bytes: int) -> Capacity:
    """Measure how many requests fit into a pool, and compute the planned number. Needs no weights and no device."""
    from kvloom.plan import Load, make_plan

    plan = make_plan(spec, Load(tokens), gpu_memory=pool_bytes)
    whole = {name: replace(layer, visibility=Visibility("full")) for name, layer in spec.layers.items()}
    fit = {name: scheme.max_requests for name, scheme in plan.schemes.items()}
    assert fit["kvloom"] is not None
    assert fit["uniform"] is not None
    return Capacity(
        spec.name, tokens, pool_bytes,
        measure_capacity(spec.layers, tokens, pool_bytes), measure_capacity(whole, tokens, pool_bytes),
        fit["kvloom"], fit["uniform"],
    )  # fmt: skip
