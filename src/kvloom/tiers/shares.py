"""Tenant shares of a tier. A share limits how much of the capacity a tenant may use. A share also guarantees a part
that other tenants cannot evict.

Shares are fractions of the capacity, so the same shares apply to every tier. All tenants without a share use one
common account. The tier chooses the pages to evict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol, runtime_checkable

from kvloom.core import Tenant

__all__ = [
    "SHARED_OWNER",
    "Account",
    "Share",
    "Shares",
    "SupportsShares",
    "TenantAccounts",
    "tenant_owner",
    "tenant_shares",
]

SHARED_OWNER = bytes(16)
"""The owner id of the common account, which all tenants without a share use."""


def tenant_owner(tenant: str) -> bytes:
    """Return the id of a tenant in stored data, which is a digest of its name. The id of the empty name is
    SHARED_OWNER."""
    if not tenant:
        return SHARED_OWNER
    return blake2b(tenant.encode(), digest_size=len(SHARED_OWNER), person=b"kvloom.owner").digest()


@dataclass(frozen=True, slots=True)
class Share:
    """A tenant's fractions of the capacity of a tier, from 0 to 1. The tenant may use at most `limit`. Other
    tenants cannot evict the `guaranteed` part.
    """

    limit: float = 1.0
    guaranteed: float = 0.0

    def __post_init__(self) -> None:
        for field in ("limit", "guaranteed"):
            if not 0 <= getattr(self, field) <= 1:
                raise ValueError(f"{field}={getattr(self, field)} is not a fraction: use 0 to 1")


Shares = Mapping[str, Share]
"""Shares by tenant."""


class Account:
    """The limit, the guaranteed part and the use of one account in one tier, in bytes. An account belongs to one tenant
    with a share, or to all other tenants. Not thread-safe: the tier's lock guards it."""

    __slots__ = ("guaranteed", "limit", "used")

    def __init__(self, share: Share, capacity: int) -> None:
        self.limit, self.guaranteed = int(share.limit * capacity), int(share.guaranteed * capacity)
        self.used = 0

    @property
    def is_above_guarantee(self) -> bool:
        """Whether the tenant uses more than its guaranteed part. Other tenants may then evict its pages."""
        return self.used > self.guaranteed


class TenantAccounts:
    """The limit and the guaranteed bytes of each tenant with a share. Used for Redis and peers, which count
    the bytes of each tenant on their side. All connections of a tier share one instance."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._accounts: dict[str, Account] = {}

    def set_shares(self, shares: Shares) -> None:
        self._accounts = {tenant: Account(share, self._capacity) for tenant, share in shares.items()}

    @property
    def tenants(self) -> list[str]:
        """The tenants with a share."""
        return list(self._accounts)

    def get(self, tenant: str) -> Account | None:
        """Return the limit and the guaranteed bytes of a tenant, or None if the tenant has no share."""
        return self._accounts.get(tenant)


@runtime_checkable
class SupportsShares(Protocol):
    """The interface of a tier that enforces shares."""

    def set_shares(self, shares: Shares) -> None:
        """Set the shares to enforce. Call this method once, before the first operation on the tier."""
        ...

    def used_by(self, tenant: str) -> int:
        """Return the number of bytes that a tenant uses. For a tenant without a share, returns the bytes of the
        common account."""
        ...


def tenant_shares(tenants: Iterable[Tenant], pool_bytes: int) -> dict[str, Share]:
    """Return the shares of tenants, as fractions that apply to every tier. A tenant with neither quota nor weight
    gets no share.

    The limit is the tenant's quota divided by `pool_bytes`, the size of the pool. The guarantee is the
    protected part of the tenant's weight (`Tenant.claim`), divided by the sum of all weights.
    """
    tenants = list(tenants)
    weights = sum(tenant.weight for tenant in tenants)
    return {
        tenant.name: Share(
            1.0 if tenant.quota is None else min(1.0, tenant.quota / pool_bytes),
            tenant.claim / weights if weights else 0.0,
        )
        for tenant in tenants
        if tenant.quota is not None or tenant.weight
    }
