"""Limits the bytes that each tenant stores in a remote tier through this process. Thread-safe.

This module is for stores that cannot count tenants. Such a store evicts pages of any tenant, so guaranteed parts
are not enforced. Pages of other processes do not count. Sizes are those of plain pages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from threading import Lock

from kvloom.tiers.shares import Account, Share, Shares

__all__ = ["TenantLimits"]


class _Account(Account):
    """The pages of one tenant, ordered by last use."""

    __slots__ = ("sizes",)

    def __init__(self, share: Share, capacity: int) -> None:
        super().__init__(share, capacity)
        self.sizes: OrderedDict[bytes, int] = OrderedDict()

    def remove(self, key: bytes) -> None:
        self.used -= self.sizes.pop(key, 0)


class TenantLimits:
    """The pages that this process stored, by tenant. Tenants without a share have no limit and are not counted."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._lock = Lock()
        self._accounts: dict[str, _Account] = {}

    def set_shares(self, shares: Shares) -> None:
        with self._lock:
            self._accounts = {
                tenant: _Account(share, self._capacity) for tenant, share in shares.items() if share.limit < 1
            }

    def used_by(self, tenant: str) -> int:
        with self._lock:
            account = self._accounts.get(tenant)
            return 0 if account is None else account.used

    def add(self, tenant: str, keys: Iterable[bytes], size: int) -> dict[bytes, int]:
        """Counts stored pages. If the tenant exceeds its limit, returns the keys and sizes of its oldest pages. The
        caller removes them from the store.
        """
        with self._lock:
            account = self._accounts.get(tenant)
            excess: dict[bytes, int] = {}
            if account is None:
                return excess
            for key in keys:
                account.remove(key)
                account.sizes[key] = size
                account.used += size
            while account.used > account.limit:
                key, size = account.sizes.popitem(last=False)
                account.used -= size
                excess[key] = size
            return excess

    def restore(self, tenant: str, sizes: Mapping[bytes, int]) -> None:
        """Counts pages again if they could not be removed. The next call of `add` returns these pages first."""
        with self._lock:
            account = self._accounts.get(tenant)
            for key, size in reversed(list(sizes.items())) if account is not None else ():
                assert account is not None
                if key not in account.sizes:
                    account.sizes[key] = size
                    account.sizes.move_to_end(key, last=False)
                    account.used += size

    def touch(self, tenant: str, keys: Iterable[bytes]) -> None:
        """Marks pages as most recently used."""
        with self._lock:
            account = self._accounts.get(tenant)
            for key in keys if account is not None else ():
                assert account is not None
                if key in account.sizes:
                    account.sizes.move_to_end(key)

    def remove(self, tenant: str, keys: Iterable[bytes]) -> None:
        with self._lock:
            account = self._accounts.get(tenant)
            for key in keys if account is not None else ():
                assert account is not None
                account.remove(key)
