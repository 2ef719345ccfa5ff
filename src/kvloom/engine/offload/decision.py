"""The decisions that the offload manager returns to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Action", "Decision"]


class Action(Enum):
    """The next action of a request."""

    COMPUTE = "compute"
    """Compute tokens, up to `Decision.until`."""
    WAIT = "wait"
    """Compute nothing, because the pages in transfer will arrive before the request could compute them."""
    NO_FREE_PAGES = "no free pages"
    """A tier has pages of the request, but the pool has no free pages for them. The request waits or computes."""
    RESUME = "resume"
    """The tail of the prompt is loaded. The request leaves the batch and resumes after the tail."""


@dataclass(frozen=True, slots=True)
class Decision:
    """An action, and the position up to which the request computes before the next decision. If the position is None,
    there is no limit."""

    action: Action
    until: int | None = None
