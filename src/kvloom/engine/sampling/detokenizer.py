"""Turns tokens into text, one token at a time. Returns whole characters, and finds stop texts that span tokens.

tokens  … already decoded | context | new, maybe part of a character |
text    … returned | waiting: may be the start of a stop text |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

__all__ = ["Detokenizer", "TextStream"]

CONTEXT = 6
"""Number of prompt tokens decoded together with the first new token, because some decoders drop a leading space."""
CHARACTER_PARTS = 3
"""Largest number of tokens of a character before its last token. A character has up to four bytes, and each byte may
be a separate token."""
MAX_HELD_TOKENS = 16
"""Largest number of tokens held back for an incomplete character. If there are more, they are not a character and are
returned.
"""
BROKEN = "\ufffd"
MAX_CACHED_TOKENS = 1 << 19
"""Largest number of tokens whose text is cached."""


class TokenDecoder:
    """Decodes lists of tokens with one tokenizer. All requests share it, so that it can cache the text of single
    tokens.

    `concatenates` means that the bytes of a text are the bytes of its tokens one after the other, as in byte-level BPE.
    The text of a token then depends on earlier tokens only if a character spans tokens.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._texts: dict[int, str] = {}
        backend = _backend(tokenizer)
        self._decode: Callable[[list[int]], str] = self._decode_slowly
        self.concatenates = backend is not None and type(backend.decoder).__name__ == "ByteLevel"
        if backend is not None:
            self._decode = lambda ids: str(backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def decode(self, ids: list[int]) -> str:
        """Return the text of a list of tokens."""
        if len(ids) == 1:
            return self.text(ids[0])
        return self._decode(ids) if ids else ""

    def text(self, token: int) -> str:
        """Return the text of one token."""
        found = self._texts.get(token)
        if found is None:
            found = self._decode([token])
            if len(self._texts) < MAX_CACHED_TOKENS:
                self._texts[token] = found
        return found

    def _decode_slowly(self, ids: list[int]) -> str:
        found = self._tokenizer.decode(
            ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False
        )
        return str(found)


def _backend(tokenizer: Any) -> Any:
    """Return the `tokenizers.Tokenizer` that decodes for a tokenizer of transformers. Return None if the tokenizer has a
    `decode` of its own. Calling the backend directly takes a third of the time."""
    from transformers import PreTrainedTokenizerFast as Fast

    kind = type(tokenizer)
    is_plain = isinstance(tokenizer, Fast) and kind.decode is Fast.decode and kind._decode is Fast._decode
    return tokenizer.backend_tokenizer if is_plain else None


@lru_cache(maxsize=8)
def _shared_decoder(tokenizer: Any, skip_special_tokens: bool) -> TokenDecoder:
    return TokenDecoder(tokenizer, skip_special_tokens)


class Detokenizer:
    """Converts the output tokens of one request to text, token by token. The time of `add` does not depend on the length
    of the output."""

    __slots__ = ("_before", "_decoder", "_ids", "_prefix")

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self._decoder = _shared_decoder(tokenizer, skip_special_tokens)
        self._ids = list(prompt[-CONTEXT:])
        self._before = len(self._ids)  # number of tokens whose text was returned
        self._prefix = self._decoder.decode(self._ids)
        if BROKEN in (self._prefix[:1], self._prefix[-1:]):
            self._align(prompt)

    def _align(self, prompt: Sequence[int]) -> None:
        """Find where decoding starts: at the last whole character of the prompt. If the prompt ends inside a character,
        the character is returned with the first output text that completes it.
        """
        for left, extra in product(range(CHARACTER_PARTS + 1), range(CHARACTER_PARTS + 1)):
            ids = list(prompt[-CONTEXT - extra :])
            before = max(len(ids) - left, 0)
            text = self._decoder.decode(ids[:before])
            if BROKEN not in (text[:1], text[-1:]):
                self._ids, self._before, self._prefix = ids, before, text
                return

    def add(self, token: int) -> str:
        """Add a token. Return the text that is now final, which is empty while a character is incomplete."""
        decoder, ids = self._decoder, self._ids
        if decoder.concatenates and len(ids) == self._before:
            text = decoder.text(token)
            if BROKEN not in text and BROKEN not in self._prefix:
                self._ids, self._before, self._prefix = [token], 1, text
                return text
        ids.append(token)
        text = decoder.decode(ids)
        if text.endswith(BROKEN) and len(self._ids) - self._before < MAX_HELD_TOKENS:
            return ""
        return self._advance(text)

    def add_all(self, tokens: Sequence[int]) -> str:
        """Add all remaining tokens of the output and return their text, including incomplete characters. Decodes once."""
        self._ids += tokens
        return self.flush()

    def flush(self) -> str:
        """Return the remaining text, including incomplete characters."""
        return self._advance(self._decoder.decode(self._ids)) if len(self._ids) > self._before else ""

    def _advance(self, text: str) -> str:
        new = text[len(self._prefix) :]
        self._ids = self._ids[self._before :]
        self._before = len(self._ids)
        self._prefix = self._decoder.decode(self._ids)
        return new


class TextStream:
    """The growing text of an output, up to the first stop text in `stops`. The stop text is removed unless
    `include_stop` is set. `take` returns text that is final. Text that may begin a stop text is held back.
    """

    __slots__ = ("_detokenizer", "_held", "_include", "_parts", "_stops", "_taken", "stopped")

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
        self._taken = 0  # number of parts that `take` has returned
        self.stopped: str | None = None

    @property
    def text(self) -> str:
        """The text so far. After `finish` it is complete."""
        return "".join(self._parts) + self._held

    def add(self, token: int, may_stop: bool = True) -> bool:
        """Add a token. Return whether a stop text is complete. With `may_stop` False, stop texts are ordinary text."""
        new = self._detokenizer.add(token)
        if self._stops:
            return self._grow(new, may_stop)
        if new:
            self._parts.append(new)
        return False

    def finish(self, may_stop: bool = True) -> bool:
        """End the text and release text that was held back. Return whether a stop text is complete."""
        if self.stopped is None:
            self._grow(self._detokenizer.flush(), may_stop)
        self._parts.append(self._held)
        self._held = ""
        return self.stopped is not None

    def take(self) -> str:
        """Return the text that became final since the last `take`."""
        new = "".join(self._parts[self._taken :])
        self._taken = len(self._parts)
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
        self._held = "" if found else self._possible_stop(window)
        self._parts.append(window.removesuffix(self._held))
        return bool(found)

    def _possible_stop(self, window: str) -> str:
        """Return the longest suffix of `window` that is the start of a stop text."""
        longest = max(map(len, self._stops), default=0)
        for size in range(min(longest - 1, len(window)), 0, -1):
            if any(len(stop) > size and stop.startswith(window[-size:]) for stop in self._stops):
                return window[-size:]
        return ""
