"""Text from a stream of tokens: whole characters, the spaces that depend on the prompt, stop texts across tokens."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from kvloom.engine.sampling import Detokenizer, TextStream

from . import made_tokenizers as tokenizers

KINDS = {
    "bytes": tokenizers.byte_level("hello", " world", "the", " the"),
    "fallback": tokenizers.byte_fallback(),
    "words": tokenizers.words(),
}
TEXTS = ["hello world the", "grüße, 世界! 🙂🙃", "a", "  two  spaces ", "👩‍👩‍👧 family\n\ttabs"]


def pieces(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.add(token) for token in ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
def test_deltas_join_to_the_whole_text(kind: str) -> None:
    tokenizer = KINDS[kind]
    texts = ["w3 w4 w5 w6", "w7"] if kind == "words" else TEXTS
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        whole = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        assert "\ufffd" not in whole
        for cut in range(len(ids)):
            ends = (
                tokenizer.decode(ids[:end], clean_up_tokenization_spaces=False) for end in range(cut, -1, -1)
            )
            prompt = next(text for text in ends if not text.endswith("\ufffd"))  # its whole characters
            found = pieces(Detokenizer(tokenizer, ids[:cut]), ids[cut:])
            assert prompt + "".join(found) == whole, (text, cut)
            assert not any("\ufffd" in piece for piece in found)


def test_character_is_returned_with_its_last_byte() -> None:
    tokenizer = KINDS["bytes"]
    ids = tokenizer("é🙂x")["input_ids"]
    assert pieces(Detokenizer(tokenizer), ids) == ["", "é", "", "", "", "🙂", "x", ""]
    assert pieces(Detokenizer(tokenizer), ids[:4]) == ["", "é", "", "", "\ufffd"]  # it ended amid a character


def test_special_tokens_are_skipped_unless_requested() -> None:
    tokenizer = KINDS["bytes"]
    ids = [1, *tokenizer("hello", add_special_tokens=False)["input_ids"], 2]
    assert "".join(pieces(Detokenizer(tokenizer), ids)) == "hello"
    assert "".join(pieces(Detokenizer(tokenizer, skip_special_tokens=False), ids)) == "<s>hello</s>"


@pytest.mark.parametrize("kind", ["bytes", "fallback"])
def test_invalid_bytes_pass_at_a_bounded_cost(kind: str) -> None:
    tokenizer = KINDS[kind]
    first = next(i for i in range(3, 259) if tokenizer.decode([i]) == "\ufffd")
    detokenizer, longest = Detokenizer(tokenizer), 0
    for _ in range(500):
        detokenizer.add(first)
        longest = max(longest, len(detokenizer._ids))
    assert longest <= 33
    ids = tokenizer("hello", add_special_tokens=False)["input_ids"]
    assert "hello" in "".join(pieces(detokenizer, ids))


def test_decode_cost_does_not_grow() -> None:
    tokenizer = KINDS["bytes"]
    ids = tokenizer("hello world the " * 500)["input_ids"]

    def spent(text: TextStream, part: list[int]) -> float:
        start = time.thread_time()
        for token in part:
            text.add(token)
        return time.thread_time() - start

    text = TextStream(tokenizer, stops=("nothing like it",))
    size = len(ids) // 8
    parts = [spent(text, ids[i * size : (i + 1) * size]) for i in range(8)]
    assert min(parts[4:]) < 3 * min(parts[:4])
    assert text.text.startswith("hello world the hello")


def run(tokenizer: Any, text: str, stops: list[str], **options: Any) -> tuple[TextStream, list[str]]:
    made = TextStream(tokenizer, (), stops, **options)
    told = []
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        stopped = made.add(token)
        told.append(made.take())
        if stopped:
            break
    made.finish()
    return made, [*told, made.take()]


def test_stop_text_across_tokens_is_never_returned() -> None:
    text, told = run(KINDS["bytes"], "one two END three", ["END"])
    assert text.stopped == "END"
    assert text.text == "".join(told) == "one two "
    text, told = run(KINDS["bytes"], "one two END three", ["END"], include_stop=True)
    assert text.text == "".join(told) == "one two END"


def test_possible_stop_text_waits() -> None:
    text, told = run(KINDS["bytes"], "aaENaENDb", ["ENDING", "NEVER"])
    assert text.stopped is None
    assert text.text == "".join(told) == "aaENaENDb"
    assert told == ["a", "a", "", "", "ENa", "", "", "", "ENDb", ""]
    text, told = run(KINDS["bytes"], "xEN", ["END"])
    assert told == ["x", "", "", "EN"]  # nothing more comes


def test_earliest_stop_text_wins() -> None:
    text, _ = run(tokenizers.byte_level("abcdef"), "xabcdefx", ["def", "bc"])
    assert (text.stopped, text.text) == ("bc", "xa")


def test_stop_texts_are_ignored_before_min_tokens() -> None:
    tokenizer = KINDS["bytes"]
    text = TextStream(tokenizer, (), ["b"])
    ids = tokenizer("abab")["input_ids"]
    assert [text.add(token, may_stop=i > 1) for i, token in enumerate(ids)] == [False, False, False, True]
    assert text.text == "aba"


def test_random_texts_and_stops_match_a_plain_search() -> None:
    rng = random.Random(1)
    tokenizer = tokenizers.byte_level("aab", "ab", "bba")
    for _ in range(300):
        whole = "".join(rng.choice("aab") for _ in range(rng.randrange(30)))
        stops = [
            "".join(rng.choice("ab") for _ in range(rng.randrange(1, 6))) for _ in range(rng.randrange(3))
        ]
        text, told = run(tokenizer, whole, stops)
        assert "".join(told) == text.text
        places = [whole.find(stop) for stop in stops if stop in whole]
        if text.stopped is None:
            assert not places
            assert text.text == whole
        else:
            assert text.stopped not in text.text
            # Tokens may carry more than one stop text; the first token with any decides.
            assert whole.startswith(text.text + text.stopped)
            assert (
                min(places) == len(text.text)
                or any(stop in whole[: len(text.text)] for stop in stops) is False
            )
