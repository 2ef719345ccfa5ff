"""The formats in which models write reasoning before the answer. The names are vLLM's.

deepseek_r1   reasoning</think>answer; the first <think> may be in the answer, in the prompt, or missing
qwen3         <think>reasoning</think>answer; the first <think> may be in the answer or in the prompt. Without it
              there is no reasoning
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod

from .pieces import Piece, partial_marker
from .tool_choice import JSON_SPACING

__all__ = ["ANSWER", "REASONING", "REASONING_PARSERS", "ReasoningParser", "after_reasoning", "last_marker"]

BEGIN, END = "<think>", "</think>"
ANSWER = "start: answer\n"
"""The first line of the server's own grammars. `after_reasoning` can put reasoning before such a grammar."""
REASONING = f'''start: reasoning SPACE answer
reasoning[suffix="{END}"]: /(.|\\n)*/
SPACE: /\\n{{0,2}}/
'''
SLASH = re.compile(r"\\.|/|\n", re.DOTALL)


class ReasoningParser(ABC):
    """Splits one answer into reasoning and content. If `is_open`, the answer begins with reasoning even if it does not
    begin with <think>.
    """

    markers = (BEGIN, END)

    def __init__(self, is_open: bool) -> None:
        self._is_open = is_open
        self._state = "start"
        self._began = False
        self._rest = ""  # unread: whitespace, or the start of a marker

    @classmethod
    @abstractmethod
    def opens(cls, prompt: str) -> bool:
        """Return whether the answer to this prompt begins with reasoning."""

    def feed(self, text: str, ended: bool = False) -> list[Piece]:
        """Read the next text of the answer, and return the pieces that are certain so far. Text that may be the start
        of a marker is kept for the next call. If `ended`, no text follows, and nothing is kept.
        """
        self._rest += text
        pieces: list[Piece] = []
        if self._state == "start":
            self._start(ended)
        if self._state == "reasoning":
            self._reasoning(pieces, ended)
        if self._state == "space":  # whitespace between reasoning and answer
            self._rest = self._rest.lstrip()
            self._state = "answer" if self._rest else "space"
        if self._state == "answer" and self._rest:
            pieces.append(Piece("content", self._rest))
            self._rest = ""
        return pieces

    def _start(self, ended: bool) -> None:
        begin = self._rest.lstrip()
        if begin.startswith(BEGIN):
            self._state, self._rest = "reasoning", begin[len(BEGIN) :]
        elif ended or not BEGIN.startswith(begin):
            self._state = "reasoning" if self._is_open else "answer"
            self._rest = begin if self._is_open else self._rest

    def _reasoning(self, pieces: list[Piece], ended: bool) -> None:
        if not self._began:
            self._rest = self._rest.lstrip()
        before, end, after = self._rest.partition(END)
        if end:
            self._state, self._rest = "space", after
            before = before.rstrip()
        else:
            certain = (
                before.rstrip() if ended else before[: len(before) - partial_marker(before, END)].rstrip()
            )
            before, self._rest = certain, before[len(certain) :]
        if before:
            self._began = True
            pieces.append(Piece("reasoning", before))


class DeepSeekReasoning(ReasoningParser):
    @classmethod
    def opens(cls, prompt: str) -> bool:
        return not prompt.rstrip().endswith(END)


class QwenReasoning(ReasoningParser):
    @classmethod
    def opens(cls, prompt: str) -> bool:
        return prompt.rstrip().endswith(BEGIN)


REASONING_PARSERS: dict[str, type[ReasoningParser]] = {
    "deepseek_r1": DeepSeekReasoning,
    "qwen3": QwenReasoning,
}


def last_marker(message: str) -> str:
    """Return <think> if a message ends inside reasoning, otherwise </think>. An answer that continues the message
    begins inside reasoning if the marker is <think>.
    """
    return BEGIN if message.rfind(BEGIN) > message.rfind(END) else END


def after_reasoning(kind: str, text: str) -> str | None:
    """Return a grammar in Lark notation for reasoning, followed by an answer with the required structure. The structure
    has the form `kind` ("json_schema", "regex" or "grammar") and is given as `text`.

    Return None for a client's own grammar, because its rules may have the same names as the rules for reasoning.
    """
    if kind == "json_schema":
        schema = json.loads(text)
        schema = {"x-guidance": JSON_SPACING, **schema} if isinstance(schema, dict) else schema
        return f"{REASONING}answer: %json {json.dumps(schema)}\n"
    if kind == "regex":
        escaped = SLASH.sub(lambda found: {"/": "\\/", "\n": "\\n"}.get(found[0], found[0]), text)
        return f"{REASONING}answer: /{escaped}/\n"
    return REASONING + text.removeprefix(ANSWER) if text.startswith(ANSWER) else None
