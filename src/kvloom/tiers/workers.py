"""Daemon threads that run jobs in order. The process can exit even if a call to a medium hangs in a thread.

A thread of a tier has its own scratch memory and codec (`Tools`), which its jobs use one after another.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from kvloom.tiers.aligned_memory import aligned_bytes

from .encoding import Codec
from .ttl import Expiry

__all__ = ["Tools", "Workers"]


class Tools:
    """The tools of one worker thread of a tier: scratch memory, codec, and the expiry of the tier's pages. Each thread
    has its own scratch memory and codec."""

    def __init__(self, codec: Codec, expiry: Expiry | None = None) -> None:
        self.codec, self.expiry = codec, expiry or Expiry()
        self._scratch = aligned_bytes(0)

    def scratch(self, size: int) -> memoryview:
        """Return at least `size` aligned bytes, valid until the next call."""
        if len(self._scratch) < size:
            self._scratch = aligned_bytes(size)
        return self._scratch


Job = TypeVar("Job")


class Workers(Generic[Job]):
    """`count` threads that take jobs from one queue. `make_run` is called once per thread and returns a function `run`.
    The thread calls `run(job)` for each of its jobs. `run` must not raise."""

    def __init__(self, count: int, name: str, make_run: Callable[[], Callable[[Job], None]]) -> None:
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._loop, args=(make_run(),), name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _loop(self, run: Callable[[Job], None]) -> None:
        while (job := self._queue.get()) is not None:
            run(job)
            del job  # frees the job's memory before the thread waits for the next job

    def submit(self, job: Job) -> None:
        """Queue a job. Does not wait."""
        self._queue.put(job)

    def close(self, timeout: float) -> bool:
        """End the threads after all submitted jobs have run. Return False if some threads still run after
        `timeout` seconds."""
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
