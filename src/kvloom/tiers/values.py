"""Pages as values of a key-value store: a head and a body (codec.py) under the object's key.

    write -> seal (checksums, compression, encryption) -> one `put` for a batch
    read  -> one `get` for a batch, straight into the caller's memory where bodies are plain -> checksums

A key in the store begins with the format's version, so that versions never meet. What a store is, and how it keeps to its
capacity, is its own file's matter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

from .codec import most_bytes, parse_head, plain_head_bytes, seal, unseal
from .keys import NoKeyError
from .remote import Connection, Job, Link, RemoteConfig, RemoteTier, Usage
from .transfer import Outcome
from .workers import Tools

__all__ = ["PREFIX", "Counted", "Place", "Store", "Want", "store_tier"]

PREFIX = b"kvloom/1/"
_FORGET = (Outcome.CORRUPT, Outcome.SHORT)  # it will not get better: room for a good copy
_FORGET_KEYED = (*_FORGET, Outcome.LAYOUT, Outcome.LOCKED, Outcome.UNTRUSTED)
"""With keys a stored name is derived from tenant, block hash and layout: a page that does not fit them is good for no reader."""

Place = Callable[[int, int], Sequence[memoryview] | None]
"""(which, length) -> where that many bytes go, in order; None: they are not wanted."""


@dataclass(frozen=True, slots=True)
class Want:
    """Bytes [start, stop) of a value; `stop` 0 is all of it, `most` bytes if it is one of ours, and `likely` so many. Fewer come
    where the value is shorter."""

    key: bytes
    start: int = 0
    stop: int = 0
    most: int = 0
    likely: int = 0


class Store(Connection, Protocol):
    """A connection to a key-value store."""

    def lend(self, memory: Any) -> None:
        """Pages come from this memory, or go there: a store that moves them by itself gets ready for it. Most need nothing."""
        return

    def get(self, wants: Sequence[Want], place: Place) -> list[int]:
        """The length of what came for each, -1 where there is nothing; the bytes are where `place` said. It may ask for the
        likely length first, and again when another came."""
        ...

    def put(self, items: Sequence[tuple[bytes, Sequence[Any]]]) -> list[Outcome]:
        """Values in pieces. OK, FULL or FAILED for each; what is there already is OK."""
        ...


class Counted:
    """What this process has put into a store that does not count by itself: sizes, least recently used first. Safe from
    any thread, and shared by all connections of a tier."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._lock = Lock()
        self._bytes = self._evicted = 0

    def reserve(self, sizes: dict[bytes, int]) -> list[bytes]:
        """Counts values that are about to be put; returns those that must leave for them."""
        with self._lock:
            for key, size in sizes.items():
                self._bytes += size - self._sizes.pop(key, 0)
                self._sizes[key] = size
            gone = []
            while self._bytes > self._capacity:
                key, size = self._sizes.popitem(last=False)
                self._bytes -= size
                gone.append(key)
            self._evicted += len(gone)
            return gone

    def touch(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                if key in self._sizes:
                    self._sizes.move_to_end(key)

    def forget(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._bytes -= self._sizes.pop(key, 0)

    def usage(self) -> Usage:
        with self._lock:
            return Usage(len(self._sizes), self._bytes, self._evicted)


def store_tier(
    name: str, config: RemoteConfig, connect: Callable[[], Store], at_end: Callable[[], None] | None = None
) -> RemoteTier:
    """A tier over a store; `at_end` is called when it is closed. A TierError when it cannot be reached."""
    return RemoteTier(name, config, lambda: _Named(connect()), (_Read, _Write), at_end=at_end)


class _Named(Connection):
    """A store whose keys are objects' keys, with the prefix put before."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return self.store.exists([PREFIX + key for key in keys])

    def remove(self, keys: Sequence[bytes]) -> int:
        return self.store.remove([PREFIX + key for key in keys])

    def usage(self) -> Usage:
        return self.store.usage()

    def close(self) -> None:
        self.store.close()


class _Write(Job):
    __slots__ = ()

    def run(self, link: Link, tools: Tools) -> None:
        keys = self.keys()
        if tools.codec.plain:
            link.call(lambda named: named.store.lend(self.ranges.buffer))
        here = link.call(lambda store: store.exists(keys))
        outcomes = {index: Outcome.OK for index, there in zip(self.which, here, strict=True) if there}
        items: list[tuple[bytes, list[Any]]] = []
        sealed: list[int] = []
        for index, key in zip(self.which, keys, strict=True):
            if index in outcomes:
                continue
            try:
                head, body = seal(
                    key, self.objects.form, self.target(index), tools.codec, self.objects.tenant
                )
            except NoKeyError as error:
                self.transfer.settle(index, Outcome.FAILED, f"not stored in the clear: {error}")
                continue
            items.append((PREFIX + key, [head.pack(), *body]))
            sealed.append(index)
        if items:
            outcomes |= zip(sealed, link.call(lambda named: named.store.put(items)), strict=True)
        self.settle(outcomes)


class _Read(Job):
    __slots__ = ()

    def run(self, link: Link, tools: Tools) -> None:
        if self.part == (0, self.objects.form.page_bytes):
            outcomes = self._whole(link, tools)
        elif tools.codec.plain:
            outcomes = self._plain_parts(link, tools)
        else:
            outcomes = self._parts(link, tools, self.which)
        forget = _FORGET if tools.codec.keys is None else _FORGET_KEYED
        bad = [self.objects.keys[index] for index, got in outcomes.items() if got in forget]
        if bad:
            link.call(lambda store: store.remove(bad))
        self.settle(outcomes)

    @staticmethod
    def _get(link: Link, wants: Sequence[Want], place: Place) -> list[int]:
        lengths: list[int] = link.call(lambda named: named.store.get(wants, place))
        return lengths

    def _open(
        self,
        index: int,
        head_data: memoryview,
        body: memoryview | None,
        tools: Tools,
        in_place: bool = False,
    ) -> Outcome:
        """What became of one object. `body` begins with the part's runs, which may be `in_place` already; None: it follows the head
        in `head_data`."""
        form, parsed = self.objects.form, parse_head(head_data)
        if isinstance(parsed, Outcome):
            return parsed
        head, length = parsed
        if head.key != self.objects.keys[index]:
            return Outcome.CORRUPT
        if (head.runs, head.run_bytes) != (form.runs, form.run_bytes):
            return Outcome.LAYOUT
        first = self.part[0] // form.run_bytes
        if body is None:
            body = head_data[length + head.span(first, first + 1)[0] :]
        target = self.target(index)
        if in_place and len(body) == len(target):
            target = body  # not copied onto itself
        return unseal(head, body, first, target, tools.codec, self.objects.tenant)

    def _whole(self, link: Link, tools: Tools) -> dict[int, Outcome]:
        """One round trip. A plain body goes straight to its page; anything else through scratch memory."""
        form = self.objects.form
        plain, most = plain_head_bytes(form), most_bytes(form)
        likely = 0
        if tools.codec.plain:  # what others wrote is most likely as we write
            likely = plain + form.page_bytes
            link.call(lambda named: named.store.lend(self.ranges.buffer))
        heads = memoryview(bytearray(plain * len(self.which)))
        scratch: dict[int, memoryview] = {}

        def place(number: int, length: int) -> Sequence[memoryview] | None:
            if length == plain + form.page_bytes:
                return heads[number * plain : (number + 1) * plain], self.target(self.which[number])
            if length > most:
                return None
            scratch[number] = memoryview(bytearray(length))
            return (scratch[number],)

        wants = [Want(PREFIX + key, most=most, likely=likely) for key in self.keys()]
        outcomes = {}
        for number, length in enumerate(self._get(link, wants, place)):
            index = self.which[number]
            if length < 0:
                outcomes[index] = Outcome.MISSING
            elif length > most:
                outcomes[index] = Outcome.CORRUPT
            elif number in scratch:
                outcomes[index] = self._open(index, scratch[number], None, tools)
            else:
                head, page = heads[number * plain : (number + 1) * plain], self.target(index)
                if _is_plain(head):
                    outcomes[index] = self._open(index, head, page, tools, in_place=True)
                else:  # compressed to this very length: rare, and no reason to lose it
                    outcomes[index] = self._open(index, memoryview(bytes(head) + bytes(page)), None, tools)
        return outcomes

    def _plain_parts(self, link: Link, tools: Tools) -> dict[int, Outcome]:
        """One round trip: the head, and the runs straight to their place."""
        start, stop = self.part
        plain = plain_head_bytes(self.objects.form)
        heads = memoryview(bytearray(plain * len(self.which)))

        def place(number: int, length: int) -> Sequence[memoryview] | None:
            number, body = divmod(number, 2)
            if body:
                return (self.target(self.which[number])[:length],)
            return (heads[number * plain : number * plain + length],)

        wants = []
        for key in self.keys():
            wants += [Want(PREFIX + key, 0, plain), Want(PREFIX + key, plain + start, plain + stop)]
        lengths = self._get(link, wants, place)
        outcomes: dict[int, Outcome] = {}
        for number, index in enumerate(self.which):
            got, body = lengths[2 * number : 2 * number + 2]
            head = heads[number * plain : number * plain + max(0, got)]
            if got < 0:
                outcomes[index] = Outcome.MISSING
            elif not _is_plain(head):  # another server compresses or encrypts
                outcomes |= self._parts(link, tools, [index])
            else:
                came = self.target(index)[: max(0, body)]
                outcomes[index] = self._open(index, head, came, tools, in_place=True)
        return outcomes

    def _parts(self, link: Link, tools: Tools, which: list[int]) -> dict[int, Outcome]:
        """Two round trips: the heads, which say where the runs lie, and the runs."""
        form, (start, stop) = self.objects.form, self.part
        most = most_bytes(form) - form.page_bytes
        heads = [memoryview(bytearray(most)) for _ in which]
        wants = [Want(PREFIX + self.objects.keys[index], 0, most) for index in which]
        lengths = self._get(link, wants, lambda number, length: (heads[number][:length],))
        outcomes: dict[int, Outcome] = {}
        spans: list[tuple[int, memoryview, Want]] = []
        for number, index in enumerate(which):
            parsed = parse_head(heads[number][: max(0, lengths[number])])
            if lengths[number] < 0:
                outcomes[index] = Outcome.MISSING
            elif isinstance(parsed, Outcome):
                outcomes[index] = parsed
            elif (parsed[0].runs, parsed[0].run_bytes) != (form.runs, form.run_bytes):
                outcomes[index] = Outcome.LAYOUT
            else:
                low, high = parsed[0].span(start // form.run_bytes, stop // form.run_bytes)
                if high - low > most_bytes(form):
                    outcomes[index] = Outcome.CORRUPT
                    continue
                spans.append(
                    (index, heads[number], Want(wants[number].key, parsed[1] + low, parsed[1] + high))
                )
        bodies = [memoryview(bytearray(want.stop - want.start)) for _, _, want in spans]
        got = self._get(link, [want for _, _, want in spans], lambda i, n: (bodies[i][:n],)) if spans else []
        for (index, head, _), body, length in zip(spans, bodies, got, strict=True):
            outcomes[index] = self._open(index, head, body[: max(0, length)], tools)
        return outcomes


def _is_plain(head: memoryview) -> bool:
    """Is what came a head of runs as they were? What is damaged counts as such: it is told later."""
    parsed = parse_head(head)
    if isinstance(parsed, Outcome):
        return parsed != Outcome.SHORT
    return parsed[0].stored is None
