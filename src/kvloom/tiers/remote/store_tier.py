"""A tier over a key-value store. Each value is one page: its header and its body (codec.py).

    write -> seal (checksums, compression, encryption) -> one `put` per batch
    read  -> one `get` per batch, directly into the caller's memory if bodies are plain -> checksums

A key in the store begins with the version of the format, so pages of different versions never mix. Each kind of store
has a module with its connection. If the store does not count its values, the tier counts the values that this process
stores (capacity_tracker.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvloom.tiers.encoding import (
    FIXED_HEAD_BYTES,
    NoKeyError,
    max_sealed_bytes,
    parse_head,
    plain_head_bytes,
    seal,
    stored_time,
    unseal,
)
from kvloom.tiers.shares import Shares
from kvloom.tiers.transfer import Outcome
from kvloom.tiers.ttl import Expiry
from kvloom.tiers.workers import Tools

from .capacity_tracker import CapacityTracker
from .remote_tier import Connection, Job, Link, RemoteConfig, RemoteTier, Usage

__all__ = ["PREFIX", "Destination", "Store", "ValueRange", "store_tier"]

PREFIX = b"kvloom/1/"
_FORGET = (Outcome.CORRUPT, Outcome.SHORT)  # a retry cannot succeed, and the space is needed for a good copy
_FORGET_KEYED = (*_FORGET, Outcome.LAYOUT, Outcome.LOCKED, Outcome.UNTRUSTED)
"""Outcomes after which a page is removed, in a tier with a key file. There, a stored key is derived from tenant, block
hash and layout. If the page under a key does not match them, no reader can ever use the page."""

Destination = Callable[[int, int], Sequence[memoryview] | None]
"""Called with (index, length). Returns memory for `length` bytes as a list of pieces, or None if the value is not
wanted."""


@dataclass(frozen=True, slots=True)
class ValueRange:
    """Bytes [start, stop) of the value of `key`, or the whole value if `stop` is 0. A value that ends before
    `stop` gives fewer bytes. If the whole value is requested, it has at most `max_bytes` bytes, and usually
    `expected_bytes`."""

    key: bytes
    start: int = 0
    stop: int = 0
    max_bytes: int = 0
    expected_bytes: int = 0


class Store(Connection, Protocol):
    """A connection to a key-value store. If the store counts its values, it implements `usage` and `used_by`, and
    evicts values in `put`. Otherwise the tier counts the values and calls `evict`.
    """

    def register_memory(self, memory: Any) -> None:
        """Receive the caller's memory, which contains the pages of a transfer. A store may register the memory for
        direct access. Most stores ignore this call."""
        return

    def get(self, ranges: Sequence[ValueRange], destination: Destination) -> list[int]:
        """Read values into the memory that `destination` returns. Return the length of each value, or -1 for a
        miss. A store may first request `ValueRange.expected_bytes` bytes, and repeat the request if the length
        differs."""
        ...

    def usage(self) -> Usage:
        return Usage(0, 0, 0)

    def used_by(self, tenant: str) -> int:
        return 0

    def evict(self, keys: Sequence[bytes]) -> None:
        """Remove values that the tier evicts. Unlike `remove`, does not return how many values existed, which may be
        faster."""
        self.remove(keys)

    def put(self, items: Sequence[tuple[bytes, Sequence[Any]]], tenant: str = "") -> list[Outcome]:
        """Store values. Each value is a list of buffers that are stored one after another. Return OK, FULL or FAILED
        for each value. A value that is already stored is OK. A store that counts the bytes of each tenant applies the
        share of `tenant`.
        """
        ...

    def put_guaranteed(self, items: Sequence[tuple[bytes, Sequence[Any]]], tenant: str = "") -> list[Outcome]:
        """Store values like `put`, for values within the guaranteed part of a tenant. If the store evicts values by
        itself, it should evict these values last. Called only if the store does not count the bytes of tenants."""
        return self.put(items, tenant)


def store_tier(
    name: str,
    config: RemoteConfig,
    connect: Callable[[], Store],
    on_close: Callable[[], None] | None = None,
    on_shares: Callable[[Shares], None] | None = None,
) -> RemoteTier:
    """Open a tier over a store. `connect` opens one connection. Closing the tier calls `on_close`. Raises TierError
    if the store cannot be reached.

    If the store counts its values, pass `on_shares`, which is called with the shares of tenants. Otherwise `capacity`
    and shares apply to the values that this process stores.
    """
    expiry = Expiry(config.ttl)
    tracker = None
    if on_shares is None:
        tracker = CapacityTracker(config.capacity)
        on_shares = tracker.set_shares
    return RemoteTier(
        name,
        config,
        lambda: _PrefixedStore(connect(), expiry, tracker),
        (_Read, _Write),
        on_shares,
        on_close=on_close,
        expiry=expiry,
    )


class _PrefixedStore(Connection):
    """A connection that adds a prefix to the keys of objects. With a TTL, `exists` reads the first bytes of each page
    and removes expired pages. `tracker` counts the values of this process and chooses the values to evict. It is None
    if the store counts its values itself."""

    def __init__(self, store: Store, expiry: Expiry, tracker: CapacityTracker | None) -> None:
        self.store, self.expiry, self.tracker = store, expiry, tracker

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        found = self.store.exists([PREFIX + key for key in keys])
        if not self.expiry.ttl or not any(found):
            return found
        stored = list(dict.fromkeys(key for key, is_stored in zip(keys, found, strict=True) if is_stored))
        size = FIXED_HEAD_BYTES
        heads = [memoryview(bytearray(size)) for _ in stored]
        ranges = [ValueRange(PREFIX + key, 0, size) for key in stored]
        self.store.get(ranges, lambda number, length: (heads[number][:length],))
        expired = {
            key for key, head in zip(stored, heads, strict=True) if self.expiry.is_expired(stored_time(head))
        }
        if expired:
            self.remove(list(expired))
        return [is_stored and key not in expired for key, is_stored in zip(keys, found, strict=True)]

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark values as recently used, if the tier counts them. The keys include the prefix."""
        if self.tracker is not None:
            self.tracker.touch(keys)

    def get(self, ranges: Sequence[ValueRange], destination: Destination) -> list[int]:
        self.touch(dict.fromkeys(wanted.key for wanted in ranges))
        return self.store.get(ranges, destination)

    def put(self, items: Sequence[tuple[bytes, Sequence[Any]]], tenant: str) -> list[Outcome]:
        """Evict values if needed, then store values like `Store.put`. A value beyond the tenant's share gets FULL
        and is not stored."""
        if self.tracker is None:
            return self.store.put(items, tenant)
        values = dict(items)
        sizes = {key: sum(map(len, pieces)) for key, pieces in values.items()}
        accepted, evicted = self.tracker.reserve(sizes, tenant)
        outcomes = dict.fromkeys(values, Outcome.FULL)
        try:
            if evicted:
                self.store.evict(list(evicted))
                evicted = {}
            for is_guaranteed, put in ((False, self.store.put), (True, self.store.put_guaranteed)):
                some = [(key, values[key]) for key, marked in accepted.items() if marked == is_guaranteed]
                if some:
                    outcomes |= zip([key for key, _ in some], put(some, tenant), strict=True)
        except BaseException:
            self.tracker.remove(sizes)
            self.tracker.restore(evicted)
            raise
        self.tracker.remove(key for key, outcome in outcomes.items() if outcome != Outcome.OK)
        return [outcomes[key] for key, _ in items]

    def remove(self, keys: Sequence[bytes]) -> int:
        stored = [PREFIX + key for key in keys]
        removed = self.store.remove(stored)
        if self.tracker is not None:
            self.tracker.remove(stored)
        return removed

    def usage(self) -> Usage:
        return self.store.usage() if self.tracker is None else self.tracker.usage()

    def used_by(self, tenant: str) -> int:
        return self.store.used_by(tenant) if self.tracker is None else self.tracker.used_by(tenant)

    def close(self) -> None:
        self.store.close()


class _Write(Job):
    __slots__ = ()

    def run(self, link: Link, tools: Tools) -> None:
        keys = self.keys()
        if tools.codec.is_plain:
            link.call(lambda prefixed: prefixed.store.register_memory(self.ranges.buffer))
        stored = link.call(lambda store: store.exists(keys))
        known = [PREFIX + key for key, is_stored in zip(keys, stored, strict=True) if is_stored]
        link.call(lambda prefixed: prefixed.touch(known))
        outcomes = {
            index: Outcome.OK for index, is_stored in zip(self.which, stored, strict=True) if is_stored
        }
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
        tenant = self.objects.tenant
        if items:
            outcomes |= zip(sealed, link.call(lambda prefixed: prefixed.put(items, tenant)), strict=True)
        self.settle(outcomes)


class _Read(Job):
    __slots__ = ("expired",)

    def run(self, link: Link, tools: Tools) -> None:
        self.expired: list[bytes] = []
        if self.part == (0, self.objects.form.page_bytes):
            outcomes = self._whole(link, tools)
        elif tools.codec.is_plain:
            outcomes = self._plain_parts(link, tools)
        else:
            outcomes = self._parts(link, tools, self.which)
        forget = _FORGET if tools.codec.keys is None else _FORGET_KEYED
        bad = [self.objects.keys[index] for index, got in outcomes.items() if got in forget]
        bad += self.expired
        if bad:
            link.call(lambda store: store.remove(bad))
        self.settle(outcomes)

    @staticmethod
    def _get(link: Link, ranges: Sequence[ValueRange], destination: Destination) -> list[int]:
        lengths: list[int] = link.call(lambda prefixed: prefixed.get(ranges, destination))
        return lengths

    def _open(
        self,
        index: int,
        head_data: memoryview,
        body: memoryview | None,
        tools: Tools,
        in_place: bool = False,
    ) -> Outcome:
        """Verify one object, decode its requested bytes into the caller's memory, and return the outcome. An object
        is a header and a body. The body has the bytes of a page, layer by layer.

        - `index`: the index of the object in the batch.
        - `head_data`: begins with the header.
        - `body`: begins with the first requested layer. If it is None, `head_data` also contains the body.
        - `in_place`: `body` may already be the caller's memory. Its bytes are then not copied.
        """
        form, parsed = self.objects.form, parse_head(head_data)
        if isinstance(parsed, Outcome):
            return parsed
        head, length = parsed
        if head.key != self.objects.keys[index]:
            return Outcome.CORRUPT
        if (head.runs, head.run_bytes) != (form.runs, form.run_bytes):
            return Outcome.LAYOUT
        if tools.expiry.is_expired(head.stored_at):
            self.expired.append(head.key)
            return Outcome.MISSING
        first = self.part[0] // form.run_bytes
        if body is None:
            body = head_data[length + head.span(first, first + 1)[0] :]
        target = self.target(index)
        if in_place and len(body) == len(target):
            target = body  # no copy onto itself
        return unseal(head, body, first, target, tools.codec, self.objects.tenant)

    def _whole(self, link: Link, tools: Tools) -> dict[int, Outcome]:
        """Read whole objects in one round trip. Plain bodies are read directly into their pages, and other bodies
        into scratch memory.
        """
        form = self.objects.form
        plain, max_bytes = plain_head_bytes(form), max_sealed_bytes(form)
        expected = 0
        if tools.codec.is_plain:  # other writers probably use the same encoding
            expected = plain + form.page_bytes
            link.call(lambda prefixed: prefixed.store.register_memory(self.ranges.buffer))
        heads = memoryview(bytearray(plain * len(self.which)))
        scratch: dict[int, memoryview] = {}

        def destination(number: int, length: int) -> Sequence[memoryview] | None:
            if length == plain + form.page_bytes:
                return heads[number * plain : (number + 1) * plain], self.target(self.which[number])
            if length > max_bytes:
                return None
            scratch[number] = memoryview(bytearray(length))
            return (scratch[number],)

        ranges = [
            ValueRange(PREFIX + key, max_bytes=max_bytes, expected_bytes=expected) for key in self.keys()
        ]
        outcomes = {}
        for number, length in enumerate(self._get(link, ranges, destination)):
            index = self.which[number]
            if length < 0:
                outcomes[index] = Outcome.MISSING
            elif length > max_bytes:
                outcomes[index] = Outcome.CORRUPT
            elif number in scratch:
                outcomes[index] = self._open(index, scratch[number], None, tools)
            else:
                head, page = heads[number * plain : (number + 1) * plain], self.target(index)
                if _is_plain(head):
                    outcomes[index] = self._open(index, head, page, tools, in_place=True)
                else:  # a compressed page that has exactly this length: rare, but valid
                    outcomes[index] = self._open(index, memoryview(bytes(head) + bytes(page)), None, tools)
        return outcomes

    def _plain_parts(self, link: Link, tools: Tools) -> dict[int, Outcome]:
        """Read the requested layer runs of plain objects in one round trip, directly into the caller's memory."""
        start, stop = self.part
        plain = plain_head_bytes(self.objects.form)
        heads = memoryview(bytearray(plain * len(self.which)))

        def destination(number: int, length: int) -> Sequence[memoryview] | None:
            number, body = divmod(number, 2)
            if body:
                return (self.target(self.which[number])[:length],)
            return (heads[number * plain : number * plain + length],)

        ranges = []
        for key in self.keys():
            ranges += [
                ValueRange(PREFIX + key, 0, plain),
                ValueRange(PREFIX + key, plain + start, plain + stop),
            ]
        lengths = self._get(link, ranges, destination)
        outcomes: dict[int, Outcome] = {}
        for number, index in enumerate(self.which):
            got, body = lengths[2 * number : 2 * number + 2]
            head = heads[number * plain : number * plain + max(0, got)]
            if got < 0:
                outcomes[index] = Outcome.MISSING
            elif not _is_plain(head):  # another process compressed or encrypted this page
                outcomes |= self._parts(link, tools, [index])
            else:
                body_read = self.target(index)[: max(0, body)]
                outcomes[index] = self._open(index, head, body_read, tools, in_place=True)
        return outcomes

    def _parts(self, link: Link, tools: Tools, which: list[int]) -> dict[int, Outcome]:
        """Read the requested layer runs of objects in two round trips. The first reads the headers, which contain
        the positions of the layer runs. The second reads the layer runs.
        """
        form, (start, stop) = self.objects.form, self.part
        max_bytes = max_sealed_bytes(form) - form.page_bytes
        heads = [memoryview(bytearray(max_bytes)) for _ in which]
        ranges = [ValueRange(PREFIX + self.objects.keys[index], 0, max_bytes) for index in which]
        lengths = self._get(link, ranges, lambda number, length: (heads[number][:length],))
        outcomes: dict[int, Outcome] = {}
        spans: list[tuple[int, memoryview, ValueRange]] = []
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
                if high - low > max_sealed_bytes(form):
                    outcomes[index] = Outcome.CORRUPT
                    continue
                spans.append(
                    (index, heads[number], ValueRange(ranges[number].key, parsed[1] + low, parsed[1] + high))
                )
        bodies = [memoryview(bytearray(wanted.stop - wanted.start)) for _, _, wanted in spans]
        got = (
            self._get(link, [wanted for _, _, wanted in spans], lambda i, n: (bodies[i][:n],))
            if spans
            else []
        )
        for (index, head, _), body, length in zip(spans, bodies, got, strict=True):
            outcomes[index] = self._open(index, head, body[: max(0, length)], tools)
        return outcomes


def _is_plain(head: memoryview) -> bool:
    """Return whether a page is plain. `head` is the start of the page, with the length of a plain header. The
    header of any other page is longer, so it is incomplete in `head`. A damaged header counts as plain: `_open`
    then reports the damage."""
    parsed = parse_head(head)
    if isinstance(parsed, Outcome):
        return parsed != Outcome.SHORT
    return parsed[0].stored_lengths is None
