"""The processes that compile grammars and compute token masks. `python -m kvloom.engine.sampling.grammar_process
CONTROL SOURCE`.

    engine ── fork, kill, nice ──▶ parent: has the tokenizer, runs no grammar ── fork ──▶ one child per grammar
    engine ◀────────────── socket of the grammar: compile once, then tokens in, masks out ──────────▶ child

A child has a memory limit for its whole life, and a limit of CPU seconds for each frame. If a child exceeds a
limit, only this child and its grammar end. The parent reports the exit status of each child. All processes end with
the engine. This file imports neither torch nor numpy, because the parent must have a single thread to fork.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

__all__ = ["COMMAND", "FRAME", "NEWS", "memory_used"]

COMMAND = struct.Struct("<cq")
"""Engine to parent: F (fork, with the child's socket), K (kill) or N (nice 19), and the child's key."""
NEWS = struct.Struct("<cqi")
"""Parent to engine: R (ready, with the number of words in a mask), X (cannot start, with the length of the error text
that follows), or E (key and wait status of an ended child).
"""
FRAME = struct.Struct("<II")
"""Header of each frame on a child's socket: bytes of JSON, bytes of masks."""

NICE = 5
"""Nice value of these processes. The engine has a higher priority, because its steps serve all requests."""
ERROR_CHARACTERS = 2000
PARALLEL_MASKS = 8
"""If a frame has at least this many masks, threads share the work."""
THREADS = 4
SHARED_LIMIT = 32
"""A frame with up to this many operations may take `seconds` of CPU time. Larger frames get proportionally more time.
"""
JSON_SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Whitespace that JSON may contain, unless the schema sets it. If any whitespace were allowed, a small model might
generate only spaces."""


def memory_used() -> int:
    """Return the bytes of private memory of this process, or 0 if the system does not report them."""
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - once a frame: a Path costs more than the read
            return int(file.read().split()[5]) * resource.getpagesize()
    except OSError:
        return 0


def main(control_fd: int, source_fd: int) -> None:
    """Load the tokenizer, then fork a child for each grammar until the engine closes the socket."""
    for number in (signal.SIGINT, signal.SIGTERM):  # ignored: this process ends with the engine
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICE)
    control = socket.socket(fileno=control_fd)
    with os.fdopen(source_fd, "rb") as file:
        file.seek(0)
        given = json.load(file)
    try:
        tokenizer = _tokenizer(given["tokenizer"], given["eos"])
    except Exception as error:  # noqa: BLE001 - whatever the library raises is the answer
        body = str(error).encode()
        control.sendall(NEWS.pack(b"X", len(body), 0) + body)
        return
    words = -(-tokenizer.vocab_size // 32)
    control.sendall(NEWS.pack(b"R", words, 0))
    gc.collect()
    gc.freeze()  # children share this memory, so the garbage collector must not write to it
    seconds, memory = float(given["seconds"]), int(given["memory"])
    _parent(control, lambda link: _Child(link, tokenizer, words, seconds, memory).serve())


def _tokenizer(source: str, eos: list[int]) -> LLTokenizer:
    from llguidance import LLTokenizer

    plain = json.loads(source)
    plain["padding"] = plain["truncation"] = None
    return LLTokenizer(json.dumps(plain), eos_token=eos or None)


def _parent(control: socket.socket, serve: Callable[[socket.socket], None]) -> None:
    """Execute the engine's commands, and report children that ended."""
    wake, woken = socket.socketpair()
    for end in (wake, woken):
        end.setblocking(False)
    signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    pids: dict[int, int] = {}
    try:
        while True:
            ready, _, _ = select.select([control, wake], [], [])
            if wake in ready:
                with suppress(BlockingIOError):
                    wake.recv(4096)
                for key, pid in list(pids.items()):
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        del pids[key]
                        control.sendall(NEWS.pack(b"E", key, status))
            if control in ready:
                data, fds, _, _ = socket.recv_fds(control, COMMAND.size, 1)
                if len(data) < COMMAND.size:
                    return
                verb, key = COMMAND.unpack(data)
                if verb == b"F":
                    try:
                        pid = os.fork()
                    except OSError:  # too many processes: report the child as killed by the system
                        os.close(fds[0])
                        control.sendall(NEWS.pack(b"E", key, signal.SIGKILL))
                        continue
                    if not pid:
                        try:
                            signal.set_wakeup_fd(-1)
                            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                            for end in (control, wake, woken):
                                end.close()
                            serve(socket.socket(fileno=fds[0]))
                        finally:
                            os._exit(3)
                    os.close(fds[0])
                    pids[key] = pid
                elif (pid := pids.get(key, 0)) and verb == b"K":
                    os.kill(pid, signal.SIGKILL)
                elif pid:
                    os.setpriority(os.PRIO_PROCESS, pid, 19)
    except OSError:
        return  # the engine is gone
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)


class _Child:
    """A child process for one grammar. For each output with this grammar it has a matcher: llguidance's object for the
    position of the output in the grammar."""

    def __init__(
        self, link: socket.socket, tokenizer: LLTokenizer, words: int, seconds: float, memory: int
    ) -> None:
        self._link, self._tokenizer, self._seconds = link, tokenizer, seconds
        self._mask_bytes = 4 * words
        self._states: dict[int, LLMatcher] = {}
        self._executor: LLExecutor | None = None
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 2)  # hides the allocator's message when memory runs out; the exit status is enough
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        self._base = memory_used()
        if self._base:
            resource.setrlimit(resource.RLIMIT_DATA, (self._base + memory, self._base + memory))

    def serve(self) -> None:
        """Compile the grammar of the first frame, then answer frames of operations until the socket is closed."""
        frame = self._receive()
        if frame is None:
            return
        self._limit(self._seconds)
        self._first, error = self._compiled(frame["kind"], frame["text"])
        masks = b""
        if not error:
            masks = self._masks([self._first])
            error = self._first.get_error()
        self._limit(0)
        about = [self._about(self._first)] if not error else []
        self._send({"error": error[:ERROR_CHARACTERS], "about": about, "bytes": self._grown()}, masks)
        while not error and (frame := self._receive()) is not None:
            self._limit(self._seconds * max(1.0, len(frame["do"]) / SHARED_LIMIT))
            about, masks = self._operate(frame["do"])
            self._limit(0)
            self._send({"about": about, "bytes": self._grown()}, masks)

    def _operate(self, operations: list[list[Any]]) -> tuple[list[list[Any]], bytes]:
        """Apply operations. Return the results, and the masks of the states that advanced.

        ["a", state, token]: advance the state by a token. ["c", state, new]: copy the state to the new state `new`.
        ["d", state]: drop the state. A state that does not exist yet begins at the start of the grammar.
        """
        moved = []
        for verb, key, *more in operations:
            if verb == "d":
                self._states.pop(key, None)
                continue
            if key not in self._states:
                self._states[key] = self._first.deep_copy()
            if verb == "c":
                self._states[more[0]] = self._states[key].deep_copy()
            else:
                self._states[key].consume_token(more[0])
                moved.append(self._states[key])
        masks = self._masks(moved)
        return [self._about(matcher) for matcher in moved], masks

    @staticmethod
    def _about(matcher: LLMatcher) -> list[Any]:
        error = matcher.get_error() if matcher.is_error() else ""
        return [error[:ERROR_CHARACTERS], matcher.is_stopped(), not error and matcher.is_accepting()]

    def _masks(self, matchers: list[LLMatcher]) -> bytes:
        """Return one mask per matcher, with one bit per token. The mask of a failed matcher has no bit set."""
        size = self._mask_bytes
        masks = (ctypes.c_char * (size * len(matchers)))()
        start = ctypes.addressof(masks)
        alive = [(matcher, i) for i, matcher in enumerate(matchers) if not matcher.is_error()]
        if len(alive) >= PARALLEL_MASKS:
            if self._executor is None:
                from llguidance import LLExecutor

                self._executor = LLExecutor(min(THREADS, os.cpu_count() or 1))
            self._executor.unsafe_compute_mask_ptr(alive, start, size, len(matchers))
        else:
            for matcher, i in alive:
                matcher.unsafe_compute_mask_ptr(start + i * size, size)
        return bytes(masks)

    def _compiled(self, kind: str, text: str) -> tuple[LLMatcher, str]:
        from llguidance import LLMatcher, LLParserLimits

        makers: dict[str, Callable[[str], str]] = {
            "json_schema": lambda text: LLMatcher.grammar_from_json_schema(text, defaults=JSON_SPACING),
            "regex": LLMatcher.grammar_from_regex,
            "grammar": LLMatcher.grammar_from_lark,
        }
        # The CPU limit already bounds the time of a mask. The library's own limits are raised, because objects with
        # several hundred optional properties exceed them.
        limits = LLParserLimits(max_items_in_row=10_000, step_max_items=200_000, verbose_errors=False)
        try:
            matcher = LLMatcher(self._tokenizer, makers[kind](text), log_level=0, limits=limits)
        except (ValueError, RecursionError) as error:
            return None, str(error) or type(error).__name__  # type: ignore[return-value]
        return matcher, matcher.get_error()

    def _limit(self, seconds: float) -> None:
        """Set a timer that ends the process with SIGPROF after `seconds` of CPU time of all its threads. 0 means no
        limit."""
        signal.setitimer(signal.ITIMER_PROF, seconds)

    def _grown(self) -> int:
        return max(0, memory_used() - self._base)

    def _receive(self) -> Any:
        header = self._exactly(FRAME.size)
        return None if header is None else json.loads(self._exactly(FRAME.unpack(header)[0]) or b"null")

    def _exactly(self, count: int) -> bytearray | None:
        data = bytearray()
        while len(data) < count:
            part = self._link.recv(min(count - len(data), 1 << 20))
            if not part:
                return None
            data += part
        return data

    def _send(self, reply: dict[str, Any], masks: bytes) -> None:
        body = json.dumps(reply).encode()
        self._link.sendall(FRAME.pack(len(body), len(masks)) + body + masks)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
