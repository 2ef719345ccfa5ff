"""Grammars over the limits: their requests are refused, and other requests do not wait for them."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serve.running import MODEL, Running

pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")

COMPLETIONS = "/v1/completions"
GOOD: dict[str, Any] = {"model": MODEL, "prompt": "hi", "max_tokens": 2, "ignore_eos": True}


def explosive(letter: str) -> str:
    """A grammar of 60 characters whose compilation takes minutes and gigabytes."""
    return f"start: T\nT: ~/.*({letter}|b).{{18}}.*/ & /.*c.{{19}}/"


def test_other_requests_are_served_while_a_grammar_compiles(server: Running) -> None:
    server.send("POST", COMPLETIONS, {**GOOD, "regex": "a"})  # the tokenizer of grammars is loaded
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(server.send, "POST", COMPLETIONS, {**GOOD, "grammar": explosive("a")})
        time.sleep(0.1)
        answered = 0
        while not slow.done() and answered < 5:
            status, _, _ = server.send("POST", COMPLETIONS, GOOD)
            assert status == 200
            answered += 1
        status, _, told = slow.result()
    assert answered > 1  # one may have been on its way when the slow one ended
    assert told["error"]["param"] == "grammar"
    assert status == 400 or "no answer after" in told["error"]["message"], "429: other work took the CPU"
    assert "0.5 s of CPU time (--grammar-seconds)" in told["error"]["message"]


def test_a_flood_of_slow_grammars_is_refused_and_cheap_ones_pass(server: Running) -> None:
    def slow(letter: str) -> tuple[int, dict[str, str], Any]:
        return server.send("POST", COMPLETIONS, {**GOOD, "grammar": explosive(letter)})

    with ThreadPoolExecutor(10) as pool:
        flood = pool.map(slow, "defghijklm")
        status, _, told = server.send("POST", COMPLETIONS, {**GOOD, "max_tokens": 9, "regex": "[xyz]{3}"})
        assert status == 200, told
        assert set(told["choices"][0]["text"]) <= set("xyz")
        found = [(status, headers.get("retry-after"), told) for status, headers, told in flood]
    assert {status for status, _, _ in found} <= {400, 429}
    for status, after, told in found:
        assert told["error"]["param"] == "grammar"
        assert (after is not None) == (status == 429)


def test_too_many_waiting_grammars_of_one_tenant_are_429(server: Running) -> None:
    """Sixteen may wait; the rest is told to come later, and nothing is lost."""

    def one(i: int) -> int:
        status, _, _ = server.send("POST", COMPLETIONS, {**GOOD, "regex": f"a{{{i}}}|{'b' * i}|[^a]*x{i}"})
        return status

    with ThreadPoolExecutor(40) as pool:
        statuses = list(pool.map(one, range(1, 41)))
    assert set(statuses) <= {200, 429}
    assert 200 in statuses
