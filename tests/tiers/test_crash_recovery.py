"""kill -9 at any moment: every acknowledged page is served afterwards, byte for byte."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvloom.tiers import DiskConfig, DiskTier
from kvloom.tiers.testing.conformance import get, objects

from .crash_child import SETTINGS

ROOT = Path(__file__).parents[2]
ROUNDS = 5
FITS = 250  # of pages, well within the tier's capacity: none of the latest has been evicted


@pytest.mark.parametrize(
    ("compression", "durable"), [("none", "power"), ("none", "process"), ("lz4", "process")]
)
@pytest.mark.few(1)
def test_after_kill_9_every_acknowledged_page_is_served(
    tmp_path: Path, compression: str, durable: str
) -> None:
    if compression == "lz4":
        pytest.importorskip("lz4", reason="pip install lz4")
    chance = random.Random(f"{compression} {durable}")
    acknowledged: list[int] = []
    written = 0
    for round_ in range(ROUNDS):
        first = 10_000 * round_
        child = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.tiers.crash_child",
                str(tmp_path),
                str(first),
                compression,
                durable,
            ],
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        early = [child.stdout.readline() for _ in range(chance.randrange(150))]
        time.sleep(chance.uniform(0.0, 0.02))
        child.kill()
        told = (b"".join(early) + child.stdout.read()).split(b"\n")
        child.wait()
        acknowledged += [int(line) for line in told[:-1]]  # the last line may be cut
        written += len(told) - 1
        tier = DiskTier(DiskConfig(tmp_path, **SETTINGS))  # type: ignore[arg-type]
        latest = acknowledged[-FITS:]
        assert tier.lookup(objects(latest)).all(), f"round {round_}: acknowledged pages are missing"
        assert get(tier, latest).ok.all(), f"round {round_}"
        others = [n for n in range(first, first + len(told) + 40) if n not in set(latest)]
        get(tier, others)  # other served pages are correct, too
        assert tier.stats().bytes <= tier.capacity
        tier.close()
    assert written > ROUNDS, "the child was killed before its first write"
