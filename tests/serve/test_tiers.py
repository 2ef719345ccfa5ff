"""A server with tiers: after a restart it hits pages on disk."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from kvloom.serve.worker import Start
from kvloom.serve.worker.engine_client import _restart

from .running import Running, running

PROMPT = "The quick brown fox jumps over the lazy dog, and then it sleeps; " * 3
ASKED = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}


def test_a_restarted_server_hits_pages_on_disk(folder: Path, tmp_path: Path) -> None:
    tiers = ("--pool", "16MiB", "--tier", "host:8MiB", "--tier", f"disk:{tmp_path}:256MiB")
    with running(folder, *tiers) as server:
        first = server.complete(**ASKED)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    with running(folder, *tiers, "--tier", "peer://me:secret@127.0.0.1:1?optional=1") as server:
        assert "tier host: 8 MiB" in server.said
        told = next(line for line in server.said if line.startswith(f"tier disk:{tmp_path}: 256 MiB, "))
        assert told.endswith("pages stored")
        left = [line for line in server.said if line.startswith("unavailable tier peer://…@127.0.0.1:1: ")]
        assert "Connection refused" in left[0]
        assert not any("secret" in line for line in server.said)
        again = server.complete(**ASKED)
        assert again["choices"] == first["choices"]
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= len(PROMPT) // 16 * 16 - 16


def test_an_unusable_tier_ends_the_start_before_loading(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for tier in ("peer://me:secret@127.0.0.1:1", f"disk:{tmp_path}/file:256MiB"):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "kvloom.cli",
                "serve",
                str(folder),
                "--port",
                "0",
                "--device",
                "cpu",
                "--tier",
                tier,
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 2
        assert "cannot be used" in done.stderr
        assert "add optional=1 to its options" in done.stderr
        assert "secret" not in done.stderr
        assert done.stdout == ""


def test_a_restarted_engine_does_not_require_its_tiers() -> None:
    start = Start(
        "model", tiers=("host:1GiB", "redis://host?capacity=1GiB", "disk:/kv:1GiB?optional=1&write=back")
    )
    assert _restart(start).tiers == (
        "host:1GiB?optional=1",
        "redis://host?capacity=1GiB&optional=1",
        "disk:/kv:1GiB?write=back&optional=1",
    )


def test_stores_after_the_last_token_are_reported_while_idle(folder: Path, tmp_path: Path) -> None:
    with running(folder, "--pool", "16MiB", "--tier", f"disk:{tmp_path}:256MiB") as server:
        server.complete(**ASKED)
        until = time.monotonic() + 20
        while objects(server) == 0:
            assert time.monotonic() < until
            time.sleep(0.1)


def objects(server: Running) -> float:
    families = text_string_to_metric_families(server.send("GET", "/metrics")[2])
    found = {
        sample.name: sample
        for family in families
        for sample in family.samples
        if sample.labels.get("tier") == "disk"
    }
    return found["kvloom_tier_objects"].value
