"""The formats in which models write tool calls. The names are vLLM's.

    hermes, qwen   <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>; may be repeated, and may follow text
    llama3_json    {"name": "f", "parameters": {"a": 1}}; further calls follow after ";" or ","
    mistral        [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}], or [TOOL_CALLS]f[ARGS]{"a": 1}
    pythonic       [f(a=1), g()]
    qwen3_coder    <tool_call><function=f><parameter=a>1</parameter></function></tool_call>; repeated as in hermes

A text that is not a call stays content. `ForcedCalls` reads the format of a forced call (tool_choice.py).
"""

from __future__ import annotations

import ast
import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from .pieces import Parsing, Piece, Reading, TextSource
from .tool_choice import STRICT, Tools, call_rules

__all__ = ["TOOL_CALL_PARSERS", "ForcedCalls", "ToolCallParser", "detect_parser"]

ALPHANUMERIC = string.ascii_letters + string.digits
ARGS = "[ARGS]"
CALL = re.compile(r"[A-Za-z_][\w.]*\(")
LITERAL_ERRORS = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


class ToolCallParser(ABC):
    """Parses one answer. `markers` are the texts that mark tool calls. Markers that are special tokens must stay in the
    text of the answer. `schemas` are the JSON schemas of the functions' parameters, by function name.
    """

    markers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self.schemas = schemas or {}
        self._source = TextSource(self.new_id)
        self._run: Parsing | None = self.parse(self._source)

    @abstractmethod
    def parse(self, source: TextSource) -> Parsing:
        """Read a source to its end, and add the pieces to it. A generator that yields when it needs more text."""

    @classmethod
    def strict_grammar(cls, functions: Tools) -> str | None:
        """Return the Lark rule `answer`, which allows text and calls in this format. The arguments of strict functions
        must follow their schemas. Return None if calls in this format contain no JSON, because schemas apply only to
        JSON.
        """
        return None

    @staticmethod
    def new_id() -> str:
        return f"call_{secrets.token_hex(12)}"

    @property
    def calls(self) -> int:
        """The number of calls so far."""
        return self._source.calls

    def feed(self, text: str) -> list[Piece]:
        """Read the next text of the answer, and return the pieces that are certain so far. Text that may be the start
        of a marker is kept for the next call."""
        self._source.rest += text
        return self._advance()

    def finish(self) -> list[Piece]:
        """Return the remaining pieces. Call this method when no more text follows."""
        self._source.ended = True
        self._advance_only()
        self._source.end_content()
        return self._source.take()

    def _advance(self) -> list[Piece]:
        self._advance_only()
        return self._source.take()

    def _advance_only(self) -> None:
        if self._run is not None:
            try:
                next(self._run)
            except StopIteration:
                self._run = None


class HermesParser(ToolCallParser):
    BEGIN, END = "<tool_call>", "</tool_call>"
    markers = (BEGIN, END)

    @classmethod
    def strict_grammar(cls, functions: Tools) -> str:
        return f'''{STRICT}strict: (before SPACE call SPACE "{cls.END}")* TEXT?
before[suffix="{cls.BEGIN}"]: /(.|\\n)*/
SPACE: /\\n?/
TEXT: /(.|\\n)+/ & ~/(.|\\n)*{cls.BEGIN}(.|\\n)*/
''' + call_rules(functions, only_strict=True)

    def parse(self, source: TextSource) -> Parsing:
        while (yield from source.content_until(self.BEGIN)):
            yield from source.skip_space()
            if not source.rest.startswith("{"):
                source.add_content(self.BEGIN)
                continue
            if (yield from source.call_object(self.BEGIN)):
                yield from source.skip_space()
                yield from source.skip(self.END)


class Llama3JsonParser(ToolCallParser):
    TAG = "<|python_tag|>"

    @classmethod
    def strict_grammar(cls, functions: Tools) -> str:
        """Return the Lark rule `answer`. An answer that begins with a brace must be a call."""
        return f"""{STRICT}strict: call ("; " call)* | TEXT
TEXT: /[^{{\\s](.|\\n)*/
""" + call_rules(functions, "parameters", only_strict=True)

    def parse(self, source: TextSource) -> Parsing:
        yield from source.skip_space()
        yield from source.skip(self.TAG)
        yield from source.skip_space()
        while source.rest.startswith("{") and (yield from source.call_object()):
            yield from _skip_separators(source, ";,")
        yield from source.rest_as_content()


class MistralParser(ToolCallParser):
    BEGIN = "[TOOL_CALLS]"
    markers = (BEGIN, ARGS)

    @staticmethod
    def new_id() -> str:
        """Return nine letters and digits, as Mistral's templates require."""
        return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))

    def parse(self, source: TextSource) -> Parsing:
        while (yield from source.content_until(self.BEGIN)):
            yield from source.skip_space()
            if source.rest.startswith("["):
                source.rest = source.rest[1:]
                yield from _skip_separators(source, ",")
                while source.rest.startswith("{") and (yield from source.call_object()):
                    yield from _skip_separators(source, ",")
                yield from source.skip("]")
            else:
                yield from self._named_call(source)

    def _named_call(self, source: TextSource) -> Parsing:
        while "{" not in source.rest and not source.ended:
            yield
        head, brace, after = source.rest.partition("{")
        name = head.partition("[")[0].strip()  # before [CALL_ID] and [ARGS]
        if not brace or not name:
            source.add_content(self.BEGIN)
            return
        source.rest = brace + after
        yield from source.call_object(self.BEGIN + head, name)


class PythonicParser(ToolCallParser):
    """Parses calls in Python syntax. A call is added when it is complete, because its arguments must be converted
    to JSON."""

    def parse(self, source: TextSource) -> Parsing:
        yield from source.skip_space()
        if source.rest.startswith("["):
            source.rest = source.rest[1:]
            before = "["
            while (yield from self._call(source, before)):
                before = ""
                yield from _skip_separators(source, ",")
                if source.rest.startswith("]"):
                    source.rest = source.rest[1:]
                    break
        yield from source.rest_as_content()

    def _call(self, source: TextSource, before: str) -> Reading:
        """Read one call. Return False if no call follows."""
        yield from source.skip_space()
        end, depth, quote, escaped = 0, 0, "", False
        while True:
            for letter in source.rest[end:]:
                end += 1
                if quote:
                    if escaped or letter == "\\":
                        escaped = not escaped
                    elif letter == quote:
                        quote = ""
                elif letter in "'\"":
                    quote = letter
                elif letter in "([{":
                    depth += 1
                elif letter in ")]}":
                    depth -= 1
                    if depth <= 0:
                        break
            else:
                if not source.ended:
                    yield
                    continue
            break
        text = source.rest[:end]
        call = _python_call(text)
        if call is None:
            source.add_content(before)
            return False
        source.rest = source.rest[end:]
        source.start_call(*call)
        return True


class Qwen3CoderParser(ToolCallParser):
    """Parses tool calls in the format of Qwen3-Coder. An argument is returned only when it is complete, because its
    schema decides whether it is a text or JSON."""

    BEGIN, END = "<tool_call>", "</tool_call>"
    FUNCTION, PARAMETER = "<function=", "<parameter="
    markers = (BEGIN, END)

    def parse(self, source: TextSource) -> Parsing:
        while found := (yield from source.content_until(self.BEGIN, self.FUNCTION)):
            if found == self.BEGIN:
                yield from source.skip_space()
                if not (yield from source.skip(self.FUNCTION)):
                    source.add_content(self.BEGIN)
                    continue
            name = yield from source.text_until(">")
            if name is None or "\n" in name:
                source.add_content(found if found == self.FUNCTION else found + self.FUNCTION)
                source.rest = source.rest if name is None else f"{name}>{source.rest}"
                continue
            yield from self._arguments(source, name.strip())

    def _arguments(self, source: TextSource, name: str) -> Parsing:
        """Read the arguments of a call up to its end."""
        schema = self.schemas.get(name, {})
        fields = schema.get("properties")
        source.start_call(name, "{")
        separator = ""
        while True:
            yield from source.skip_space()
            if not (yield from source.skip(self.PARAMETER)):
                break
            field = yield from source.text_until(">")
            value = None if field is None else (yield from source.text_until("</parameter>"))
            if field is None or value is None:
                source.rest = ""  # the answer was cut
                return
            given = fields.get(field.strip()) if isinstance(fields, dict) else None
            text = json.dumps(_xml_value(value, given), ensure_ascii=False)
            source.add_arguments(f"{separator}{json.dumps(field.strip())}: {text}")
            separator = ", "
        if source.rest:
            source.add_arguments("}")
        yield from source.skip("</function>")
        yield from source.skip_space()
        yield from source.skip(self.END)


class ForcedCalls(ToolCallParser):
    """Parses a JSON array of calls, in the form that `forced_grammar` enforces. If the token limit cuts the array off,
    text that belongs to no call yet, such as the start of a name, is dropped.
    """

    def parse(self, source: TextSource) -> Parsing:
        yield from source.skip_space()
        yield from source.skip("[")
        yield from source.skip_space()
        while source.rest.startswith("{") and (yield from source.call_object()):
            yield from _skip_separators(source, ",")

    def finish(self) -> list[Piece]:
        return [piece for piece in super().finish() if piece.kind == "call"]


TOOL_CALL_PARSERS: dict[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
    "qwen": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "pythonic": PythonicParser,
    "qwen3_coder": Qwen3CoderParser,
}


def detect_parser(template: str) -> type[ToolCallParser] | None:
    """Return the parser for the format of calls in a chat template, or None for an unknown format."""
    if "[TOOL_CALLS]" in template:
        return MistralParser
    if "<tool_call>" in template:
        return Qwen3CoderParser if "<function=" in template else HermesParser
    if "<|python_start|>" in template:
        return PythonicParser
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return Llama3JsonParser
    return None


def _skip_separators(source: TextSource, letters: str) -> Parsing:
    """Skip whitespace and separators between calls."""
    while True:
        source.rest = source.rest.lstrip(letters + string.whitespace)
        if source.rest or source.ended:
            return
        yield


def _xml_value(text: str, schema: Any) -> Any:
    """Return the value of an argument. Strings have no quotes in this format, so the value is the text itself if
    `schema` allows a string or is missing. Otherwise the text is parsed as JSON. Text that is not JSON stays text.
    """
    text = text.removeprefix("\n").removesuffix("\n")
    given = schema.get("type") if isinstance(schema, dict) else "string"
    types = given if isinstance(given, list) else [given]
    if "string" in types and not ("null" in types and text == "null"):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text, text)


def _python_call(text: str) -> tuple[str, str] | None:
    """Return the name and arguments (as JSON) of a Python call with literal keyword arguments. Return None for other
    text.
    """
    if CALL.match(text) is None:
        return None
    try:
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        arguments: Mapping[str | None, Any] = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
        if None in arguments:
            return None
        return ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False)
    except LITERAL_ERRORS:
        return None
