"""Lists the pages of a Redis or Valkey database, for operators. Servers may use the database at the same time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kvloom.tiers.encoding import parse_head
from kvloom.tiers.shares import tenant_owner
from kvloom.tiers.stored_page import StoredPage, StoredPages, verify_page
from kvloom.tiers.tier import TierError
from kvloom.tiers.transfer import Outcome

from .redis import RedisAddress, RedisStore
from .redis_protocol import RedisReplyError
from .remote_tier import RemoteConfig, StoreError
from .store_tier import PREFIX

__all__ = ["RedisPages"]

_BATCH = 500
_HEAD_BYTES = 64 << 10


class RedisPages(StoredPages):
    """The pages of one database, over one connection. Raises TierError if the server cannot be reached."""

    def __init__(self, address: RedisAddress, config: RemoteConfig) -> None:
        self._config, self._notes = config, list[str]()
        try:
            self._store = RedisStore(address, config.capacity, config.timeout)
        except (StoreError, RedisReplyError, OSError, ValueError) as error:
            raise TierError(f"{address} cannot be opened: {error}") from error

    @property
    def version(self) -> str:
        return PREFIX.decode().strip("/").rpartition("/")[2]

    @property
    def capacity(self) -> int:
        return self._config.capacity

    @property
    def notes(self) -> list[str]:
        return self._notes

    def pages(self, max_heads: int | None = None) -> Iterator[StoredPage]:
        """Yield every page. Reads the stored header of at most `max_heads` pages, or of all pages if None. Redis
        counts the read of a header as a use of the page, so the page's idle time starts again."""
        heads = 0
        for keys in self._store.scan(PREFIX, _BATCH):
            idle = self._store.commands([("OBJECT", "IDLETIME", key) for key in keys])
            sizes, owners = self._store.sizes(keys), self._store.owners(keys)
            count = len(keys) if max_heads is None else max(0, min(len(keys), max_heads - heads))
            heads += count
            starts: list[Any] = [None] * len(keys)
            for number in range(count):
                starts[number] = self._store.value(keys[number], _HEAD_BYTES)
            for key, age, size, owner, start in zip(keys, idle, sizes, owners, starts, strict=True):
                parsed = None if start is None else parse_head(memoryview(start))
                head = parsed[0] if isinstance(parsed, tuple) else None
                seconds = float(age) if isinstance(age, int) else 0.0
                yield StoredPage(key[len(PREFIX) :], size, head, owner, seconds)

    def verify(self, page: StoredPage) -> Outcome:
        value = self._store.value(PREFIX + page.key)
        if not value:  # removed in the meantime, or reserved and not yet filled
            return Outcome.MISSING
        parsed = parse_head(memoryview(value))
        if isinstance(parsed, Outcome):
            return parsed
        head, length = parsed
        return Outcome.CORRUPT if head.key != page.key else verify_page(head, memoryview(value)[length:])

    def owner_of(self, tenant: str) -> bytes:
        return tenant_owner(tenant)

    def drop(self, pages: Iterable[StoredPage]) -> int:
        keys = [PREFIX + page.key for page in pages]
        return sum(self._store.remove(keys[at : at + _BATCH]) for at in range(0, len(keys), _BATCH))

    def close(self) -> None:
        self._store.close()
