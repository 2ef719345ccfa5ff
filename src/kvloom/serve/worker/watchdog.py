"""Detects an engine process that hangs. The engine sends a heartbeat with its step number every HEARTBEAT_SECONDS.

| the process counts as hung if                   | limit            | exception                                      |
|-------------------------------------------------|------------------|------------------------------------------------|
| no message arrives for longer than the limit    | `silent_seconds` | until it is ready, the limit is `step_seconds`, because imports block heartbeats |
| one step takes longer than the limit            | `step_seconds`   | loading and idle time do not count             |

Heartbeats are also sent during long steps (first prefill on a CPU, kernel compilation). Time in which the API process
did not run does not count, so a suspended machine resumes without a restart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .messages import FromEngine, Heartbeat, Ready

__all__ = ["HEARTBEAT_SECONDS", "Watchdog", "WatchdogLimits"]

HEARTBEAT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class WatchdogLimits:
    """The times after which the watchdog treats the engine process as hung: seconds without any message, and seconds in
    one step. 0 means no limit."""

    silent_seconds: float = 30.0
    step_seconds: float = 600.0

    def __post_init__(self) -> None:
        for name, least in (("silent_seconds", 2 * HEARTBEAT_SECONDS), ("step_seconds", HEARTBEAT_SECONDS)):
            seconds = getattr(self, name)
            if seconds != 0 and not least <= seconds < math.inf:
                raise ValueError(
                    f"--{name.replace('_', '-')} {seconds:g} must be at least {least:g}, because the engine sends a heartbeat every "
                    f"{HEARTBEAT_SECONDS:g} s; 0 disables the limit"
                )


class Watchdog:
    """Watches one engine process. Pass every message to `received`, and call `tick` about every HEARTBEAT_SECONDS."""

    def __init__(self, limits: WatchdogLimits) -> None:
        self._limits = limits
        self._ready = False
        self._step = 0
        self._silent = self._in_step = 0.0

    def received(self, message: FromEngine) -> None:
        """Record a message from the engine."""
        self._silent = 0.0
        self._ready = self._ready or isinstance(message, Ready)
        if isinstance(message, Heartbeat) and message.step != self._step:
            self._step, self._in_step = message.step, 0.0

    def tick(self, seconds: float) -> str | None:
        """Count `seconds`, the time since the last tick. Return the reason why the engine counts as hung, or None."""
        seconds = min(seconds, 2 * HEARTBEAT_SECONDS)
        self._silent += seconds
        self._in_step += seconds if self._step else 0.0
        bound = self._limits.silent_seconds if self._ready else self._limits.step_seconds
        if bound and self._silent > bound:
            return f"sent no message for {bound:g} s"
        if self._limits.step_seconds and self._in_step > self._limits.step_seconds:
            return f"spent more than {self._limits.step_seconds:g} s in one step"
        return None
