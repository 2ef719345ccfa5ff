"""Preemption: chooses the running request that releases its pages when another request needs them. The scheduler
preempts it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Many
from operator import attrgetter

from kvloom.core import KVCache
from kvloom.engine.request import Request
from kvloom.models.paged import Work

__all__ = ["RANK", "Scheduled", "choose_victim"]

Scheduled = tuple[Request, Work]
RANK = attrgetter("rank")


def choose_victim(
    cache: KVCache,
    running: Many[Request],
    request: Request,
    count: int,
    picked: Many[Scheduled],
    excess: Callable[[Request], float],
) -> Request | None:
    """Return the running request to preempt so that `request` gets pages for `count` tokens. Return None if there is no
    candidate. Requests with work in this step are never candidates.

    A request of the same tenant is a candidate if it has a lower rank, or is a parked beam. A request of another tenant
    is a candidate if its tenant is above its share, and if the request arrived later or is a parked beam. If the quota
    of the tenant is exhausted, only its own requests are candidates.

    `excess(request)` returns how far a tenant is above its fair share of the pool. If the tenant of `request` is within
    its share, ranks are ignored, and the tenant with the largest excess is preempted first."""
    assert request.sequence is not None
    busy = {id(other) for other, _ in picked} | {id(request)}
    others = [r for r in running if id(r) not in busy]
    if len(cache.inspect.accounts) == 1:
        return max((r for r in others if r.rank > request.rank or r.parked), key=RANK, default=None)
    own_account, quota_is_short = (
        cache.account(request.control.tenant),
        cache.exceeds_quota(request.sequence, count),
    )
    within_share = excess(request) <= 0
    best: tuple[tuple[float, tuple[int, int]], Request] | None = None
    for other in others:
        account, above = cache.account(other.control.tenant), 0.0
        if account is own_account:
            may = other.rank > request.rank or other.parked
        else:
            above = max(0.0, excess(other)) if within_share else 0.0
            may = not quota_is_short and account.used > account.guaranteed
            may = may and (above > 0 or other.order > request.order or other.parked)
        if may and (best is None or (above, other.rank) > best[0]):
            best = (above, other.rank), other
    return None if best is None else best[1]
