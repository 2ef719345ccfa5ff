"""Redis or Valkey as a tier: `redis://user:password@host:port/db?capacity=64GiB`.

    kvloom/1/KEY     the page: head and body                     kvloom/1:used    keys by last use (a sorted set)
    kvloom/1:sizes   bytes by key                                kvloom/1:counts  bytes, evicted, a clock of uses

Everyone who shares the database shares the capacity: a write first makes an empty value and room for it, in one step on the
server, and fills it only if it is still there. So nothing is ever outside the count. Knows no pages.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit

from .options import Options
from .remote import RemoteConfig, RemoteTier, StoreError, Usage
from .resp import RefusedError, Resp
from .transfer import Outcome
from .values import Place, Store, Want, store_tier

__all__ = ["RedisAddress", "RedisStore", "open_redis", "opener"]

_INDEX, _SIZES, _COUNTS = b"kvloom/1:used", b"kvloom/1:sizes", b"kvloom/1:counts"
_BATCH_BYTES = 2 << 20  # what a processor's cache holds: 8 MiB at once are up to twice slower
_MOST_COUNT = (1 << 63) - 1
_INDEXES = (3, _INDEX, _SIZES, _COUNTS)

_RESERVE = """
local used, sizes, counts = KEYS[1], KEYS[2], KEYS[3]
local total = tonumber(redis.call('HGET', counts, 'bytes') or '0')
local now = redis.call('HINCRBY', counts, 'clock', 1)
for i = 2, #ARGV, 2 do
  local key, size = ARGV[i], tonumber(ARGV[i + 1])
  total = total + size - tonumber(redis.call('HGET', sizes, key) or '0')
  redis.call('HSET', sizes, key, size)
  redis.call('ZADD', used, now, key)
  redis.call('SETNX', key, '')
end
local evicted = 0
while total > tonumber(ARGV[1]) do
  local oldest = redis.call('ZPOPMIN', used)[1]
  if not oldest then total = 0 break end
  total = total - tonumber(redis.call('HGET', sizes, oldest) or '0')
  redis.call('HDEL', sizes, oldest)
  redis.call('UNLINK', oldest)
  evicted = evicted + 1
end
redis.call('HSET', counts, 'bytes', total)
redis.call('HINCRBY', counts, 'evicted', evicted)
return evicted
"""

_TOUCH = """
local now = redis.call('HINCRBY', KEYS[3], 'clock', 1)
for i = 1, #ARGV do redis.call('ZADD', KEYS[1], 'XX', now, ARGV[i]) end
return 0
"""

_REMOVE = """
local there = 0
for i = 1, #ARGV do
  local key = ARGV[i]
  if redis.call('STRLEN', key) > 0 then there = there + 1 end
  redis.call('UNLINK', key)
  redis.call('ZREM', KEYS[1], key)
  local size = redis.call('HGET', KEYS[2], key)
  if size then
    redis.call('HDEL', KEYS[2], key)
    redis.call('HINCRBY', KEYS[3], 'bytes', -tonumber(size))
  end
end
return there
"""


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """Where a server is, and who asks. `socket` is a path, instead of host and port."""

    host: str = "127.0.0.1"
    port: int = 6379
    database: int = 0
    user: str = ""
    password: str = ""
    tls: bool = False
    socket: str = ""

    def __str__(self) -> str:
        """For logs: no password."""
        return f"{'rediss' if self.tls else 'redis'}://{self.socket or f'{self.host}:{self.port}'}/{self.database}"


class RedisStore(Store):
    """One connection to a server."""

    def __init__(self, address: RedisAddress, capacity: int, timeout: float) -> None:
        self._capacity = capacity
        tls = ssl.create_default_context() if address.tls else None
        try:
            self._resp = Resp(address.socket or (address.host, address.port), timeout, tls)
        except OSError as error:
            raise StoreError(f"{address} cannot be reached: {error}") from error
        try:
            if address.password:
                self._resp.ask("AUTH", *filter(None, (address.user, address.password)))
            if address.database:
                self._resp.ask("SELECT", address.database)
            self._reserve, self._touch, self._remove = (
                self._resp.ask("SCRIPT", "LOAD", script) for script in (_RESERVE, _TOUCH, _REMOVE)
            )
        except BaseException:
            self._resp.close()
            raise

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        self._resp.send([("STRLEN", key) for key in keys])
        return [bool(length) for length in self._answers(len(keys))]

    def get(self, wants: Sequence[Want], place: Place) -> list[int]:
        commands: list[tuple[Any, ...]] = [
            ("GETRANGE", want.key, want.start, want.stop - 1) if want.stop else ("GET", want.key)
            for want in wants
        ]
        keys = list(dict.fromkeys(want.key for want in wants))
        self._resp.send([*commands, ("EVALSHA", self._touch, *_INDEXES, *keys)])
        lengths = []
        for number in range(len(wants)):

            def here(length: int, number: int = number) -> Sequence[memoryview] | None:
                return place(number, length) if length else ()

            # An empty string: nothing there, or a value that has yet to come.
            lengths.append(self._resp.long_answer(here) or -1)
        self._answers(1)
        return lengths

    def put(self, items: Sequence[tuple[bytes, Sequence[Any]]]) -> list[Outcome]:
        sizes = [value for key, pieces in items for value in (key, sum(map(len, pieces)))]
        reserve = ("EVALSHA", self._reserve, *_INDEXES, self._capacity, *sizes)
        self._resp.send([reserve, *(("SET", key, list(pieces), "XX") for key, pieces in items)])
        outcomes = []
        reserved = self._resp.answer()
        for _ in items:
            answer = self._resp.answer()
            full = isinstance(answer, RefusedError) and answer.args[0].startswith("OOM")
            # None: someone pushed it out before it was filled.
            outcomes.append(
                Outcome.OK if answer == b"OK" else Outcome.FULL if full or answer is None else Outcome.FAILED
            )
        if isinstance(reserved, RefusedError):
            if not reserved.args[0].startswith("OOM"):
                raise reserved
            return [Outcome.FULL] * len(items)
        return outcomes

    def remove(self, keys: Sequence[bytes]) -> int:
        return int(self._resp.ask("EVALSHA", self._remove, *_INDEXES, *keys))

    def usage(self) -> Usage:
        self._resp.send([("HLEN", _SIZES), ("HMGET", _COUNTS, "bytes", "evicted")])
        objects, counts = self._answers(2)
        # A server may say anything: counts stay within what metrics take.
        return Usage(*(max(0, min(int(count or 0), _MOST_COUNT)) for count in (objects, *counts[:2])))

    def close(self) -> None:
        self._resp.close()

    def _answers(self, count: int) -> list[Any]:
        answers = [self._resp.answer() for _ in range(count)]
        for answer in answers:
            if isinstance(answer, RefusedError):
                raise answer
        return answers


def open_redis(address: RedisAddress, config: RemoteConfig) -> RemoteTier:
    """A TierError when the server cannot be reached, or will not have us."""
    config = replace(config, batch_bytes=min(config.batch_bytes, _BATCH_BYTES))
    return store_tier(str(address), config, lambda: RedisStore(address, config.capacity, config.timeout))


def opener(text: str) -> Callable[[], RemoteTier]:
    """`redis://[user:password@]host[:port][/db]?capacity=64GiB&compression=lz4&…`; `rediss://` with TLS; a socket:
    `redis:///path/of/socket?capacity=…&db=0`. The options are those of RemoteConfig."""
    url = urlsplit(text)
    options = Options(text, url.query)
    path = unquote(url.path)
    address = RedisAddress(tls=url.scheme == "rediss", user=unquote(url.username or ""))
    try:
        address = replace(address, password=unquote(url.password or ""))
        if url.hostname is None:
            address = replace(address, socket=path, database=options.whole("db", 0))
        else:
            database = path.strip("/") or "0"
            if not database.isdecimal():
                raise ValueError(f"{database!r} is no number of a database")
            address = replace(address, host=url.hostname, port=url.port or 6379, database=int(database))
    except ValueError as error:
        raise ValueError(f"{options.told}: {error}; write redis://host:port/db?capacity=64GiB") from None
    return partial(open_redis, address, options.remote())
