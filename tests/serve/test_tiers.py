"""A server with tiers: after a restart it hits pages on disk."""

from __future__ import annotations

import time
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from .running import Running, running

PROMPT = "The quick brown fox jumps over the lazy dog, and then it sleeps; " * 3
ASKED = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}


def test_a_restarted_server_hits_pages_on_disk(folder: Path, tmp_path: Path) -> None:
    tiers = ("--pool", "16MiB", "--tier", "host:8MiB", "--tier", f"disk:{tmp_path}:256MiB")
    with running(folder, *tiers) as server:
        first = server.complete(**ASKED)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    with running(folder, *tiers, "--tier", "peer://me:secret@127.0.0.1:1") as server:
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
