"""A grammar that takes too much time or memory loses its process; other requests do not wait for it."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import string
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvloom
from kvloom.engine import SamplingParams
from tests.models.zoo import tiny

from . import made_tokenizers as tokenizers

pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")

from kvloom.engine.sampling import grammar as module
from kvloom.engine.sampling.grammar import Grammar, GrammarBusyError, GrammarLimits, Grammars, collect, fill
from kvloom.engine.sampling.grammar_process import NICE

TOKENIZER = tokenizers.byte_level('"name"', '": "', "true", "false")
EOS = 2
MASK_SECONDS = 60.0


def explosive(letter: str = "a", size: int = 18) -> str:
    """Return a grammar of 60 characters whose compilation takes minutes and gigabytes."""
    return f"start: T\nT: ~/.*({letter}|b).{{{size}}}.*/ & /.*c.{{{size + 1}}}/"


def children(grammars: Grammars) -> list[int]:
    """Return the process ids of a tokenizer's grammars."""
    parent = grammars._parent
    if parent is None:
        return []
    return [int(pid) for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()]


def until(true: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def made() -> Iterator[Callable[..., Grammars]]:
    found: list[Grammars] = []

    def make(**limits: Any) -> Grammars:
        found.append(Grammars(TOKENIZER, [EOS], GrammarLimits(**limits)))
        return found[-1]

    yield make
    for grammars in found:
        grammars.close()


def test_too_much_time_is_refused_with_the_limit_and_costs_nothing_again(
    made: Callable[..., Grammars],
) -> None:
    grammars = made(seconds=0.2, memory=1 << 30)
    for _ in range(50):
        with pytest.raises(
            ValueError, match=r"^grammar: .*limits are 0.2 s of CPU time \(--grammar-seconds\)"
        ) as error:
            grammars.compile("grammar", explosive())
        if "no answer" not in str(error.value):  # else the machine is busy, and the grammar may be sent again
            break
    with pytest.raises(ValueError, match="--grammar-seconds"):
        grammars.begin("grammar", explosive())  # at once, without a process
    assert grammars.compile("regex", "[a-c]+").start().advance(TOKENIZER.convert_tokens_to_ids("a"))


def test_too_much_memory_is_refused_with_the_limit(made: Callable[..., Grammars]) -> None:
    grammars = made(seconds=60, memory=16 << 20)
    schema = json.dumps({"type": "integer", "multipleOf": 999983})
    with pytest.raises(ValueError, match=r"^json_schema: .*memory.* 16 MiB \(--grammar-memory\)"):
        grammars.compile("json_schema", schema)
    assert grammars.compile("json_schema", '{"type": "integer", "multipleOf": 7}').ready


def test_a_cheap_grammar_passes_expensive_ones(made: Callable[..., Grammars]) -> None:
    grammars = made(seconds=30, memory=1 << 30)
    slow = [grammars.begin("grammar", explosive(letter), "one") for letter in "defg"]
    cheap = grammars.begin("regex", "x{3}", "two")
    while not cheap.ready:
        grammars.poll(0.01)
    assert not cheap.error
    assert not all(grammar.ready for grammar in slow)
    more = [grammars.begin("grammar", explosive(letter), "three") for letter in "hijk"]
    while not any(grammar.ready for grammar in more):  # more of them than may be slow at once
        grammars.poll(0.01)
    assert all("send it again later" in grammar.error for grammar in more if grammar.ready)


def test_the_queue_is_bounded_for_a_tenant_and_for_all(made: Callable[..., Grammars]) -> None:
    grammars = made(waiting=8)

    def flood() -> None:
        for i in range(9):
            grammars.begin("regex", f"a{{{i + 1}}}", "one")

    with pytest.raises(GrammarBusyError, match="limits are 8 and 2: send it again later"):
        flood()
    fine = grammars.begin("regex", "b", "two")
    while not fine.ready:
        grammars.poll(0.01)
    assert not fine.error


def test_processes_of_unused_grammars_end_first(
    made: Callable[..., Grammars], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_GRAMMARS", 3)
    grammars = made()
    used = grammars.compile("regex", "used").start()
    for i in range(8):
        grammars.compile("regex", f"a{{{i + 1}}}")
    until(lambda: len(children(grammars)) <= 3)
    assert used.advance(TOKENIZER.convert_tokens_to_ids("u"))
    assert not used.failed
    assert grammars.compile("regex", "a{1}").ready  # again, in a new process


def test_memory_of_all_grammars_is_bounded(
    made: Callable[..., Grammars], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TOTAL_MEMORY", 1)
    grammars = made(memory=17 << 20)  # three processes without any grammar to speak of
    states = [grammars.compile("regex", f"a{{{i + 1}}}").start() for i in range(3)]
    coming = [grammars.begin("regex", f"b{{{i + 1}}}") for i in range(3)]
    while not all(grammar.ready for grammar in coming):
        grammars.poll(0.01)
    lost = [one.error for one in [*states, *coming] if one.error]
    assert 1 <= len(lost) < 6
    assert all("all grammars" in error or "no request used it" in error for error in lost)
    assert not any(state.failed for state in states)  # those without a request end first
    assert sum(grammar.bytes for grammar in grammars._live.values()) <= 17 << 20


def test_one_tenant_leaves_places_for_grammars_of_others(
    made: Callable[..., Grammars], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_GRAMMARS", 5)
    grammars = made()
    used = []
    for i in range(4):
        grammar = grammars.begin("regex", f"a{{{i + 1}}}", "red")
        until(lambda grammar=grammar: grammars.poll() or grammar.ready)  # type: ignore[misc]
        used.append(grammar.start())
    with pytest.raises(GrammarBusyError, match="4 of 5 grammars are in use, 4 of them by this tenant"):
        grammars.begin("regex", "a{9}", "red")
    other = grammars.begin("regex", "b", "blue")
    until(lambda: grammars.poll() or other.ready)
    used.append(other.start())
    grammars.begin("regex", "c", "grey")  # waits for a place


def test_the_tenant_with_most_slow_grammars_loses_one() -> None:
    grammars = Grammars(TOKENIZER, [EOS])
    slow = [
        Grammar(grammars, "regex", str(i), bytes([i]), tenant)
        for i, tenant in enumerate(("red", "blue", "red", "red", "blue"))
    ]
    assert grammars._last_of_largest(slow) is slow[3]
    assert grammars._last_of_largest(slow[:2]) is slow[1]


def test_a_process_without_cpu_time_is_not_held_against_its_grammar(
    made: Callable[..., Grammars], monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = made()
    state = grammars.compile("regex", "[ab]*").start()
    assert grammars._parent is not None
    assert os.getpriority(os.PRIO_PROCESS, grammars._parent.pid) == min(
        19, os.getpriority(os.PRIO_PROCESS, 0) + NICE
    )
    (child,) = children(grammars)
    os.kill(child, signal.SIGSTOP)
    with monkeypatch.context() as patched:
        patched.setattr(GrammarLimits, "wall", 0.1)
        state.advance(TOKENIZER("a", add_special_tokens=False)["input_ids"][0])
        assert "no answer after" in state.error
    assert grammars.compile("regex", "[ab]*").start().accepts


def test_a_lost_process_takes_its_own_grammar_alone(made: Callable[..., Grammars]) -> None:
    grammars = made()
    a = TOKENIZER.convert_tokens_to_ids("a")
    first = grammars.compile("regex", "a{9}").start()
    (lost,) = children(grammars)
    other = grammars.compile("regex", "a{8}").start()
    os.kill(lost, signal.SIGKILL)
    assert first.advance(a)  # not yet known
    assert "killed its process" in first.error
    assert not first.advance(a)
    assert not fill([first, other])[0].any()
    assert other.advance(a)
    assert not other.failed
    assert grammars.compile("regex", "a{9}").start().advance(a)  # anew


def test_a_lost_parent_fails_every_grammar_and_is_replaced(made: Callable[..., Grammars]) -> None:
    grammars = made()
    state = grammars.compile("regex", "a{9}").start()
    assert grammars._parent is not None
    before = grammars._parent.pid
    os.kill(before, signal.SIGKILL)
    state.advance(TOKENIZER.convert_tokens_to_ids("a"))

    def noticed() -> bool:
        grammars.poll()
        return bool(state.error)

    until(noticed)
    assert "ended: send the request again" in state.error
    assert not grammars.compile("regex", "a{9}").start().failed
    assert grammars._parent is not None
    assert grammars._parent.pid != before


def test_close_ends_every_process(made: Callable[..., Grammars]) -> None:
    grammars = made()
    state = grammars.compile("regex", "a+").start()
    assert grammars._parent is not None
    pids = [grammars._parent.pid, *children(grammars)]
    grammars.close()
    assert state.failed
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def large_schemas() -> Iterator[tuple[str, dict[str, Any]]]:
    rng = random.Random(1)

    def word(size: int) -> str:
        return "".join(rng.choices(string.ascii_lowercase, k=size))

    kinds = ("string", "integer", "boolean", "number")
    properties = {f"{word(8)}_{i}": {"type": rng.choice(kinds)} for i in range(700)}
    yield "properties", {"type": "object", "properties": properties, "additionalProperties": False}
    yield "required", {"type": "object", "properties": properties, "required": list(properties)}
    yield (
        "enum",
        {"type": "object", "properties": {"x": {"enum": [word(12) for _ in range(4000)]}}, "required": ["x"]},
    )
    every = [
        {
            "type": "object",
            "properties": {"kind": {"const": word(6)}, **{word(5): {"type": "string"} for _ in range(6)}},
            "required": ["kind"],
        }
        for _ in range(150)
    ]
    yield "anyOf", {"anyOf": every}


LARGE = dict(large_schemas())


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.few(2)
def test_large_honest_schemas_are_within_the_limits(made: Callable[..., Grammars], name: str) -> None:
    state = made().compile("json_schema", json.dumps(LARGE[name])).start()
    rng = random.Random(0)
    for _ in range(40):
        if state.done:
            break
        allowed = [i for i in range(len(TOKENIZER)) if state._allows(i) and i != EOS]
        assert state.advance(rng.choice(allowed) if allowed else EOS)
    assert not state.failed, state.error


def test_limits_that_make_no_sense_are_refused() -> None:
    for wrong, said in (
        ({"seconds": 0}, "grammar_seconds 0"),
        ({"memory": 5}, "16 MiB"),
        ({"waiting": 0}, "waiting"),
    ):
        with pytest.raises(ValueError, match=said):
            GrammarLimits(**wrong)  # type: ignore[arg-type]


@pytest.fixture
def llm() -> Iterator[kvloom.LLM]:
    found = kvloom.LLM(
        tiny("llama", vocab_size=len(TOKENIZER)), pool_bytes=1 << 22, tokenizer=TOKENIZER, grammar_seconds=0.5
    )
    yield found
    found.close()


def test_an_offline_request_is_refused_and_the_engine_goes_on(llm: kvloom.LLM) -> None:
    with pytest.raises(ValueError, match=r"limits are 0.5 s of CPU time"):
        llm.generate("a", SamplingParams(grammar=explosive()))
    assert not llm.engine.busy
    (result,) = llm.generate("a", SamplingParams(max_tokens=90, seed=1, regex="[a-z]{4}!"))
    assert re.fullmatch("[a-z]{4}!", result.outputs[0].text)


def test_a_request_whose_mask_is_late_is_left_out_of_steps(llm: kvloom.LLM) -> None:
    """While the grammar's process is stopped, all other requests finish. When it continues, so does the request."""
    engine = llm.engine
    held = engine.add([5, 6], SamplingParams(max_tokens=60, seed=1, regex="[a-z]{20}"))
    engine.step()
    assert engine._grammars is not None
    (pid,) = children(engine._grammars)
    os.kill(pid, signal.SIGSTOP)
    try:
        other = engine.add([7, 8], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
        until(lambda: bool(engine.step()) and other.finish_reason is not None)
        assert (other.finish_reason, held.finish_reason) == ("length", None)
        assert held.output_count < 5
    finally:
        os.kill(pid, signal.SIGCONT)
    engine.run()
    assert held.finish_reason == "stop"
    assert re.fullmatch("[a-z]{20}", TOKENIZER.decode(held.output))


def test_a_late_request_whose_process_dies_ends_with_the_reason(llm: kvloom.LLM) -> None:
    engine = llm.engine
    held = engine.add([5, 6], SamplingParams(max_tokens=60, seed=1, regex="[a-z]{20}"))
    engine.step()
    assert engine._grammars is not None
    (pid,) = children(engine._grammars)
    os.kill(pid, signal.SIGSTOP)
    engine.step()
    os.kill(pid, signal.SIGKILL)
    engine.run()
    assert held.finish_reason == "grammar"
    assert "killed its process" in str(held.stop_reason)


def test_masks_of_several_grammars_come_together(made: Callable[..., Grammars]) -> None:
    grammars = made()
    a = TOKENIZER.convert_tokens_to_ids("a")
    forms: list[Grammar] = [grammars.compile("regex", f"a{{{n}}}") for n in (3, 4)]
    states = [form.start() for form in forms for _ in range(20)]
    for _ in range(3):
        assert all(state.advance(a) for state in states)
        collect(states, MASK_SECONDS)
    assert [state.done for state in states] == [True] * 20 + [False] * 20
