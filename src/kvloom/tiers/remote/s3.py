"""A bucket of an S3 store as a tier: `s3://bucket/prefix?capacity=1TiB&endpoint=http://host:9000&region=eu-central-1`.

Values travel by NIXL's object backend; what it cannot say or do, lengths and deletions, is asked of the store itself (boto3).
Credentials are those of the environment, as any S3 client finds them. The store does not count for us, so `capacity` bounds what this
process put there: who shares a bucket for long gives it a lifecycle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import accumulate
from os import urandom
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from kvloom.tiers.disk.files import aligned, aligned_bytes
from kvloom.tiers.options import Options
from kvloom.tiers.tier import TierError
from kvloom.tiers.transfer import Outcome

from .bounded_calls import BoundedCalls
from .nixl import wait_each, make_agent
from .remote_tier import RemoteConfig, RemoteTier, StoreError, Usage
from .store_tier import CapacityTracker, Destination, Store, ValueRange, store_tier

__all__ = ["S3Bucket", "S3Store", "open_s3", "parse_url"]

_AT_ONCE = 8  # requests to the store, of each kind
_MOST_DELETED = 1000  # in one call
_SIGNED = 8  # bytes behind a value that tell whether it goes on
_LATELY = 1.0  # seconds after which a store that was not heard of may be gone


@dataclass(frozen=True, slots=True)
class S3Bucket:
    """Where a bucket is; without an `endpoint`, at Amazon's."""

    name: str
    prefix: str = ""
    endpoint: str = ""
    region: str = "us-east-1"

    def __str__(self) -> str:
        return f"s3://{self.name}/{self.prefix}".rstrip("/")


class _Heard:
    """When any connection heard of the store last."""

    at = float("-inf")


class S3Store(Store):
    """One thread's way to a bucket: calls that are bounded in time, and a buffer that NIXL knows."""

    def __init__(
        self, bucket: S3Bucket, client: Any, credentials: Any, counted: CapacityTracker, heard: _Heard, timeout: float
    ) -> None:
        self._bucket, self._client, self._credentials, self._counted = bucket, client, credentials, counted
        self._heard = heard
        self._bounded = BoundedCalls(timeout, str(bucket))
        self._asking = ThreadPoolExecutor(_AT_ONCE, "kvloom-s3")
        self._room, self._address = memoryview(b""), 0
        self._known: Any = None  # the buffer, as NIXL has it registered
        self._agent = self._bounded.call(self._begin, max(timeout, 20.0))

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [length >= 0 for length in self._call(lambda: self._lengths(keys))]

    def get(self, wants: Sequence[ValueRange], place: Destination) -> list[int]:
        self._counted.touch(list(dict.fromkeys(want.key for want in wants)))
        return list(self._call(lambda: self._get(wants, place), lent=True))

    def put(self, items: Sequence[tuple[bytes, Sequence[Any]]]) -> list[Outcome]:
        sizes = {key: sum(map(len, pieces)) for key, pieces in items}
        gone = self._counted.reserve(sizes)
        try:
            self._call(lambda: self._put(dict(items), sizes, gone), lent=True)
        except BaseException:
            self._counted.remove(list(sizes))
            raise
        return [Outcome.OK] * len(items)

    def remove(self, keys: Sequence[bytes]) -> int:
        def remove() -> int:
            there = [key for key, length in zip(keys, self._lengths(keys), strict=True) if length >= 0]
            self._delete(there)
            return len(there)

        self._counted.remove(keys)
        return int(self._call(remove))

    def usage(self) -> Usage:
        return self._counted.usage()

    def close(self) -> None:
        self._bounded.close()
        self._asking.shutdown(wait=False)

    # --- inside, in the bounded thread

    def _call(self, function: Callable[[], Any], lent: bool = False) -> Any:
        return self._bounded.call(function, uses_caller_memory=lent)

    def _begin(self) -> Any:
        try:
            self._client.head_bucket(Bucket=self._bucket.name)
        except Exception as error:
            said = getattr(error, "response", {}).get("ResponseMetadata", {}).get("HTTPStatusCode")
            why = {
                404: f"there is no bucket {self._bucket.name!r}",
                403: "the store refuses these credentials",
            }.get(said, str(error))
            raise StoreError(f"{self._bucket} cannot be reached: {why}") from error
        self._heard.at = time.monotonic()
        given = {"bucket": self._bucket.name, "region": self._bucket.region, "num_threads": str(_AT_ONCE)}
        given |= {"req_checksum": "required", "resp_checksum": "required"}  # pages have their own
        if self._credentials is not None:  # else it looks for them by itself
            frozen = self._credentials.get_frozen_credentials()
            given |= {"access_key": frozen.access_key, "secret_key": frozen.secret_key}
            given |= {"session_token": frozen.token} if frozen.token else {}
        if self._bucket.endpoint:
            given |= {"endpoint_override": self._bucket.endpoint, "use_virtual_addressing": "false"}
            given["scheme"] = urlsplit(self._bucket.endpoint).scheme
        return make_agent("OBJ", given)

    def _name(self, key: bytes) -> str:
        return f"{self._bucket.prefix}{key.hex()}"

    def _lengths(self, keys: Sequence[bytes]) -> list[int]:
        """The length of each value, -1 where there is none."""
        missing = self._client.exceptions.ClientError

        def ask(key: bytes) -> int:
            try:
                return int(
                    self._client.head_object(Bucket=self._bucket.name, Key=self._name(key))["ContentLength"]
                )
            except missing as error:
                if error.response["ResponseMetadata"]["HTTPStatusCode"] == 404:
                    return -1
                raise StoreError(f"{self._bucket}: {error}") from error

        lengths = list(self._asking.map(ask, keys))
        if keys:
            self._heard.at = time.monotonic()
        return lengths

    def _get(self, wants: Sequence[ValueRange], place: Destination) -> list[int]:
        lengths = self._likely(wants, place)
        rest = [number for number in range(len(wants)) if number not in lengths]
        keys = list(dict.fromkeys(wants[number].key for number in rest))
        whole = dict(zip(keys, self._lengths(keys), strict=True))
        asked = []
        for number in rest:
            want, size = wants[number], whole[wants[number].key]
            length = size if not want.stop else max(0, min(want.stop, size) - want.start)
            lengths[number] = length if size > 0 and length > 0 else -1
            pieces = place(number, length) if lengths[number] > 0 else None
            if pieces is not None:
                asked.append((want, length, pieces))
        begins = self._moved("READ", [(want.key, want.start, length) for want, length, _ in asked])
        for begin, (_, _, pieces) in zip(begins, asked, strict=True):
            self._hand_over(begin, pieces)
        return [lengths[number] for number in range(len(wants))]

    def _likely(self, wants: Sequence[ValueRange], place: Destination) -> dict[int, int]:
        """Those values that are as long as they likely are, without asking for their lengths first. NIXL does not say how much
        came: so the last byte that should come and some behind it are signed before, and the value ended there if that one
        changed and those did not. (One that is the same by chance is asked for again.) None where the store may be gone: NIXL would
        try on for long."""
        if time.monotonic() - self._heard.at > _LATELY:
            return {}
        likely = {number: want.expected_bytes for number, want in enumerate(wants) if want.expected_bytes}
        sizes = [length + _SIGNED for length in likely.values()]
        sign = urandom(1 + _SIGNED)
        self._stage(sum(map(aligned, sizes)))
        for begin, length in zip(_begins(sizes), likely.values(), strict=True):
            self._room[begin + length - 1 : begin + length + _SIGNED] = sign
        parts = [(wants[number].key, 0, size) for number, size in zip(likely, sizes, strict=True)]
        came = {}
        for begin, (number, length) in zip(self._tried("READ", parts), likely.items(), strict=True):
            end = begin + length
            if begin >= 0 and self._room[end - 1] != sign[0] and self._room[end : end + _SIGNED] == sign[1:]:
                came[number] = length
                self._hand_over(begin, place(number, length) or ())
        return came

    def _hand_over(self, begin: int, pieces: Sequence[memoryview]) -> None:
        for piece in pieces:
            piece[:] = self._room[begin : begin + len(piece)]
            begin += len(piece)

    def _put(self, values: dict[bytes, Sequence[Any]], sizes: dict[bytes, int], gone: list[bytes]) -> None:
        self._delete(gone)
        self._stage(sum(aligned(size) for size in sizes.values()))
        for begin, pieces in zip(_begins(sizes.values()), values.values(), strict=True):
            for piece in pieces:
                self._room[begin : begin + len(piece)] = memoryview(piece)
                begin += len(piece)
        self._moved("WRITE", [(key, 0, size) for key, size in sizes.items()])

    def _delete(self, keys: Sequence[bytes]) -> None:
        for at in range(0, len(keys), _MOST_DELETED):
            named = [{"Key": self._name(key)} for key in keys[at : at + _MOST_DELETED]]
            self._client.delete_objects(Bucket=self._bucket.name, Delete={"Objects": named, "Quiet": True})

    def _moved(self, verb: str, parts: Sequence[tuple[bytes, int, int]]) -> list[int]:
        """Key, offset and length of each part to or from the buffer; where each begins there."""
        begins = self._tried(verb, parts)
        if -1 in begins:
            raise StoreError(f"{self._bucket}: NIXL: {begins.count(-1)} of {len(begins)} transfers failed")
        return begins

    def _tried(self, verb: str, parts: Sequence[tuple[bytes, int, int]]) -> list[int]:
        """`_moved`, with -1 for parts that failed. Each is a transfer of its own: of one for all, NIXL would tell the first failure
        while it still wrote to the buffer."""
        if not parts:
            return []
        begins = _begins([length for _, _, length in parts])
        self._stage(sum(aligned(length) for _, _, length in parts))
        agent, handles = self._agent, list[Any]()
        objects = [
            (offset, length, number + 1, self._name(key))
            for number, (key, offset, length) in enumerate(parts)
        ]
        registered = agent.register_memory(objects, "OBJ")
        try:
            try:
                for begin, place in zip(begins, objects, strict=True):
                    memory = agent.get_xfer_descs([(self._address + begin, place[1], 0)], "DRAM")
                    there = agent.get_xfer_descs([place[:3]], "OBJ")
                    handles.append(agent.initialize_xfer(verb, memory, there, agent.name))
                done = wait_each(agent, handles)
            finally:
                for handle in handles:
                    agent.release_xfer_handle(handle)
        except Exception as error:
            raise StoreError(f"{self._bucket}: {error!r}") from error
        finally:
            agent.deregister_memory(registered)
        if any(done):
            self._heard.at = time.monotonic()
        return [begin if came else -1 for begin, came in zip(begins, done, strict=True)]

    def _stage(self, size: int) -> None:
        """A buffer of that size, which NIXL knows."""
        if size <= len(self._room):
            return
        if self._known is not None:
            self._agent.deregister_memory(self._known)
        self._room = aligned_bytes(max(size, 1 << 20))
        self._address = np.frombuffer(self._room, np.uint8).ctypes.data
        self._known = self._agent.register_memory([(self._address, len(self._room), 0, "")], "DRAM")


def _begins(sizes: Any) -> list[int]:
    return [0, *accumulate(aligned(size) for size in sizes)][:-1]


def _ask(bucket: S3Bucket, timeout: float) -> tuple[Any, Any]:
    """A client of the store, for all threads, and the credentials that it found."""
    try:
        boto3, config = import_module("boto3"), import_module("botocore.config")
    except ImportError as error:
        raise TierError(f"S3 cannot be asked ({error}): pip install boto3") from error
    settings = config.Config(
        connect_timeout=timeout,
        read_timeout=timeout,
        retries={"max_attempts": 1},
        max_pool_connections=_AT_ONCE,
        s3={"addressing_style": "path"} if bucket.endpoint else {},
    )
    session = boto3.session.Session()
    client = session.client(
        "s3", endpoint_url=bucket.endpoint or None, region_name=bucket.region, config=settings
    )
    return client, session.get_credentials()


def open_s3(bucket: S3Bucket, config: RemoteConfig) -> RemoteTier:
    """A TierError where NIXL or boto3 is missing, or the bucket cannot be reached."""
    asked, counted, heard = _ask(bucket, config.timeout), CapacityTracker(config.capacity), _Heard()
    return store_tier(str(bucket), config, lambda: S3Store(bucket, *asked, counted, heard, config.timeout))


def parse_url(text: str) -> Callable[[], RemoteTier]:
    """`s3://bucket/prefix?capacity=1TiB&endpoint=http://host:9000&region=…`; the other options are those of RemoteConfig."""
    url = urlsplit(text)
    options = Options(text, url.query)
    if not url.netloc:
        raise ValueError(f"{options.url}: which bucket? Write s3://bucket/prefix?capacity=1TiB")
    prefix, endpoint = unquote(url.path).strip("/"), options.text("endpoint", "")
    if endpoint and urlsplit(endpoint).scheme not in ("http", "https"):
        raise ValueError(f"{options.url}: endpoint={endpoint!r} is no URL; write http://host:9000")
    bucket = S3Bucket(url.netloc, f"{prefix}/" if prefix else "", endpoint, options.text("region", "us-east-1"))
    return partial(open_s3, bucket, options.remote())
