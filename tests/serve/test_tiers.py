"""A server with tiers: it hits pages that it, or another process, left on disk."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvloom import LLM, SamplingParams
from kvloom.cli import main
from kvloom.serve.worker import Start
from kvloom.serve.worker.engine_client import _restart

from .running import Running, running, serve_command

PROMPT = "The quick brown fox jumps over the lazy dog, and then it sleeps; " * 3
ASKED = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}


def test_a_server_hits_pages_that_another_process_left_on_disk(folder: Path, tmp_path: Path) -> None:
    disk = f"disk:{tmp_path}:256MiB"
    llm = LLM(str(folder), device="cpu", dtype="float32", pool_bytes=16 << 20, tiers=["host:8MiB", disk])
    (first,) = llm.generate([PROMPT], SamplingParams(max_tokens=8, temperature=0))
    llm.close()
    tiers = ("--pool", "16MiB", "--load", "always", "--tier", "host:8MiB", "--tier", disk)
    with running(folder, *tiers, "--tier", "peer://me:secret@127.0.0.1:1?optional=1") as server:
        assert "tier host: 8 MiB" in server.said
        told = next(line for line in server.said if line.startswith(f"tier disk:{tmp_path}: 256 MiB, "))
        assert told.endswith("pages stored")
        left = [line for line in server.said if line.startswith("unavailable tier peer://…@127.0.0.1:1: ")]
        assert "Connection refused" in left[0]
        assert not any("secret" in line for line in server.said)
        again = server.complete(**ASKED)
        assert again["choices"][0]["text"] == first.outputs[0].text
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert 0 < cached < len(PROMPT)  # on a busy machine it computes the head while the tail loads


@pytest.mark.slow
def test_a_restarted_server_does_not_load_expired_pages(folder: Path, tmp_path: Path) -> None:
    def tiers(ttl: float) -> tuple[str, ...]:
        return (
            "--pool",
            "16MiB",
            "--load",
            "always",
            "--tier",
            f"host:8MiB?ttl={ttl}",
            "--tier",
            f"disk:{tmp_path}:256MiB?ttl={ttl}",
        )

    with running(folder, *tiers(3600)) as server:
        first = server.complete(**ASKED)
    with running(folder, *tiers(3600)) as server:
        again = server.complete(**ASKED)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    time.sleep(1.1)
    with running(folder, *tiers(0.1)) as server:
        late = server.complete(**ASKED)
        assert late["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert first["choices"] == again["choices"] == late["choices"]


@pytest.mark.slow
def test_servers_with_other_kv_dtypes_share_lossy_pages(folder: Path, tmp_path: Path) -> None:
    tiers = ("--pool", "16MiB", "--load", "always", "--tier", f"int8:disk:{tmp_path}:256MiB")
    cached = []
    for kv_dtype in ("int8", "fp32", "fp8"):
        with running(folder, *tiers, "--kv-dtype", kv_dtype) as server:
            near, exact = server.complete(**ASKED, lossy=True), server.complete(**ASKED)
            found = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (near, exact)]
            cached.append(found)
    assert [exact for _, exact in cached] == [0, 0, 0]
    assert [near for near, _ in cached] == [0, len(PROMPT) // 16 * 16, len(PROMPT) // 16 * 16]


@pytest.mark.slow
def test_a_partial_hit_from_a_tier_is_explained_with_one_account(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiers = ("--pool", "16MiB", "--tier", "host:8MiB", "--tier", f"disk:{tmp_path}:256MiB")
    known, other = [5 + i * 7 % 300 for i in range(400)], [5 + i * 11 % 300 for i in range(130)]
    with running(folder, *tiers) as server:
        server.complete(prompt=known, max_tokens=1)
    with running(folder, *tiers) as server:
        # Partly from disk; partly from the pool, and on from disk; from neither. Loads that computing would beat are skipped.
        prompts = ([*known[:200], *other], [*known, *other], other[::-1])
        for prompt in prompts:
            found = server.complete(prompt=prompt, max_tokens=2, ignore_eos=True)
            record = server.send("GET", f"/kvloom/requests/{found['id']}")[2]
            hits = {hit["tier"]: hit["tokens"] for hit in record["hits"]}
            assert record["cached_tokens"] == sum(hits.values())
            assert record["cached_tokens"] == found["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert record["cached_tokens"] + record["computed_tokens"] == len(prompt)
            at = record["stopped"]["at_token"]
            assert record["cached_tokens"] <= at < len(prompt)
            assert main(["explain", found["id"], "--url", server.url]) == 0
            said = capsys.readouterr().out
            for tier, tokens in hits.items():
                assert (
                    f"{tokens} were in the pool" if tier == "device" else f"{tokens} were loaded from {tier}"
                ) in said
            assert f"{record['computed_tokens']} were computed" in said
            assert f"The lookup ended at token {at} of {len(prompt)}: no earlier request" in said
            if prompt is prompts[0]:
                assert set(hits) <= {"disk", "host"}
                assert at == (192 if hits else 0)
            elif prompt is prompts[1]:
                assert hits["device"] >= 192
                assert at == (400 if len(hits) > 1 else 200)
            else:
                assert (hits, at) == ({}, 0)


@pytest.mark.slow
def test_an_unusable_tier_ends_the_start_before_loading(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for tier in ("peer://me:secret@127.0.0.1:1", f"disk:{tmp_path}/file:256MiB"):
        done = subprocess.run(
            serve_command(folder, "--tier", tier),
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
    tiers = ["host:1GiB", "redis://host?capacity=1GiB", "disk:/kv:1GiB?optional=1&write=back"]
    start = Start("model", settings={"tiers": tiers})
    before: Any = SimpleNamespace(adapter_slots=0)  # the rest matters to pools that share memory
    assert _restart(start, before).settings["tiers"] == [
        "host:1GiB?optional=1",
        "redis://host?capacity=1GiB&optional=1",
        "disk:/kv:1GiB?write=back&optional=1",
    ]


@pytest.mark.slow
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
