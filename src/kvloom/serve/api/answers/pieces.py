"""The pieces (reasoning, content, tool calls) of an answer, and the text from which they are read.

A parser is a generator over a TextSource. It reads the text that has arrived, adds pieces, and yields when it needs
more text. The same code therefore parses streams and whole texts. The time grows with the length of the text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Literal

__all__ = ["Parsing", "Piece", "Reading", "TextSource"]

ARGUMENTS = ("arguments", "parameters")
MAX_NAME_CHARACTERS = 256

Parsing = Generator[None, None, None]
Reading = Generator[None, None, bool]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer. `text` is reasoning, content, or a part of the arguments of the tool call number `index`.
    The first piece of a tool call contains its `id` and `name`.
    """

    kind: Literal["reasoning", "content", "call"]
    text: str
    index: int = 0
    id: str | None = None
    name: str | None = None

    def followed_by(self, other: Piece) -> Piece | None:
        """Merge this piece and `other` into one piece. Return None if they cannot be merged."""
        if (self.kind, self.index) != (other.kind, other.index) or other.id is not None:
            return None
        return Piece(self.kind, self.text + other.text, self.index, self.id, self.name)


class TextSource:
    """A text that arrives in parts, and the pieces that were read from it. `rest` is the unread text. `ended` states
    that no more text follows. `new_id` creates the id of a call.
    """

    def __init__(self, new_id: Callable[[], str]) -> None:
        self.rest = ""
        self.ended = False
        self.calls = 0
        self._new_id = new_id
        self._pieces: list[Piece] = []
        self._space = ""  # whitespace that is dropped if a call follows

    def take(self) -> list[Piece]:
        """Return the pieces that were added since `take` was last called. Adjacent pieces are merged if possible."""
        merged: list[Piece] = []
        for piece in self._pieces:
            both = merged[-1].followed_by(piece) if merged else None
            if both is None:
                merged.append(piece)
            else:
                merged[-1] = both
        self._pieces = []
        return merged

    def add_content(self, text: str) -> None:
        """Add content. Whitespace at its end is held back until more content follows, because whitespace before or
        after a call is dropped.
        """
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            self._pieces.append(Piece("content", kept))

    def end_content(self) -> None:
        """End the content. If the answer has no calls, whitespace that was held back is added."""
        if self._space and not self.calls:
            self._pieces.append(Piece("content", self._space))
        self._space = ""

    def start_call(self, name: str, arguments: str = "") -> None:
        self._space = ""
        self._pieces.append(Piece("call", arguments, self.calls, self._new_id(), name))
        self.calls += 1

    def add_arguments(self, text: str) -> None:
        self._pieces.append(Piece("call", text, self.calls - 1))

    def skip_space(self) -> Reading:
        """Skip whitespace. Return whether text follows."""
        while True:
            self.rest = self.rest.lstrip()
            if self.rest or self.ended:
                return bool(self.rest)
            yield

    def skip(self, marker: str) -> Reading:
        """Skip a marker. Return whether the marker was there."""
        while len(self.rest) < len(marker) and marker.startswith(self.rest) and not self.ended:
            yield
        found = self.rest.startswith(marker)
        if found:
            self.rest = self.rest[len(marker) :]
        return found

    def content_until(self, *markers: str) -> Generator[None, None, str]:
        """Add the text before the first of `markers` as content, and skip this marker. Return the marker, or "" at
        the end of the text.
        """
        while True:
            places = [(place, marker) for marker in markers if (place := self.rest.find(marker)) >= 0]
            if places:
                place, marker = min(places)
                self.add_content(self.rest[:place])
                self.rest = self.rest[place + len(marker) :]
                return marker
            size = 0 if self.ended else max(partial_marker(self.rest, marker) for marker in markers)
            kept = len(self.rest) - size
            self.add_content(self.rest[:kept])
            self.rest = self.rest[kept:]
            if self.ended:
                return ""
            yield

    def text_until(self, marker: str) -> Generator[None, None, str | None]:
        """Return the text before a marker, and skip the marker. Return None if the text ends before the marker."""
        searched = 0
        while (place := self.rest.find(marker, searched)) < 0:
            if self.ended:
                return None
            searched = max(0, len(self.rest) - len(marker))
            yield
        text = self.rest[:place]
        self.rest = self.rest[place + len(marker) :]
        return text

    def rest_as_content(self) -> Parsing:
        """Add all text that follows as content."""
        while True:
            self.add_content(self.rest)
            self.rest = ""
            if self.ended:
                return
            yield

    def call_object(self, before: str = "", name: str | None = None) -> Reading:
        """Read a JSON object as a call: {"name": …, "arguments": …}. Return whether the object is a call. Adds the
        arguments as they arrive.

        If `name` is given, the object contains only the arguments of this function. `before` is the marker that
        precedes the object. Without a marker, an object with a name but no arguments is not a call. An object that is
        not a call becomes content, together with its marker.
        """
        scanner = _CallScanner(name)
        started = False
        while not scanner.is_done and not (self.ended and not self.rest):
            if not self.rest:
                yield
                continue
            self.rest = scanner.read(self.rest)
            new = scanner.take_arguments()
            if scanner.has_arguments and not started:
                started = True
                self.start_call(scanner.name or "", new)
            elif new:
                self.add_arguments(new)
        given = scanner.whole_arguments() if scanner.is_done else None
        if not started and scanner.is_done and scanner.name and (before or given is not None):
            self.start_call(scanner.name, given or "{}")
            started = True
        if not started:
            self.add_content(before + scanner.raw)
        return started


def partial_marker(text: str, marker: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `marker`."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-size:]):
            return size
    return 0


class _CallScanner:
    """Finds the name and the arguments in the text of a JSON object while the text arrives.

    As soon as the name is known, `take_arguments` returns the new text of the arguments, unchanged. The JSON is
    not validated: the object ends where its brackets are balanced.
    """

    def __init__(self, name: str | None) -> None:
        self.name, self.is_done = name, False
        self.has_arguments = False
        """Whether the name was read, and the object of arguments has begun. The JSON object is then a call."""
        self._depth = 0 if name is None else 1
        self._in_string = self._escaped = False
        self._key: str | None = None if name is None else ARGUMENTS[0]
        self._only_arguments = name is not None
        self._raw: list[str] = []
        self._text: list[str] = []  # the text of the current key or value
        self._values: dict[str, str] = {}
        self._new: list[str] = []
        self._streams = False

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    def read(self, text: str) -> str:
        """Read text up to the end of the object. Return the text after the object."""
        for place, letter in enumerate(text):
            if not self.has_arguments:
                self._raw.append(letter)
            self._step(letter)
            if self.is_done:
                return text[place + 1 :]
        return ""

    def take_arguments(self) -> str:
        new = "".join(self._new)
        self._new.clear()
        return new

    def whole_arguments(self) -> str | None:
        """Return the arguments that `take_arguments` could not return, because they came before the name, or because
        they are a JSON string instead of an object. Return None if there are no such arguments.
        """
        given = next((self._values[key] for key in ARGUMENTS if key in self._values), None)
        try:
            read = None if given is None else json.loads(given)
        except (ValueError, RecursionError):
            return given
        return read if isinstance(read, str) else None if read is None else given

    def _step(self, letter: str) -> None:
        if self._in_string:
            self._take(letter)
            if self._escaped:
                self._escaped = False
            elif letter == "\\":
                self._escaped = True
            elif letter == '"':
                self._in_string = False
        elif letter in "{[":
            self._depth += 1
            if self._depth == 2 and letter == "{" and self._key in ARGUMENTS and self.name and not self._text:
                self._streams = self.has_arguments = True
            if self._depth > 1:
                self._take(letter)
        elif letter in "}]":
            self._depth -= 1
            if self._depth > 0:
                self._take(letter)
            if self._depth == 1 and self._streams:
                self._streams = False
                self.is_done = self._only_arguments
            if self._depth <= 0:
                self._end_value()
                self.is_done = True
        elif self._depth == 1 and letter == ":" and self._key is None:
            self._key = _string("".join(self._text)) or ""
            self._text.clear()
        elif self._depth == 1 and letter == ",":
            self._end_value()
        else:
            self._in_string = letter == '"'
            self._take(letter)

    def _take(self, letter: str) -> None:
        if self._streams:
            self._new.append(letter)
        elif not self.has_arguments and (self._text or not letter.isspace()):
            self._text.append(letter)

    def _end_value(self) -> None:
        if self._key is not None and not self.has_arguments:
            value = "".join(self._text).rstrip()
            if self._key == "name":
                self.name = _string(value)
            self._values[self._key] = value
        self._key = None
        self._text.clear()


def _string(text: str) -> str | None:
    """Return the string that a JSON text represents, or None if the text is not a string."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return read if isinstance(read, str) and 0 < len(read) <= MAX_NAME_CHARACTERS else None
