"""Structured output: every text that a grammar allows has the required structure, whatever the probabilities of tokens."""

from __future__ import annotations

import builtins
import json
import random
import re
from typing import Any

import numpy as np
import pytest
import torch

from kvloom.engine import Request, SamplingParams
from kvloom.engine.sampling import Sampler

from . import made_tokenizers as tokenizers

pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")

from kvloom.engine.sampling import GrammarBusyError, Grammars, GrammarState, fill

TOKENIZER = tokenizers.byte_level('"name"', '": "', "true", "false", " the", "123")
EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "ok": {"type": "boolean"},
        "kind": {"enum": ["a", "bc"]},
    },
    "required": ["name", "age", "ok", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, [EOS])


def allowed(state: GrammarState) -> list[int]:
    bits = np.unpackbits(fill([state])[0].view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def walk(state: GrammarState, rng: random.Random, most: int = 400) -> list[int]:
    tokens: list[int] = []
    while not state.done and len(tokens) < most:
        choices = allowed(state)
        assert choices
        token = EOS if EOS in choices and rng.random() < 0.5 else rng.choice(choices)
        assert state.advance(token)
        if token == EOS:
            break
        tokens.append(token)
    return tokens


def test_every_walk_through_a_json_schema_is_json_of_that_form(grammars: Grammars) -> None:
    grammar = grammars.compile("json_schema", json.dumps(SCHEMA))
    for seed in range(10):
        found = json.loads(TOKENIZER.decode(walk(grammar.start(), random.Random(seed), 4000)))
        assert set(found) == {"name", "age", "ok", "kind"}
        assert len(found["name"]) <= 8
        assert 0 <= found["age"] <= 99
        assert isinstance(found["ok"], bool)
        assert found["kind"] in ("a", "bc")


def test_regular_expressions_and_grammars_hold_too(grammars: Grammars) -> None:
    pattern = r"[a-c]{2,5}(-[0-9]+)?"
    grammar = grammars.compile("regex", pattern)
    for seed in range(20):
        assert re.fullmatch(pattern, TOKENIZER.decode(walk(grammar.start(), random.Random(seed))))
    lark = grammars.compile("grammar", 'start: "(" start ")" | "x"')
    for seed in range(20):
        text = TOKENIZER.decode(walk(lark.start(), random.Random(seed)))
        depth = text.count("(")
        assert text == "(" * depth + "x" + ")" * depth


def test_states_say_where_they_stand_and_fork(grammars: Grammars) -> None:
    state = grammars.compile("regex", "ab*").start()
    a, b = (TOKENIZER.convert_tokens_to_ids(letter) for letter in "ab")
    assert (state.done, state.accepts) == (False, False)
    assert state.advance(a)
    assert (state.done, state.accepts) == (False, True)
    other = state.fork()
    assert other.advance(b)
    assert not other.advance(a)
    assert other.failed
    assert (state.failed, state.accepts) == (False, True)
    assert set(allowed(state)) >= {b, EOS}
    assert state.advance(EOS)
    assert state.done
    both = fill([other, grammars.compile("regex", "ab*").start()])  # a failed one allows nothing
    assert not both[0].any()
    assert both[1].any()


def test_a_form_is_compiled_once_for_each_tenant(grammars: Grammars) -> None:
    assert grammars.compile("regex", "xyz") is grammars.compile("regex", "xyz")
    other = grammars.begin("regex", "xyz", "other")
    assert other is not grammars.compile("regex", "xyz"), "the time would reveal another tenant's grammar"
    assert grammars.begin("regex", "xyz", "other") is other


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("json_schema", '{"type": "strin"}', "json_schema: .*strin"),
        ("json_schema", "{", "json_schema"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("regex", "a(b", "regex: .*unclosed group"),
        ("grammar", "start: NOTHING", "grammar: .*NOTHING"),
    ],
)
def test_what_makes_no_sense_is_refused(grammars: Grammars, kind: Any, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.compile(said, re.DOTALL)):
        grammars.compile(kind, text)


def test_a_tokenizer_that_cannot_do_it_is_refused() -> None:
    class Slow:
        eos_token_id = None

    with pytest.raises(ValueError, match="fast tokenizer"):
        Grammars(Slow())


def test_a_tokenizer_that_the_library_rejects_is_no_reason_to_try_again() -> None:
    grammars = Grammars(TOKENIZER, [1 << 30])  # an end token outside the vocabulary
    with pytest.raises(ValueError, match="cannot use this tokenizer") as raised:
        grammars.compile("regex", "a")
    assert not isinstance(raised.value, GrammarBusyError)
    grammars.close()


def test_without_the_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("llguidance"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"pip install 'kvloom\[grammar\]'"):
        Grammars(TOKENIZER, [EOS])


def test_the_sampler_chooses_only_what_the_form_allows(grammars: Grammars) -> None:
    """Rows with and without a grammar in one batch; logits wider than the tokenizer's vocabulary."""
    size, rows = len(TOKENIZER) + 45, 6
    forms = ["json_schema", None, "regex", "json_schema", None, "regex"]
    texts = {"json_schema": json.dumps(SCHEMA), "regex": "[a-z]{3,9}!"}
    requests = []
    for i, form in enumerate(forms):
        one = Request(i, (1,), SamplingParams(max_tokens=4000, seed=i, temperature=1.0 if i % 2 else 0.0))
        one.structure = None if form is None else grammars.compile(form, texts[form]).start()  # type: ignore[arg-type]
        requests.append(one)
    sampler, generator = Sampler([EOS]), torch.Generator().manual_seed(0)
    for _ in range(2000):
        logits = torch.randn(rows, size, generator=generator)
        for one, token in zip(requests, sampler.choose(logits, requests).tokens.tolist(), strict=True):
            if one.structure is not None and not one.structure.done:
                assert one.structure.advance(token), (one.order, token)
            elif one.structure is not None:
                continue
            one.tokens.append(token)
        if all(one.structure is None or one.structure.done for one in requests):
            break
    for one, form in zip(requests, forms, strict=True):
        text = TOKENIZER.decode(one.output, skip_special_tokens=True)
        if form == "json_schema":
            assert set(json.loads(text)) == {"name", "age", "ok", "kind"}
        elif form == "regex":
            assert re.fullmatch(texts["regex"], text)
