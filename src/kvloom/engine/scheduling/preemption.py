"""Preemption: if a request needs pages, chooses the running request that the scheduler preempts."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Many
from operator import attrgetter

from kvloom.core import KVCache
from kvloom.engine.request import Request
from kvloom.models.paged import Work

__all__ = ["SORT_KEY", "Scheduled", "awaits_progress", "choose_victim"]

Scheduled = tuple[Request, Work]
STUCK_PREEMPTIONS = 4
"""A request with so many preemptions since its last new token is stuck."""
SORT_KEY = attrgetter("sort_key")


def awaits_progress(request: Request) -> bool:
    """Return whether a request was preempted and has produced no token since then. Such a request is not preempted
    again only because its tenant is above its fair share. Otherwise tenants whose requests do not fit into the pool
    together could preempt each other without end.
    """
    return request.preemptions > 0 and len(request.tokens) <= request.tokens_when_preempted


def choose_victim(
    cache: KVCache,
    running: Many[Request],
    request: Request,
    count: int,
    picked: Many[Scheduled],
    excess: Callable[[Request], float],
) -> Request | None:
    """Return the running request to preempt so that `request` gets pages for `count` tokens, or None if there
    is no candidate.

    | a running request      | is a candidate if                                                                   |
    |------------------------|-------------------------------------------------------------------------------------|
    | with work in this step | never                                                                               |
    | of the same tenant     | it is sorted after `request` (`Request.sort_key`), or is a parked beam              |
    | of another tenant      | its tenant uses more than its guaranteed share of the pool (or, if `request` is     |
    |                        | stuck and the share is not firm, any part of the pool), and one of these holds:     |
    |                        | 1. it arrived later than `request`                                                  |
    |                        | 2. it is a parked beam                                                              |
    |                        | 3. its tenant is above its fair share, the tenant of `request` is not, and          |
    |                        |    `awaits_progress` is False                                                       |

    Two requests that do not fit into the pool together could preempt each other without end, if neither may use the
    guaranteed share of the other tenant. A request that is stuck may therefore preempt every later request, so the
    earliest request always ends.

    A parked beam waits for the other beams of its search. The guaranteed share of a tenant follows from the
    weights of all tenants (see `Tenant`). The fair share follows from the weights of the tenants that have
    requests now. If `request` would exceed the quota of its tenant, only requests of the same tenant are
    candidates.

    If the tenant of `request` is not above its fair share, the candidate whose tenant has the largest excess
    is chosen. Otherwise, and among equals, the candidate with the largest sort key is chosen. `excess(request)`
    returns the bytes that the tenant of a request uses above its fair share. `picked` is the work of this step.
    """
    assert request.sequence is not None
    busy = {id(other) for other, _ in picked} | {id(request)}
    others = [r for r in running if id(r) not in busy]
    if len(cache.inspect.accounts) == 1:
        return max(
            (r for r in others if r.sort_key > request.sort_key or r.parked), key=SORT_KEY, default=None
        )
    own_account, quota_is_short = (
        cache.account(request.control.tenant),
        cache.exceeds_quota(request.sequence, count),
    )
    within_share = excess(request) <= 0
    is_stuck = awaits_progress(request) and request.fruitless_preemptions >= STUCK_PREEMPTIONS
    best: tuple[tuple[float, tuple[int, int]], Request] | None = None
    for other in others:
        account, above = cache.account(other.control.tenant), 0.0
        if account is own_account:
            may = other.sort_key > request.sort_key or other.parked
        else:
            above = max(0.0, excess(other)) if within_share and not awaits_progress(other) else 0.0
            is_guaranteed = account.counted <= account.guaranteed
            may = not quota_is_short and (not is_guaranteed or (is_stuck and not account.tenant.firm))
            may = may and (above > 0 or other.order > request.order or other.parked)
        if may and (best is None or (above, other.sort_key) > best[0]):
            best = (above, other.sort_key), other
    return None if best is None else best[1]
