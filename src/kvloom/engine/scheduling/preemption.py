"""Who gives its pages up when others need room. Chooses; the scheduler acts."""

from __future__ import annotations

from collections.abc import Sequence as Many
from operator import attrgetter

from kvloom.core import KVCache
from kvloom.engine.request import Request
from kvloom.models.paged import Work

__all__ = ["RANK", "Scheduled", "choose_victim"]

Scheduled = tuple[Request, Work]
RANK = attrgetter("rank")


def choose_victim(
    cache: KVCache, running: Many[Request], request: Request, count: int, picked: Many[Scheduled]
) -> Request | None:
    """The running request that ranks last, behind `request` or parked, and has no work in this step; of those whose pages can
    help `count` tokens of `request`: its own tenant's and, where its quota is not what is short, those of tenants that use
    more than their share. None where there is none."""
    assert request.sequence is not None
    busy = {id(other) for other, _ in picked} | {id(request)}
    others = [r for r in running if id(r) not in busy and (r.rank > request.rank or r.parked)]
    if len(cache.inspect.accounts) > 1 and others:
        mine, own = cache.account(request.control.tenant), cache.exceeds_quota(request.sequence, count)
        theirs = [(r, cache.account(r.control.tenant)) for r in others]
        others = [r for r, a in theirs if a is mine or not (own or a.used <= a.guaranteed)]
    return max(others, key=RANK, default=None)
