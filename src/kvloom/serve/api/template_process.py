"""Renders chat templates of requests in separate processes.

    server ── frames on stdin ──▶ parent: has transformers imported ── fork ──▶ one child per template: renders, exits
    server ◀─ frames on stdout ── parent

The template of a request is code that a client has written. In the server process, an endless loop or a huge constant
in this code would stop the server. A child process therefore has limits on CPU time and memory, and is killed if it
exceeds a limit. The child renders in jinja's sandbox. The parent exits when the server closes the pipe.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
from typing import Any

from kvloom.serve.api.templates import RenderError

__all__ = ["TemplateProcess"]

FRAME = struct.Struct("<I")
MEMORY_BYTES = 256 << 20
ERROR_CHARACTERS = 500
START_SECONDS = 60.0


class TemplateProcess:
    """Renders templates of requests, one at a time, within limits. The process starts with the first template.
    Thread-safe.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def render(self, seconds: float, characters: int, **given: Any) -> str:
        """Return the result of transformers' `render_jinja_template` for the arguments `given`. `seconds` limits the
        CPU time, and `characters` the length of the result. Raises RenderError if a limit is exceeded, and ValueError
        for an error of the template.
        """
        asked = json.dumps({"seconds": seconds, "characters": characters, "given": given}).encode()
        with self._lock:
            process = self._start()
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(FRAME.pack(len(asked)) + asked)
                process.stdin.flush()
                ready, _, _ = select.select([process.stdout], [], [], START_SECONDS + 5 * seconds)
                found = _read(process.stdout) if ready else None
            except OSError:
                found = None
            if found is None:
                self._end(process)
                raise RenderError("the chat template was not rendered: its process ended; send it again")
        if "text" in found:
            return str(found["text"])
        raise (RenderError if found["limit"] else ValueError)(found["error"])

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "OPENBLAS_NUM_THREADS": "1",
                    "TOKENIZERS_PARALLELISM": "false",
                },
            )
        return self._process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        self._process = None


def main() -> None:
    """Render templates from frames on stdin until the server closes the pipe."""
    from transformers.utils.chat_template_utils import render_jinja_template

    for number in (signal.SIGINT, signal.SIGTERM):  # the server may drain
        signal.signal(number, signal.SIG_IGN)
    while (asked := _read(sys.stdin.buffer)) is not None:
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                os.close(reader)
                _limit(asked["seconds"])
                with os.fdopen(writer, "wb") as file:
                    file.write(_rendered(render_jinja_template, asked))
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as file:
            frame = file.read()
        _, status = os.waitpid(pid, 0)
        if not frame or os.WIFSIGNALED(status):
            limits = f"{asked['seconds']:g} seconds of CPU time or {MEMORY_BYTES >> 20} MiB of memory"
            frame = json.dumps(
                {"limit": True, "error": f"the chat template exceeds {limits}: simplify it"}
            ).encode()
        sys.stdout.buffer.write(FRAME.pack(len(frame)) + frame)
        sys.stdout.buffer.flush()


def _limit(seconds: float) -> None:
    """Limit the CPU seconds and the memory of this process."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError), open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - as in other processes
        used = int(file.read().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _rendered(render: Any, asked: dict[str, Any]) -> bytes:
    """Return the frame with the rendered template, or with its error."""
    try:
        rendered = render(**asked["given"])
        text = rendered[0][0] if isinstance(rendered, tuple) else rendered[0]
    except MemoryError:
        return b""
    except Exception as error:  # noqa: BLE001 - a template may raise anything
        reason = (str(error) or type(error).__name__)[:ERROR_CHARACTERS]
        return json.dumps({"limit": False, "error": reason}).encode()
    most = asked["characters"]
    if len(text) > most:
        reason = (
            f"the chat template writes {len(text):,} characters, the limit is {most:,}: shorten the messages"
        )
        return json.dumps({"limit": True, "error": reason}).encode()
    return json.dumps({"text": text}).encode()


def _read(file: Any) -> Any | None:
    """Return the next frame from `file`, or None at the end of the file."""
    head = file.read(FRAME.size)
    body = file.read(FRAME.unpack(head)[0]) if len(head) == FRAME.size else b""
    return json.loads(body) if body else None
