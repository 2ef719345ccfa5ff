"""Who gives its pages up when others need room. Chooses; the scheduler acts."""

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
    """The running request that ranks last, behind `request` or parked, and has no work in this step; of those whose pages can
    help `count` tokens of `request`: its own tenant's and, where its quota is not what is short, those of tenants that use
    more than their share. None where there is none.

    `excess` says how far the tenant of a request is above its fair part of the pool, 0 and below where it is not. A tenant that
    is not above it preempts those that are, whatever their rank; priorities count inside one tenant only."""
    assert request.sequence is not None
    busy = {id(other) for other, _ in picked} | {id(request)}
    others = [r for r in running if id(r) not in busy]
    if len(cache.inspect.accounts) == 1:
        return max((r for r in others if r.rank > request.rank or r.parked), key=RANK, default=None)
    mine, own = cache.account(request.control.tenant), cache.exceeds_quota(request.sequence, count)
    needy = excess(request) <= 0
    best: tuple[tuple[float, tuple[int, int]], Request] | None = None
    for one in others:
        account, above = cache.account(one.control.tenant), 0.0
        if account is mine:
            may = one.rank > request.rank or one.parked
        else:
            above = max(0.0, excess(one)) if needy else 0.0
            may = not own and account.used > account.guaranteed
            may = may and (above > 0 or one.order > request.order or one.parked)
        if may and (best is None or (above, one.rank) > best[0]):
            best = (above, one.rank), one
    return None if best is None else best[1]
