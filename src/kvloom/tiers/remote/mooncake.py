"""Mooncake Store as a tier: `mooncake://master:50051?capacity=64GiB&segment=16GiB&replicas=2`.

A tier has one client (mooncake_client.py). Pages move directly between registered memory and the store. Page headers,
and values that are short, compressed or encrypted, pass through a registered buffer per thread. The store does not
count values or report evictions, so `capacity` limits only the values of this process. An empty or negative reply is a
miss. Lengths from the store are always checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from kvloom.tiers.aligned_memory import address_of, aligned, aligned_bytes
from kvloom.tiers.options import Options
from kvloom.tiers.transfer import Outcome

from .bounded_calls import BoundedCalls
from .mooncake_client import ABANDONED_MEMORY, MooncakeClient, MooncakeConfig, load_library
from .remote_tier import RemoteConfig, RemoteTier, StoreError, remote_config
from .store_tier import Destination, Store, ValueRange, store_tier

__all__ = ["MooncakeConfig", "MooncakeStore", "open_mooncake", "parse_url"]

_NO_SPACE, _TOO_LONG, _ABSENT = -200, -600, -704
_BATCH_BYTES = 16 << 20  # a tenth faster than 8 MiB, and as fast as 32 MiB
_MIN_PIECE = (
    256 << 10
)  # a value in two memory regions needs two requests; for shorter pieces a copy is faster


class MooncakeStore(Store):
    """The connection of one thread to the store, with a timeout for each call and a registered buffer."""

    def __init__(self, client: MooncakeClient, timeout: float, what: str, replicas: int = 1) -> None:
        self._mooncake, self._client = client, client.get()
        self._replicas = replicas
        self._bounded = BoundedCalls(timeout, what)
        self._buffer = aligned_bytes(0)
        self._address = 0

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        names = [key.hex() for key in keys]
        found = self._call(lambda: self._client.batch_is_exist(names))
        self._check_count(found, len(keys))
        if any(code < 0 for code in found):
            raise StoreError(f"the master does not answer: code {min(found)}")
        return [code == 1 for code in found]

    def register_memory(self, memory: npt.NDArray[np.uint8]) -> None:
        if self._mooncake.should_register(memory):
            self._call(lambda: self._mooncake.register_memory(self._client, memory))

    def get(self, ranges: Sequence[ValueRange], destination: Destination) -> list[int]:
        """Read values into the memory that `destination` returns. Return the length of each value, or -1 for a miss.
        If a key occurs twice in a batch, the key is requested only once, because the library would fill only one of two
        destinations."""
        lengths = (
            self._get_direct(ranges, destination) if len(set(ranges)) == len(ranges) else [0] * len(ranges)
        )
        remaining = [number for number, length in enumerate(lengths) if not length]
        if not remaining:
            return lengths
        positions = {
            wanted: number for number, wanted in enumerate(dict.fromkeys(ranges[n] for n in remaining))
        }
        distinct = list(positions)
        sizes = [wanted.stop - wanted.start if wanted.stop else wanted.max_bytes for wanted in distinct]
        begins = [0, *accumulate(aligned(size) for size in sizes)]
        self._reserve_buffer(begins[-1])
        got = self._fetch(distinct, begins, sizes)
        for number in remaining:
            wanted = ranges[number]
            at, length = begins[positions[wanted]], got[positions[wanted]]
            lengths[number] = length if length > 0 else -1
            for piece in (destination(number, length) or ()) if length > 0 else ():
                piece[:] = self._buffer[at : at + len(piece)]
                at += len(piece)
        return lengths

    def _get_direct(self, ranges: Sequence[ValueRange], destination: Destination) -> list[int]:
        """Read values directly into registered memory, if they have the expected length. Return the length of
        each value. -1 means a miss. 0 means that the value must be read through the buffer instead."""
        lengths = [0] * len(ranges)
        pieces = {
            n: destination(n, wanted.expected_bytes) or ()
            for n, wanted in enumerate(ranges)
            if wanted.expected_bytes
        }
        targets = {number: self._addresses(pieces_of) for number, pieces_of in pieces.items()}
        direct = [number for number, addresses in targets.items() if any(address for address, _ in addresses)]
        if not direct:
            return lengths
        self._reserve_buffer(
            sum(aligned(size) for n in direct for address, size in targets[n] if not address)
        )
        at, small = 0, []  # unregistered memory is read through the buffer
        buffers: list[list[int]] = []
        for number in direct:
            buffers.append([])
            for piece, (address, size) in zip(pieces[number], targets[number], strict=True):
                if not address:
                    address = self._address + at
                    small.append((number, piece, at))
                    at += aligned(size)
                buffers[-1].append(address)
        names = [ranges[number].key.hex() for number in direct]
        spans = [[size for _, size in targets[number]] for number in direct]

        def fetch() -> Any:
            with self._mooncake.one_at_a_time("get"):
                return self._client.batch_get_into_multi_buffers(names, buffers, spans)

        got = self._call(fetch, uses_caller_memory=True)
        self._check_count(got, len(direct))
        for number, length in zip(direct, got, strict=True):
            expected = ranges[number].expected_bytes
            lengths[number] = -1 if length == _ABSENT else expected if length == expected else 0
        for number, piece, begin in small:
            if lengths[number] > 0:
                piece[:] = self._buffer[begin : begin + len(piece)]
        return lengths

    def _addresses(self, pieces: Sequence[Any]) -> list[tuple[int, int]]:
        """Return the address and length of each piece. The address is 0 if the memory is not registered."""
        views = [memoryview(piece) for piece in pieces]
        return [
            (self._mooncake.registered_address(view) if len(view) >= _MIN_PIECE else 0, len(view))
            for view in views
        ]

    def put(self, items: Sequence[tuple[bytes, Sequence[Any]]], tenant: str = "") -> list[Outcome]:
        return self._put(items, *([] if self._replicas == 1 else [self._replicate_config()]))

    def put_guaranteed(self, items: Sequence[tuple[bytes, Sequence[Any]]], tenant: str = "") -> list[Outcome]:
        """Store values with a soft pin. Mooncake's master evicts them after all values without a soft pin. A soft pin
        ends after a time that the master sets, half an hour by default. A read does not extend this time."""
        pinned = self._replicate_config()
        pinned.soft_pin_action = load_library().SoftPinAction.ENABLE
        return self._put(items, pinned)

    def _replicate_config(self) -> Any:
        """Return the library's settings for a write with `replicas` copies."""
        config = load_library().ReplicateConfig()
        config.replica_num = self._replicas
        return config

    def _put(self, items: Sequence[tuple[bytes, Sequence[Any]]], *config: Any) -> list[Outcome]:
        values = dict(items)
        addresses = {key: self._addresses(pieces) for key, pieces in items}
        self._reserve_buffer(
            sum(aligned(s) for parts in addresses.values() for address, s in parts if not address)
        )
        at, buffers, lengths = 0, [], []
        for key, parts in addresses.items():
            pointers: list[int] = []
            spans: list[int] = []
            for piece, (address, size) in zip(values[key], parts, strict=True):
                if address:
                    pointers.append(address)
                    spans.append(size)
                    continue
                self._buffer[at : at + size] = memoryview(piece)
                if pointers and pointers[-1] + spans[-1] == self._address + at:
                    spans[-1] += size
                else:
                    pointers.append(self._address + at)
                    spans.append(size)
                at += size
            at = aligned(at)
            buffers.append(pointers)
            lengths.append(spans)
        names, uses_caller_memory = [key.hex() for key in addresses], any(len(each) > 1 for each in buffers)

        def send() -> Any:
            with self._mooncake.one_at_a_time("put"):
                return self._client.batch_put_from_multi_buffers(names, buffers, lengths, *config)

        codes = self._call(send, uses_caller_memory=uses_caller_memory)
        self._check_count(codes, len(names))
        outcome = {
            key: Outcome.OK if code == 0 else Outcome.FULL if code == _NO_SPACE else Outcome.FAILED
            for key, code in zip(addresses, codes, strict=True)
        }
        return [outcome[key] for key, _ in items]

    def remove(self, keys: Sequence[bytes]) -> int:
        names = [key.hex() for key in dict.fromkeys(keys)]
        codes = self._call(lambda: self._client.batch_remove(names, True))
        self._check_count(codes, len(names))
        return sum(code == 0 for code in codes)

    def close(self) -> None:
        if self._address:
            try:
                self._call(lambda: self._client.unregister_buffer(self._address))
            except TimeoutError:
                ABANDONED_MEMORY.append(self._buffer)  # a hung call may still write there
        self._address = 0
        self._bounded.close()

    # --- inside

    def _call(self, function: Any, uses_caller_memory: bool = False) -> Any:
        return self._bounded.call(
            partial(self._mooncake.run, function), uses_caller_memory=uses_caller_memory
        )

    @staticmethod
    def _check_count(answers: Any, count: int) -> None:
        if len(answers) != count:
            raise StoreError(f"the store returned {len(answers)} results for {count} keys")

    def _reserve_buffer(self, size: int) -> None:
        """Ensure that the connection has a registered buffer of at least `size` bytes. After a hung call, the
        connection is closed, so no other call uses its buffer."""
        if size <= len(self._buffer) and self._address:
            return
        buffer = aligned_bytes(max(size, 1 << 20))
        address = address_of(np.frombuffer(buffer, np.uint8))
        old = self._address
        if self._call(lambda: self._client.register_buffer(address, len(buffer))):
            raise StoreError(f"a buffer of {len(buffer)} bytes could not be registered")
        if old:
            self._call(lambda: self._client.unregister_buffer(old))
        self._buffer, self._address = buffer, address

    def _fetch(self, ranges: Sequence[ValueRange], begins: list[int], sizes: list[int]) -> list[int]:
        """Read each range to its position in the buffer. `begins` are these positions, and `sizes` the numbers of
        bytes available there. Return the lengths. A zero or negative length is a miss."""
        lengths = [-1] * len(ranges)
        whole = [number for number, wanted in enumerate(ranges) if not wanted.stop]
        parts = [number for number, wanted in enumerate(ranges) if wanted.stop]
        if whole:
            names = [ranges[number].key.hex() for number in whole]
            pointers = [self._address + begins[number] for number in whole]
            spans = [sizes[number] for number in whole]
            got = self._call(lambda: self._client.batch_get_into(names, pointers, spans))
            self._check_count(got, len(whole))
            for number, buffer, length in zip(whole, spans, got, strict=True):
                # The value is longer than any valid value, so it is reported as damaged.
                lengths[number] = buffer + 1 if length == _TOO_LONG else min(length, buffer + 1)
        for number in parts:
            wanted, size = ranges[number], sizes[number]
            name = wanted.key.hex()
            length = self._range(name, begins[number], wanted.start, size)
            if length == _TOO_LONG:
                size = min(size, self._size(name) - wanted.start)
                length = self._range(name, begins[number], wanted.start, size) if size > 0 else -1
            lengths[number] = length if length == size else -1
        return lengths

    def _size(self, name: str) -> int:
        return int(self._call(lambda: self._client.get_size(name)))

    def _range(self, name: str, to: int, start: int, size: int) -> int:
        answer = self._call(
            lambda: self._client.get_into_ranges([self._address], [[name]], [[[to]]], [[[start]]], [[[size]]])
        )
        return int(answer[0][0][0])


def open_mooncake(
    mooncake: MooncakeConfig, config: RemoteConfig, client: MooncakeClient | None = None
) -> RemoteTier:
    """Open the tier. Raises TierError if the package is missing or the master cannot be reached. The tier uses
    `client` if it is given, and closes it."""
    load_library()
    config = replace(config, batch_bytes=max(config.batch_bytes, _BATCH_BYTES))
    client = client or MooncakeClient(mooncake, config.timeout)
    return store_tier(
        str(mooncake),
        config,
        lambda: MooncakeStore(client, config.timeout, str(mooncake), mooncake.replicas),
        client.close,
    )


def parse_url(url: str) -> Callable[[], RemoteTier]:
    """Parse `mooncake://master:port?capacity=64GiB&segment=16GiB&local=10.0.0.7&protocol=rdma&devices=mlx5_0&replicas=2`.
    Return the function that opens the tier.
    """
    parts = urlsplit(url)
    options = Options(url, parts.query)
    try:
        port = parts.port or 50051
    except ValueError as error:
        raise ValueError(f"{options.url}: {error}") from None
    if parts.hostname is None:
        raise ValueError(f"{options.url}: the master is missing; write mooncake://host:port?capacity=64GiB")
    mooncake = MooncakeConfig(
        master=f"{parts.hostname}:{port}",
        segment=options.size("segment", 0),
        local=options.text("local", "127.0.0.1"),
        metadata=options.text("metadata", "P2PHANDSHAKE"),
        protocol=options.text("protocol", "tcp"),
        devices=options.text("devices", ""),
        replicas=options.integer("replicas", 1),
    )
    return partial(open_mooncake, mooncake, remote_config(options))
