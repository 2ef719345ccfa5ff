"""A cache with simulated bytes: every page slot records which prefix was written to it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from kvloom.core import (
    CacheControl,
    Field,
    KVCache,
    LayerSpec,
    Media,
    PoolLayout,
    Sequence,
    VirtualClock,
    Visibility,
    attention_fields,
)


def attention(span: Visibility | None = None, heads: int = 1, **kind: str) -> LayerSpec:
    return LayerSpec("token", attention_fields(heads, 16, "bf16"), span or Visibility("full"), **kind)  # type: ignore[arg-type]


def state(size: int = 1024) -> LayerSpec:
    return LayerSpec("state", (Field("conv", (size // 4,), "bf16"), Field("recurrent", (size // 8,), "fp32")))


LAYOUTS: dict[str, dict[str, LayerSpec]] = {
    "full": {f"l{i}": attention() for i in range(2)},
    "sliding": {f"l{i}": attention(Visibility("sliding", 40)) for i in range(2)},
    "sliding+full": {
        **{f"s{i}": attention(Visibility("sliding", 40), heads=256) for i in range(4)},  # two pages a block
        **{f"f{i}": attention(heads=256) for i in range(2)},
    },
    "chunked+full": {"c": attention(Visibility("chunked", 48)), "f": attention()},
    "state": {f"m{i}": state() for i in range(2)},
    "state+full": {**{f"m{i}": state(2048) for i in range(3)}, "f": attention()},
    "state+sliding+full": {
        "m": state(6144),
        **{f"s{i}": attention(Visibility("sliding", 24)) for i in range(2)},
        "f": attention(),
    },
    "several pages a slab": {
        "m": state(4096),
        "n": state(3000),
        "f": attention(),
        "d": attention(lifetime="draft"),
    },
    "several pages a slab, every kind": {
        "m": state(512),
        "f": attention(heads=3),
        "s": attention(Visibility("sliding", 40), heads=5),
        "x": attention(axis="media", heads=3),
    },
    "cross": {"f": attention(), "x": attention(axis="media")},
}


def prefix_hash(tokens: list[int], root: bytes) -> bytes:
    return hashlib.blake2b(root + np.array(tokens, np.int64).tobytes(), digest_size=8).digest()


@dataclass
class Open:
    sequence: Sequence
    tokens: list[int]
    prompt: list[int]
    control: CacheControl
    media: tuple[Media, ...] = ()


@dataclass
class World:
    cache: KVCache
    clock: VirtualClock
    bytes_: dict[tuple[int, int], dict[object, bytes]] = field(default_factory=dict)
    opened: list[Open] = field(default_factory=list)
    stored: list[tuple[bytes, list[int]]] = field(default_factory=list)
    mapped: set[int] = field(default_factory=set)
    """Slabs that have memory; the rest must not be touched."""

    def __post_init__(self) -> None:
        self.mapped = set(range(self.cache.state.pool.slabs))

    # -- what an engine does ----------------------------------------------------------------------

    def grow(self, n: int) -> None:
        slabs = self.cache.unbacked_slabs(n).tolist()
        assert len(slabs) == n
        assert self.mapped.isdisjoint(slabs)
        self.mapped.update(slabs)
        self.cache.grow(slabs)

    def shrink(self, n: int) -> int:
        """Remove slabs and their recorded contents; return how many were removed."""
        slabs = self.cache.shrink(n).tolist()
        assert len(set(slabs)) == len(slabs) <= n
        assert 0 not in slabs
        assert self.mapped.issuperset(slabs)
        self.mapped.difference_update(slabs)
        for c in self.cache.state.pool.classes:
            for page in [p for cls, p in self.bytes_ if cls == c.index and p // c.per_slab in slabs]:
                del self.bytes_[c.index, page]
        return len(slabs)

    def _touch(self, cls: int, page: int) -> None:
        slab = page // self.cache.state.pool.classes[cls].per_slab
        assert slab in self.mapped, f"page {page} of class {cls} has no memory"

    def run_copies(self) -> None:
        strides = {self.cache.layout.slab_bytes // c.per_slab: c.index for c in self.cache.state.pool.classes}
        for batch in self.cache.take_copies():
            cls = strides[batch.page_stride]
            assert not set(batch.source.tolist()) & set(batch.target.tolist())
            assert len(set(batch.target.tolist())) == batch.target.size
            for page in batch.source.tolist() + batch.target.tolist():
                self._touch(cls, page)
            moved = [dict(self.bytes_.get((cls, s), {})) for s in batch.source.tolist()]
            for target, content in zip(batch.target.tolist(), moved, strict=True):
                # A page of another size may have stood here: its bytes are gone.
                self._wipe(cls, target)
                self.bytes_[cls, target] = content

    def _wipe(self, cls: int, page: int) -> None:
        per_slab = self.cache.state.pool.classes[cls].per_slab
        slab = page // per_slab
        for other in self.cache.state.pool.classes:
            if other.index != cls:
                for i in range(slab * other.per_slab, (slab + 1) * other.per_slab):
                    self.bytes_.pop((other.index, i), None)

    def _write(self, cls: int, page: int, slot: object, value: bytes) -> None:
        assert page > 0, "written to no page"
        self._touch(cls, page)
        self._wipe(cls, page)
        self.bytes_.setdefault((cls, page), {})[slot] = value

    def _columns(self, numbering: str) -> list[tuple[int, int, Visibility]]:
        """Return (column, size class, span) of a kind of rows: token, state or media."""
        return [
            (column, self.cache.state.pool.class_of[g.index], g.spec.visibility)
            for g in self.cache.layout.of(numbering)
            for column in range(g.columns.start, g.columns.stop)
        ]

    def step(self, item: Open, tokens: list[int], draft: bool = False) -> None:
        """Compute `tokens` after what the sequence has (they are reserved) and commit them. A step that
        verifies a `draft` brings the states up to the tokens before it, and no further."""
        self.run_copies()
        seq, cache = item.sequence, self.cache
        self.verify(item)
        start = seq.length
        assert start == len(item.tokens)
        after = item.tokens + tokens
        for position in range(start, len(after)):
            value = prefix_hash(after[: position + 1], seq.root.hash)
            block, slot = divmod(position, cache.block_tokens)
            for column, cls, _ in self._columns("token"):
                self._write(
                    cls, int(cache.block_tables.tables[column, seq.row, block]), (column, slot), value
                )
        reached = prefix_hash(item.tokens if draft else after, seq.root.hash)
        for column, cls, _ in self._columns("state"):
            self._write(cls, int(cache.block_tables.states[column, seq.row]), "state", reached)
        for media in item.media:
            if media.start < len(after) and self.cache.state.media.width:
                for i, row in enumerate(seq.media_rows(media.digest).tolist()):
                    for column, cls, _ in self._columns("media"):
                        key = seq.media_root + media.digest
                        if seq.length <= media.start:
                            self._write(cls, row[column], ("media", column, i), key)
        ids = np.maximum(np.array(tokens, np.int32), 0)  # media ids are given as placeholders
        seq.commit(ids, start if draft else None)
        item.tokens = after

    # -- what must hold ---------------------------------------------------------------------------

    def verify(self, item: Open) -> None:
        """Check that everything the next query of a sequence reads was written for it."""
        seq, cache = item.sequence, self.cache
        length = seq.length
        hashes = {}
        for column, cls, span in self._columns("token"):
            for position in range(span.first_visible(length), length):
                block, slot = divmod(position, cache.block_tokens)
                page = int(cache.block_tables.tables[column, seq.row, block])
                expected = hashes.setdefault(
                    position, prefix_hash(item.tokens[: position + 1], seq.root.hash)
                )
                assert page > 0, f"no page for position {position} of {length}, column {column}"
                assert self.bytes_[cls, page].get((column, slot)) == expected, (
                    f"wrong bytes at {position} of {length}"
                )
        if seq.state_length and cache.has_states and cache.block_tables.states[0, seq.row]:
            so_far = prefix_hash(item.tokens[: seq.state_length], seq.root.hash)
            for column, cls, _ in self._columns("state"):
                page = int(cache.block_tables.states[column, seq.row])
                assert self.bytes_[cls, page].get("state") == so_far, "wrong state"
        for media in item.media:
            if media.stop <= length and cache.state.media.width:
                for i, row in enumerate(seq.media_rows(media.digest).tolist()):
                    for column, cls, _ in self._columns("media"):
                        assert (
                            self.bytes_[cls, row[column]][("media", column, i)]
                            == seq.media_root + media.digest
                        )

    def check(self) -> None:
        self.cache.check()
        self._check_memory()
        for item in self.opened:
            self.run_copies()
            self.verify(item)
        self.cache.check()

    def _check_memory(self) -> None:
        """Check that all referenced pages have memory, and that they and the free pages are all of it."""
        pool, rows = self.cache.state.pool, self.cache.block_tables
        used: set[int] = set()
        for c in pool.classes:
            pages = np.flatnonzero((c.in_use > 0) | (c.cached > 0))
            used.update((pages // c.per_slab).tolist())
            assert pages.size == c.in_use_pages + c.cached_pages
        assert used <= self.mapped - {0}
        assert len(used) + pool.free_slabs == len(self.mapped) - 1 == pool.slabs - 1
        for numbering, tables in (("token", rows.tables), ("state", rows.states)):
            for column, cls, _ in self._columns(numbering):
                named = np.unique(tables[column] // pool.classes[cls].per_slab)
                assert self.mapped.issuperset(named.tolist()), (
                    f"{numbering} column {column} names lost memory"
                )


def make_world(kind: str, slabs: int, block_tokens: int = 16, **options: object) -> World:
    clock = VirtualClock()
    layout = PoolLayout.build(LAYOUTS[kind], block_tokens)
    cache = KVCache(layout, slabs, clock=clock, max_sequences=8, max_tokens=1024, **options)  # type: ignore[arg-type]
    return World(cache, clock)


# -- what an engine does, shared by the feature tests ------------------------------------------------

WITH_STATES = sorted(
    k for k, layers in LAYOUTS.items() if any(spec.unit == "state" for spec in layers.values())
)


def prompt_of(n: int, seed: int = 0) -> list[int]:
    """Return `n` tokens that differ from those of every other seed from the first token on."""
    return [(seed * 7919 + i * 31) % 50000 + 1 for i in range(n)]


def start(
    world: World, prompt: list[int], control: CacheControl | None = None, media: tuple[Media, ...] = ()
) -> Open:
    """Look a prompt up and open a sequence; nothing is computed yet."""
    cache = world.cache
    control = control or CacheControl()
    match = cache.match(prompt, control, media)
    sequence = cache.open(match)
    seen = np.frombuffer(match.data, np.int32).tolist()
    item = Open(sequence, seen[: sequence.length], seen, control, media)
    world.opened.append(item)
    return item


def run(world: World, item: Open, tokens: list[int] | None = None) -> Open:
    """Compute `tokens` (by default the rest of the prompt); steps end where a snapshot is wanted."""
    left = item.prompt[len(item.tokens) :] if tokens is None else list(tokens)
    while left:
        boundary = item.sequence.next_checkpoint
        n = len(left) if boundary is None else min(len(left), boundary - item.sequence.length)
        assert item.sequence.extend(n) == 0, "out of pages"
        world.step(item, left[:n])
        left = left[n:]
    return item


def serve(
    world: World, prompt: list[int], control: CacheControl | None = None, media: tuple[Media, ...] = ()
) -> Open:
    return run(world, start(world, prompt, control, media))


def finish(world: World, item: Open) -> None:
    world.opened.remove(item)
    item.sequence.close()
    world.check()


def cached(
    world: World, prompt: list[int], control: CacheControl | None = None, media: tuple[Media, ...] = ()
) -> int:
    """Run a request from its prompt to its end; return where it resumed."""
    item = serve(world, prompt, control, media)
    resumed = item.sequence.resumed
    finish(world, item)
    return resumed


def slabs_for(kind: str, tokens: int, states: int = 2) -> int:
    """Return the slabs for one sequence of `tokens` tokens, one more block, and `states` states."""
    slabs = 1
    for group in PoolLayout.build(LAYOUTS[kind]).groups:
        units = states if group.spec.unit == "state" else -(-tokens // 16) + 1
        slabs += -(-units * group.runs // group.pages_per_slab)
    return slabs
