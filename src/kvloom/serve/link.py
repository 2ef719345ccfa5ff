"""The server's end of the engine: starts its process, sends requests, hands answers out, and starts it again when it dies.

    loading ──▶ ready ──▶ died, or hung and ended: whoever waited is told, and after a pause ──▶ loading …

A first start that fails is final: there is nothing to serve. Later ones are tried again, at most RESTARTS in a minute.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress

import msgspec

from .errors import ApiError, engine_died, engine_loading, grammars_busy
from .fields import explained
from .mailbox import Mailbox
from .messages import (
    HEADER_BYTES,
    Add,
    Beat,
    Cancel,
    Delta,
    EndSession,
    ExpectSession,
    Failed,
    FromEngine,
    Look,
    Outputs,
    Ready,
    Start,
    Stats,
    Story,
    ToEngine,
    frame,
    length_of,
)
from .watchdog import BEAT_SECONDS, Patience, Watchdog

__all__ = ["Backoff", "EngineLink", "StartError"]

RESTARTS = 5
WINDOW_SECONDS = 60.0
FIRST_PAUSE = 0.25
LONGEST_PAUSE = 8.0
SOCKET_BYTES = 1 << 20
STDERR = 2
CALM = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads of the engine that wait for others sleep: spinning, they take the cores from those they wait for, and from this
process. Can only be said before torch is loaded."""


class StartError(Exception):
    """The engine could not be started the first time."""


class Backoff:
    """How long to wait before an engine is started again: longer each time, and at most RESTARTS within WINDOW_SECONDS."""

    def __init__(self) -> None:
        self._starts: deque[float] = deque()

    def pause(self, now: float) -> float:
        """An engine died `now`: the seconds to wait. They are counted as waited for."""
        while self._starts and now - self._starts[0] > WINDOW_SECONDS:
            self._starts.popleft()
        seconds = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** len(self._starts))
        if len(self._starts) >= RESTARTS:
            seconds = max(seconds, self._starts[-RESTARTS] + WINDOW_SECONDS - now)
        self._starts.append(now + seconds)
        return seconds


class EngineLink:
    """`say` gets a line for people when something happens; `on_ready` is called each time an engine is ready, `on_story` when
    it tells how a prompt goes, `on_answer` (if set) with each piece of an answer that somebody waits for."""

    def __init__(
        self,
        start: Start,
        say: Callable[[str], None],
        on_ready: Callable[[Ready], None],
        patience: Patience | None = None,
    ) -> None:
        self.start, self._say, self._on_ready = start, say, on_ready
        self._patience = patience or Patience()
        self.facts: Ready | None = None
        self.ready = False
        self.restarts = 0
        self.pid: int | None = None
        self.stats = Stats()
        self._mailboxes: dict[int, Mailbox] = {}
        self._looks: list[asyncio.Future[bytes]] = []
        self._writer: asyncio.StreamWriter | None = None
        self._closing = asyncio.Event()
        self._count = 0
        self.on_story: Callable[[Story], None] = lambda story: None
        self.on_answer: Callable[[Delta], None] | None = None
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

    def check(self) -> Ready:
        """What the engine is. Raises ApiError where there is none at the moment."""
        if not self.ready or self.facts is None:
            raise engine_loading()
        return self.facts

    def numbers(self, count: int) -> list[int]:
        """Ids for so many prompts."""
        self._count += count
        return list(range(self._count - count, self._count))

    def submit(self, messages: Iterable[Add], mailbox: Mailbox) -> None:
        """Send prompts to the engine; their answers come to `mailbox`."""
        self.check()
        for message in messages:
            self._mailboxes[message.id] = mailbox
            self._send(message)

    def withdraw(self, mailbox: Mailbox) -> None:
        """Nobody wants what is still open in a mailbox: end it, and free its pages."""
        for id_ in mailbox.open:
            if self._mailboxes.pop(id_, None) is not None:
                self._send(Cancel(id_))
        mailbox.open.clear()

    def expect_session(self, tenant: str, session: str) -> None:
        """A tenant's session is about to come back."""
        self._send(ExpectSession(tenant, session))

    def end_session(self, tenant: str, session: str) -> None:
        """A tenant's session will not come back."""
        self._send(EndSession(tenant, session))

    async def look(self, seconds: float) -> bytes:
        """A picture of the engine's cache, as JSON. Raises ApiError where there is no engine, TimeoutError where it does not
        come within so long."""
        self.check()
        answer = asyncio.get_running_loop().create_future()
        self._looks.append(answer)
        self._send(Look())
        return await asyncio.wait_for(answer, seconds)

    def close(self) -> None:
        """End the engine's process; `run` returns."""
        self._closing.set()
        if self._writer is not None:
            self._writer.close()

    def fail_all(self, error: ApiError) -> None:
        """Tell everyone who waits."""
        for mailbox in {id(one): one for one in self._mailboxes.values()}.values():
            mailbox.open.clear()
            mailbox.fail(error)
        self._mailboxes.clear()
        looks, self._looks = self._looks, []
        for look in looks:
            if not look.done():
                look.set_exception(error)

    async def run(self) -> None:
        """Keep an engine running until `close`. Raises StartError where the first cannot be started."""
        backoff = Backoff()
        while not self._closing.is_set():
            why = await self._live()
            if self._closing.is_set():
                return
            if self.facts is None:
                raise StartError(f"the engine {why}")
            pause = backoff.pause(time.monotonic())
            self._say(f"the engine {why}; it is started again in {pause:.2g} s")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), pause)
            self.restarts += 1

    async def _live(self) -> str:
        """One engine's life; how it ended."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        with theirs:
            fd = theirs.fileno()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kvloom.serve.engine_process", str(fd)), pass_fds=[fd], stdout=STDERR,
                env={**CALM, **os.environ},
            )  # fmt: skip
        self.pid = process.pid
        reader, self._writer = await asyncio.open_connection(sock=ours)
        if self._closing.is_set():
            self._writer.close()
        said = hung = ""
        watchdog = Watchdog(self._patience)

        async def watch() -> None:
            nonlocal hung
            last = time.monotonic()
            while not hung:
                await asyncio.sleep(BEAT_SECONDS)
                now = time.monotonic()
                hung, last = watchdog.tick(now - last) or "", now
            with suppress(ProcessLookupError):
                process.kill()  # what it held open closes, and the reading below ends

        watching = asyncio.create_task(watch())
        try:
            self._send(self.start)
            while not said:
                header = await reader.readexactly(HEADER_BYTES)
                message = self._decoder.decode(await reader.readexactly(length_of(header)))
                watchdog.heard(message)
                said = self._take(message)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            watching.cancel()
            self.ready = False
            self._writer.close()
            self._writer = None
            self.fail_all(engine_died(hung))  # at once: the process itself may take a while to end
            try:
                code = await asyncio.wait_for(process.wait(), 5)
            except TimeoutError:
                process.kill()
                code = await process.wait()
        if hung:
            return f"hung and was ended: it {hung}"
        return said or (f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}")

    def _take(self, message: FromEngine) -> str:
        """Hand a message out; why the engine is of no use, if it said so."""
        if isinstance(message, Outputs):
            self._hand_out(message)
            return ""
        if isinstance(message, Failed):
            return f"cannot be loaded: {message.why}"
        if isinstance(message, Beat):
            return ""
        self.facts, self.ready, self.stats = message, True, Stats()
        self._on_ready(message)
        return ""

    def _hand_out(self, outputs: Outputs) -> None:
        for story in outputs.stories:  # before the answers that it is about
            self.on_story(story)
        for delta in outputs.deltas:
            mailbox = self._mailboxes.get(delta.id)
            if mailbox is not None:
                if self.on_answer is not None:
                    self.on_answer(delta)
                mailbox.put(delta)
                if delta.id not in mailbox.open:
                    del self._mailboxes[delta.id]
        for refused in outputs.refused:
            mailbox = self._mailboxes.pop(refused.id, None)
            if mailbox is not None:
                mailbox.open.discard(refused.id)
                error = explained(refused.why)
                mailbox.fail(grammars_busy(refused.why, error.param) if refused.busy else error)
        if outputs.stats is not None:
            self.stats = outputs.stats
        if outputs.picture is not None:
            looks, self._looks = self._looks, []
            for look in looks:
                if not look.done():
                    look.set_result(outputs.picture)

    def _send(self, message: ToEngine) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message))
