"""Measures how long vLLM takes to compute tokens, for the decision to load or to recompute."""

from __future__ import annotations

import time

import torch

__all__ = ["ComputeTime"]

MIN_TOKENS = 16
"""Steps with fewer tokens are decode steps. They are not measured, because their time does not predict that of a
prompt.
"""


class ComputeTime:
    """Measures how long vLLM's steps take. If `enabled` is False, nothing is measured. On a GPU, CUDA events measure
    the time."""

    def __init__(self, enabled: bool) -> None:
        self._model = None
        if enabled:
            from kvloom.engine.offload import TimeModel  # loads torch modules, so only if needed

            self._model = TimeModel()
        self._began: float | None = None
        self._start: torch.cuda.Event | None = None
        self._running: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> None:
        """Record the start of a step."""
        if self._model is None:
            return
        self._began = time.monotonic()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._start = _event()

    def end(self, tokens: int) -> None:
        """Record the end of a step of `tokens` tokens."""
        if self._model is None or self._began is None:
            return
        began, self._began = self._began, None
        if self._start is not None:
            if tokens >= MIN_TOKENS:
                self._running.append((tokens, self._start, _event()))
            self._start = None
            while self._running and self._running[0][2].query():  # type: ignore[no-untyped-call]
                count, first, last = self._running.pop(0)
                self._model.observe(count, first.elapsed_time(last) / 1e3)
        elif tokens >= MIN_TOKENS:
            self._model.observe(tokens, time.monotonic() - began)

    def seconds(self, tokens: int) -> float | None:
        """Return the estimated seconds to compute `tokens` tokens, or None if too little was measured."""
        if self._model is None or not self._model.is_trusted:
            return None
        return self._model.seconds(tokens)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
