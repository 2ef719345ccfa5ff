"""Runs a command as a child: `python -m kvloom.cluster.deploy.supervised SECONDS COMMAND…`.

The parent holds the other end of stdin. When the parent is gone, however it died, stdin ends and the child is terminated:
SIGTERM first, SIGKILL after SECONDS. So no server outlives the Ray actor that started it. SIGTERM is passed on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

__all__ = ["main"]


def main(argv: list[str]) -> int:
    """Run the command to its end and return its status."""
    seconds = float(argv[0])
    child = subprocess.Popen(argv[1:], stdin=subprocess.DEVNULL)
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
