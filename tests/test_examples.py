"""The scripts of examples/ run as a user would start them."""

import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from kvloom.tiers import (
    HostConfig,
    HostTier,
    Objects,
    Outcome,
    Ranges,
    Transfer,
    TransferCounts,
    failed_transfer,
)

EXAMPLES = Path(__file__).parent.parent / "examples"
EXPECTED = {
    "offline.py": "31 of 38 prompt tokens cached",
    "tiers_and_restart.py": "after a restart: 576 of 583 prompt tokens cached",
    "multi_tenant.py": "blue, the same text:  0 of 482 prompt tokens cached",
    "numpy_engine.py": "same tokens as without a cache",
    "toy_engine.py": "72 requests; ",
    "hundred_line_engine.py": "48 requests; 168 pages loaded",
    "custom_policy.py": "deepest first:",
    "adapters.py": "activated: 103 of 106 tokens from the base model",
    "transformers_generate.py": "same tokens",
}


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=300, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.few(2)
def test_an_example_runs(name: str) -> None:
    assert EXPECTED[name] in run(name)


@pytest.mark.slow
def test_the_client_example_asks_a_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "kvloom.cli", "serve", "--port", str(port), "--pool", "64MiB"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        for _ in range(1200):
            with suppress(urllib.error.URLError):
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            assert server.poll() is None, "the server ended before it was ready"
            time.sleep(0.1)
        shown = run("server_client.py", url)
    finally:
        server.terminate()
        server.wait(60)
    assert "[0 of " in shown
    assert shown.count("prompt tokens cached]") == 2


def test_the_toy_engine_computes_what_a_tier_fails_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from toy_engine import Request, ToyEngine

    class Unreadable(HostTier):
        def read(self, objects: Objects, into: Ranges, part: tuple[int, int] | None = None) -> Transfer:
            return failed_transfer(len(objects), TransferCounts(), "read", Outcome.CORRUPT, "damaged")

    engine = ToyEngine(slabs=40, tier=Unreadable(HostConfig(8 << 20)))
    prompts = [list(range(start, start + 120)) for start in range(0, 12_000, 1000)]
    for prompt in [*prompts, *prompts]:
        engine.add(Request(prompt, 20))
    engine.run()
    engine.cache.check()
    assert engine.offloaded > 0
    assert engine.loaded == 0
    for request in engine.done:
        for end in range(len(request.prompt), len(request.tokens)):
            assert request.tokens[end] == request.next_token(request.tokens[:end])
    assert len(engine.done) == 24


def test_the_engine_of_a_hundred_lines_has_no_more() -> None:
    assert len((EXAMPLES / "hundred_line_engine.py").read_text(encoding="utf-8").splitlines()) <= 100


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*EXPECTED, "server_client.py"}
