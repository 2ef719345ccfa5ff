"""The offload manager's answers to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Action", "Decision"]


class Action(Enum):
    """What a request does next."""

    COMPUTE = "compute"
    """Compute tokens, up to `Decision.until`."""
    WAIT = "wait"
    """Compute nothing: pages in transfer arrive before they could be computed."""
    NO_ROOM = "no room"
    """A tier has pages of the request, but the pool has no free pages for them: wait, or compute."""
    RESUME = "resume"
    """The tail of the prompt is loaded: leave the batch, and resume after the tail."""


@dataclass(frozen=True, slots=True)
class Decision:
    """An action, and the position up to which the request computes before the next decision (None: no limit)."""

    action: Action
    until: int | None = None
