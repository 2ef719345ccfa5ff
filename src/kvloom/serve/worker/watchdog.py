"""Whether an engine's process that has not ended still works: it beats every BEAT_SECONDS, and names the step it is in.

| it is hung when                       | bound    | what does not count                                          |
|---------------------------------------|----------|--------------------------------------------------------------|
| nothing at all came from it for       | `silent` | before it is ready `step` holds instead: imports block beats |
| it beats, but stays in one step for   | `step`   | loading, and waiting for work                                |

Long steps (a first prefill on a CPU, kernels that are compiled) beat all the while. Knows no process and no clock: time that
this process itself did not run is not counted, so that a machine that was suspended wakes up with its engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .messages import Beat, FromEngine, Ready

__all__ = ["BEAT_SECONDS", "Patience", "Watchdog"]

BEAT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that an engine may be silent, and that one of its steps may take; 0 waits for ever."""

    silent: float = 30.0
    step: float = 600.0

    def __post_init__(self) -> None:
        for name, least in (("silent", 2 * BEAT_SECONDS), ("step", BEAT_SECONDS)):
            seconds = getattr(self, name)
            if seconds != 0 and not least <= seconds < math.inf:
                raise ValueError(
                    f"--{name}-seconds {seconds:g} must be {least:g} or more, as the engine beats every {BEAT_SECONDS:g} s; 0 waits for ever"
                )


class Watchdog:
    """One engine's life. `heard` is told every message, `tick` about every BEAT_SECONDS how long ago the last tick was."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._ready = False
        self._step = 0
        self._silent = self._stuck = 0.0

    def heard(self, message: FromEngine) -> None:
        """Something came."""
        self._silent = 0.0
        self._ready = self._ready or isinstance(message, Ready)
        if isinstance(message, Beat) and message.step != self._step:
            self._step, self._stuck = message.step, 0.0

    def tick(self, seconds: float) -> str | None:
        """Time passed; why the engine counts as hung, None while it does not."""
        seconds = min(seconds, 2 * BEAT_SECONDS)
        self._silent += seconds
        self._stuck += seconds if self._step else 0.0
        bound = self._patience.silent if self._ready else self._patience.step
        if bound and self._silent > bound:
            return f"said nothing for {bound:g} s"
        if self._patience.step and self._stuck > self._patience.step:
            return f"was in one step for {self._patience.step:g} s"
        return None
