"""Runs LMCache's workload `rag-qa-quality` with documents that kvloom can reuse: each passage is sent as a content part
of type `document`. All arguments are those of `lmcache`:

    build/lmcache/bin/python tools/lmcache_rag.py bench engine --workload rag-qa-quality --engine-url … --model … …

The tool also lets LMCache pad documents with fewer different words, because it needs 4,096 words of one token each, and a
small tokenizer has fewer.
"""

from __future__ import annotations

import sys

from lmcache.cli.commands.bench.engine_bench.quality import alignment, prompts
from lmcache.cli.commands.bench.engine_bench.workloads import rag_qa_quality
from lmcache.cli.main import main

__all__ = ["messages"]

FILLER_WORDS = 1000


def messages(system: str, passages: list[str], end: str = "") -> list[dict[str, object]]:
    """Return one message of the user: the instructions, a document for each passage, and the question."""
    parts = [{"type": "text", "text": system}]
    parts += [{"type": "document", "text": passage} for passage in passages]
    if end:
        parts.append({"type": "text", "text": end})
    return [{"role": "user", "content": parts}]


def _question(system: str, passages: list[str], question: str) -> list[dict[str, object]]:
    return messages(system, passages, prompts.QA_QUESTION_TEMPLATE.format(question=question))


if __name__ == "__main__":
    alignment._FILLER_VOCAB_SIZE = FILLER_WORDS
    rag_qa_quality.compose_qa_messages = _question
    rag_qa_quality.compose_store_messages = messages
    sys.exit(main())
