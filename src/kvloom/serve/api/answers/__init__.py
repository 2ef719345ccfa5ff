"""Splits an answer into reasoning, content and tool calls. The text of the answer may arrive in pieces.

    pieces.py          Piece: a part of an answer; TextSource: text that arrives in pieces
    tool_calls.py      one parser for each format of tool calls, and their registry
    reasoning.py       one parser for each format of reasoning, and their registry
    tool_choice.py     checks of tools; the grammar that forces a call
    blocks.py          Blocks: pieces grouped into blocks that open and close
    answer_parser.py   AnswerFormats: the formats of a model; AnswerParser: one answer

The same parsers read streams and whole answers, so a streamed answer is split in the same way as a whole answer.
"""

from __future__ import annotations

from .answer_parser import AnswerFormats, AnswerParser
from .blocks import Block, BlockChange, Blocks
from .pieces import Piece
from .reasoning import ANSWER, REASONING_PARSERS, last_marker
from .tool_calls import TOOL_CALL_PARSERS
from .tool_choice import check_tools, forced_functions, forced_grammar

__all__ = [
    "ANSWER",
    "REASONING_PARSERS",
    "TOOL_CALL_PARSERS",
    "AnswerFormats",
    "AnswerParser",
    "Block",
    "BlockChange",
    "Blocks",
    "Piece",
    "check_tools",
    "forced_functions",
    "forced_grammar",
    "last_marker",
]
