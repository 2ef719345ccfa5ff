"""Splits an answer into reasoning, content and tool calls, by the formats of the served model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .pieces import Piece
from .reasoning import ANSWER, REASONING, REASONING_PARSERS, ReasoningParser, after_reasoning
from .tool_calls import TOOL_CALL_PARSERS, ForcedCalls, ToolCallParser, detect_parser
from .tool_choice import STRICT, Tools

__all__ = ["AnswerFormats", "AnswerParser"]

TOOLS_VARIABLE = re.compile(r"\btools\b")


class AnswerParser:
    """Parses one answer. Without `parallel`, only the first tool call of the answer is returned."""

    def __init__(
        self, reasoning: ReasoningParser | None, calls: ToolCallParser | None, parallel: bool = True
    ) -> None:
        self._reasoning, self._calls, self._parallel = reasoning, calls, parallel

    @property
    def has_calls(self) -> bool:
        """Whether a tool call has been found so far."""
        return self._calls is not None and self._calls.calls > 0

    def feed(self, text: str, ended: bool = False) -> list[Piece]:
        """Read the next text of the answer, and return the pieces that are certain so far. Text that may be the start
        of a marker is kept for the next call. If `ended`, no text follows, and nothing is kept.
        """
        if self._reasoning is not None:
            read = self._reasoning.feed(text, ended)
        else:
            read = [Piece("content", text)] if text else []
        if self._calls is None:
            return read
        pieces: list[Piece] = []
        for piece in read:
            pieces += self._calls.feed(piece.text) if piece.kind == "content" else [piece]
        if ended:
            pieces += self._calls.finish()
        return [piece for piece in pieces if self._parallel or not piece.index]


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """The formats in which the served model writes tool calls and reasoning.

    - `calls` and `reasoning` are parser classes, or None.
    - `shows_tools` is True if the chat template shows tools to the model.
    - `special` is True if a special token marks tool calls or reasoning. Special tokens must then stay in the text of
      an answer.
    """

    calls: type[ToolCallParser] | None = None
    reasoning: type[ReasoningParser] | None = None
    shows_tools: bool = False
    special: bool = False

    @staticmethod
    def of(tokenizer: Any | None, calls: str = "auto", reasoning: str | None = None) -> AnswerFormats:
        """Return the formats of a model. `calls` and `reasoning` are names of parsers. If `calls` is "auto", the format
        of tool calls is detected from the chat template.
        """
        template = getattr(tokenizer, "chat_template", None) or ""
        text = "\n".join(template.values()) if isinstance(template, dict) else template
        found = detect_parser(text) if calls == "auto" else TOOL_CALL_PARSERS.get(calls)
        thinks = None if reasoning is None else REASONING_PARSERS[reasoning]
        special = set(getattr(tokenizer, "all_special_tokens", ()))
        markers = {*(found.markers if found else ()), *(thinks.markers if thinks else ())}
        return AnswerFormats(found, thinks, TOOLS_VARIABLE.search(text) is not None, bool(special & markers))

    def reasoning_grammar(self, prompt: str, structure: tuple[str, str] | None) -> str | None:
        """Return the grammar of an answer in which reasoning precedes the required structure. Return None in three
        cases: no structure is required, the answer to `prompt` does not begin with reasoning, or the structure is a
        client's own grammar. In the last two cases, the structure applies from the first token on.
        """
        if structure is None or self.reasoning is None or not self.reasoning.opens(prompt):
            return None
        return after_reasoning(*structure)

    def parser(
        self,
        prompt: str,
        structure: tuple[str, str] | None,
        functions: Tools | None,
        forced: bool,
        parallel: bool,
    ) -> AnswerParser | None:
        """Return the parser of one answer to a prompt, or None if the answer is plain content.

        - `structure` is the required structure of the whole answer. The answer may call `functions`.
        - With `forced`, the answer must call at least one function.
        - Without `parallel`, only the first call is returned.
        """
        reasoning = None
        if self.reasoning is not None and (
            structure is None or structure[1].startswith((REASONING, ANSWER + STRICT))
        ):
            reasoning = self.reasoning(self.reasoning.opens(prompt))
        kind = ForcedCalls if forced else self.calls if functions else None
        schemas = {function["name"]: function.get("parameters") or {} for function in functions or ()}
        calls = None if kind is None else kind(schemas)
        return None if reasoning is None and calls is None else AnswerParser(reasoning, calls, parallel)

    def strict_grammar(self, functions: Tools) -> str | None:
        """Return the Lark rule `answer`, in which calls of strict functions follow their schemas. Return None if no
        function is strict, or if schemas cannot be enforced in the format of this model.
        """
        if self.calls is None or self.special or not any(function.get("strict") for function in functions):
            return None
        return self.calls.strict_grammar(functions)

    def tools_warning(self, forced: bool, functions: Tools) -> str | None:
        """Return a warning if the template or parser of this model does not support tool calls, else None. A forced
        call (`forced`) needs no parser of the model, because the server enforces its own format."""
        if not self.shows_tools:
            return "the chat template does not show tools to the model; use --chat-template FILE"
        if self.calls is None and not forced:
            return "tool calls stay text: the format is unknown; use --tool-call-parser NAME"
        is_strict = any(function.get("strict") for function in functions)
        if is_strict and not forced and self.strict_grammar(functions) is None:
            return "strict has no effect with this format of tool calls; use tool_choice required"
        return None
