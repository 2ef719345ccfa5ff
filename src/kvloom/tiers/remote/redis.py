"""Redis or Valkey as a tier: `redis://user:password@host:port/db?capacity=64GiB`.

    kvloom/1/KEY     the page: header and body                   kvloom/1:used    keys by last use (a sorted set)
    kvloom/1:sizes   bytes by key                                kvloom/1:counts  bytes, evicted, a clock of uses
    kvloom/1:owners  tenant and bytes by key                     kvloom/1:tenant:ID  keys of a tenant by last use
    kvloom/1:tenants bytes by tenant                             kvloom/1:shares     guaranteed bytes by tenant

All clients of the database share the capacity and the shares of tenants. A write has two steps. First the server
creates an empty value, counts it, and evicts other values, in one atomic step. Then the client fills the value, but
only if it still exists. Every stored value is therefore counted.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit

from kvloom.tiers.options import Options
from kvloom.tiers.shares import TenantAccounts, tenant_owner
from kvloom.tiers.transfer import Outcome

from .redis_protocol import RedisReplyError, RespConnection
from .remote_tier import RemoteConfig, RemoteTier, StoreError, Usage, remote_config
from .store_tier import Destination, Store, ValueRange, store_tier

__all__ = ["RedisAddress", "RedisStore", "open_redis", "parse_url"]

_INDEX, _SIZES, _COUNTS = b"kvloom/1:used", b"kvloom/1:sizes", b"kvloom/1:counts"
_OWNERS, _TENANTS, _SHARES = b"kvloom/1:owners", b"kvloom/1:tenants", b"kvloom/1:shares"
_BATCH_BYTES = 2 << 20  # fits into the processor's cache; 8 MiB is up to twice as slow
_MAX_COUNT = (1 << 63) - 1
_INDEXES = (6, _INDEX, _SIZES, _COUNTS, _OWNERS, _TENANTS, _SHARES)

_COMMON = """
local used, sizes, counts, owners, tenants, shares = unpack(KEYS)
local function order_of(id) return 'kvloom/1:tenant:' .. id end
local function owner_of(key)
  local owned = redis.call('HGET', owners, key)
  if owned then return string.match(owned, '^(%x+) (%d+)$') end
end
local function forget(key)
  local size = tonumber(redis.call('HGET', sizes, key) or '0')
  redis.call('ZREM', used, key)
  redis.call('HDEL', sizes, key)
  local id, bytes = owner_of(key)
  if id then
    redis.call('HDEL', owners, key)
    redis.call('ZREM', order_of(id), key)
    if redis.call('HINCRBY', tenants, id, -tonumber(bytes)) <= 0 then
      redis.call('HDEL', tenants, id)
      redis.call('HDEL', shares, id)
    end
  end
  return size
end
"""
"""The Lua function `forget` removes a key from all counts and returns its size. Clients of earlier releases do not
count tenants. The tenant counts may therefore still contain a key that is gone, or an earlier size of a value."""

_RESERVE = (
    _COMMON
    + """
local capacity, id, limit, guaranteed = tonumber(ARGV[1]), ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local total = tonumber(redis.call('HGET', counts, 'bytes') or '0')
local now = redis.call('HINCRBY', counts, 'clock', 1)
local function forget_gone(order)
  for i = 1, 10000 do
    local gone = redis.call('ZRANGE', order, 0, 0)[1]
    if not gone or redis.call('EXISTS', gone) == 1 then break end
    total = total - forget(gone)
    redis.call('ZREM', order, gone)
  end
end
forget_gone(used)
if id ~= '' then forget_gone(order_of(id)) end
for i = 5, #ARGV, 2 do
  local key, size = ARGV[i], tonumber(ARGV[i + 1])
  total = total + size - forget(key)
  redis.call('HSET', sizes, key, size)
  redis.call('ZADD', used, now, key)
  redis.call('SETNX', key, '')
  if id ~= '' then
    redis.call('HSET', owners, key, id .. ' ' .. size)
    redis.call('HINCRBY', tenants, id, size)
    redis.call('ZADD', order_of(id), now, key)
  end
end
local evicted = 0
local function evict(key)
  total = total - forget(key)
  redis.call('UNLINK', key)
  evicted = evicted + 1
end
if id ~= '' then
  if guaranteed > 0 then redis.call('HSET', shares, id, guaranteed) else redis.call('HDEL', shares, id) end
  while tonumber(redis.call('HGET', tenants, id) or '0') > limit do
    local oldest = redis.call('ZRANGE', order_of(id), 0, 0)[1]
    if not oldest then redis.call('HDEL', tenants, id) break end
    evict(oldest)
    redis.call('ZREM', order_of(id), oldest)
  end
end
local passed = 0
while total > capacity do
  local oldest = redis.call('ZRANGE', used, 0, 0)[1]
  if not oldest then total = 0 break end
  local other = passed < 1000 and owner_of(oldest)
  local reserved = other and tonumber(redis.call('HGET', shares, other) or '0')
  if reserved and tonumber(redis.call('HGET', tenants, other) or '0') <= reserved then
    redis.call('ZADD', used, now, oldest)
    passed = passed + 1
  else
    evict(oldest)
  end
end
redis.call('HSET', counts, 'bytes', total)
redis.call('HINCRBY', counts, 'evicted', evicted)
return evicted
"""
)

_TOUCH = (
    _COMMON
    + """
local now = redis.call('HINCRBY', counts, 'clock', 1)
local counted = redis.call('EXISTS', owners) == 1
for i = 2, #ARGV do
  redis.call('ZADD', used, 'XX', now, ARGV[i])
  local id = counted and owner_of(ARGV[i])
  if id then redis.call('ZADD', order_of(id), 'XX', now, ARGV[i]) end
  if tonumber(ARGV[1]) > 0 then redis.call('PEXPIRE', ARGV[i], ARGV[1]) end
end
return 0
"""
)

_REMOVE = (
    _COMMON
    + """
local there = 0
for i = 1, #ARGV do
  if redis.call('STRLEN', ARGV[i]) > 0 then there = there + 1 end
  redis.call('UNLINK', ARGV[i])
  local size = forget(ARGV[i])
  if size > 0 then redis.call('HINCRBY', counts, 'bytes', -size) end
end
return there
"""
)


def tenant_id(tenant: str) -> str:
    """Return the id under which the store counts a tenant, which is a digest of the tenant's name."""
    return tenant_owner(tenant).hex()


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """The address and credentials of a server. `socket` is a path that is used instead of host and port."""

    host: str = "127.0.0.1"
    port: int = 6379
    database: int = 0
    user: str = ""
    password: str = ""
    tls: bool = False
    socket: str = ""

    def __str__(self) -> str:
        """Return the address for logs, without the password."""
        return f"{'rediss' if self.tls else 'redis'}://{self.socket or f'{self.host}:{self.port}'}/{self.database}"


class RedisStore(Store):
    """One connection to a Redis or Valkey server, used as a key-value store for pages."""

    def __init__(
        self,
        address: RedisAddress,
        capacity: int,
        timeout: float,
        ttl: float = 0,
        accounts: TenantAccounts | None = None,
    ) -> None:
        """`ttl` is the number of seconds after which the server drops a page that was not read or written. 0 means
        never. `accounts` has the shares of tenants."""
        self._capacity, self._ttl = capacity, int(ttl * 1000)
        self._accounts = accounts or TenantAccounts(capacity)
        tls = ssl.create_default_context() if address.tls else None
        try:
            self._connection = RespConnection(address.socket or (address.host, address.port), timeout, tls)
        except OSError as error:
            raise StoreError(f"{address} cannot be reached: {error}") from error
        try:
            if address.password:
                self._connection.call("AUTH", *filter(None, (address.user, address.password)))
            if address.database:
                self._connection.call("SELECT", address.database)
            self._reserve, self._touch, self._remove = (
                self._connection.call("SCRIPT", "LOAD", script) for script in (_RESERVE, _TOUCH, _REMOVE)
            )
        except BaseException:
            self._connection.close()
            raise

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        self._connection.send([("STRLEN", key) for key in keys])
        return [bool(length) for length in self._replies(len(keys))]

    def get(self, ranges: Sequence[ValueRange], destination: Destination) -> list[int]:
        commands: list[tuple[Any, ...]] = [
            ("GETRANGE", wanted.key, wanted.start, wanted.stop - 1) if wanted.stop else ("GET", wanted.key)
            for wanted in ranges
        ]
        keys = list(dict.fromkeys(wanted.key for wanted in ranges))
        self._connection.send([*commands, ("EVALSHA", self._touch, *_INDEXES, self._ttl, *keys)])
        lengths = []
        for number in range(len(ranges)):

            def destination_of(length: int, number: int = number) -> Sequence[memoryview] | None:
                return destination(number, length) if length else ()

            # An empty string is a miss, or a value that is not yet filled.
            lengths.append(self._connection.read_value_into(destination_of) or -1)
        self._replies(1)
        return lengths

    def put(self, items: Sequence[tuple[bytes, Sequence[Any]]], tenant: str = "") -> list[Outcome]:
        sizes = [value for key, pieces in items for value in (key, sum(map(len, pieces)))]
        account = self._accounts.get(tenant)
        share = ("", 0, 0) if account is None else (tenant_id(tenant), account.limit, account.guaranteed)
        reserve = ("EVALSHA", self._reserve, *_INDEXES, self._capacity, *share, *sizes)
        expire = ("PX", self._ttl) if self._ttl else ()
        self._connection.send(
            [reserve, *(("SET", key, list(pieces), "XX", *expire) for key, pieces in items)]
        )
        outcomes = []
        reserved = self._connection.read_reply()
        for _ in items:
            answer = self._connection.read_reply()
            full = isinstance(answer, RedisReplyError) and answer.args[0].startswith("OOM")
            # None: another client evicted the value before it was filled.
            outcomes.append(
                Outcome.OK if answer == b"OK" else Outcome.FULL if full or answer is None else Outcome.FAILED
            )
        if isinstance(reserved, RedisReplyError):
            if not reserved.args[0].startswith("OOM"):
                raise reserved
            return [Outcome.FULL] * len(items)
        return outcomes

    def remove(self, keys: Sequence[bytes]) -> int:
        return int(self._connection.call("EVALSHA", self._remove, *_INDEXES, *keys))

    def usage(self) -> Usage:
        self._connection.send([("HLEN", _SIZES), ("HMGET", _COUNTS, "bytes", "evicted")])
        objects, counts = self._replies(2)
        tenants = self._accounts.tenants
        return Usage(
            _count(objects),
            _count(counts[0]),
            _count(counts[1]),
            dict(zip(tenants, self._used(tenants), strict=True)),
        )

    def used_by(self, tenant: str) -> int:
        return self._used([tenant])[0]

    def _used(self, tenants: Sequence[str]) -> list[int]:
        if not tenants:
            return []
        found = self._connection.call("HMGET", _TENANTS, *map(tenant_id, tenants))
        return [_count(used) for used in found]

    # --- for operators

    def owners(self, keys: Sequence[bytes]) -> list[bytes]:
        """Returns, for each key, the id of the tenant that owns the value. The id is empty if no share of the
        store is configured for the tenant."""
        found = self._connection.call("HMGET", _OWNERS, *keys)
        ids = ((owned or b"").partition(b" ")[0].decode(errors="replace") for owned in found)
        return [bytes.fromhex(each) if re.fullmatch("[0-9a-f]{32}", each) else b"" for each in ids]

    def scan(self, prefix: bytes, count: int) -> Iterator[list[bytes]]:
        """Yield all keys with a prefix in batches of about `count`. Each key occurs once."""
        cursor, seen = b"0", set[bytes]()
        while True:
            cursor, keys = self._connection.call("SCAN", cursor, "MATCH", prefix + b"*", "COUNT", count)
            fresh = [key for key in dict.fromkeys(keys) if key not in seen]
            seen.update(fresh)
            if fresh:
                yield fresh
            if cursor == b"0":
                return

    def commands(self, commands: Sequence[Sequence[Any]]) -> list[Any]:
        """Run commands and return their replies. Use this method only for commands whose replies are short. The
        reply of a failed command is a RedisReplyError."""
        self._connection.send(commands)
        return [self._connection.read_reply() for _ in commands]

    def sizes(self, keys: Sequence[bytes]) -> list[int]:
        """Return the counted sizes of values. The call does not count as a use of the values."""
        return [int(size or 0) for size in self._connection.call("HMGET", _SIZES, *keys)]

    def value(self, key: bytes, most: int = 0) -> bytes:
        """Return a value, or its first `most` bytes. Return empty bytes for a miss."""
        self._connection.send([("GETRANGE", key, 0, most - 1) if most else ("GET", key)])
        memory = [bytearray()]

        def destination(length: int) -> Sequence[memoryview]:
            memory[0] = bytearray(length)
            return (memoryview(memory[0]),) if length else ()

        self._connection.read_value_into(destination)
        return bytes(memory[0])

    def close(self) -> None:
        self._connection.close()

    def _replies(self, count: int) -> list[Any]:
        answers = [self._connection.read_reply() for _ in range(count)]
        for answer in answers:
            if isinstance(answer, RedisReplyError):
                raise answer
        return answers


def _count(reply: Any) -> int:
    """Return a count that the server sent, limited to the range of the metrics. The server is not trusted."""
    return max(0, min(int(reply or 0), _MAX_COUNT))


def open_redis(address: RedisAddress, config: RemoteConfig) -> RemoteTier:
    """Open the tier. Raises TierError if the server cannot be reached or refuses the connection.

    With a `ttl`, the server drops pages that were not used for `ttl` seconds.
    """
    ttl, config = config.ttl, replace(config, batch_bytes=min(config.batch_bytes, _BATCH_BYTES), ttl=0)
    accounts = TenantAccounts(config.capacity)
    return store_tier(
        str(address),
        config,
        lambda: RedisStore(address, config.capacity, config.timeout, ttl, accounts),
        on_shares=accounts.set_shares,
    )


def parse_url(url: str) -> Callable[[], RemoteTier]:
    """Parse `redis://[user:password@]host[:port][/db]?capacity=64GiB&compression=lz4&…`. Return the function that
    opens the tier.

    `rediss://` uses TLS. `redis:///path/of/socket?capacity=…&db=0` uses a Unix socket. The other options are those
    of RemoteConfig.
    """
    parts = urlsplit(url)
    options = Options(url, parts.query)
    path = unquote(parts.path)
    address = RedisAddress(tls=parts.scheme == "rediss", user=unquote(parts.username or ""))
    try:
        address = replace(address, password=unquote(parts.password or ""))
        if parts.hostname is None:
            address = replace(address, socket=path, database=options.integer("db", 0))
        else:
            database = path.strip("/") or "0"
            if not database.isdecimal():
                raise ValueError(f"{database!r} is not a database number")
            address = replace(address, host=parts.hostname, port=parts.port or 6379, database=int(database))
    except ValueError as error:
        raise ValueError(f"{options.url}: {error}; write redis://host:port/db?capacity=64GiB") from None
    return partial(open_redis, address, remote_config(options))
