"""Runs a command as a child: `python -m kvloom.cluster.deploy.supervised SECONDS COMMAND…`.

The parent of this process, a Ray actor, holds the other end of stdin. When the parent ends for any reason, stdin ends.
The child then gets SIGTERM and, after SECONDS, SIGKILL. No server therefore outlives the Ray actor that started it.
SIGTERM to this process is passed to the child.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

__all__ = ["main"]

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    """Run the command to its end and return its status."""
    seconds = float(argv[0])
    # There are no threads yet, so running code between fork and exec is safe.
    child = subprocess.Popen(argv[1:], stdin=subprocess.DEVNULL, preexec_fn=_end_with_parent)  # noqa: PLW1509
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())

    def watch() -> None:
        while os.read(0, 4096):
            pass
        child.terminate()
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.kill()

    threading.Thread(target=watch, daemon=True).start()
    while True:
        try:
            return child.wait(1.0)
        except subprocess.TimeoutExpired:
            continue


def _end_with_parent() -> None:
    """Make the kernel send SIGTERM to the command when its parent, the supervising process, dies. Ray kills the
    children of a lost actor with SIGKILL, so the supervising process may have no time to end the command.
    """
    with suppress(OSError, AttributeError):  # Linux only
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
