"""Texts that the router tokenises in pieces: the tokens are those of the whole text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("aiohttp")

import tokenizers

from kvloom.cluster.router import text_tokenizer
from kvloom.cluster.router.text_tokenizer import TextTokenizer
from kvloom.core import token_bytes

FOLDER = Path(text_tokenizer.__file__).parents[2] / "models/embedded/llama"
STORY = "".join(
    f"The {i}th story, told by Ann: a cat found {i * 3} toys!\n\n  def f(x):\n    return x\n"
    for i in range(60)
)


class Counting:
    """A tokenizer that counts the characters that it encodes."""

    def __init__(self) -> None:
        self.inner = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
        self.characters = 0

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        self.characters += len(text)
        return self.inner.encode(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("has_special", [False, True])
def test_pieces_have_the_tokens_of_the_whole_text(monkeypatch: pytest.MonkeyPatch, has_special: bool) -> None:
    monkeypatch.setattr(text_tokenizer, "COMPARED_TEXTS", 0)
    counting = Counting()
    tokenizer = TextTokenizer(counting)
    for length in (0, 1, 300, 700, 3000, len(STORY)):
        text = STORY[:length]
        expected = token_bytes(counting.inner.encode(text, add_special_tokens=has_special).ids)
        assert tokenizer.tokens(text, has_special) == expected


def test_a_repeated_beginning_is_not_tokenised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_tokenizer, "COMPARED_TEXTS", 0)
    counting = Counting()
    tokenizer = TextTokenizer(counting)
    tokenizer.tokens(STORY, True)
    counting.characters = 0
    tokenizer.tokens(STORY + " And the next turn.", True)
    assert counting.characters < 2 * text_tokenizer.PIECE_CHARACTERS


def test_the_time_of_a_text_does_not_depend_on_texts_of_other_tenants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(text_tokenizer, "COMPARED_TEXTS", 0)
    counting = Counting()
    tokenizer = TextTokenizer(counting)
    tokenizer.tokens(STORY, True, "victim")
    counting.characters = 0
    tokenizer.tokens(STORY, True, "attacker")
    assert counting.characters == len(STORY), "nothing comes from the other tenant's pieces"


def test_a_tokenizer_whose_tokens_cross_words_gets_whole_texts() -> None:
    class Crossing(Counting):
        def encode(self, text: str, add_special_tokens: bool) -> Any:
            return super().encode(text.replace(" ", ""), add_special_tokens)

    tokenizer = TextTokenizer(Crossing())
    text = STORY
    assert tokenizer.tokens(text, False) == token_bytes(Crossing().encode(text, False).ids)
    assert not tokenizer.is_piecewise
