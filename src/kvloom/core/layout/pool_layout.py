"""From layer specs to a pool: groups, page sizes and the slab. Plain arithmetic, no memory.

    slab     |--------------------------------|   lent to one group at a time
    group A  |      page      |      page      |   pages_per_slab = 2
    group B  |            one page             |   pages_per_slab = 1

A block of a token group owns `runs` pages, each holding `run_layers` layers; a state owns `runs`
pages too. The layout picks the runs so that page sizes meet, the slab as a common multiple of
them, and pads where neither works, by MAX_WASTE of a slab at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from .layer_spec import LayerSpec

__all__ = ["HASH_TOKENS", "MAX_WASTE", "PageGroup", "PoolLayout"]

HASH_TOKENS = 16
"""Tokens under one name; a block is a multiple of it."""
MAX_WASTE = 0.05
"""The largest share of a slab that padding may take, per group."""
_ALIGN = 16
_MULTIPLES = 64
_COLUMN_COST = 64 * 1024
_WASTE_COST = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers that keep the same thing of the same tokens for the same time."""

    index: int
    spec: LayerSpec
    layers: tuple[str, ...]
    block_tokens: int
    runs: int
    column: int
    """Where this group's `runs` page ids begin in a row of page ids (token groups of the text axis
    share one numbering, state groups another, media groups a third)."""
    pages_per_slab: int
    page_stride: int
    """Bytes from one page to the next in the pool; the part over `page_bytes` is padding."""

    @property
    def name(self) -> str:
        lifetime = "" if self.spec.lifetime == "target" else f"{self.spec.lifetime} "
        span = f" {self.spec.visibility.size}" if self.spec.visibility.windowed else ""
        return f"{lifetime}{self.spec.kind}{span} #{self.index}"

    @property
    def run_layers(self) -> int:
        return -(-len(self.layers) // self.runs)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer in one page."""
        return _layer_bytes(self.spec, self.block_tokens)

    @property
    def page_bytes(self) -> int:
        return self.layer_bytes * self.run_layers

    @property
    def unit_bytes(self) -> int:
        """Bytes that one token (or one state) needs over all layers, without any padding."""
        return self.spec.bytes * len(self.layers)

    @property
    def columns(self) -> slice:
        return slice(self.column, self.column + self.runs)

    def locate(self, layer: str) -> tuple[int, int]:
        """Run and place within the run of a layer: (which page column, which layer in the page)."""
        try:
            return divmod(self.layers.index(layer), self.run_layers)
        except ValueError:
            raise KeyError(f"layer {layer!r} is not in group {self.name}") from None


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """The groups of one or several models in one pool, and the slab they share."""

    groups: tuple[PageGroup, ...]
    slab_bytes: int
    block_tokens: int

    @classmethod
    def build(
        cls, layers: Mapping[str, LayerSpec], block_tokens: int = HASH_TOKENS, granularity: int = _ALIGN
    ) -> PoolLayout:
        """Group `layers` (name → spec) and choose runs and slab; `granularity` divides the slab
        (2 MiB for elastic backing). Deterministic: the same specs give the same layout anywhere."""
        if block_tokens <= 0 or block_tokens % HASH_TOKENS:
            raise ValueError(f"block_tokens {block_tokens} is not a positive multiple of {HASH_TOKENS}")
        if granularity <= 0 or granularity % _ALIGN:
            raise ValueError(f"granularity {granularity} is not a positive multiple of {_ALIGN}")
        if not layers:
            raise ValueError("a layout needs at least one layer")
        members: dict[LayerSpec, list[str]] = {}
        for name, spec in layers.items():
            members.setdefault(spec, []).append(name)
        sizes = tuple((_layer_bytes(spec, block_tokens), len(names)) for spec, names in members.items())
        slab, cuts = _choose(sizes, granularity)
        groups = []
        next_column = {"token": 0, "state": 0, "media": 0}
        for index, ((spec, names), (runs, stride)) in enumerate(zip(members.items(), cuts, strict=True)):
            numbering = "media" if spec.axis == "media" else spec.unit
            column = next_column[numbering]
            next_column[numbering] += runs
            groups.append(
                PageGroup(index, spec, tuple(names), block_tokens, runs, column, slab // stride, stride)
            )
        return cls(tuple(groups), slab, block_tokens)

    def of(self, numbering: str) -> tuple[PageGroup, ...]:
        """The groups of one numbering: "token" (text), "state" or "media"."""
        return tuple(g for g in self.groups if _numbering(g.spec) == numbering)

    def width(self, numbering: str) -> int:
        """How many page ids one block (one state, one media block) has."""
        return sum(group.runs for group in self.of(numbering))

    def slabs_in(self, pool_bytes: int) -> int:
        return pool_bytes // self.slab_bytes

    def waste(self, group: PageGroup) -> float:
        """The share of a slab lent to `group` that no layer can use."""
        used = group.pages_per_slab * group.layer_bytes * len(group.layers) / group.runs
        return 1 - used / self.slab_bytes

    def bytes_per_token(self) -> int:
        """One text token in every layer that keeps it while in view."""
        return sum(g.unit_bytes for g in self.of("token"))

    def slab_bytes_for(self, length: int, media: Iterable[int] = (), states: int = 1) -> int:
        """Bytes of pool that one sequence of `length` text tokens and `media` runs occupies: the pages
        that its last query still needs, its states, and the padding of both."""
        block = self.block_tokens
        media = tuple(media)
        total = 0.0
        for group in self.groups:
            if group.spec.unit == "state":
                units = states
            elif group.spec.axis == "media":
                units = sum(-(-tokens // block) for tokens in media)
            else:
                first = group.spec.visibility.first_visible(max(0, length - 1)) // block
                units = -(-length // block) - first
            total += units * group.runs * self.slab_bytes / group.pages_per_slab
        return math.ceil(total)

    def table(self) -> list[dict[str, object]]:
        """One row a group, for people and for JSON."""
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


def _layer_bytes(spec: LayerSpec, block_tokens: int) -> int:
    units = block_tokens if spec.unit == "token" else 1
    return -(-spec.bytes * units // _ALIGN) * _ALIGN


@lru_cache(maxsize=256)
def _choose(sizes: tuple[tuple[int, int], ...], granularity: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """The slab and, for each group of (layer bytes, layers), its (runs, page stride).

    Tries every slab that is a small multiple of some group's page; each group takes the cut that
    costs least there. What costs: groups whose slab holds several pages (half a slab lies idle per
    sequence, and live pages can pin it), page ids per block, and padding.
    """
    slabs = {
        _round_up(layer * run * k, granularity)
        for layer, count in sizes
        for run in _run_lengths(count)
        for k in range(1, _MULTIPLES + 1)
    }
    # The least common multiple always fits, however large.
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


def _best_cut(layer: int, count: int, slab: int) -> tuple[float, int, int] | None:
    best = None
    for run in _run_lengths(count):
        page = layer * run
        pages = slab // page
        runs = -(-count // run)
        # Pages stand at equal strides, which must divide the slab for plain strided views; fewer
        # pages than `least` would waste too much.
        least = max(1, pages - _MULTIPLES, math.ceil((1 - MAX_WASTE) * slab * runs / (layer * count)))
        pages = next((n for n in range(pages, least - 1, -1) if slab % (n * _ALIGN) == 0), 0)
        if not pages:
            continue
        waste = 1 - pages * layer * count / runs / slab
        if waste > MAX_WASTE:
            continue
        pinned = slab if pages > 1 else 0
        cost = pinned + runs * _COLUMN_COST + waste * _WASTE_COST
        if best is None or cost < best[0]:
            best = (cost, runs, slab // pages)
    return best


@lru_cache(maxsize=1024)
def _run_lengths(count: int) -> tuple[int, ...]:
    """Run lengths worth trying: the shortest for each number of runs."""
    return tuple(sorted({-(-count // runs) for runs in range(1, count + 1)}))


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
