"""Threads, locks and clocks that one seed schedules. Threads are greenlets, so that exactly one of them runs at a time.

    with VirtualThreads(seed).installed():   # the modules `time`, `threading` and `queue` of kvloom are replaced
        ...

A thread may lose its turn whenever it uses a lock, a queue, an event or the clock. The seed decides. If no thread can
run, the clock advances to the next deadline. If there is no deadline either, `DeadlockError` is raised in the main
thread. A run therefore depends on nothing but its seed.
"""

from __future__ import annotations

import heapq
import queue
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

from kvloom.core import WallClock

__all__ = ["DeadlockError", "VirtualThreads"]

TICK = 1e-6
"""Seconds that the clock advances when it is read or when a thread may lose its turn. A loop that only polls
therefore ends, too."""


class DeadlockError(AssertionError):
    """Raised if every thread waits, and none of them has a deadline."""


class _Task:
    """One virtual thread. `wakes` counts its waits, so that a deadline of an earlier wait has no effect."""

    __slots__ = ("error", "is_ready", "name", "run", "wakes", "woken")

    def __init__(self, name: str, run: greenlet) -> None:
        self.name, self.run = name, run
        self.wakes, self.woken, self.is_ready = 0, False, False
        self.error: BaseException | None = None


class VirtualThreads:
    """Schedules virtual threads. `switches` is the number of times that another thread got its turn.

    `switch_rate` is the probability that a thread loses its turn at a point where it may.
    """

    def __init__(self, seed: int | str, switch_rate: float = 0.2) -> None:
        self.random = random.Random(seed)
        self.switch_rate = switch_rate
        self.now = 1000.0
        self._os_thread = threading.get_ident()
        self.switches = 0
        self.errors: list[tuple[str, BaseException]] = []
        """Exceptions that ended a thread."""
        self.is_closed = False
        self._main = self._current = _Task("main", getcurrent())
        self._ready: list[_Task] = []
        self._sleeping: list[tuple[float, int, int, _Task]] = []
        self._tasks: dict[_Task, None] = {}
        self._doomed: list[_Task] = []
        self._is_deadlocked = False
        self._count = 0
        self.time = self._time_module()
        self.threading = self._threading_module()
        self.queue = self._queue_module()

    # -- what primitives use ----------------------------------------------------------------------

    def clock(self) -> float:
        if threading.get_ident() != self._os_thread:
            return time.monotonic()  # a thread that was started before the run
        self.now += TICK
        return self.now

    def pause(self) -> None:
        """Let another thread run, if the seed says so."""
        if self.is_closed or threading.get_ident() != self._os_thread:
            return
        self.now += TICK
        if self.random.random() < self.switch_rate:
            self._wake_due()
            if self._ready:
                self._make_ready(self._current)
                self._switch()

    def block(self, deadline: float | None = None) -> bool:
        """Wait until `wake` is called for this thread. Return False if the deadline passed first."""
        task = self._current
        if self.is_closed:
            raise GreenletExit
        task.wakes += 1
        task.woken = False
        if deadline is not None:
            self._count += 1
            heapq.heappush(self._sleeping, (deadline, self._count, task.wakes, task))
        self._switch()
        task.wakes += 1  # a deadline that has not passed yet has no effect
        return task.woken

    def wake(self, task: _Task) -> None:
        if not task.is_ready:
            task.woken = True
            self._make_ready(task)

    @property
    def current(self) -> _Task:
        return self._current

    def sleep(self, seconds: float) -> None:
        deadline = self.now + max(TICK, seconds)
        while self.now < deadline:  # a notification of an earlier wait may end a block too soon
            self.block(deadline)

    def start(self, run: Callable[[], object], name: str) -> _Task:
        """Start a thread."""

        def body(*_: object) -> None:
            try:
                run()
            except GreenletExit:
                return
            except BaseException as error:  # noqa: BLE001  reported as a failure of the run
                self.errors.append((name, error))
            finally:
                self._tasks.pop(task, None)
            if not self.is_closed:
                self._current = self._next()
                getcurrent().parent = self._current.run  # it continues when this greenlet has ended

        task = _Task(name, greenlet(body, parent=self._main.run))
        self._tasks[task] = None
        self._make_ready(task)
        return task

    @property
    def alive(self) -> list[str]:
        """Names of the threads that have not ended."""
        return [task.name for task in self._tasks]

    def forget_threads(self) -> None:
        """End all other threads where they are, like a process that is killed. They run no further code."""
        for task in self._tasks:
            self._doomed.append(task)
        self._tasks.clear()
        self._ready.clear()
        self._sleeping.clear()

    def close(self) -> None:
        """End all threads. Their `finally` blocks run, but find locks without effect."""
        self.is_closed = True
        doomed = [*self._tasks, *self._doomed]
        self._tasks.clear()
        self._doomed.clear()
        for task in doomed:
            for _ in range(100):
                if task.run.dead or not task.run:
                    break
                self._current = task
                task.run.throw(GreenletExit)
        self._current = self._main

    # -- scheduling -------------------------------------------------------------------------------

    def _make_ready(self, task: _Task) -> None:
        task.is_ready = True
        self._ready.append(task)

    def _wake_due(self) -> None:
        while self._sleeping and self._sleeping[0][0] <= self.now:
            _, _, wakes, task = heapq.heappop(self._sleeping)
            if wakes == task.wakes and not task.is_ready and task is not self._current:
                self._make_ready(task)

    def _next(self) -> _Task:
        """Remove and return a ready thread. Advance the clock if no thread is ready."""
        while True:
            while self._sleeping and self._sleeping[0][0] <= self.now:
                _, _, wakes, task = heapq.heappop(self._sleeping)
                if wakes == task.wakes and not task.is_ready:
                    self._make_ready(task)
            if self._ready:
                break
            if not self._sleeping:
                self._is_deadlocked = True
                return self._main
            self.now = max(self.now, self._sleeping[0][0])
        at = self.random.randrange(len(self._ready))
        task = self._ready[at]
        self._ready[at] = self._ready[-1]
        self._ready.pop()
        task.is_ready = False
        return task

    def _switch(self) -> None:
        """Give the turn to a ready thread. The caller is ready or waits."""
        task = self._next()
        if task is not self._current:
            self.switches += 1
            self._current = task
            task.run.switch()
        if self._is_deadlocked:
            self._is_deadlocked = False
            raise DeadlockError(f"every thread waits without a deadline: {self.alive}")

    # -- modules ----------------------------------------------------------------------------------

    def _time_module(self) -> Any:
        def wall() -> float:
            return 1.7e9 + self.clock()

        names = {
            "monotonic": self.clock,
            "perf_counter": self.clock,
            "time": wall,
            "time_ns": lambda: int(1e9 * wall()),
            "monotonic_ns": lambda: int(1e9 * self.clock()),
            "perf_counter_ns": lambda: int(1e9 * self.clock()),
            "sleep": self.sleep,
        }
        return SimpleNamespace(**{**vars(time), **names})

    def _threading_module(self) -> Any:
        world = self

        class Lock(_Lock):
            def __init__(self) -> None:
                super().__init__(world)

        class RLock(_Lock):
            def __init__(self) -> None:
                super().__init__(world, reentrant=True)

        class Condition(_Condition):
            def __init__(self, lock: Any = None) -> None:
                super().__init__(world, lock or RLock())

        class Event(_Event):
            def __init__(self) -> None:
                super().__init__(world)

        class Thread(_Thread):
            _world = world

        class Local:
            def __getattribute__(self, name: str) -> Any:
                values = object.__getattribute__(self, "__dict__").setdefault(world.current, {})
                if name in values:
                    return values[name]
                raise AttributeError(name)

            def __setattr__(self, name: str, value: Any) -> None:
                object.__getattribute__(self, "__dict__").setdefault(world.current, {})[name] = value

        names = {
            "Lock": Lock,
            "RLock": RLock,
            "Condition": Condition,
            "Event": Event,
            "Thread": Thread,
            "local": Local,
            "current_thread": lambda: world.current,
            "get_ident": lambda: id(world.current),
        }
        return SimpleNamespace(**{**vars(threading), **names})

    def _queue_module(self) -> Any:
        world = self

        class Queue(_Queue):
            def __init__(self, maxsize: int = 0) -> None:
                super().__init__(world, maxsize)

        return SimpleNamespace(**{**vars(queue), "Queue": Queue, "SimpleQueue": Queue})

    @contextmanager
    def installed(self) -> Iterator[VirtualThreads]:
        """Replace `time`, `threading` and `queue` in all loaded modules of kvloom. At the end, all virtual threads
        end."""
        ours = {time: self.time, threading: self.threading, queue: self.queue}
        locks = {threading.Lock: self.threading.Lock, threading.RLock: self.threading.RLock}
        changed: list[tuple[Any, str, Any]] = []
        modules = [m for name, m in list(sys.modules.items()) if name.startswith("kvloom.")]
        for module in modules:
            for name, value in list(vars(module).items()):
                if isinstance(value, ModuleType) and value in ours:
                    changed.append((module, name, value))
                    setattr(module, name, ours[value])
                elif name in ("Lock", "RLock") and value in locks:
                    changed.append((module, name, value))
                    setattr(module, name, locks[value])
        wall = WallClock.__dict__["now"]
        WallClock.now = staticmethod(self.clock)
        try:
            yield self
        finally:
            self.close()
            WallClock.now = wall
            for module, name, value in changed:
                setattr(module, name, value)


class _Lock:
    def __init__(self, world: VirtualThreads, reentrant: bool = False) -> None:
        self._world, self._reentrant = world, reentrant
        self._owner: _Task | None = None
        self._depth = 0
        self._waiters: list[_Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        world = self._world
        if world.is_closed:
            return True
        world.pause()
        me = world.current
        if self._owner is me:
            if not self._reentrant:
                raise DeadlockError(f"{me.name} acquires a lock that it already has")
            self._depth += 1
            return True
        deadline = None if timeout < 0 else world.now + timeout
        while self._owner is not None:
            if not blocking:
                return False
            self._waiters.append(me)
            woken = world.block(deadline)
            if me in self._waiters:
                self._waiters.remove(me)
            if not woken and deadline is not None and world.now >= deadline and self.locked():
                return False
        self._owner, self._depth = me, 1
        return True

    def release(self) -> None:
        world = self._world
        if world.is_closed or getcurrent() is not world.current.run:
            return  # the second case: a killed thread is garbage-collected, and leaves its `with` blocks
        if self._owner is None:
            raise RuntimeError("release unlocked lock")
        self._depth -= 1
        if self._depth:
            return
        self._owner = None
        waiters, self._waiters = self._waiters, []
        for task in waiters:
            world.wake(task)
        world.pause()

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def release_all(self) -> int:
        depth, self._depth = self._depth, 1
        self.release()
        return depth

    def restore(self, depth: int) -> None:
        self.acquire()
        self._depth = depth

    @property
    def is_mine(self) -> bool:
        return self._owner is self._world.current


class _Condition:
    def __init__(self, world: VirtualThreads, lock: _Lock) -> None:
        self._world, self._lock = world, lock
        self._waiters: list[_Task] = []
        self.acquire, self.release = lock.acquire, lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        world = self._world
        if not world.is_closed and not self._lock.is_mine:
            raise RuntimeError("cannot wait on un-acquired lock")
        me = world.current
        self._waiters.append(me)
        depth = self._lock.release_all()
        woken = True
        if me in self._waiters:  # a notification may arrive while the lock is released
            woken = world.block(None if timeout is None else world.now + timeout)
        if me in self._waiters:
            self._waiters.remove(me)
            woken = False
        self._lock.restore(depth)
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        end = None if timeout is None else self._world.now + timeout
        result = predicate()
        while not result:
            left = None if end is None else end - self._world.now
            if left is not None and left <= 0:
                break
            self.wait(left)
            result = predicate()
        return result

    def notify(self, count: int = 1) -> None:
        if not self._world.is_closed and not self._lock.is_mine:
            raise RuntimeError("cannot notify on un-acquired lock")
        for _ in range(min(count, len(self._waiters))):
            at = self._world.random.randrange(len(self._waiters))
            self._world.wake(self._waiters.pop(at))

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class _Event:
    def __init__(self, world: VirtualThreads) -> None:
        self._world, self._is_set = world, False
        self._waiters: list[_Task] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        waiters, self._waiters = self._waiters, []
        for task in waiters:
            self._world.wake(task)
        self._world.pause()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        world = self._world
        world.pause()
        end = None if timeout is None else world.now + timeout
        while not self._is_set:
            if end is not None and world.now >= end:
                return False
            self._waiters.append(world.current)
            world.block(end)
            if world.current in self._waiters:
                self._waiters.remove(world.current)
            elif end is not None and not self._is_set:
                return True  # set and cleared again
        return True


class _Queue:
    def __init__(self, world: VirtualThreads, maxsize: int = 0) -> None:
        self._world, self._maxsize = world, maxsize
        self._items: deque[Any] = deque()
        self._waiters: list[_Task] = []

    def qsize(self) -> int:
        return len(self._items)

    def empty(self) -> bool:
        return not self._items

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        while self._maxsize and len(self._items) >= self._maxsize:
            if not block:
                raise queue.Full
            self._wait(timeout, queue.Full)
        self._items.append(item)
        self._wake()
        self._world.pause()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self._world.pause()
        end = None if timeout is None else self._world.now + timeout
        while not self._items:
            if not block:
                raise queue.Empty
            self._wait(None if end is None else end - self._world.now, queue.Empty)
        item = self._items.popleft()
        if self._maxsize:
            self._wake()
        return item

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def put_nowait(self, item: Any) -> None:
        self.put(item, block=False)

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for task in waiters:
            self._world.wake(task)

    def _wait(self, timeout: float | None, error: type[Exception]) -> None:
        if timeout is not None and timeout <= 0:
            raise error
        self._waiters.append(self._world.current)
        self._world.block(None if timeout is None else self._world.now + timeout)
        if self._world.current in self._waiters:
            self._waiters.remove(self._world.current)


class _Thread:
    _world: VirtualThreads

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        assert group is None
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        self.name, self.daemon = name or "thread", bool(daemon)
        self._task: _Task | None = None
        self._has_ended = False
        self._joiners: list[_Task] = []

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def start(self) -> None:
        def body() -> None:
            try:
                self.run()
            finally:
                self._has_ended = True
                for task in self._joiners:
                    self._world.wake(task)

        self._task = self._world.start(body, self.name)
        self._world.pause()

    @property
    def ident(self) -> int | None:
        return None if self._task is None else id(self._task)

    def is_alive(self) -> bool:
        return self._task is not None and not self._has_ended

    def join(self, timeout: float | None = None) -> None:
        world = self._world
        end = None if timeout is None else world.now + timeout
        while self.is_alive():
            if world.is_closed or (end is not None and world.now >= end):
                return
            self._joiners.append(world.current)
            world.block(end)
