"""What of a tier is whose: a part that a tenant may keep at most, and a part that is not taken from it for others.

Parts, not bytes: one set of shares suits every tier, however large. Tenants without a share have one account together.
Knows names of tenants and bytes; which pages leave is the tier's to choose.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvloom.core import Tenant

__all__ = ["Account", "Share", "Shares", "Sharing", "shares_of"]


@dataclass(frozen=True, slots=True)
class Share:
    """Parts of a tier's capacity, 0 to 1: `most` may be kept; what is within `sure` is not taken for others."""

    most: float = 1.0
    sure: float = 0.0

    def __post_init__(self) -> None:
        for field in ("most", "sure"):
            if not 0 <= getattr(self, field) <= 1:
                raise ValueError(f"{field}={getattr(self, field)} is no part of a whole: give 0 to 1")


Shares = Mapping[str, Share]


class Account:
    """One tenant's bytes in one tier. Not thread-safe: its tier's lock guards it."""

    __slots__ = ("most", "sure", "used")

    def __init__(self, share: Share, capacity: int) -> None:
        self.most, self.sure = int(share.most * capacity), int(share.sure * capacity)
        self.used = 0

    @property
    def spares(self) -> bool:
        """Whether others may take from it."""
        return self.used > self.sure


@runtime_checkable
class Sharing(Protocol):
    """A tier in which shares hold."""

    def share_out(self, shares: Shares) -> None:
        """From here on shares hold. Once, before anything is asked of the tier."""
        ...

    def kept_for(self, tenant: str) -> int:
        """Bytes kept for a tenant; for one without a share, what all of those have."""
        ...


def shares_of(tenants: Iterable[Tenant], pool_bytes: int) -> dict[str, Share]:
    """What tenants have of a pool, as parts: a quota of a tenth of the pool is a tenth of every tier. Who has neither quota
    nor weight has no share of its own."""
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
