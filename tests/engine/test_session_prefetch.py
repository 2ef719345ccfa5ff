"""Prefetch of a session: its pages are in host memory before its next request."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvloom.core import CacheControl
from kvloom.engine.offload import SessionHistory
from tests.engines import make_engine
from tests.models.zoo import expected, tiny

from .test_lossy_tiers import empty
from .test_offload import PATIENT, POOL, QUICK, closed, drawn, faulty, greedy, offload_of, stored


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_expected_session_is_prefetched_into_host_memory(family: str, tmp_path: Path) -> None:
    engine = make_engine(tiny(family), POOL, tiers=["host:8MiB", f"disk:{tmp_path}:64MiB"], offload=PATIENT)
    control = CacheControl(session="talk", tenant="someone")
    prompt = drawn(family, 70)[0]
    first = engine.add(prompt, greedy(8), control)
    engine.run()
    stored(engine)
    assert not engine.expect_session("talk"), "everything is in the pool"
    assert not engine.expect_session("another")
    empty(engine)
    offload = offload_of(engine)
    assert engine.expect_session("talk")
    assert engine.busy
    engine.run()
    assert offload.stats.prefetched_sessions == 1
    assert offload.host.stats().objects
    assert not offload.stats.load_jobs, "the pool is as it was"
    turn = [*first.tokens, 5, 6]
    again = engine.add(turn, greedy(8), control)
    engine.run()
    assert (again.cached_tokens or 0) >= 64
    assert {tier for tier, *_ in again.loads} == {"host"}
    assert again.tokens == expected(tiny(family), [turn], 8)[0]
    engine.end_session("talk")
    empty(engine)
    assert not engine.expect_session("talk")
    closed(engine)


@pytest.mark.parametrize("wrong", ["failing", "hung"])
def test_session_prefetch_from_a_faulty_tier_ends(wrong: str, tmp_path: Path) -> None:
    from kvloom.tiers.testing import Faults

    faults = Faults()
    place, _ = faulty(tmp_path, faults)
    engine = make_engine(tiny("llama"), POOL, tiers=["host:8MiB", place], offload=QUICK)
    prompt = drawn(wrong, 70)[0]
    engine.add(prompt, greedy(8), CacheControl(session="talk"))
    engine.run()
    stored(engine)
    empty(engine)
    setattr(faults, wrong, True)
    engine.expect_session("talk")
    engine.run()
    assert not engine.busy
    request = engine.add(prompt, greedy(8), CacheControl(session="talk"))
    engine.run()
    assert request.tokens == expected(tiny("llama"), [prompt], 8)[0]
    faults.failing = False
    faults.release()
    closed(engine)


def test_session_history_is_bounded() -> None:
    sessions = SessionHistory(max_tokens=100)
    for number in range(5):
        sessions.record(f"s{number}", range(30), CacheControl())
    assert len(sessions) == 3
    assert sessions.of("s1") is None
    sessions.record("s2", range(90), CacheControl(tenant="t"))  # it said more: only the last counts
    known = sessions.of("s2")
    assert known is not None
    assert (len(known[0]), known[1].tenant) == (90, "t")
    assert len(sessions) == 1
    sessions.record("s9", range(101), CacheControl())
    assert len(sessions) == 0
