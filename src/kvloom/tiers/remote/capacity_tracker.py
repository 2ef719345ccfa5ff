"""Limits the bytes that this process stores in a remote tier, and divides them between tenants. Thread-safe.

This module is for stores that do not count the bytes of tenants. Values that other processes store are not counted.
All connections of a tier share one tracker.

    a tenant above its limit    its own least recently used value is evicted
    the tier above capacity     the least recently used value of the tenants above their guaranteed part is evicted
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from threading import Lock

from kvloom.tiers.shares import Account, Share, Shares

from .remote_tier import Usage

__all__ = ["CapacityTracker", "TrackedValue"]


class _Account(Account):
    """The values of one tenant, ordered by last use. `marked` is the number of bytes of the values whose
    `is_guaranteed` is set."""

    __slots__ = ("marked", "values")

    def __init__(self, share: Share, capacity: int) -> None:
        super().__init__(share, capacity)
        self.values: OrderedDict[bytes, TrackedValue] = OrderedDict()
        self.marked = 0


@dataclass(slots=True)
class TrackedValue:
    """A value that this process has stored. `is_guaranteed` means that the value counts as part of its tenant's
    guaranteed bytes. The guaranteed values of a tenant together never exceed these bytes. `used_at` orders values by
    last use.
    """

    account: _Account
    size: int
    used_at: int
    is_guaranteed: bool


class CapacityTracker:
    """Counts the values that this process stores. Tenants without a share have one common account."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = Lock()
        self._default = _Account(Share(), capacity)
        self._by_tenant: dict[str, _Account] = {}
        self._accounts = [self._default]
        self._values: dict[bytes, TrackedValue] = {}
        self._bytes = self._evicted = self._clock = 0

    def set_shares(self, shares: Shares) -> None:
        with self._lock:
            if self._values or self._by_tenant:
                raise ValueError("shares must be set once, before the first page is stored")
            self._by_tenant = {tenant: _Account(share, self._capacity) for tenant, share in shares.items()}
            self._default = self._by_tenant.get("", self._default)
            self._accounts = list({id(a): a for a in (self._default, *self._by_tenant.values())}.values())

    def used_by(self, tenant: str) -> int:
        with self._lock:
            return self._account_of(tenant).used

    def reserve(
        self, sizes: Mapping[bytes, int], tenant: str = ""
    ) -> tuple[dict[bytes, bool], dict[bytes, TrackedValue]]:
        """Count values before they are put into the store. `sizes` maps each key to the size of its value. Return two
        dictionaries. The first has the accepted keys, and for each key whether its value is guaranteed. The second has
        the values that the caller must evict. Values that do not fit into the tenant's share are not accepted."""
        with self._lock:
            account = self._account_of(tenant)
            self._clock += 1
            for key, size in sizes.items():
                self._remove(key)
                is_guaranteed = account.marked + size <= account.guaranteed
                self._insert(key, TrackedValue(account, size, self._clock, is_guaranteed))
            evicted: dict[bytes, TrackedValue] = {}
            while (victim := self._victim(account)) is not None:
                key = next(iter(victim.values))
                value = self._remove(key)
                if value is not None and key not in sizes:
                    evicted[key] = value
            self._evicted += len(evicted)
            return {key: self._values[key].is_guaranteed for key in sizes if key in self._values}, evicted

    def restore(self, values: Mapping[bytes, TrackedValue]) -> None:
        """Count values again after their eviction failed. The next eviction tries these values first."""
        with self._lock:
            self._evicted -= len(values)
            for key, value in reversed(list(values.items())):
                if key not in self._values:
                    self._insert(key, value)
                    value.account.values.move_to_end(key, last=False)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Mark values as most recently used."""
        with self._lock:
            self._clock += 1
            for key in keys:
                value = self._values.get(key)
                if value is not None:
                    value.used_at = self._clock
                    value.account.values.move_to_end(key)

    def remove(self, keys: Iterable[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._remove(key)

    def usage(self) -> Usage:
        with self._lock:
            tenants = {tenant: account.used for tenant, account in self._by_tenant.items()}
            return Usage(len(self._values), self._bytes, self._evicted, tenants)

    # --- the caller holds the lock

    def _account_of(self, tenant: str) -> _Account:
        return self._by_tenant.get(tenant, self._default)

    def _insert(self, key: bytes, value: TrackedValue) -> None:
        self._values[key] = value.account.values[key] = value
        value.account.used += value.size
        value.account.marked += value.size * value.is_guaranteed
        self._bytes += value.size

    def _remove(self, key: bytes) -> TrackedValue | None:
        value = self._values.pop(key, None)
        if value is not None:
            del value.account.values[key]
            value.account.used -= value.size
            value.account.marked -= value.size * value.is_guaranteed
            self._bytes -= value.size
        return value

    def _victim(self, account: _Account) -> _Account | None:
        """Return the account whose oldest value must be evicted after a value of `account` was added. Return None if
        `account` is within its limit and all values fit into the capacity. O(accounts)."""
        if account.used > account.limit:
            return account
        if self._bytes <= self._capacity:
            return None
        evictable = [one for one in self._accounts if one.is_above_guarantee]
        return min(
            (one for one in evictable or [account] if one.values),
            key=lambda one: next(iter(one.values.values())).used_at,
            default=None,
        )
