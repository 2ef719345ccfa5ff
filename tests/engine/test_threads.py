"""How many threads a CPU's work gets: one rule."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvloom.engine import use_threads
from kvloom.engine.execution import cores, threads


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for name in threads.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield
    torch.set_num_threads(before)


def test_default_threads_leave_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    assert use_threads() == 7 == torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    assert use_threads() == 1 == torch.get_num_threads()


def test_argument_precedes_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    assert use_threads() == 3
    monkeypatch.setenv("KVLOOM_THREADS", "2")
    assert use_threads() == 2
    assert use_threads(5) == 5
    monkeypatch.setenv("KVLOOM_THREADS", "")  # as if it were not there
    assert use_threads() == 3


@pytest.mark.parametrize("wrong", ["0", "-1", "two", "1.5", "99999999"])
def test_invalid_variable_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv("KVLOOM_THREADS", wrong)
    with pytest.raises(ValueError, match=f"KVLOOM_THREADS='{wrong}'"):
        use_threads()


@pytest.mark.parametrize(
    ("said", "found"), [("max 100000", 8), ("250000 100000", 3), ("50000 100000", 1), ("what", 8)]
)
def test_container_quota_limits_cores(tmp_path: Path, said: str, found: int) -> None:
    (tmp_path / "cpu.max").write_text(f"{said}\n")
    assert cores() == found
