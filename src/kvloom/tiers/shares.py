"""Tenant shares of a tier: a fraction of capacity that a tenant may use, and a fraction that others cannot evict.

Shares are fractions, not bytes, so one set fits every tier. Tenants without a share have one common account. The tier
chooses the pages to evict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvloom.core import Tenant

__all__ = ["Account", "Share", "Shares", "SupportsShares", "tenant_shares"]


@dataclass(frozen=True, slots=True)
class Share:
    """Fractions of a tier's capacity, 0 to 1: the `limit` of use, and the `guaranteed` part that others cannot evict."""

    limit: float = 1.0
    guaranteed: float = 0.0

    def __post_init__(self) -> None:
        for field in ("limit", "guaranteed"):
            if not 0 <= getattr(self, field) <= 1:
                raise ValueError(f"{field}={getattr(self, field)} is not a fraction: use 0 to 1")


Shares = Mapping[str, Share]


class Account:
    """One tenant's bytes in one tier. Not thread-safe: the tier's lock guards it."""

    __slots__ = ("guaranteed", "limit", "used")

    def __init__(self, share: Share, capacity: int) -> None:
        self.limit, self.guaranteed = int(share.limit * capacity), int(share.guaranteed * capacity)
        self.used = 0

    @property
    def is_above_guarantee(self) -> bool:
        """Whether other tenants may evict its pages."""
        return self.used > self.guaranteed


@runtime_checkable
class SupportsShares(Protocol):
    """A tier that enforces shares."""

    def set_shares(self, shares: Shares) -> None:
        """Enforces shares from now on. Call it once, before the first operation on the tier."""
        ...

    def used_by(self, tenant: str) -> int:
        """Returns the bytes a tenant uses; for a tenant without a share, the bytes of the common account."""
        ...


def tenant_shares(tenants: Iterable[Tenant], pool_bytes: int) -> dict[str, Share]:
    """Returns tenants' shares of a pool as fractions: a quota of a tenth of the pool is a tenth of every tier.

    A tenant without quota and weight has no share of its own.
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
