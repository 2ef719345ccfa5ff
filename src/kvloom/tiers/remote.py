"""A tier over any key-value store: threads with a connection each, batches, bounded waits, and a way back after faults.

    write -> writing thread: seal (checksums, compression, encryption) -> one `put` for a batch
    read  -> reading thread: one `get` for a batch, straight into the caller's memory where bodies are plain -> checksums

A value is a head and a body (codec.py) under the object's key; the key begins with the format's version. What a store is,
and how it keeps to its capacity, is its own file's matter (`Store`).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .codec import Compression, make_codec, most_bytes, parse_head, plain_head_bytes, seal, unseal
from .keys import Keyring, NoKeyError
from .tier import Objects, Ranges, Tier, TierError, parted
from .transfer import Outcome, Tally, TierStats, Transfer, explain, failed_transfer
from .workers import Tools, Workers

__all__ = ["Place", "RemoteConfig", "RemoteTier", "Store", "StoreError", "Usage", "Want"]

PREFIX = b"kvloom/1/"
_FORGET = (Outcome.CORRUPT, Outcome.SHORT)  # it will not get better: room for a good copy
_MOST_BACKOFF = 10.0

Place = Callable[[int, int], Sequence[memoryview] | None]
"""(which, length) -> where that many bytes go, in order; None: they are not wanted."""


class StoreError(RuntimeError):
    """The store said no, or said nothing; its connection is not used again."""


@dataclass(frozen=True, slots=True)
class Want:
    """Bytes [start, stop) of a value; `stop` 0 is all of it. Fewer come where the value is shorter."""

    key: bytes
    start: int = 0
    stop: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    objects: int
    bytes: int
    evicted: int


class Store(Protocol):
    """One connection, used by one thread at a time. Every call is bounded in time. Whatever it raises means that the
    connection is gone."""

    def exists(self, keys: Sequence[bytes]) -> list[bool]: ...

    def get(self, wants: Sequence[Want], place: Place) -> list[int]:
        """The length of what came for each, -1 where there is nothing; the bytes are where `place` said."""
        ...

    def put(self, items: Sequence[tuple[bytes, Sequence[Any]]]) -> list[Outcome]:
        """Values in pieces. OK, FULL or FAILED for each; what is there already is OK."""
        ...

    def remove(self, keys: Sequence[bytes]) -> int:
        """Returns how many there were."""
        ...

    def usage(self) -> Usage: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """`capacity` is what all who share the store may keep there, or this process alone where the store cannot count.

    `timeout` bounds each call to the store; `lookup`, `drop` and `stats` wait no longer. After a failure nobody asks the
    store for a moment, which doubles to 10 s. `keys` is a file of keys (keys.py): pages are encrypted.
    """

    capacity: int
    compression: Compression = "none"
    keys: Path | str | None = None
    readers: int = 2
    writers: int = 2
    timeout: float = 2.0
    batch_bytes: int = 8 << 20
    pending_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        for field in ("capacity", "readers", "writers", "timeout", "batch_bytes", "pending_bytes"):
            if getattr(self, field) <= 0:
                raise ValueError(f"{field}={getattr(self, field)} must be positive")

    @property
    def batch(self) -> int:
        """Bytes of one call: all batches that may be under way fit the store at once."""
        return min(self.batch_bytes, self.capacity // (2 * self.writers))


class _Link:
    """A connection that is made when needed, and made again after it broke; a pause between, so that a store that is
    gone costs little. Used by one thread at a time."""

    def __init__(self, connect: Callable[[], Store]) -> None:
        self._connect = connect
        self._store: Store | None = None
        self._closed = False
        self._until = self._pause = 0.0
        self._why = ""

    def call(self, verb: Callable[[Store], Any]) -> Any:
        """A StoreError for whatever goes wrong, with the store's words."""
        if self._closed:
            raise StoreError("the tier is closed")
        if self._store is None and time.monotonic() < self._until:
            raise StoreError(f"{self._why} (trying again in {self._until - time.monotonic():.1f} s)")
        try:
            if self._store is None:
                self._store = self._connect()
            answer = verb(self._store)
        except Exception as error:
            self._why = str(error) or type(error).__name__
            self.drop()
            self._pause = min(_MOST_BACKOFF, max(0.1, 2 * self._pause))
            self._until = time.monotonic() + self._pause
            raise StoreError(self._why) from error
        self._pause = 0.0
        return answer

    def drop(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            try:
                store.close()
            except Exception as error:  # noqa: BLE001
                self._why = str(error)

    def close(self) -> None:
        self._closed = True
        self.drop()


class RemoteTier(Tier):
    """Safe from any thread. Raises TierError when the store cannot be reached at the start; afterwards nothing raises."""

    def __init__(self, name: str, config: RemoteConfig, connect: Callable[[], Store]) -> None:
        self._name, self._config = name, config
        keys = None if config.keys is None else Keyring.read(config.keys)
        self._make_codec = partial(make_codec, config.compression, keys)
        self._plain = self._make_codec().plain  # and a missing package is said now
        self._connect = connect
        self._control, self._control_lock = _Link(connect), threading.Lock()
        try:
            self._usage: Usage = self._control.call(lambda store: store.usage())
        except StoreError as error:
            self._control.close()
            raise TierError(f"the tier {name} cannot be opened: {error}") from error
        self._evicted_before = self._usage.evicted
        self._tally = Tally()
        self._lock = threading.Lock()
        self._closed = False
        self._under_way = {"read": 0, "write": 0}
        self._open: weakref.WeakSet[Transfer] = weakref.WeakSet()
        self._readers: Workers[_Job] = Workers(config.readers, "kvloom-remote-read", self._worker)
        self._writers: Workers[_Job] = Workers(config.writers, "kvloom-remote-write", self._worker)

    @property
    def name(self) -> str:
        return self._name

    @property
    def capacity(self) -> int:
        return self._config.capacity

    def lookup(self, objects: Objects) -> npt.NDArray[np.bool_]:
        nothing = [False] * len(objects)
        keys = _keys(objects)
        found = self._ask(lambda store: store.exists(keys), nothing) if keys else nothing
        return np.array(found, np.bool_)

    def read(self, objects: Objects, into: Ranges, part: tuple[int, int] | None = None) -> Transfer:
        into.check(objects, writable=True)
        start, stop = parted(objects.form, part)
        transfer = Transfer(len(objects), self._tally, "read", stop - start)
        return self._submit(_Read, transfer, objects, into, (start, stop))

    def write(self, objects: Objects, source: Ranges) -> Transfer:
        source.check(objects, writable=False)
        size = objects.form.page_bytes
        if most_bytes(objects.form) > self._config.capacity // (2 * self._config.writers):
            raise ValueError(
                f"a page of {size} bytes does not fit a store of {self.capacity} that {self._config.writers} threads "
                "write to: raise its capacity"
            )
        transfer = Transfer(len(objects), self._tally, "write", size)
        return self._submit(_Write, transfer, objects, source, (0, size))

    def drop(self, objects: Objects) -> int:
        keys = _keys(objects)
        return int(self._ask(lambda store: store.remove(keys), 0)) if keys else 0

    def stats(self) -> TierStats:
        """The store's own count; the last one known while it does not answer."""
        self._usage = usage = self._ask(lambda store: store.usage(), self._usage)
        evicted = max(0, usage.evicted - self._evicted_before)
        return self._tally.stats(usage.objects, usage.bytes, self.capacity, evicted)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        deadline = time.monotonic() + 2 * self._config.timeout
        for workers in (self._writers, self._readers):
            workers.close(max(0.1, deadline - time.monotonic()))
        with self._lock:
            left = list(self._open)
        for transfer in left:
            transfer.settle_rest(Outcome.FAILED, f"{self.name} was closed")
        with self._control_lock:
            self._control.close()

    # --- inside

    def _ask(self, verb: Callable[[Store], Any], otherwise: Any) -> Any:
        """A short question in the caller's thread. A store that does not answer costs its timeout, once in a while."""
        if self._closed or not self._control_lock.acquire(timeout=self._config.timeout):
            return otherwise
        try:
            return self._control.call(verb)
        except StoreError:
            return otherwise
        finally:
            self._control_lock.release()

    def _submit(
        self,
        kind: type[_Job],
        transfer: Transfer,
        objects: Objects,
        ranges: Ranges,
        part: tuple[int, int],
    ) -> Transfer:
        config, verb, size = self._config, kind.verb, part[1] - part[0]
        workers, threads = (
            (self._readers, config.readers) if kind is _Read else (self._writers, config.writers)
        )
        with self._lock:
            if not self._closed:
                room = max(0, config.pending_bytes - self._under_way[verb]) // size
                taken = min(len(objects), room)
                self._open.add(transfer)
                self._under_way[verb] += taken * size
                # A small batch is shared by all threads, too.
                step = max(1, min(config.batch // size, -(-taken // threads)))
                for at in range(0, taken, step):
                    which = list(range(at, min(at + step, taken)))
                    workers.submit(kind(self, transfer, objects, ranges, part, which))
                transfer.settle(
                    np.arange(taken, len(objects)), Outcome.BUSY, f"too many {verb}s are under way"
                )
                return transfer
        return failed_transfer(len(objects), self._tally, verb, Outcome.FAILED, f"{self.name} is closed")

    def _worker(self) -> Callable[[_Job], None]:
        tools, link = Tools(self._make_codec()), _Link(self._connect)

        def run(job: _Job) -> None:
            try:
                if job.transfer.enter():
                    try:
                        job.run(link, tools)
                    finally:
                        job.transfer.leave()
            except Exception as error:  # noqa: BLE001  whatever it is, the request goes on without these pages
                job.transfer.settle(job.which, Outcome.FAILED, f"{self.name}: {error}")
            with self._lock:
                self._under_way[job.verb] -= len(job.which) * (job.part[1] - job.part[0])
            if self._closed:
                link.drop()

        return run


@dataclass(slots=True)
class _Job:
    """What one call to the store is for."""

    tier: RemoteTier
    transfer: Transfer
    objects: Objects
    ranges: Ranges
    part: tuple[int, int]
    which: list[int]
    verb = ""

    def run(self, link: _Link, tools: Tools) -> None:
        raise NotImplementedError


@dataclass(slots=True)
class _Write(_Job):
    verb = "write"

    def run(self, link: _Link, tools: Tools) -> None:
        form, pages, starts = self.objects.form, self.ranges.view, self.ranges.starts
        items: list[tuple[bytes, list[Any]]] = []
        sealed: list[int] = []
        keys = [PREFIX + self.objects.keys[index] for index in self.which]
        here = link.call(lambda store: store.exists(keys))
        self.transfer.settle([i for i, there in zip(self.which, here, strict=True) if there], Outcome.OK)
        for index in (i for i, there in zip(self.which, here, strict=True) if not there):
            at, key = int(starts[index]), self.objects.keys[index]
            try:
                head, body = seal(
                    key, form, pages[at : at + form.page_bytes], tools.codec, self.objects.tenant
                )
            except NoKeyError as error:
                self.transfer.settle(index, Outcome.FAILED, f"not stored in the clear: {error}")
                continue
            items.append((PREFIX + key, [head.pack(), *body]))
            sealed.append(index)
        outcomes = link.call(lambda store: store.put(items)) if items else []
        for outcome in set(outcomes):
            which = [index for index, got in zip(sealed, outcomes, strict=True) if got == outcome]
            self.transfer.settle(
                which, outcome, "" if outcome == Outcome.OK else f"{self.tier.name}: {explain(outcome)}"
            )


@dataclass(slots=True)
class _Read(_Job):
    verb = "read"

    def run(self, link: _Link, tools: Tools) -> None:
        whole = self.part == (0, self.objects.form.page_bytes)
        if whole:
            results = self._whole(link, tools)
        elif self.tier._plain:
            results = self._plain_parts(link, tools)
        else:
            results = self._parts(link, tools)
        bad = [
            PREFIX + self.objects.keys[i]
            for i, got in zip(self.which, results, strict=True)
            if got in _FORGET
        ]
        if bad:
            link.call(lambda store: store.remove(bad))
        for outcome in set(results):
            which = [index for index, got in zip(self.which, results, strict=True) if got == outcome]
            quiet = outcome in (Outcome.OK, Outcome.MISSING)
            self.transfer.settle(which, outcome, "" if quiet else f"{self.tier.name}: {explain(outcome)}")

    def _target(self, index: int) -> memoryview:
        at = int(self.ranges.starts[index])
        return self.ranges.view[at + self.part[0] : at + self.part[1]]

    def _open(self, index: int, head_data: memoryview, body: memoryview | None, tools: Tools) -> Outcome:
        """What became of one object. `body` begins with the part's runs; None: it follows the head in `head_data`."""
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
        return unseal(head, body, first, self._target(index), tools.codec, self.objects.tenant)

    def _whole(self, link: _Link, tools: Tools) -> list[Outcome]:
        """One round trip. A plain body goes straight to its page; anything else through scratch memory."""
        form = self.objects.form
        plain, most = plain_head_bytes(form), most_bytes(form)
        heads = memoryview(bytearray(plain * len(self.which)))
        scratch: dict[int, memoryview] = {}

        def place(number: int, length: int) -> Sequence[memoryview] | None:
            if length == plain + form.page_bytes:
                return heads[number * plain : (number + 1) * plain], self._target(self.which[number])
            if length > most:
                return None
            scratch[number] = memoryview(bytearray(length))
            return (scratch[number],)

        wants = [Want(PREFIX + self.objects.keys[index]) for index in self.which]
        results = []
        for number, length in enumerate(link.call(lambda store: store.get(wants, place))):
            index = self.which[number]
            if length < 0:
                results.append(Outcome.MISSING)
            elif length > most:
                results.append(Outcome.CORRUPT)
            elif number in scratch:
                results.append(self._open(index, scratch[number], None, tools))
            else:
                head, page = heads[number * plain : (number + 1) * plain], self._target(index)
                if _is_plain(head):
                    results.append(self._open(index, head, page, tools))
                else:  # compressed to this very length: rare, and no reason to lose it
                    results.append(self._open(index, memoryview(bytes(head) + bytes(page)), None, tools))
        return results

    def _plain_parts(self, link: _Link, tools: Tools) -> list[Outcome]:
        """One round trip: the head, and the runs straight to their place."""
        form, (start, stop) = self.objects.form, self.part
        plain = plain_head_bytes(form)
        heads = memoryview(bytearray(plain * len(self.which)))

        def place(number: int, length: int) -> Sequence[memoryview] | None:
            number, body = divmod(number, 2)
            if body:
                return (self._target(self.which[number])[:length],)
            return (heads[number * plain : number * plain + length],)

        wants = []
        for index in self.which:
            key = PREFIX + self.objects.keys[index]
            wants += [Want(key, 0, plain), Want(key, plain + start, plain + stop)]
        lengths = link.call(lambda store: store.get(wants, place))
        results = []
        for number, index in enumerate(self.which):
            got, body = lengths[2 * number : 2 * number + 2]
            if got < 0:
                results.append(Outcome.MISSING)
                continue
            head = heads[number * plain : number * plain + got]
            if not _is_plain(head):  # another server compresses or encrypts
                results += self._parts(link, tools, [index])
            else:
                results.append(self._open(index, head, self._target(index)[: max(0, body)], tools))
        return results

    def _parts(self, link: _Link, tools: Tools, which: list[int] | None = None) -> list[Outcome]:
        """Two round trips: the heads, which say where the runs lie, and the runs."""
        form, (start, stop) = self.objects.form, self.part
        which = self.which if which is None else which
        most = most_bytes(form) - form.page_bytes
        heads = [memoryview(bytearray(most)) for _ in which]
        wants = [Want(PREFIX + self.objects.keys[index], 0, most) for index in which]
        lengths = link.call(lambda store: store.get(wants, lambda i, n: (heads[i][:n],)))
        results: dict[int, Outcome] = {}
        spans, bodies = [], []
        for number, index in enumerate(which):
            parsed = parse_head(heads[number][: max(0, lengths[number])])
            if lengths[number] < 0:
                results[index] = Outcome.MISSING
            elif isinstance(parsed, Outcome):
                results[index] = parsed
            elif (parsed[0].runs, parsed[0].run_bytes) != (form.runs, form.run_bytes):
                results[index] = Outcome.LAYOUT
            else:
                low, high = parsed[0].span(start // form.run_bytes, stop // form.run_bytes)
                if high - low > most_bytes(form):
                    results[index] = Outcome.CORRUPT
                    continue
                spans.append((number, index, Want(wants[number].key, parsed[1] + low, parsed[1] + high)))
                bodies.append(memoryview(bytearray(high - low)))
        if spans:
            got = link.call(
                lambda store: store.get([want for _, _, want in spans], lambda i, n: (bodies[i][:n],))
            )
            for (number, index, _), body, length in zip(spans, bodies, got, strict=True):
                results[index] = self._open(index, heads[number], body[: max(0, length)], tools)
        return [results[index] for index in which]


def _is_plain(head: memoryview) -> bool:
    """Is what came a head of runs as they were? What is damaged counts as such: it is told later."""
    parsed = parse_head(head)
    if isinstance(parsed, Outcome):
        return parsed != Outcome.SHORT
    return parsed[0].stored is None


def _keys(objects: Objects) -> list[bytes]:
    return [PREFIX + key for key in objects.keys]
