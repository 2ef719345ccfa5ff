"""The fleet index stores which worker has which blocks, and in which medium. If events are lost, there are fewer hits,
but answers stay correct.

    prompt hashes ──▶ prefix in GPU ──▶ in GPU or CPU ──▶ in GPU, CPU or DISK ──▶ …      one HashIndex per medium

Events of the workers fill one index per medium. Another index contains expected blocks: a worker will have them soon,
because the router sent it a request with these blocks. When the worker has computed an expected block, its events
report the block, and the block is no longer expected. For a worker without events, expected blocks stay.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvloom.core import (
    HASH_BYTES,
    HASH_TOKENS,
    Field,
    HashIndex,
    LayerSpec,
    PageGroup,
    Visibility,
    hash_chain,
    token_bytes,
)
from kvloom.events_wire import (
    GPU,
    MEDIA,
    AllBlocksCleared,
    BlockStored,
    EventBatch,
    WireHash,
    wire_hash,
    wire_hashes,
)

__all__ = ["FleetIndex", "Group", "WorkerBlocks"]

MAIN_KINDS = (None, "full_attention", "mla_attention", "sink_full_attention")
"""Kinds of layer groups in which every token of the prompt needs a page. None stands for events that state no kind."""
MAX_EXPECTED = 200_000
"""Largest number of expected blocks per worker. For a worker without events, this is the assumed size of its cache."""


@dataclass(frozen=True, slots=True)
class Group:
    """A layer group of the model: index, kind (full, sliding, chunked, state) and window."""

    index: int = 0
    kind: str = "full"
    window: int = 0

    def page_group(self) -> PageGroup:
        """Return the group in the form that the hash index reads."""
        unit, visibility = ("state", Visibility("full")) if self.kind == "state" else ("token", Visibility(self.kind, self.window))  # fmt: skip
        spec = LayerSpec(unit, (Field("kv", (1,), "int8"),), visibility)  # type: ignore[arg-type]
        return PageGroup(self.index, spec, (), HASH_TOKENS, 1, 0, 1, 1)


@dataclass(slots=True)
class WorkerBlocks:
    """The data of the index about one worker, in addition to its blocks.

    - `number`: the number of the worker in the index.
    - `trusts_hashes`: the worker computes block hashes like `kvloom.core`. Otherwise the worker is foreign, such as
      vLLM, and the router hashes the tokens in its events itself, starting from `root`.
    - `names`: maps a foreign hash to the router's hashes of the same block.
    - `has_events`: the worker has sent events.
    """

    number: int
    trusts_hashes: bool = True
    root: bytes = bytes(HASH_BYTES)
    has_events: bool = False
    names: dict[WireHash, list[bytes]] = field(default_factory=dict)
    expected: OrderedDict[int, None] = field(default_factory=OrderedDict)
    """Expected blocks of the worker, oldest first."""


class FleetIndex:
    """The blocks of all workers that serve one model. Not thread-safe."""

    def __init__(self, groups: Sequence[Group] = (Group(),)) -> None:
        self.groups = tuple(groups)
        pages = [group.page_group() for group in groups]
        self._known = {group.index for group in groups}
        self._media: dict[str, HashIndex[int]] = {medium: HashIndex(pages, False) for medium in MEDIA}
        self._expected: HashIndex[int] = HashIndex([Group().page_group()], False)
        self._workers: dict[str, WorkerBlocks] = {}
        self._free: list[int] = []
        self._names: list[str] = []
        """Name of each worker, by its number. The name is "" if the number is free."""

    def __len__(self) -> int:
        return sum(len(index) for index in self._media.values())

    @property
    def workers(self) -> Iterable[str]:
        return self._workers.keys()

    def counts(self, worker: str) -> dict[str, int]:
        """Return the number of blocks of a worker in each medium, from its events."""
        blocks = self._workers.get(worker)
        place = "" if blocks is None else str(blocks.number)
        return {medium: index.count(place) for medium, index in self._media.items()}

    def add(self, worker: str, trusts_hashes: bool = True, root: bytes = bytes(HASH_BYTES)) -> None:
        """Add a worker without blocks. For `trusts_hashes` and `root` see `WorkerBlocks`. Does nothing if the index has
        the worker."""
        if worker in self._workers:
            return
        if self._free:
            number = self._free.pop()
            self._names[number] = worker
        else:
            number = len(self._names)
            self._names.append(worker)
        for index in (*self._media.values(), self._expected):
            assert index.add_place(str(number)) == number
        self._workers[worker] = WorkerBlocks(number, trusts_hashes, root)

    def remove(self, worker: str) -> Iterator[None]:
        """Remove a worker. From now on, `lengths` leaves the worker out, and `add` adds it again without blocks.

        Each iteration of the result removes a part of the blocks, so that other tasks can run between two iterations.
        The caller must iterate to the end, because the worker's number is free only then.
        """
        blocks = self._workers.pop(worker, None)
        if blocks is None:
            return iter(())
        self._names[blocks.number] = ""
        return self._forget(blocks.number)

    def _forget(self, number: int) -> Iterator[None]:
        for index in (*self._media.values(), self._expected):
            yield from index.forgetting(str(number))
        self._free.append(number)

    def apply(self, worker: str, batch: EventBatch) -> None:
        """Apply a batch of a worker's events. Takes about 0.3 µs per block."""
        blocks = self._workers.get(worker)
        if blocks is None:
            return
        place = str(blocks.number)
        blocks.has_events = True
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.clear(worker)
                continue
            index = self._media.get(event.medium or GPU, self._media["STORAGE"])
            if isinstance(event, BlockStored):
                group = self._group(event.group_idx, event.kv_cache_spec_kind, blocks)
                if group is None:
                    continue
                if not blocks.trusts_hashes:
                    self._store_foreign(index, blocks, event)
                    continue
                hashes = _integers(event.block_hashes)
                parent = event.parent_block_hash
                tail = event.block_size if event.block_size < HASH_TOKENS else 0
                index.stored(0 if parent is None else _integer(parent), hashes, (group,), place, tail)
            else:
                if not blocks.trusts_hashes:
                    for name in event.block_hashes:
                        index.dropped(wire_hashes(blocks.names.pop(name, [])), (0,), place)
                    continue
                removed = event.group_idx
                groups = self._known if removed is None else {removed} & self._known
                if groups:
                    index.dropped(_integers(event.block_hashes), groups, place)

    def _group(self, index: int | None, kind: str | None, blocks: WorkerBlocks) -> int | None:
        """Return the layer group to which an event belongs, or None if the index does not store this group. If the
        worker is foreign (not kvloom), only groups of MAIN_KINDS are stored, all as group 0.
        """
        if blocks.trusts_hashes:
            index = index or 0
            return index if index in self._known else None
        return 0 if kind in MAIN_KINDS else None

    def _store_foreign(self, index: HashIndex[int], blocks: WorkerBlocks, event: BlockStored) -> None:
        """Hash the tokens of a foreign worker's event and store its blocks. Skips blocks with an unknown parent, and
        block sizes that are not a multiple of HASH_TOKENS."""
        above = event.parent_block_hash
        known = blocks.root if above is None else (blocks.names.get(above) or [b""])[-1]
        units, rest = divmod(event.block_size, HASH_TOKENS)
        tokens = event.tokens
        if not known or rest or not units or len(tokens) != event.block_size * len(event.block_hashes):
            return
        root = _adapted(known, event.lora_name) if above is None else known
        chain = hash_chain(root, token_bytes(tokens))
        for at, name in enumerate(event.block_hashes):
            blocks.names[name] = chain[at * units : (at + 1) * units]
        index.stored(wire_hash(root), wire_hashes(chain), (0,), str(blocks.number))

    def clear(self, worker: str) -> None:
        """Remove the blocks of a worker that restarted, or whose events were lost. O(blocks of all workers)."""
        blocks = self._workers[worker]
        blocks.names.clear()
        for index in self._media.values():
            if len(index):
                index.forget(str(blocks.number))

    def expect(self, worker: str, hashes: Sequence[int]) -> None:
        """Record that a worker will have these blocks soon, because a request with them was sent to it."""
        blocks = self._workers.get(worker)
        if blocks is None or not hashes:
            return
        order, place = blocks.expected, str(blocks.number)
        self._expected.stored(0, hashes, (0,), place)
        for hash_ in hashes:
            order[hash_] = None
            order.move_to_end(hash_)
        while len(order) > MAX_EXPECTED:
            self._expected.dropped([order.popitem(last=False)[0]], (0,), place)

    def arrived(self, worker: str, hashes: Iterable[int]) -> None:
        """Remove blocks from the expected blocks of a worker, because the worker has computed them and its events
        report them. Does nothing for a worker without events.
        """
        blocks = self._workers.get(worker)
        if blocks is not None and blocks.has_events:
            self.unexpect(worker, hashes)

    def unexpect(self, worker: str, hashes: Iterable[int]) -> None:
        """Remove blocks from the expected blocks of a worker, because the worker will not compute them."""
        blocks = self._workers.get(worker)
        if blocks is not None:
            gone = [hash_ for hash_ in hashes if blocks.expected.pop(hash_, 0) is None]
            self._expected.dropped(gone, (0,), str(blocks.number))

    def lengths(self, hashes: list[int]) -> dict[str, tuple[int, ...]]:
        """Return, for each worker, how many tokens of the prompt it has cached, as one number per entry of MEDIA.

        Each number counts the tokens in its medium and in all earlier media of MEDIA, so the numbers never decrease.
        Expected blocks count as if they were in every medium. For the cost see `HashIndex.lengths`.
        """
        gpu, *farther = self._media.values()
        if any(map(len, farther)):
            bits = gpu.bits(hashes)
            steps = [step := gpu.lengths(bits)]
            for index in farther:
                if len(index):
                    bits = [a | b for a, b in zip(bits, index.bits(hashes), strict=True)]
                    step = gpu.lengths(bits)
                steps.append(step)
        else:
            steps = [gpu.lengths_of(hashes)]
        if len(self._expected):
            soon = self._expected.lengths_of(hashes)
            steps = [list(map(max, step, soon)) for step in steps]
        if len(steps) == 1:
            steps *= len(MEDIA)
        found: dict[str, tuple[int, ...]] = dict(zip(self._names, zip(*steps, strict=True), strict=True))
        found.pop("", None)
        return found


def _adapted(root: bytes, adapter: str | None) -> bytes:
    """Return the root of the block hashes of requests that use `adapter` on a foreign worker. Without an adapter,
    return `root`.
    """
    return root if not adapter else hash_chain(root, adapter.encode().ljust(64, b"\0")[:64])[0]


def _integer(hash_: WireHash) -> int:
    return hash_ if isinstance(hash_, int) else wire_hash(hash_)


def _integers(hashes: list[WireHash]) -> list[int]:
    if hashes and isinstance(hashes[0], int):
        return hashes  # type: ignore[return-value]
    return [_integer(hash_) for hash_ in hashes]
