"""Text of a given form: which tokens may come next, by a JSON schema, a regular expression or a grammar.

    Grammars (a tokenizer) ── compile, cached ──▶ Grammar ── start ──▶ GrammarState: advance, fork
                                                                             └── fill ──▶ one bit a token

The work is llguidance's (the extra "grammar"), which knows the tokenizer's bytes; this file knows neither logits nor requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .params import StructureKind

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

__all__ = ["Grammar", "GrammarState", "Grammars", "fill"]

MOST_KEPT = 256
"""Compiled grammars that are kept for a tokenizer; those not used for longest go first."""


class GrammarState:
    """Where one text stands in its grammar. Not thread safe."""

    __slots__ = ("_matcher", "words")

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self._matcher = matcher
        self.words = words  # of 32 tokens each

    def advance(self, token: int) -> bool:
        """Take in the next token; False where the grammar does not allow it, and then for ever."""
        return self._matcher.consume_token(token)

    @property
    def done(self) -> bool:
        """Nothing but the end can follow, or nothing at all."""
        return self._matcher.is_stopped()

    @property
    def failed(self) -> bool:
        """No text of this grammar goes on from here: a token was not allowed, or none of the vocabulary is."""
        return self._matcher.is_error()

    @property
    def accepts(self) -> bool:
        """The text could end here."""
        return self._matcher.is_accepting()

    def fork(self) -> GrammarState:
        """A second state that goes its own way from here (some 20 µs)."""
        return GrammarState(self._matcher.deep_copy(), self.words)


class Grammar:
    """A compiled form; `start` is cheap."""

    __slots__ = ("_first",)

    def __init__(self, first: GrammarState) -> None:
        self._first = first

    def start(self) -> GrammarState:
        return self._first.fork()


JSON_SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Where spaces stand in JSON, unless a schema says otherwise: a small model that may put them anywhere puts nothing else."""


class Grammars:
    """The grammars of one tokenizer (a fast Hugging Face one). `eos` are the tokens that end a text."""

    def __init__(self, tokenizer: Any, eos: Iterable[int] = ()) -> None:
        self._tokenizer = _tokens(tokenizer, tuple(eos))
        self._kept: OrderedDict[tuple[StructureKind, str], Grammar] = OrderedDict()

    def compile(self, kind: StructureKind, text: str) -> Grammar:
        """The form that `text` describes; kept for the next time. Raises ValueError where it makes no sense, or asks for
        what the library cannot hold a text to. A first time takes milliseconds."""
        found = self._kept.get((kind, text))
        if found is None:
            found = self._kept[kind, text] = self._compiled(kind, text)
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end((kind, text))
        return found

    def _compiled(self, kind: StructureKind, text: str) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        makers: dict[StructureKind, Callable[[str], str]] = {
            "json_schema": lambda text: LLMatcher.grammar_from_json_schema(text, defaults=JSON_SPACING),
            "regex": LLMatcher.grammar_from_regex,
            "grammar": LLMatcher.grammar_from_lark,
        }
        limits = LLParserLimits(verbose_errors=False)
        try:
            source = makers[kind](text)
            matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
        except ValueError as error:
            raise ValueError(f"{kind}: {error}") from None
        if matcher.is_error():
            raise ValueError(f"{kind}: {matcher.get_error()}")
        return Grammar(GrammarState(matcher, -(-self._tokenizer.vocab_size // 32)))


_executor: LLExecutor | None = None


def fill(states: Sequence[GrammarState]) -> npt.NDArray[np.int32]:
    """Which tokens may come next: [states, words], bit i of word j for token 32 j + i. Some 0.1 ms a state; several are
    filled in parallel. Where a state has failed, no bit is set."""
    global _executor  # noqa: PLW0603 - threads that are started once
    from llguidance import LLExecutor
    from llguidance.numpy import fill_next_token_bitmask, fill_next_token_bitmask_par

    bits = np.zeros((len(states), max(state.words for state in states)), dtype=np.int32)
    alive = [(state._matcher, i) for i, state in enumerate(states) if not state.failed]
    if len(alive) == 1:
        fill_next_token_bitmask(alive[0][0], bits, alive[0][1])
    elif alive:
        if _executor is None:
            _executor = LLExecutor()
        fill_next_token_bitmask_par(_executor, alive, bits)
    return bits


def _tokens(tokenizer: Any, eos: tuple[int, ...]) -> LLTokenizer:
    """The tokenizer as the library reads it."""
    try:
        from llguidance import LLTokenizer
    except ImportError:
        raise ValueError(
            "structured output needs the package llguidance: pip install 'kvloom[grammar]'"
        ) from None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"structured output needs a fast tokenizer (tokenizer.json), not a {type(tokenizer).__name__}"
        )
    plain = type(backend).from_str(
        backend.to_str()
    )  # a copy: the one in use keeps its padding and truncation
    plain.no_padding()
    plain.no_truncation()
    ends = eos or (() if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),))
    try:
        return LLTokenizer(plain.to_str(), eos_token=list(ends) or None)
    except ValueError as error:
        raise ValueError(f"structured output cannot use this tokenizer: {error}") from None
