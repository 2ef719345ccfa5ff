"""Who pays for which pages: one account a tenant, with a quota and a fair share.

Isolation is not here but in the names: a tenant's salt makes its pages unreachable to others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from .policies import Entry, Policy
from .queue import EvictionQueue

__all__ = ["Account", "Accounts", "Tenant"]

SOFT_PART = 0.5
"""The part of a default share that is protected."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """`quota` is the most bytes of the pool it may use; `weight` its share when the pool is full.

    A tenant at or below its share (weight over the sum of weights) loses nothing to others. Weight
    0 claims no share: it may use what is free, and loses it to anyone; where others' shares fill the pool there is no
    room for it. Where all weights are 0 nobody has a share, and the policy alone decides. Shares follow the size of the
    pool, quotas do not.

    A share that is not `firm` is a default: it covers half of what the weight claims, and the other half of the pool serves
    any tenant. The only open sequence of a tenant may evict cached pages from it, so that one long request always fits.
    """

    name: str
    quota: int | None = None
    weight: float = 0.0
    firm: bool = True

    @property
    def claim(self) -> float:
        """The weight that its share protects: all of it, or a part where the share is a default."""
        return self.weight if self.firm else self.weight * SOFT_PART

    def __post_init__(self) -> None:
        if self.quota is not None and self.quota < 0:
            raise ValueError(f"tenant {self.name!r}: quota {self.quota} is negative")
        if self.weight < 0:
            raise ValueError(f"tenant {self.name!r}: weight {self.weight} is negative")
        if not self.weight < inf:
            raise ValueError(f"tenant {self.name!r}: weight {self.weight} is no number to share by")


class Account:
    """Bytes of one tenant: `used` in all, of which `held` by its sequences and pins. `open` counts its open sequences. Beside
    them what it has looked up and found so far, in tokens, and how many of its entries left."""

    __slots__ = (
        "evictions",
        "guaranteed",
        "hit_tokens",
        "in_use",
        "looked_up_tokens",
        "open",
        "queue",
        "tenant",
        "used",
    )

    def __init__(self, tenant: Tenant, policy: Policy) -> None:
        self.tenant = tenant
        self.used = 0
        self.in_use = 0
        self.open = 0
        self.guaranteed = 0.0
        self.looked_up_tokens = self.hit_tokens = self.evictions = 0
        self.queue: EvictionQueue[Entry] = EvictionQueue(policy)

    def charge(self, size: int) -> None:
        """Pages of `size` bytes were lent to it."""
        self.used += size
        self.in_use += size

    def release(self, idle: int, freed: int) -> None:
        """It holds `idle` bytes less, of which `freed` are nobody's now."""
        self.in_use -= idle
        self.used -= freed

    def over_quota(self, need: int) -> int:
        """Bytes that must leave before `need` more fit the quota."""
        return 0 if self.tenant.quota is None else max(0, self.used + need - self.tenant.quota)

    def beyond_quota(self, need: int) -> int:
        """Bytes lacking for `need` even with everything of its own evicted."""
        return 0 if self.tenant.quota is None else max(0, self.in_use + need - self.tenant.quota)


class Accounts:
    """The accounts of one pool. Tenants that were not declared share the account of DEFAULT."""

    DEFAULT = ""

    def __init__(self, tenants: Iterable[Tenant], policy: Policy, pool_bytes: int) -> None:
        declared = {tenant.name: tenant for tenant in tenants}
        declared.setdefault(self.DEFAULT, Tenant(self.DEFAULT))
        self.accounts = {name: Account(tenant, policy) for name, tenant in declared.items()}
        self.set_pool_bytes(pool_bytes)

    def set_pool_bytes(self, pool_bytes: int) -> None:
        """The pool has so many bytes (now): everyone's share of it. O(tenants)."""
        weights = sum(account.tenant.weight for account in self.accounts.values())
        for account in self.accounts.values():
            account.guaranteed = pool_bytes * account.tenant.claim / weights if weights else 0.0

    def __getitem__(self, tenant: str) -> Account:
        return self.accounts.get(tenant) or self.accounts[self.DEFAULT]

    def victim(self, requester: Account | None, now: float) -> Account | None:
        """Whose entry leaves next so that `requester` gets room: spares first, then the smallest key among those above
        their share. The requester competes with them, or comes last while it is below its own share. For the pool
        itself (None), which outranks shares, anyone's where those have nothing. O(tenants)."""
        if len(self.accounts) == 1:
            only = requester or self.accounts[self.DEFAULT]
            return only if only.queue.live or only.queue.unneeded else None
        accounts = self.accounts.values()
        below = requester is not None and requester.used < requester.guaranteed
        victim = self._first(
            (a for a in accounts if (a is requester and not below) or a.used > a.guaranteed), now
        )
        if victim is None and below:
            victim = self._first((a for a in accounts if a is requester), now)
        if victim is None and requester is None:
            victim = self._first(accounts, now)
        if victim is None and requester is not None and requester.open <= 1:
            victim = self._first((a for a in accounts if not a.tenant.firm), now)
        return victim

    @staticmethod
    def gives(account: Account, requester: Account) -> int:
        """Cached bytes of `account` that `requester`, another tenant, may evict."""
        cached, above = account.used - account.in_use, account.used - int(account.guaranteed)
        if requester.open <= 1 and not account.tenant.firm:
            return cached
        return max(0, min(cached, above))

    @staticmethod
    def _first(accounts: Iterable[Account], now: float) -> Account | None:
        """The account whose next entry has the smallest key. A rank that a request gave counts inside its account only: a
        TTL or a priority does not outrank another tenant's entries."""
        best = None
        for account in accounts:
            if account.queue.unneeded:
                return account
            entry = account.queue.next_victim(now)
            if entry is not None:
                assert entry.queued is not None
                rank, priority = entry.queued
                key = min(rank, 0), priority
                if best is None or key < best[0]:
                    best = (key, account)
        return best[1] if best else None
