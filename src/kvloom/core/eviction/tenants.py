"""Tenants. Each tenant has one account, with a quota and a guaranteed share of the pool.

Quotas and shares limit memory use. They are not needed for isolation: the tenant's salt is part of the
block hashes, so other tenants cannot hit the tenant's pages. Only blocks that a request marked public can
be hit by all tenants. They are charged to a separate account.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from kvloom.core.control import PUBLIC_TENANT, Objective

from .policies import Entry, Policy
from .queue import EvictionQueue

__all__ = ["Account", "Accounts", "Owner", "Tenant"]

SOFT_PART = 0.5
"""Fraction of a share that is protected if the share is not firm."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant, with limits on its use of the pool.

    - `quota`: the largest number of bytes of the pool that the tenant may use. It does not change with the size of the
      pool.
    - `weight`: sets the tenant's share of the pool, which is its weight divided by the sum of all weights. Pages of a
      tenant at or below its share are not evicted for other tenants. With weight 0, all cached pages of the tenant may
      be evicted for other tenants. If all weights are 0, only the policy decides.
    - `firm`: whether the whole share is protected. Otherwise only half of it is protected, and every tenant may use
      the other half. A tenant with at most one open sequence may also evict the protected half of shares that are not
      firm. One long request therefore always fits.
    """

    name: str
    quota: int | None = None
    weight: float = 0.0
    firm: bool = True
    objective: Objective = field(default_factory=Objective)
    """Objective of the tenant's requests that set no objective themselves."""

    @property
    def claim(self) -> float:
        """The protected part of the weight. If the share is firm, this is the whole weight, otherwise the fraction
        SOFT_PART of the weight."""
        return self.weight if self.firm else self.weight * SOFT_PART

    def __post_init__(self) -> None:
        if self.quota is not None and self.quota < 0:
            raise ValueError(
                f"tenant {self.name!r}: quota {self.quota} is negative; give bytes, or None for no limit"
            )
        if self.weight < 0:
            raise ValueError(f"tenant {self.name!r}: weight {self.weight} is negative; give 0 or more")
        if not self.weight < inf:
            raise ValueError(
                f"tenant {self.name!r}: weight {self.weight} is not finite; give a finite number"
            )


class Account:
    """The pool memory of one tenant, in bytes.

    | field        | meaning                                                                            |
    |--------------|------------------------------------------------------------------------------------|
    | `used`       | all pages of the tenant                                                            |
    | `in_use`     | the part of `used` that sequences, pins and transfers use                          |
    | `borrowed`   | pages of public prefixes that the tenant's sequences, pins and loads use; a page   |
    |              | with several of these users counts once                                            |
    | `guaranteed` | the protected share                                                                |
    | `open`       | number of open sequences                                                           |

    Quotas and shares apply to the sum of own and borrowed pages. Also counts the tokens looked up, the tokens
    hit and the entries evicted.
    """

    __slots__ = (
        "borrowed",
        "borrowed_pages",
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
        self.borrowed = 0
        self.borrowed_pages: dict[int, int] = {}
        """Number of uses of each borrowed page. `BlockPages.numbers` defines the keys."""
        self.open = 0
        self.guaranteed = 0.0
        self.looked_up_tokens = self.hit_tokens = self.evictions = 0
        self.queue: EvictionQueue[Entry] = EvictionQueue(policy)

    @property
    def counted(self) -> int:
        """Bytes that count against quota and share: the tenant's own pages, and the public pages that it uses."""
        return self.used + self.borrowed

    @property
    def counted_in_use(self) -> int:
        """The part of `counted` that is in use, and cannot be evicted."""
        return self.in_use + self.borrowed

    def borrow(self, pages: Iterable[int], size: int) -> None:
        """Count one more use of each public page in `pages`. The pages have `size` bytes each. O(pages)."""
        uses = self.borrowed_pages
        for page in pages:
            count = uses.get(page, 0)
            uses[page] = count + 1
            if not count:
                self.borrowed += size

    def give_back(self, pages: Iterable[int], size: int) -> None:
        """Count one use less of each public page in `pages`. The pages have `size` bytes each. O(pages)."""
        uses = self.borrowed_pages
        for page in pages:
            count = uses[page]
            if count > 1:
                uses[page] = count - 1
            else:
                del uses[page]
                self.borrowed -= size

    def charge(self, size: int) -> None:
        """Count `size` bytes of allocated pages."""
        self.used += size
        self.in_use += size

    def retain(self, size: int) -> None:
        """Count `size` bytes of cached pages as in use."""
        self.in_use += size

    def release(self, idle: int, freed: int) -> None:
        """Count the release of pages that were in use. `idle` is the number of released bytes. `freed` of them are now
        free, and the others are cached.
        """
        self.in_use -= idle
        self.used -= freed

    def free(self, size: int) -> None:
        """Count `size` bytes of evicted pages as free."""
        self.used -= size

    def count_lookup(self, tokens: int, hit: int) -> None:
        """Count the tokens of a prompt, and the tokens that were hit."""
        self.looked_up_tokens += tokens
        self.hit_tokens += hit

    def over_quota(self, need: int) -> int:
        """Return how many bytes of the tenant must be evicted so that `need` more bytes fit into the quota."""
        return 0 if self.tenant.quota is None else max(0, self.counted + need - self.tenant.quota)

    def beyond_quota(self, need: int) -> int:
        """Return by how many bytes `need` more bytes would exceed the quota, even if all cached pages of the tenant
        were evicted."""
        if self.tenant.quota is None:
            return 0
        return max(0, self.counted_in_use + need - self.tenant.quota)


class Owner(NamedTuple):
    """The account to which pages are charged, and the name of the tenant under which tiers store them."""

    account: Account
    tenant: str


class Accounts:
    """The accounts of one pool. Undeclared tenants share the account of DEFAULT.

    `public_bytes` limits the memory of public prefixes, which all tenants share. If it is 0, requests cannot mark a
    prefix public.

    - When public pages are allocated, cached public pages are evicted to keep the limit. Pages in use are not evicted,
      so running requests may exceed the limit.
    - The public pages that a request uses count against the quota of its tenant.
    - Tiers apply the limit like the quota of a tenant.
    """

    DEFAULT = ""

    def __init__(
        self, tenants: Iterable[Tenant], policy: Policy, pool_bytes: int, public_bytes: int = 0
    ) -> None:
        declared = {tenant.name: tenant for tenant in tenants}
        if PUBLIC_TENANT in declared:
            raise ValueError(f"tenant name {PUBLIC_TENANT!r} is reserved; choose another name")
        if public_bytes < 0:
            raise ValueError(
                f"public_bytes {public_bytes} is negative; give bytes, or 0 for no public prefixes"
            )
        self.public_bytes = public_bytes
        if public_bytes:
            declared[PUBLIC_TENANT] = Tenant(PUBLIC_TENANT, quota=public_bytes)
        declared.setdefault(self.DEFAULT, Tenant(self.DEFAULT))
        self.policy = policy
        self.accounts = {name: Account(tenant, policy) for name, tenant in declared.items()}
        self.set_pool_bytes(pool_bytes)

    def set_pool_bytes(self, pool_bytes: int) -> None:
        """Recompute the shares for a pool of this size. O(tenants)."""
        weights = sum(account.tenant.weight for account in self.accounts.values())
        for account in self.accounts.values():
            account.guaranteed = pool_bytes * account.tenant.claim / weights if weights else 0.0

    def __getitem__(self, tenant: str) -> Account:
        return self.accounts.get(tenant) or self.accounts[self.DEFAULT]

    def owner(self, tenant: str) -> Owner:
        """Return the owner of a tenant's private pages, or of public pages for the name PUBLIC_TENANT."""
        return Owner(self[tenant], tenant)

    def renumber_borrowed(self, new_of: dict[int, int]) -> None:
        """Replace the page numbers of borrowed pages that compaction has moved. `new_of` maps old numbers to new
        numbers. O(tenants * moved pages)."""
        for account in self.accounts.values():
            uses = account.borrowed_pages
            if uses:
                moved = {new: uses.pop(old) for old, new in new_of.items() if old in uses}
                uses.update(moved)

    def victim(self, requester: Account | None, now: float) -> Account | None:
        """Return the account whose next entry is evicted so that `requester` gets pages. Return None if no account
        may lose an entry. O(tenants).

        The candidates are tried in this order:

        1. the accounts above their share, and the requester itself if it is not below its share;
        2. the requester, if it is below its share;
        3. all accounts, if `requester` is None. The pool then needs the memory itself, for example to shrink;
        4. all accounts whose share is not firm, if the requester has at most one open sequence.

        If a step has several candidates, an account with window pages that no checkpoint needs is returned first.
        Otherwise `_first` compares the next entries of the accounts.
        """
        if len(self.accounts) == 1:
            only = requester or self.accounts[self.DEFAULT]
            return only if only.queue.live or only.queue.unneeded else None
        accounts = self.accounts.values()
        below = requester is not None and requester.counted < requester.guaranteed
        victim = self._first(
            (a for a in accounts if (a is requester and not below) or a.counted > a.guaranteed), now
        )
        if victim is None and below:
            victim = self._first((a for a in accounts if a is requester), now)
        if victim is None and requester is None:
            victim = self._first(accounts, now)
        if victim is None and requester is not None and requester.open <= 1:
            victim = self._first((a for a in accounts if not a.tenant.firm), now)
        return victim

    @staticmethod
    def evictable(account: Account, requester: Account) -> int:
        """Return the cached bytes of `account` that `requester`, a different tenant, may evict."""
        cached, above = account.used - account.in_use, account.counted - int(account.guaranteed)
        if requester.open <= 1 and not account.tenant.firm:
            return cached
        return max(0, min(cached, above))

    @staticmethod
    def _first(accounts: Iterable[Account], now: float) -> Account | None:
        """Return the account from which the next entry is evicted. Return None if no account has an entry to evict.

        An account with window pages that no checkpoint needs is returned at once. Otherwise the next entries of all
        accounts are compared. The entry with the lowest `Entry.retention_priority` is evicted first, and among equals
        the entry with the smallest `Policy.priority`. A retention priority above 0 was set by a request. In this
        comparison it counts as 0. A request can therefore protect an entry only from the other entries of its
        tenant, not from other tenants.
        """
        best = None
        for account in accounts:
            if account.queue.unneeded:
                return account
            entry = account.queue.next_victim(now)
            if entry is not None:
                assert entry.queued is not None
                retention, priority = entry.queued
                key = min(retention, 0), priority
                if best is None or key < best[0]:
                    best = (key, account)
        return best[1] if best else None
