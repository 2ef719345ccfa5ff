"""Two tenants on one server: each has its own key, quota and cache. A tenant never hits pages of another one.

    python examples/multi_tenant.py

Starts `kvloom serve` on a free port of loopback, asks as both tenants, and stops the server.
"""

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

KEYS = {
    "key-of-red": {"tenant": "red", "quota": "32MiB"},
    "key-of-blue": {"tenant": "blue", "quota": "16MiB"},
}
PROMPT = "".join(f"x{i} = {i} * {i}\n" for i in range(60))


@contextlib.contextmanager
def server(keys: Path) -> Iterator[str]:
    """A server with the given key file; yields its URL when it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "kvloom.cli",
        "serve",
        "--port",
        str(port),
        "--api-keys",
        str(keys),
        "--pool",
        "64MiB",
        "--quiet",
    ]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            with contextlib.suppress(urllib.error.URLError):
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            if process.poll() is not None:
                raise SystemExit(f"the server ended with status {process.returncode}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def cached_tokens(url: str, key: str) -> str:
    """Ask with a tenant's key. Return how many prompt tokens its cache had."""
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        usage = json.load(answer)["usage"]
    return f"{usage['prompt_tokens_details']['cached_tokens']} of {usage['prompt_tokens']}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "keys.json")
        keys.touch(mode=0o600)
        keys.write_text(json.dumps(KEYS))
        with server(keys) as url:
            print("red, first request:  ", cached_tokens(url, "key-of-red"), "prompt tokens cached")
            print("red, the same again: ", cached_tokens(url, "key-of-red"), "prompt tokens cached")
            print("blue, the same text: ", cached_tokens(url, "key-of-blue"), "prompt tokens cached")


if __name__ == "__main__":
    main()
