"""Tokens to text, one token at a time: characters whole, stop texts found across tokens.

    tokens  … already text | context | new, maybe half a character |
    text    … given out | held: may begin a stop text |

Knows no request and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

__all__ = ["Detokenizer", "TextStream"]

CONTEXT = 6
"""Tokens of the prompt that are decoded with the first new one: some decoders drop a space at the beginning."""
PARTS = 3
"""Tokens that a character has besides its last, at most: it has up to four bytes."""
MOST_HELD = 16
"""Tokens that may wait for the rest of a character; more are no character."""
BROKEN = "\ufffd"


class Detokenizer:
    """Text that goes on from `prompt`. `add` costs two small decodes, whatever came before."""

    __slots__ = ("_before", "_ids", "_prefix", "_skip", "_tokenizer")

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._ids = list(prompt[-CONTEXT:])
        self._before = len(self._ids)  # of so many the text is out
        self._prefix = self._decode(self._ids)
        if BROKEN in (self._prefix[:1], self._prefix[-1:]):
            self._align(prompt)

    def _align(self, prompt: Sequence[int]) -> None:
        """Begin with a whole character of the prompt, and tell the one it left unfinished when it is whole."""
        for left, extra in product(range(PARTS + 1), range(PARTS + 1)):
            ids = list(prompt[-CONTEXT - extra :])
            before = max(len(ids) - left, 0)
            text = self._decode(ids[:before])
            if BROKEN not in (text[:1], text[-1:]):
                self._ids, self._before, self._prefix = ids, before, text
                return

    def add(self, token: int) -> str:
        """The text that a token made certain: empty while a character is incomplete."""
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(BROKEN) and len(self._ids) - self._before < MOST_HELD:
            return ""
        return self._moved(text)

    def add_all(self, tokens: Sequence[int]) -> str:
        """The text of the last tokens, all at once, broken characters included. One decode of them."""
        self._ids += tokens
        return self.flush()

    def flush(self) -> str:
        """What is left, broken characters included."""
        return self._moved(self._decode(self._ids)) if len(self._ids) > self._before else ""

    def _moved(self, text: str) -> str:
        new = text[len(self._prefix) :]
        self._ids = self._ids[self._before :]
        self._before = len(self._ids)
        self._prefix = self._decode(self._ids)
        return new

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        found = self._tokenizer.decode(
            ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
        )
        return str(found)


class TextStream:
    """An output's text while it grows, up to the first of `stops`, which is left out unless `include_stop`.

    `take` gives what can no longer change; what may begin a stop text is held back until it is decided.
    """

    __slots__ = ("_detokenizer", "_given", "_held", "_include", "_parts", "_stops", "stopped")

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int] = (),
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens)
        self._stops, self._include = tuple(stops), include_stop
        self._parts: list[str] = []
        self._held = ""
        self._given = 0  # parts that `take` gave
        self.stopped: str | None = None

    @property
    def text(self) -> str:
        """All of it by now; after `finish`, all there will be."""
        return "".join(self._parts) + self._held

    def add(self, token: int, may_stop: bool = True) -> bool:
        """Take in a token; whether a stop text is met. With `may_stop` False stop texts are text as any other."""
        return self._grow(self._detokenizer.add(token), may_stop)

    def finish(self, may_stop: bool = True) -> bool:
        """No more tokens come: nothing is held back any longer. Whether what was left made a stop text."""
        if self.stopped is None:
            self._grow(self._detokenizer.flush(), may_stop)
        self._parts.append(self._held)
        self._held = ""
        return self.stopped is not None

    def take(self) -> str:
        """What is certain since the last `take`."""
        new = "".join(self._parts[self._given :])
        self._given = len(self._parts)
        return new

    def _grow(self, new: str, may_stop: bool) -> bool:
        if self.stopped is not None or not new:
            return self.stopped is not None
        window = self._held + new
        stops = self._stops if may_stop else ()
        found = [(place, stop) for stop in stops if (place := window.find(stop)) >= 0]
        if found:
            place, self.stopped = min(found, key=lambda one: one[0])
            window = window[: place + len(self.stopped) if self._include else place]
        self._held = "" if found else self._beginning(window)
        self._parts.append(window.removesuffix(self._held))
        return bool(found)

    def _beginning(self, window: str) -> str:
        """The longest end of `window` with which a stop text could begin."""
        longest = max(map(len, self._stops), default=0)
        for size in range(min(longest - 1, len(window)), 0, -1):
            if any(len(stop) > size and stop.startswith(window[-size:]) for stop in self._stops):
                return window[-size:]
        return ""
