"""A problem that `kvloom doctor` reports."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Problem"]


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong and one line that repairs it. `blocks` names the commands that do not work because of it. It is
    empty for a warning."""

    what: str
    fix: str
    blocks: tuple[str, ...] = ()
