"""Pool layout: groups of layers, page sizes and the slab, computed from layer specs. Allocates no memory.

    slab     |--------------------------------|   cut into pages of one size at a time
    group A  |      page      |      page      |   pages_per_slab = 2
    group B  |            one page             |   pages_per_slab = 1

The layers of a group may be split over several pages of a block. A run is the set of layers that share one page. A
block of a token group, or a state of a state group, owns `runs` pages of `run_layers` layers each.

If possible, the layout chooses the runs so that the pages of all groups have the same size. The slab size is a common
multiple of the page sizes. If there is no suitable common multiple, pages are padded, by at most MAX_WASTE of a slab.

On several ranks, the layout uses the runs of the whole model if possible. Engines with different numbers of ranks then
store the same layers in a page, and can exchange pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from .context_part import WHOLE, ContextPart
from .layer_spec import LayerSpec

__all__ = ["HASH_TOKENS", "MAX_WASTE", "PageGroup", "PoolLayout"]

HASH_TOKENS = 16
"""Number of tokens that one block hash covers. The number of tokens of a block is a multiple of HASH_TOKENS."""
MAX_WASTE = 0.05
"""Largest padding of a group, as a fraction of a slab."""
_ALIGN = 16
_MULTIPLES = 64
_COLUMN_COST = 64 * 1024
_WASTE_COST = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers with equal specs: the same fields, visibility and lifetime. The layers may be split over `runs` pages per
    block. A slab has `pages_per_slab` pages of this group."""

    index: int
    spec: LayerSpec
    layers: tuple[str, ...]
    page_tokens: int
    """Tokens of a block that a page contains. With context parallelism, a page of full-attention layers contains only
    the tokens of one rank."""
    runs: int
    column: int
    """Index of the group's first page id among all page ids of a block. The group has `runs` page ids, from this index
    on. Token, state and media groups have separate lists."""
    pages_per_slab: int
    page_stride: int
    """Distance between two pages in the pool, in bytes. The bytes after `page_bytes` are padding."""
    parts: int = 1
    """Number of ranks between which each block is divided (context parallelism). A page contains the tokens of one
    rank."""

    @property
    def name(self) -> str:
        """Name of the group: lifetime, kind, window and index."""
        lifetime = "" if self.spec.lifetime == "target" else f"{self.spec.lifetime} "
        span = f" {self.spec.visibility.size}" if self.spec.visibility.windowed else ""
        return f"{lifetime}{self.spec.kind}{span} #{self.index}"

    @property
    def run_layers(self) -> int:
        """Number of layers that share one page."""
        return -(-len(self.layers) // self.runs)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer in one page."""
        return _layer_bytes(self.spec, self.page_tokens)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, without padding."""
        return self.layer_bytes * self.run_layers

    @property
    def unit_bytes(self) -> int:
        """Bytes of one token (or one state) over all layers, without padding."""
        return self.spec.bytes * len(self.layers)

    @property
    def columns(self) -> slice:
        """The group's columns in the block tables. A column has one page id for each block. The group has `runs` pages
        per block, so it has `runs` columns."""
        return slice(self.column, self.column + self.runs)

    def locate(self, layer: str) -> tuple[int, int]:
        """Return the index of the page that contains a layer, and the index of the layer in this page."""
        try:
            return divmod(self.layers.index(layer), self.run_layers)
        except ValueError:
            raise KeyError(f"layer {layer!r} is not in group {self.name}") from None


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """The layer groups of one or several models in one pool, and their slab size."""

    groups: tuple[PageGroup, ...]
    slab_bytes: int
    block_tokens: int
    part: ContextPart = WHOLE
    """The part of each block that full-attention layers store on this rank."""

    @classmethod
    def build(
        cls,
        layers: Mapping[str, LayerSpec],
        block_tokens: int = HASH_TOKENS,
        granularity: int = _ALIGN,
        part: ContextPart = WHOLE,
    ) -> PoolLayout:
        """Group `layers` (name → spec), and choose the slab size and the number of pages per block of each group.

        The slab size is a multiple of `granularity` (2 MiB for elastic memory). Full-attention layers store `part` of
        every block. Equal specs give equal layouts on every machine and on every rank.
        """
        if block_tokens <= 0 or block_tokens % HASH_TOKENS:
            raise ValueError(f"block_tokens {block_tokens} is not a positive multiple of {HASH_TOKENS}")
        if granularity <= 0 or granularity % _ALIGN:
            raise ValueError(f"granularity {granularity} is not a positive multiple of {_ALIGN}")
        if not layers:
            raise ValueError("a layout needs at least one layer")
        members: dict[LayerSpec, list[str]] = {}
        for name, spec in layers.items():
            members.setdefault(spec, []).append(name)
        divided = part.page_tokens(block_tokens)
        tokens = {spec: divided if _is_divisible(spec) else block_tokens for spec in members}
        sizes = _sizes(members, tokens)
        slab, cuts = _choose(sizes, granularity)
        whole = {spec.whole(): names for spec, names in members.items()}
        if (whole.keys() != members.keys() or part != WHOLE) and len(whole) == len(members):
            whole_tokens = dict.fromkeys(whole, block_tokens)
            slab, cuts = _choose_like(_sizes(whole, whole_tokens), sizes, granularity) or (slab, cuts)
        groups = []
        next_column = {"token": 0, "state": 0, "media": 0}
        for index, ((spec, names), (runs, stride)) in enumerate(zip(members.items(), cuts, strict=True)):
            numbering = "media" if spec.axis == "media" else spec.unit
            column = next_column[numbering]
            next_column[numbering] += runs
            parts = block_tokens // tokens[spec]
            groups.append(
                PageGroup(
                    index, spec, tuple(names), tokens[spec], runs, column, slab // stride, stride, parts
                )
            )
        return cls(tuple(groups), slab, block_tokens, part)

    def of(self, numbering: str) -> tuple[PageGroup, ...]:
        """Return the groups of one kind: "token" (text), "state" or "media". Each kind has separate arrays of page
        ids."""
        return tuple(g for g in self.groups if _numbering(g.spec) == numbering)

    def width(self, numbering: str) -> int:
        """Return the number of page ids of one block, or of one state, over all groups of a kind. `numbering` is the
        kind: "token" or "media" for a block, "state" for a state."""
        return sum(group.runs for group in self.of(numbering))

    def whole(self) -> PoolLayout:
        """Return the layout of whole pages, which tiers store. On one of several ranks, a page has some heads of each layer
        (tensor parallelism), or some tokens of a block (context parallelism). The whole page has the same layers with all
        heads and tokens. On one rank, this is the layout itself."""
        layers = {name: group.spec.whole() for group in self.groups for name in group.layers}
        if self.part == WHOLE and all(group.spec.whole() == group.spec for group in self.groups):
            return self
        found = PoolLayout.build(layers, self.block_tokens)
        if [group.runs for group in found.groups] == [group.runs for group in self.groups]:
            return found
        groups = []
        for own in self.groups:
            tokens = own.page_tokens * own.parts
            group = replace(
                own, spec=own.spec.whole(), page_tokens=tokens, pages_per_slab=1, page_stride=0, parts=1
            )
            groups.append(replace(group, page_stride=group.page_bytes))
        return replace(found, groups=tuple(groups), slab_bytes=max(group.page_stride for group in groups))

    def slabs_in(self, pool_bytes: int) -> int:
        """Return the number of whole slabs in `pool_bytes`."""
        return pool_bytes // self.slab_bytes

    def waste(self, group: PageGroup) -> float:
        """Return the fraction of a slab of `group` that is padding."""
        used = group.pages_per_slab * group.layer_bytes * len(group.layers) / group.runs
        return 1 - used / self.slab_bytes

    def bytes_per_token(self) -> int:
        """Return the bytes of one text token over all layers that store it. With context parallelism, this is the mean
        over the tokens of a block."""
        return sum(g.unit_bytes * g.page_tokens // self.block_tokens for g in self.of("token"))

    def slab_bytes_for(self, length: int, media: Iterable[int] = (), states: int = 1) -> int:
        """Return the number of pool bytes that a sequence of `length` text tokens uses. `media` contains the number of
        tokens of each image, and `states` is the number of state snapshots and live states. Only pages that the last
        query sees count. The result includes padding."""
        block = self.block_tokens
        media = tuple(media)
        total = 0.0
        for group in self.groups:
            if group.spec.unit == "state":
                units = states
            elif group.spec.axis == "media":
                units = sum(-(-tokens // block) for tokens in media)
            else:
                units = len(group.spec.visibility.visible_blocks(length - 1, block)) if length else 0
            total += units * group.runs * self.slab_bytes / group.pages_per_slab
        return math.ceil(total)

    def table(self) -> list[dict[str, object]]:
        """Return one dictionary per group, for printing and JSON."""
        return [
            {
                "group": group.name,
                "kind": group.spec.kind,
                "span": str(group.spec.visibility),
                "layers": len(group.layers),
                "fields": [f"{f.name}:{f.dtype}{list(f.shape)}" for f in group.spec.fields],
                "bytes_per_unit": group.unit_bytes,
                "pages_per_block": group.runs,
                "page_bytes": group.page_bytes,
                "pages_per_slab": group.pages_per_slab,
                "waste": round(self.waste(group), 6),
            }
            for group in self.groups
        ]


def _numbering(spec: LayerSpec) -> str:
    return "media" if spec.axis == "media" else spec.unit


def _is_divisible(spec: LayerSpec) -> bool:
    """Return whether context parallelism divides the blocks of a layer between ranks. A draft model runs on one rank, so
    its blocks are whole."""
    is_full = spec.unit == "token" and spec.axis == "text" and not spec.visibility.windowed
    return is_full and spec.lifetime != "draft"


def _sizes(
    members: Mapping[LayerSpec, list[str]], tokens: Mapping[LayerSpec, int]
) -> tuple[tuple[int, int], ...]:
    """Return (bytes of one layer, number of layers) for each group."""
    return tuple((_layer_bytes(spec, tokens[spec]), len(names)) for spec, names in members.items())


def _layer_bytes(spec: LayerSpec, page_tokens: int) -> int:
    units = page_tokens if spec.unit == "token" else 1
    return -(-spec.bytes * units // _ALIGN) * _ALIGN


@lru_cache(maxsize=256)
def _choose(sizes: tuple[tuple[int, int], ...], granularity: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return the slab size, and (runs, page stride) for each group. A run is the set of layers that share one
    page. `sizes` contains (bytes of a layer, number of layers) for each group.

    Tries every slab size that is a small multiple of a group's page. For each slab size, chooses the cheapest
    runs of each group. The cost has three parts: padding, page ids per block, and a part for slabs with several
    pages. A slab with several pages cannot be freed while one of its pages is in use. On average, one such slab
    per sequence is half empty.
    """
    slabs = {
        _round_up(layer * run * k, granularity)
        for layer, count in sizes
        for run in _run_lengths(count)
        for k in range(1, _MULTIPLES + 1)
    }
    # The least common multiple is always possible, even above the usual limit.
    slabs.add(math.lcm(granularity, *(layer * count for layer, count in sizes)))
    best: tuple[float, int, tuple[tuple[int, int], ...]] | None = None
    for slab in sorted(slabs):
        cost, cuts = 0.0, []
        for layer, count in sizes:
            cut = _best_cut(layer, count, slab)
            if cut is None or (best is not None and cost >= best[0]):
                break
            cost += cut[0]
            cuts.append(cut[1:])
        else:
            if best is None or cost < best[0]:
                best = (cost, slab, tuple(cuts))
    assert best is not None
    return best[1], best[2]


@lru_cache(maxsize=256)
def _choose_like(
    whole: tuple[tuple[int, int], ...], sizes: tuple[tuple[int, int], ...], granularity: int
) -> tuple[int, tuple[tuple[int, int], ...]] | None:
    """Return the same as `_choose`, but with the runs that `_choose` selects for the `whole` model. Return None if the
    slab would be larger than a slab of the whole model.
    """
    most, cuts = _choose(whole, granularity)
    runs = [-(-count // runs) for (_, count), (runs, _) in zip(whole, cuts, strict=True)]
    steps = {
        layer * run * k for (layer, _), run in zip(sizes, runs, strict=True) for k in range(1, _MULTIPLES + 1)
    }
    best: tuple[float, int, tuple[tuple[int, int], ...]] | None = None
    for slab in sorted({_round_up(step, granularity) for step in steps}):
        found = [_best_cut(*size, slab, run) for size, run in zip(sizes, runs, strict=True)]
        fitting = [cut for cut in found if cut is not None]
        cost = sum(cut[0] for cut in fitting)
        if slab <= most and len(fitting) == len(found) and (best is None or cost < best[0]):
            best = cost, slab, tuple(cut[1:] for cut in fitting)
    return None if best is None else best[1:]


def _best_cut(layer: int, count: int, slab: int, only: int | None = None) -> tuple[float, int, int] | None:
    """Return how a group is cut into pages: the cost, the runs (pages per block) and the page stride. `layer` is the
    number of bytes of a layer, `count` the number of layers, and `slab` the size of a slab. `only` sets the number of
    layers of a page. By default, the number with the lowest cost is chosen. Return None if no page fits.
    """
    best = None
    for run in _run_lengths(count) if only is None else (only,):
        page = layer * run
        pages = slab // page
        runs = -(-count // run)
        # The stride must divide the slab, so that views have constant strides. Fewer pages than `least`
        # waste too much.
        least = max(1, pages - _MULTIPLES, math.ceil((1 - MAX_WASTE) * slab * runs / (layer * count)))
        pages = next((n for n in range(pages, least - 1, -1) if slab % (n * _ALIGN) == 0), 0)
        if not pages:
            continue
        waste = 1 - pages * layer * count / runs / slab
        if waste > MAX_WASTE:
            continue
        fragmented = slab if pages > 1 else 0
        cost = fragmented + runs * _COLUMN_COST + waste * _WASTE_COST
        if best is None or cost < best[0]:
            best = (cost, runs, slab // pages)
    return best


@lru_cache(maxsize=1024)
def _run_lengths(count: int) -> tuple[int, ...]:
    """Return the numbers of layers per page to try, for a group of `count` layers: `count` / pages, rounded up, for
    every possible number of pages."""
    return tuple(sorted({-(-count // runs) for runs in range(1, count + 1)}))


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
