"""`kvloom bench tiers`: it measures what it says, and bytes that came back wrong end it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvloom import cli
from kvloom.bench.tiers import LMCache, main, measure
from kvloom.bench.tiers_media import Memory, Side
from kvloom.bench.tiers_work import Work


def test_every_tier_that_needs_no_server_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--total", "2MiB", "--pages", "64KiB", "256KiB", "--rounds", "1", "--dir", str(tmp_path)]
    assert main([*arguments, "--only", "host", "disk", "peer", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["missing"] == {}
    rows = told["rows"]
    tiers = {"host", "disk (power)", "disk (process)", "peer, same host", "peer, by TCP"}
    assert {row["tier"] for row in rows} == tiers
    assert len(rows) == len(tiers) * 2 * 2
    for row in rows:
        assert row["share"] == pytest.approx(row["ours"] / row["medium_speed"])
        assert row["lmcache"] is None
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    assert main([*arguments[:2], "--pages", "64KiB", "--rounds", "1", "--only", "host"]) == 0
    assert "memcpy" in capsys.readouterr().out


def test_wrong_bytes_end_the_benchmark() -> None:
    memory = Memory(65536, 1 << 20)
    right = Side(lambda: None, lambda: np.copyto(memory.target, memory.source))
    rows = measure(Work("a", "b", right, right), memory, 2, None)
    assert [row.verb for row in rows] == ["write", "read"]
    wrong = Side(lambda: None, lambda: None)
    with pytest.raises(RuntimeError, match="differ from those written"):
        measure(Work("a", "b", wrong, right), memory, 1, None)


class SomeBackends(LMCache):
    """LMCache of which one backend runs."""

    def __init__(self) -> None:
        self.missing = {}

    def ask(self, what: dict[str, Any]) -> dict[str, Any]:
        if what["backend"] == "absent":
            raise RuntimeError("no such thing")
        return {"write": 1e6, "read": 2e6}


def test_every_lmcache_backend_has_rows_or_a_reason() -> None:
    memory = Memory(65536, 1 << 20)
    side = Side(lambda: None, lambda: np.copyto(memory.target, memory.source))
    lmcache = SomeBackends()
    rows = measure(Work("a", "b", side, side, ("one", "absent")), memory, 2, lmcache)
    assert [(row.backend, row.verb) for row in rows] == [
        ("one", "write"),
        ("one", "read"),
        ("", "write"),
        ("", "read"),
    ]
    assert rows[0].times_lmcache is not None
    assert rows[0].times_lmcache > 1000
    assert rows[2].lmcache is None
    assert lmcache.missing == {"absent": "no such thing"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pages", "1000"], "multiples of 4096"),
        (["--total", "1MiB", "--pages", "2MiB"], "divide --total"),
        (["--rounds", "0"], "--rounds: 0 is out of range"),
        (["--dir", "/nonexistent"], "is not a folder"),
        (["--total", "much"], "'much' is not understood"),
    ],
)
def test_invalid_arguments_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "tiers", *arguments]) == 2
    assert said in capsys.readouterr().err
