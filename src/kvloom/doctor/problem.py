"""A problem that `kvloom doctor` reports."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Problem"]


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault (`what`), and one line that repairs it (`fix`). `blocks` names the commands that do not work because of
    the fault. For a warning, `blocks` is empty."""

    what: str
    fix: str
    blocks: tuple[str, ...] = ()
