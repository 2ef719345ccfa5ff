"""Timeouts for client libraries without timeouts. A call runs in a separate thread, and the caller stops waiting
after the timeout.

An abandoned call continues in its thread and may still use the caller's memory. The caller gets a `StillRunningError`.
Its method `on_finished` runs a function when the call ends.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["BoundedCalls", "StillRunningError"]

_MAX_STUCK = 16


class StillRunningError(TimeoutError):
    """Raised if a call did not end in time and still runs in its thread. If `uses_caller_memory` is set, the call may
    access the caller's memory until it ends."""

    def __init__(self, text: str, pending: _PendingCall, uses_caller_memory: bool) -> None:
        super().__init__(text)
        self._pending, self.uses_caller_memory = pending, uses_caller_memory

    def on_finished(self, call: Callable[[], None]) -> None:
        """Run `call` once, when the call that did not end in time has ended. If it has ended already, runs `call` at
        once."""
        with BoundedCalls._lock:
            if not self._pending.finished.is_set():
                self._pending.watchers.append(call)
                return
        call()


class BoundedCalls:
    """A thread that runs the calls of one connection, one after the other. After a TimeoutError the object cannot be
    used again."""

    _stuck = 0  # threads of this process that are inside an abandoned call
    _lock = threading.Lock()

    def __init__(self, timeout: float, what: str) -> None:
        if BoundedCalls._stuck >= _MAX_STUCK:
            raise TimeoutError(f"{BoundedCalls._stuck} calls to {what} hang; the limit is {_MAX_STUCK}")
        self._timeout, self._what = timeout, what
        self._ended = False
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], _PendingCall] | None] = queue.SimpleQueue()
        threading.Thread(target=self._loop, name="kvloom-bounded", daemon=True).start()

    def call(
        self, function: Callable[[], Any], timeout: float | None = None, uses_caller_memory: bool = False
    ) -> Any:
        """Run `function` in the thread, and return its result or raises its exception. Raises StillRunningError if
        the function has not ended after `timeout` seconds.

        `uses_caller_memory` states that the function accesses memory of the caller.
        """
        if self._ended:
            raise TimeoutError(f"{self._what} did not answer an earlier call")
        pending = _PendingCall()
        self._calls.put((function, pending))
        limit = self._timeout if timeout is None else timeout
        if not pending.finished.wait(limit):
            with BoundedCalls._lock:
                abandoned = pending.abandon()
                BoundedCalls._stuck += abandoned
            if abandoned:
                self.close()
                raise StillRunningError(
                    f"{self._what} did not answer within {limit} s", pending, uses_caller_memory
                )
        if pending.error is not None:
            raise pending.error
        return pending.value

    def close(self) -> None:
        self._ended = True
        self._calls.put(None)

    def _loop(self) -> None:
        while (item := self._calls.get()) is not None:
            function, pending = item
            try:
                pending.value = function()
            except BaseException as error:  # noqa: BLE001  raised in the caller's thread
                pending.error = error
            with BoundedCalls._lock:
                pending.finished.set()
                BoundedCalls._stuck -= pending.abandoned
                watchers, pending.watchers = pending.watchers, []
            for call in watchers:
                call()
            del item, function, pending, watchers


class _PendingCall:
    def __init__(self) -> None:
        self.finished = threading.Event()
        self.abandoned = False
        self.value: Any = None
        self.error: BaseException | None = None
        self.watchers: list[Callable[[], None]] = []

    def abandon(self) -> bool:
        self.abandoned = not self.finished.is_set()
        return self.abandoned
