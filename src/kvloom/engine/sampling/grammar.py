"""Structured output: computes the tokens that a JSON schema, a regular expression or a grammar allows next.

    Grammars (one tokenizer) ── begin ──▶ Grammar: queued, compiling, ready or failed ── start ──▶ GrammarState
                                                GrammarState: advance, fork; collect ──▶ fill: masks, one bit a token

llguidance (the extra "grammar") compiles grammars and computes masks. It runs in other processes
(grammar_process.py), because even a small grammar can take minutes and gigabytes. If a grammar exceeds a limit, it
fails with a reason and its process is killed. Other requests do not wait for it. This file does not depend on
logits or requests.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvloom.engine.sampling.grammar_process import COMMAND, FRAME, NEWS

from .params import StructureKind

__all__ = ["Grammar", "GrammarBusyError", "GrammarLimits", "GrammarState", "Grammars", "collect", "fill"]

FAST_COMPILES = 2
"""Largest number of grammars that compile at the same time at normal priority."""
FAST_SECONDS = 0.5
"""A compilation that takes longer than this many seconds continues at the lowest priority, and the next compilation
starts."""
SLOW_COMPILES = 4
"""Largest number of compilations at the lowest priority. If there are more, one of them fails."""
LATE_SECONDS = 0.1
"""A mask that takes longer than this many seconds is computed at the lowest priority."""
PROCESS_BYTES = 4 << 20
"""Bytes of a process without its grammar."""
MOST_GRAMMARS = 512
"""Largest number of processes. Processes without a request end first, in the order of last use."""
TENANT_PRESSURE = 4
"""A tenant may use at most this many grammars for each grammar that can still start. A single tenant therefore gets 4/5
of MOST_GRAMMARS.
"""
UNUSED_SECONDS = 1.0
"""Seconds for which an unused grammar stays compiled, because its request may be about to start."""
TOTAL_MEMORY = 8
"""Memory limit of all grammars together, as a multiple of the limit of one grammar."""
QUEUE_SECONDS = 30.0
START_SECONDS = 120.0
MOST_REFUSED = 1024
"""Number of failed grammars that are remembered. Such a grammar is refused at once."""
QUIET = {
    "MALLOC_ARENA_MAX": "2",
    "RAYON_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


class GrammarBusyError(ValueError):
    """Raised if too many grammars compile or wait. The same grammar may be accepted later."""


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """The limits of one grammar: `seconds` of CPU time for the compilation and for the masks of each step, and
    bytes of `memory`. At most `waiting` grammars may wait to be compiled. At most `waiting` / 4 of them may
    belong to one tenant.
    """

    seconds: float = 2.0
    memory: int = 256 << 20
    waiting: int = 64

    def __post_init__(self) -> None:
        if not 0.01 <= self.seconds < math.inf:
            raise ValueError(f"grammar_seconds {self.seconds} must be 0.01 or more, and finite")
        if self.memory < 1 << 24:
            raise ValueError(f"grammar_memory {self.memory:,} must be at least 16 MiB ({1 << 24:,} bytes)")
        if self.waiting < 1:
            raise ValueError(f"GrammarLimits.waiting {self.waiting} must be at least 1")

    @property
    def wall(self) -> float:
        """Wall-clock seconds after which a process without an answer is killed. It is more than `seconds`, because
        the CPU may be busy.
        """
        return 5 * self.seconds + 5


class GrammarState:
    """The position of one output in its grammar. Not thread-safe. After `advance`, the next mask is `pending` until the
    grammar's process has computed it. Methods and properties of a state first wait for this mask. `collect` waits for
    the masks of several states at once.
    """

    __slots__ = ("__weakref__", "_accepts", "_done", "_error", "grammar", "key", "mask", "pending")

    def __init__(
        self, grammar: Grammar, key: int, mask: npt.NDArray[np.int32], done: bool, accepts: bool
    ) -> None:
        self.grammar, self.key, self.mask = grammar, key, mask
        self._done, self._accepts, self._error = done, accepts, ""
        self.pending = False
        grammar.users += 1

    def __del__(self) -> None:
        self.grammar.forget(self.key)

    def advance(self, token: int) -> bool:
        """Advance by one token. Return False if the grammar does not allow the token. The state has then failed
        permanently. Does not wait for the next mask.
        """
        self._settle()
        if not self.error and not self._allows(token):
            self._error = (
                f"token {token} is not allowed here" if self.mask.any() else "no token is allowed here"
            )
        if self.error:
            return False
        self.pending = True
        self.grammar.post(["a", self.key, token], self)
        return True

    @property
    def error(self) -> str:
        """The reason why no token is allowed. Empty if the output can continue."""
        self._settle()
        return self._error or self.grammar.error

    @property
    def failed(self) -> bool:
        """Whether the output cannot continue: a token was refused, no token is allowed, or the grammar exceeded a limit."""
        return bool(self.error)

    @property
    def done(self) -> bool:
        """Whether the output must end here: only end-of-sequence is allowed, or the output has failed."""
        return self.failed or self._done

    @property
    def accepts(self) -> bool:
        """Whether the output is complete and may end here."""
        return not self.failed and self._accepts

    def fork(self) -> GrammarState:
        """Return a copy of this state. Later changes of the copy do not affect this state, and later changes of this
        state do not affect the copy."""
        self._settle()
        other = GrammarState(self.grammar, self.grammar.next_key(), self.mask, self._done, self._accepts)
        other._error = self._error
        self.grammar.post(["c", self.key, other.key], None)
        return other

    def follow(self, tokens: Sequence[int], parents: Sequence[int] = ()) -> list[GrammarState]:
        """Return the state after each prefix of `tokens`: after one token, after two tokens, and so on. If `tokens` are
        a draft tree, `parents` has the index of each token's parent (-1: the token before the tree), and the result
        has the state after each node. This state does not change.

        The masks of the new states are pending. If a token is not allowed, the states after it fail when their masks
        arrive. Return [] if this state has failed, or if the first token of a chain (without `parents`) is not
        allowed.
        """
        self._settle()
        states: list[GrammarState] = []
        if self.error or not tokens or (not parents and not self._allows(tokens[0])):
            return states
        for i, token in enumerate(tokens):
            parent = parents[i] if parents else i - 1
            before = self if parent < 0 else states[parent]
            state = GrammarState(self.grammar, self.grammar.next_key(), self.mask, False, False)
            self.grammar.post(["c", before.key, state.key], None)
            state.pending = True
            self.grammar.post(["a", state.key, token], state)
            states.append(state)
        return states

    def answer(self, error: str, done: bool, accepts: bool, mask: npt.NDArray[np.int32]) -> None:
        """Store the answer of the grammar process.

        - `mask` has the allowed next tokens.
        - `accepts` means that the output may end here, and `done` that it must end.
        - `error` is the reason if no token is allowed.
        """
        self.pending = False
        self.mask, self._error, self._done, self._accepts = mask, error, done, accepts

    def _settle(self) -> None:
        while self.pending:
            self.grammar.grammars.poll(None)

    def _allows(self, token: int) -> bool:
        word = token >> 5
        return 0 <= word < len(self.mask) and bool(int(self.mask[word]) >> (token & 31) & 1)


class Grammar:
    """A compiled grammar and its process. `ready` means that the grammar is compiled, or failed with an `error`.
    `start` takes little time.
    """

    def __init__(
        self, grammars: Grammars, kind: StructureKind, text: str, digest: bytes, tenant: str
    ) -> None:
        self.grammars, self.kind, self.digest, self.tenant = grammars, kind, digest, tenant
        self.text: str | None = text
        """The source text, until a process has received it."""
        self.ready = False
        self.error = ""
        self.busy = False
        """Whether the grammar failed because other grammars used the memory or the processes. The grammar may succeed
        later."""
        self.users = 0
        self.bytes = PROCESS_BYTES
        self.link: socket.socket | None = None
        self.buffer, self.unsent = bytearray(), bytearray()
        self.sent: deque[tuple[float, list[GrammarState]]] = deque()
        """Frames without an answer: the time of sending, and the states whose masks the frame requests."""
        self.late = False
        self.key = -1
        self.queued = self.wanted = time.monotonic()
        """Two times of the monotonic clock. `queued` is the time when the grammar was first requested. `wanted` is the
        time of the latest request, or the time when the grammar became ready, if that is later.
        """
        self._operations: list[list[Any]] = []
        self._asking: list[GrammarState] = []
        self._dropped: list[int] = []
        self._first: tuple[npt.NDArray[np.int32], bool, bool] | None = None
        self._count = 0

    def start(self) -> GrammarState:
        """Return the state before the first token. Raises ValueError if the grammar failed."""
        self.check()
        assert self._first is not None
        return GrammarState(self, self.next_key(), *self._first)

    def check(self) -> None:
        """Raise an error if the grammar failed: GrammarBusyError if it may succeed later, else ValueError."""
        if self.error:
            raise (GrammarBusyError if self.busy else ValueError)(self.error)

    def next_key(self) -> int:
        """Return a new number that identifies one state of the grammar."""
        self._count += 1
        return self._count

    def post(self, operation: list[Any], asking: GrammarState | None) -> None:
        """Queue an operation for the process. `flush` sends all queued operations in one frame. `asking` is the state
        that gets the answer, or None.
        """
        self._operations.append(operation)
        if asking is not None:
            self._asking.append(asking)

    def forget(self, key: int) -> None:
        """Queue the removal of a state. Does not send it, because the garbage collector may call this method at any
        time.
        """
        self.users -= 1
        self._dropped.append(key)

    def flush(self) -> None:
        """Send the queued operations. Does not block."""
        if not self._operations and (self.sent or not self._dropped or not self.ready):
            return
        operations = [*self._operations, *(["d", key] for key in self._dropped)]
        asking, self._operations, self._asking, self._dropped = self._asking, [], [], []
        if self.link is not None and not self.error:
            self.send({"do": operations}, asking)

    def send(self, asked: dict[str, Any], asking: list[GrammarState]) -> None:
        """Send a frame. `asking` are the states that get the answers. If the socket does not accept all bytes now,
        `write` sends the rest later."""
        body = json.dumps(asked).encode()
        self.sent.append((time.monotonic(), asking))
        self.unsent += FRAME.pack(len(body), 0) + body
        self.write()

    def write(self) -> None:
        """Send queued bytes until the socket is full. Does not block."""
        assert self.link is not None
        try:
            while self.unsent:
                del self.unsent[: self.link.send(self.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.unsent.clear()  # the process has ended; the parent process reports why

    def receive(self) -> bool:
        """Read and apply the answers that have arrived. Return False if the process closed the socket."""
        assert self.link is not None
        open_ = False
        try:
            while part := self.link.recv(1 << 20):
                self.buffer += part
        except BlockingIOError:
            open_ = True
        except OSError:
            pass
        while len(self.buffer) >= FRAME.size:
            length, masks = FRAME.unpack_from(self.buffer)
            end = FRAME.size + length + masks
            if len(self.buffer) < end:
                break
            reply = json.loads(self.buffer[FRAME.size : FRAME.size + length])
            data = np.frombuffer(bytes(self.buffer[FRAME.size + length : end]), np.int32)
            del self.buffer[:end]
            self._take(reply, data)
        return open_

    def fail(self, why: str, busy: bool = False) -> None:
        """Fail the grammar with the reason `why`. Its states stop waiting."""
        self.ready, self.text = True, None
        self.error, self.busy = self.error or why, busy
        waiting = [*self._asking, *(state for _, asking in self.sent for state in asking)]
        self.sent.clear()
        self.unsent.clear()
        self._operations, self._asking, self._dropped = [], [], []
        for state in waiting:
            state.pending = False
        self.hang_up()

    def hang_up(self) -> None:
        """Close the connection between the engine and the process of the grammar, if there is one."""
        if self.link is not None:
            self.link.close()
            self.link = None

    def _take(self, reply: dict[str, Any], data: npt.NDArray[np.int32]) -> None:
        _, asking = self.sent.popleft()
        self.bytes = PROCESS_BYTES + reply["bytes"]
        masks = data.reshape(len(reply["about"]), -1) if reply["about"] else data
        if not self.ready:
            if reply["error"]:
                self.fail(f"{self.kind}: {reply['error']}")
                return
            _, done, accepts = reply["about"][0]
            self._first, self.ready = (masks[0], done, accepts), True
            self.wanted = time.monotonic()
            return
        for state, about, mask in zip(asking, reply["about"], masks, strict=True):
            error, done, accepts = about
            state.answer(error, done, accepts, mask)


class Grammars:
    """The grammars of one tokenizer, which must be a fast Hugging Face tokenizer. Not thread-safe.

    `eos` are the end-of-sequence tokens. The parent process starts with the first grammar.
    """

    def __init__(self, tokenizer: Any, eos: Iterable[int] = (), limits: GrammarLimits | None = None) -> None:
        try:
            import llguidance  # noqa: F401
        except ImportError:
            raise ValueError(
                "structured output needs the package llguidance: pip install 'kvloom[grammar]'"
            ) from None
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ValueError(
                f"structured output needs a fast tokenizer (tokenizer.json), not a {type(tokenizer).__name__}"
            )
        self._tokenizer, self._eos = tokenizer, tuple(eos)
        self.limits = limits or GrammarLimits()
        self._parent: _Parent | None = None
        self._known: OrderedDict[bytes, Grammar] = OrderedDict()
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        self._queues: OrderedDict[str, deque[Grammar]] = OrderedDict()
        self._fast: list[Grammar] = []
        self._slow: list[Grammar] = []
        self._live: dict[int, Grammar] = {}
        self._count = 0

    def compile(self, kind: StructureKind, text: str) -> Grammar:
        """Return the compiled grammar of `text`, cached for later requests. Waits until it is compiled. `kind` is the
        language of `text`, such as a regular expression or a JSON schema.

        Raises ValueError if the text is invalid, uses a feature that the library cannot enforce, or exceeds a limit."""
        grammar = self.begin(kind, text)
        while not grammar.ready:
            self.poll(None)
        grammar.check()
        return grammar

    def begin(self, kind: StructureKind, text: str, tenant: str = "") -> Grammar:
        """Start to compile the grammar of `text` and return it. The arguments are those of `compile`. Does not wait.
        Call `poll` until the grammar is ready. Raises GrammarBusyError if too many grammars wait.
        """
        # Tenants do not share grammars. Otherwise the time of a request would reveal that another tenant uses one.
        digest = hashlib.sha256(f"{kind}:{tenant}\0{text}".encode("utf-8", "surrogatepass")).digest()
        found = self._known.get(digest)
        if found is not None and not found.busy:
            self._known.move_to_end(digest)
            found.check()
            found.wanted = time.monotonic()
            return found
        if (why := self._refused.get(digest)) is not None:
            self._refused.move_to_end(digest)
            raise ValueError(why)
        waiting, mine = sum(map(len, self._queues.values())), len(self._queues.get(tenant, ()))
        most = max(1, self.limits.waiting // 4)
        if waiting >= self.limits.waiting or mine >= most:
            raise GrammarBusyError(
                f"{kind}: {waiting} grammars wait to be compiled, {mine} of them of this tenant; the limits are "
                f"{self.limits.waiting} and {most}: send it again later"
            )
        used = [one for one in self._live.values() if one.users or not one.ready]
        held = sum(one.tenant == tenant for one in used)
        if held and held >= TENANT_PRESSURE * (MOST_GRAMMARS - len(used)):
            raise GrammarBusyError(
                f"{kind}: {len(used)} of {MOST_GRAMMARS} grammars are in use, {held} of them by this tenant: send it again later"
            )
        grammar = self._known[digest] = Grammar(self, kind, text, digest, tenant)
        self._queues.setdefault(tenant, deque()).append(grammar)
        self._begin_next()
        return grammar

    def poll(self, seconds: float | None = 0.0) -> None:
        """Send queued operations, read answers, and fail grammars that exceed a limit.

        Waits up to `seconds` for an answer, or up to 0.05 seconds if `seconds` is None.
        """
        for grammar in list(self._live.values()):
            grammar.flush()
        if self._parent is not None:
            pause = 0.05 if seconds is None else seconds
            asked = select.poll()
            by_fd: dict[int, Grammar | None] = {
                grammar.link.fileno(): grammar for grammar in self._live.values() if grammar.link is not None
            }
            by_fd[self._parent.control.fileno()] = None
            for fd, one in by_fd.items():
                more = one is not None and one.unsent
                asked.register(fd, select.POLLIN | select.POLLOUT if more else select.POLLIN)
            for fd, _ in asked.poll(1000 * pause):
                sender = by_fd[fd]
                if sender is None:
                    self._read_parent()
                    continue
                if sender.link is not None:
                    sender.write()
                if sender.link is not None and not sender.receive():
                    sender.hang_up()  # the parent process reports the reason
        self._watch()
        self._begin_next()

    def close(self) -> None:
        """Kill all processes. Remaining states fail."""
        self._lose_parent("the engine closed")

    def _lose_parent(self, why: str, busy: bool = True) -> None:
        """Kill all processes and fail all grammars. The next grammar starts new processes.

        `busy` means that the grammars may succeed later."""
        parent, self._parent = self._parent, None
        for grammar in self._all():
            grammar.fail(f"{grammar.kind}: {why}", busy)
        self._known.clear()
        self._queues.clear()
        self._live.clear()
        self._fast, self._slow = [], []
        if parent is not None:
            parent.close()

    def _all(self) -> list[Grammar]:
        queued = [grammar for queue in self._queues.values() for grammar in queue]
        return [*queued, *self._live.values()]

    def _begin_next(self) -> None:
        """Start processes for queued grammars within the limits, one tenant after another."""
        self._fast = [grammar for grammar in self._fast if not grammar.ready]
        self._slow = [grammar for grammar in self._slow if not grammar.ready]
        while self._queues and len(self._fast) < FAST_COMPILES and self._make_place():
            if self._parent is None:
                self._parent = _Parent(self._tokenizer, self._eos, self.limits)
            tenant, queue = self._queues.popitem(last=False)
            grammar = queue.popleft()
            if queue:
                self._queues[tenant] = queue
            self._count += 1
            grammar.key = self._count
            self._live[grammar.key] = grammar
            self._fast.append(grammar)
            grammar.link = self._parent.fork(grammar.key)
            grammar.send({"kind": grammar.kind, "text": grammar.text}, [])
            grammar.text = None

    def _make_place(self) -> bool:
        """End unused grammars while there are too many processes, or while too much memory is used. Return whether
        one more grammar may start.
        """
        now = time.monotonic()
        used = sum(grammar.bytes for grammar in self._live.values())
        most = TOTAL_MEMORY * self.limits.memory
        for digest, grammar in list(self._known.items()):
            if len(self._live) < MOST_GRAMMARS and used <= most:
                return True
            unused = grammar.ready and not grammar.users and now - grammar.wanted > UNUSED_SECONDS
            if unused and grammar.key in self._live:
                used -= grammar.bytes
                del self._known[digest]
                self._end(grammar, "ended: no request used it", busy=True)
        return len(self._live) < MOST_GRAMMARS and used <= most

    def _watch(self) -> None:
        """Fail grammars that exceed a limit on time or total memory. The operating system enforces the other limits."""
        now = time.monotonic()
        if self._parent is None:
            return
        for queue in self._queues.values():
            if now - queue[0].queued > QUEUE_SECONDS:
                grammar = queue.popleft()
                self._known.pop(grammar.digest, None)
                grammar.fail(
                    f"{grammar.kind}: it waited {QUEUE_SECONDS:g} s behind {len(self._live)} other grammars: send it again later",
                    busy=True,
                )
        self._queues = OrderedDict((tenant, queue) for tenant, queue in self._queues.items() if queue)
        if self._parent.words is None:  # the tokenizer is still loading, so this time does not count
            if now > self._parent.ready_at + START_SECONDS:
                self._lose_parent(f"the tokenizer for grammars has not loaded within {START_SECONDS:g} s")
            return
        for grammar in list(self._live.values()):
            waited = now - max(grammar.sent[0][0], self._parent.ready_at) if grammar.sent else 0.0
            if waited > self.limits.wall:
                # The process has used less CPU time than allowed, because other work used the CPU.
                self._end(grammar, f"it has no answer after {waited:.0f} s; {self._limits_text()}", busy=True)
            elif not grammar.ready and waited > FAST_SECONDS and grammar in self._fast:
                self._fast.remove(grammar)
                self._slow.append(grammar)
                self._lower_priority(grammar)
                if len(self._slow) > SLOW_COMPILES:
                    last = self._last_of_largest(self._slow)
                    self._slow.remove(last)
                    self._end(
                        last, f"{SLOW_COMPILES} slow grammars compile already: send it again later", busy=True
                    )
            elif grammar.ready and waited > LATE_SECONDS:
                self._lower_priority(grammar)
        if sum(grammar.bytes for grammar in self._live.values()) > TOTAL_MEMORY * self.limits.memory:
            if not self._make_place() and self._live:
                largest = max(self._live.values(), key=lambda grammar: (not grammar.users, grammar.bytes))
                self._end(
                    largest, f"it uses {largest.bytes:,} bytes, and all grammars together exceed their memory limit: send it again later", busy=True
                )  # fmt: skip

    @staticmethod
    def _last_of_largest(grammars: list[Grammar]) -> Grammar:
        """Return the last grammar of the tenant with the most grammars in the list. If several tenants have equally
        many, return the last grammar of all these tenants.
        """
        counts = Counter(grammar.tenant for grammar in grammars)
        most = max(counts.values())
        return next(grammar for grammar in reversed(grammars) if counts[grammar.tenant] == most)

    def _lower_priority(self, grammar: Grammar) -> None:
        if not grammar.late and self._parent is not None:
            grammar.late = True
            self._parent.command(b"N", grammar.key)

    def _end(self, grammar: Grammar, why: str, busy: bool = False) -> None:
        """Kill a grammar's process and fail the grammar."""
        if self._parent is not None:
            self._parent.command(b"K", grammar.key)
        self._lose(grammar, why, busy)

    def _lose(self, grammar: Grammar, why: str, busy: bool = False) -> None:
        self._live.pop(grammar.key, None)
        if self._known.get(grammar.digest) is grammar:
            del self._known[grammar.digest]
        grammar.fail(f"{grammar.kind}: {why}", busy)
        if not busy:
            self._refused[grammar.digest] = grammar.error
            while len(self._refused) > MOST_REFUSED:
                self._refused.popitem(last=False)

    def _limits_text(self) -> str:
        memory = f"{self.limits.memory / (1 << 20):,.0f} MiB"
        return (
            f"the limits are {self.limits.seconds:g} s of CPU time (--grammar-seconds) and {memory} (--grammar-memory): "
            "give a simpler one"
        )

    def _read_parent(self) -> None:
        assert self._parent is not None
        try:
            news = self._parent.read_exits()
        except GrammarBusyError as error:
            self._lose_parent(str(error))
            return
        except ValueError as error:
            self._lose_parent(str(error), busy=False)
            return
        for key, status in news:
            grammar = self._live.get(key)
            if grammar is not None:
                if grammar.link is not None:
                    grammar.receive()  # reads the last answer of the ended process
                killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
                self._lose(grammar, self._explained(status), busy=killed and not grammar.error)

    def _explained(self, status: int) -> str:
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            if number == signal.SIGKILL:
                return "the system killed its process, perhaps because memory ran out: send it again"
            if number == signal.SIGPROF:
                return f"it exceeds the time limit; {self._limits_text()}"
            if number in (signal.SIGSEGV, signal.SIGBUS):
                return f"it is nested too deeply, or the compiler crashed (signal {number}); {self._limits_text()}"
        return f"it exceeds the memory limit, or the compiler crashed; {self._limits_text()}"


class _Parent:
    """The parent process. It loads the tokenizer once and forks a child for each grammar."""

    def __init__(self, tokenizer: Any, eos: tuple[int, ...], limits: GrammarLimits) -> None:
        ends = eos or (() if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),))
        self.words: int | None = None
        self.pid = 0
        self.ready_at = time.monotonic()
        """Time at which the tokenizer was loaded. Before that, the time at which loading began."""
        self._buffer = bytearray()
        self.control, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as source:
            given = {
                "tokenizer": tokenizer.backend_tokenizer.to_str(),
                "eos": ends,
                "seconds": limits.seconds,
                "memory": limits.memory,
            }
            source.write(json.dumps(given).encode())
            source.flush()
            fds = (theirs.fileno(), source.fileno())
            process = subprocess.Popen(
                [sys.executable, "-m", "kvloom.engine.sampling.grammar_process", *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **QUIET},
            )
        self.pid = process.pid
        self.close = weakref.finalize(self, _ended, self.control, process)

    def fork(self, key: int) -> socket.socket:
        """Fork a child for the grammar `key`, and return the socket to the child."""
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):  # if the parent has ended, `read_exits` raises
            socket.send_fds(self.control, [COMMAND.pack(b"F", key)], [theirs.fileno()])
        ours.setblocking(False)
        return ours

    def command(self, verb: bytes, key: int) -> None:
        with contextlib.suppress(OSError):
            self.control.sendall(COMMAND.pack(verb, key))

    def read_exits(self) -> list[tuple[int, int]]:
        """Return the children that ended, with their wait status.

        Raises GrammarBusyError if the parent has ended, ValueError if it cannot use the tokenizer."""
        data = self.control.recv(1 << 16)
        self._buffer += data
        ended: list[tuple[int, int]] = []
        while len(self._buffer) >= NEWS.size:
            verb, key, status = NEWS.unpack_from(self._buffer)
            if verb == b"X":
                if len(self._buffer) < NEWS.size + key and data:
                    return ended
                why = bytes(self._buffer[NEWS.size :]).decode(errors="replace")
                raise ValueError(f"structured output cannot use this tokenizer: {why}")
            del self._buffer[: NEWS.size]
            if verb == b"R":
                self.words, self.ready_at = key, time.monotonic()
            else:
                ended.append((key, status))
        if not data:
            raise GrammarBusyError("the process that compiles grammars ended: send the request again")
        return ended


def _ended(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def collect(states: Sequence[GrammarState], seconds: float) -> None:
    """Wait until all masks of `states` have arrived, but at most `seconds`."""
    deadline = time.monotonic() + seconds
    while late := [state for state in states if state.pending]:
        left = deadline - time.monotonic()
        for grammars in {id(state.grammar.grammars): state.grammar.grammars for state in late}.values():
            grammars.poll(max(0.0, left))
        if left <= 0:
            return


def fill(states: Sequence[GrammarState]) -> npt.NDArray[np.int32]:
    """Return the masks of the next tokens: [states, words], bit i of word j for token 32 j + i.

    Waits for pending masks. A failed state has no bit set."""
    for state in states:
        _ = state.failed
    bits = np.zeros((len(states), max(len(state.mask) for state in states)), dtype=np.int32)
    for row, state in zip(bits, states, strict=True):
        if not state.failed:
            row[: len(state.mask)] = state.mask
    return bits
