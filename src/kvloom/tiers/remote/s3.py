"""An S3 bucket as a tier: `s3://bucket/prefix?capacity=1TiB&endpoint=http://host:9000&region=eu-central-1`.

NIXL's object backend transfers values. boto3 reads the lengths of values and deletes values, because NIXL can do
neither. Credentials come from the environment, as for any S3 client. The store does not count values, so `capacity`
limits only the values of this process. If several processes share a bucket, the bucket needs a lifecycle rule that
deletes old values.
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

from kvloom.tiers.aligned_memory import aligned, aligned_bytes
from kvloom.tiers.options import Options
from kvloom.tiers.tier import TierError
from kvloom.tiers.transfer import Outcome

from .bounded_calls import BoundedCalls
from .nixl import make_agent, wait_each
from .remote_tier import RemoteConfig, RemoteTier, StoreError, remote_config
from .store_tier import Destination, Store, ValueRange, store_tier

__all__ = ["S3Bucket", "S3Store", "open_s3", "parse_url"]

_CONCURRENT = 8  # number of requests of each kind that run at the same time
_MAX_DELETED = 1000  # per call
_MARK_BYTES = 8  # bytes after a value that show whether the value continues
_MAX_REPLY_BYTES = 4 << 20  # largest reply of the store to boto3: the errors of _MAX_DELETED deletions
_RECENT_SECONDS = 1.0  # after this many seconds without contact, a store may be unreachable


@dataclass(frozen=True, slots=True)
class S3Bucket:
    """The address of a bucket. Without an `endpoint`, the bucket is at Amazon."""

    name: str
    prefix: str = ""
    endpoint: str = ""
    region: str = "us-east-1"

    def __str__(self) -> str:
        return f"s3://{self.name}/{self.prefix}".rstrip("/")


class _LastContact:
    """The time of the last reply that any connection received from the store."""

    at = float("-inf")


class S3Store(Store):
    """The connection of one thread to a bucket, with a timeout for each call and a buffer registered with NIXL."""

    def __init__(
        self,
        bucket: S3Bucket,
        client: Any,
        credentials: Any,
        last_contact: _LastContact,
        timeout: float,
    ) -> None:
        self._bucket, self._client, self._credentials = bucket, client, credentials
        self._last_contact = last_contact
        self._bounded = BoundedCalls(timeout, str(bucket))
        self._executor = ThreadPoolExecutor(_CONCURRENT, "kvloom-s3")
        self._buffer, self._address = memoryview(b""), 0
        self._registration: Any = None  # NIXL's registration of the buffer
        self._agent = self._bounded.call(self._begin, max(timeout, 20.0))

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return [length >= 0 for length in self._call(lambda: self._lengths(keys))]

    def get(self, ranges: Sequence[ValueRange], destination: Destination) -> list[int]:
        return list(self._call(lambda: self._get(ranges, destination), uses_caller_memory=True))

    def put(self, items: Sequence[tuple[bytes, Sequence[Any]]], tenant: str = "") -> list[Outcome]:
        sizes = {key: sum(map(len, pieces)) for key, pieces in items}
        self._call(lambda: self._put(dict(items), sizes), uses_caller_memory=True)
        return [Outcome.OK] * len(items)

    def remove(self, keys: Sequence[bytes]) -> int:
        def remove() -> int:
            stored = [key for key, length in zip(keys, self._lengths(keys), strict=True) if length >= 0]
            self._delete(stored)
            return len(stored)

        return int(self._call(remove))

    def evict(self, keys: Sequence[bytes]) -> None:
        self._call(lambda: self._delete(keys))

    def close(self) -> None:
        self._bounded.close()
        self._executor.shutdown(wait=False)

    # --- in the bounded thread

    def _call(self, function: Callable[[], Any], uses_caller_memory: bool = False) -> Any:
        return self._bounded.call(function, uses_caller_memory=uses_caller_memory)

    def _begin(self) -> Any:
        try:
            self._client.head_bucket(Bucket=self._bucket.name)
        except Exception as error:
            status = getattr(error, "response", {}).get("ResponseMetadata", {}).get("HTTPStatusCode")
            reason = {
                404: f"the bucket {self._bucket.name!r} does not exist",
                403: "the store refuses these credentials",
            }.get(status, str(error))
            raise StoreError(f"{self._bucket} cannot be reached: {reason}") from error
        self._last_contact.at = time.monotonic()
        given = {"bucket": self._bucket.name, "region": self._bucket.region, "num_threads": str(_CONCURRENT)}
        given |= {"req_checksum": "required", "resp_checksum": "required"}  # pages have their own checksums
        if self._credentials is not None:  # else NIXL finds them by itself
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
        """Return the length of each value, with -1 for a miss."""
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

        lengths = list(self._executor.map(ask, keys))
        if keys:
            self._last_contact.at = time.monotonic()
        return lengths

    def _get(self, ranges: Sequence[ValueRange], destination: Destination) -> list[int]:
        lengths = self._get_expected(ranges, destination)
        rest = [number for number in range(len(ranges)) if number not in lengths]
        keys = list(dict.fromkeys(ranges[number].key for number in rest))
        whole = dict(zip(keys, self._lengths(keys), strict=True))
        requested = []
        for number in rest:
            wanted, size = ranges[number], whole[ranges[number].key]
            length = size if not wanted.stop else max(0, min(wanted.stop, size) - wanted.start)
            lengths[number] = length if size > 0 and length > 0 else -1
            pieces = destination(number, length) if lengths[number] > 0 else None
            if pieces is not None:
                requested.append((wanted, length, pieces))
        begins = self._transfer(
            "READ", [(wanted.key, wanted.start, length) for wanted, length, _ in requested]
        )
        for begin, (_, _, pieces) in zip(begins, requested, strict=True):
            self._copy_out(begin, pieces)
        return [lengths[number] for number in range(len(ranges))]

    def _get_expected(self, ranges: Sequence[ValueRange], destination: Destination) -> dict[int, int]:
        """Read values without asking for their lengths first. Return the lengths of the values that have the expected
        length, by index. For the other values, the caller asks for the length and reads again. Return {} if the store
        may be unreachable, because NIXL would retry for a long time.

        NIXL does not report how many bytes it read. The method therefore requests a few bytes more than expected.
        Before the read, it puts random bytes at the position of the last expected byte and after it. The length is as
        expected if the read changed the first of these bytes and none of the others. If the last byte of the value
        happens to equal the first random byte, the caller reads the value again.
        """
        if time.monotonic() - self._last_contact.at > _RECENT_SECONDS:
            return {}
        expected = {
            number: wanted.expected_bytes for number, wanted in enumerate(ranges) if wanted.expected_bytes
        }
        sizes = [length + _MARK_BYTES for length in expected.values()]
        mark = urandom(1 + _MARK_BYTES)
        self._reserve_buffer(sum(map(aligned, sizes)))
        for begin, length in zip(_begins(sizes), expected.values(), strict=True):
            self._buffer[begin + length - 1 : begin + length + _MARK_BYTES] = mark
        parts = [(ranges[number].key, 0, size) for number, size in zip(expected, sizes, strict=True)]
        received = {}
        for begin, (number, length) in zip(self._try_transfer("READ", parts), expected.items(), strict=True):
            end = begin + length
            if (
                begin >= 0
                and self._buffer[end - 1] != mark[0]
                and self._buffer[end : end + _MARK_BYTES] == mark[1:]
            ):
                received[number] = length
                self._copy_out(begin, destination(number, length) or ())
        return received

    def _copy_out(self, begin: int, pieces: Sequence[memoryview]) -> None:
        for piece in pieces:
            piece[:] = self._buffer[begin : begin + len(piece)]
            begin += len(piece)

    def _put(self, values: dict[bytes, Sequence[Any]], sizes: dict[bytes, int]) -> None:
        self._reserve_buffer(sum(aligned(size) for size in sizes.values()))
        for begin, pieces in zip(_begins(sizes.values()), values.values(), strict=True):
            for piece in pieces:
                self._buffer[begin : begin + len(piece)] = memoryview(piece)
                begin += len(piece)
        self._transfer("WRITE", [(key, 0, size) for key, size in sizes.items()])

    def _delete(self, keys: Sequence[bytes]) -> None:
        for at in range(0, len(keys), _MAX_DELETED):
            named = [{"Key": self._name(key)} for key in keys[at : at + _MAX_DELETED]]
            self._client.delete_objects(Bucket=self._bucket.name, Delete={"Objects": named, "Quiet": True})

    def _transfer(self, verb: str, parts: Sequence[tuple[bytes, int, int]]) -> list[int]:
        """Transfer parts (key, offset, length) to or from the buffer. Return the start of each part in the buffer."""
        begins = self._try_transfer(verb, parts)
        if -1 in begins:
            raise StoreError(f"{self._bucket}: NIXL: {begins.count(-1)} of {len(begins)} transfers failed")
        return begins

    def _try_transfer(self, verb: str, parts: Sequence[tuple[bytes, int, int]]) -> list[int]:
        """Transfer parts like `_transfer`, but return -1 for a failed part. Each part is a separate NIXL transfer.
        If several parts were one transfer, NIXL would report the first failure while it still writes other parts to
        the buffer."""
        if not parts:
            return []
        begins = _begins([length for _, _, length in parts])
        self._reserve_buffer(sum(aligned(length) for _, _, length in parts))
        agent, handles = self._agent, list[Any]()
        objects = [
            (offset, length, number + 1, self._name(key))
            for number, (key, offset, length) in enumerate(parts)
        ]
        registered = agent.register_memory(objects, "OBJ")
        try:
            try:
                for begin, destination in zip(begins, objects, strict=True):
                    memory = agent.get_xfer_descs([(self._address + begin, destination[1], 0)], "DRAM")
                    stored = agent.get_xfer_descs([destination[:3]], "OBJ")
                    handles.append(agent.initialize_xfer(verb, memory, stored, agent.name))
                done = wait_each(agent, handles)
            finally:
                for handle in handles:
                    agent.release_xfer_handle(handle)
        except Exception as error:
            raise StoreError(f"{self._bucket}: {error!r}") from error
        finally:
            agent.deregister_memory(registered)
        if any(done):
            self._last_contact.at = time.monotonic()
        return [begin if received else -1 for begin, received in zip(begins, done, strict=True)]

    def _reserve_buffer(self, size: int) -> None:
        """Register a buffer of at least `size` bytes with NIXL."""
        if size <= len(self._buffer):
            return
        if self._registration is not None:
            self._agent.deregister_memory(self._registration)
        self._buffer = aligned_bytes(max(size, 1 << 20))
        self._address = np.frombuffer(self._buffer, np.uint8).ctypes.data
        self._registration = self._agent.register_memory([(self._address, len(self._buffer), 0, "")], "DRAM")


def _begins(sizes: Any) -> list[int]:
    return [0, *accumulate(aligned(size) for size in sizes)][:-1]


def _make_client(bucket: S3Bucket, timeout: float) -> tuple[Any, Any]:
    """Return a client that all threads share, and the credentials that the client found."""
    try:
        boto3, config = import_module("boto3"), import_module("botocore.config")
    except ImportError as error:
        raise TierError(f"the S3 client cannot be loaded ({error}): pip install boto3") from error
    settings = config.Config(
        connect_timeout=timeout,
        read_timeout=timeout,
        retries={"max_attempts": 1},
        max_pool_connections=_CONCURRENT,
        s3={"addressing_style": "path"} if bucket.endpoint else {},
    )
    session = boto3.session.Session()
    client = session.client(
        "s3", endpoint_url=bucket.endpoint or None, region_name=bucket.region, config=settings
    )
    # boto3 reads replies of any length, and an abandoned call would not stop.
    client.meta.events.register("before-send.s3", partial(_send, client._endpoint.http_session))
    return client, session.get_credentials()


def _send(session: Any, request: Any, **_: Any) -> Any:
    """Send a request of boto3. Return the response. Its body is read later, up to a limit."""
    request.stream_output = True
    response = session.send(request)
    response.raw = _BoundedBody(response.raw)
    return response


class _BoundedBody:
    """The body of a response. `stream` raises StoreError if the body is longer than the limit."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw

    def stream(self) -> list[bytes]:
        body = self._raw.read(_MAX_REPLY_BYTES + 1)
        if len(body) > _MAX_REPLY_BYTES:
            self._raw.close()
            raise StoreError(f"the store's reply exceeds {_MAX_REPLY_BYTES} bytes; is it an S3 store?")
        return [body]


def open_s3(bucket: S3Bucket, config: RemoteConfig) -> RemoteTier:
    """Open the tier. Raises TierError if NIXL or boto3 is missing, or the bucket cannot be reached."""
    requested, last_contact = _make_client(bucket, config.timeout), _LastContact()
    return store_tier(str(bucket), config, lambda: S3Store(bucket, *requested, last_contact, config.timeout))


def parse_url(url: str) -> Callable[[], RemoteTier]:
    """Parse `s3://bucket/prefix?capacity=1TiB&endpoint=http://host:9000&region=…`. The other options are those of
    RemoteConfig. Return the function that opens the tier.
    """
    parts = urlsplit(url)
    options = Options(url, parts.query)
    if not parts.netloc:
        raise ValueError(f"{options.url}: the bucket is missing; write s3://bucket/prefix?capacity=1TiB")
    prefix, endpoint = unquote(parts.path).strip("/"), options.text("endpoint", "")
    if endpoint and urlsplit(endpoint).scheme not in ("http", "https"):
        raise ValueError(f"{options.url}: endpoint={endpoint!r} is not a URL; write http://host:9000")
    bucket = S3Bucket(
        parts.netloc, f"{prefix}/" if prefix else "", endpoint, options.text("region", "us-east-1")
    )
    return partial(open_s3, bucket, remote_config(options))
