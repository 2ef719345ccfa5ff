"""What a request does next while tiers have some of its pages: compute, wait, or resume. The offload manager returns
this to the scheduler. `load_or_recompute.py` compares the times of loading and recomputing."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Action", "Decision"]


class Action(Enum):
    """The next action of a request."""

    COMPUTE = "compute"
    """Compute tokens, up to `Decision.until`."""
    WAIT = "wait"
    """Compute nothing in this step. The pages in transfer arrive sooner than the request could compute their tokens.
    """
    NO_FREE_PAGES = "no free pages"
    """A tier has pages of the request, but the pool has no free pages for them. The scheduler decides whether the
    request waits or computes."""
    RESUME = "resume"
    """The end of the prompt is in host memory. The request releases its pages and waits for the copy into the pool.
    Then it resumes after the loaded tokens."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The action of a request. `until` is the position up to which the request computes before the next decision, or
    None if there is no limit.
    """

    action: Action
    until: int | None = None
