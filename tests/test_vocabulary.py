"""Plain language: words that the project's vocabulary replaces do not come back in docs, docstrings, help texts, errors and comments."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "kvloom").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

REPLACED = {
    r"nobody|somebody|someone|anybody|everybody|whoever|whom": "name the thing: a request, a sequence, a tier",
    r"who (?:waits|comes|needs|asks|reads|runs|ended|stands|computes)|those who": "waiting request, running request, caller",
    r"(?:is|are|was|were|be|been|what|has) told|tells?": "report, log, count, return",
    r"foresee\w*|foreseen|foresight": "prefetch, or protect a queued prefix",
    r"prospects?": "load plan",
    r"parcels?": "offload batch",
    r"(?<!round )(?<!round-)trips?": "load job",
    r"lies? below|from below|below the pool|lower tiers?": "tier",
    r"gives? way|gave way|giving way": "evict",
    r"land(?:ed|s|ing)": "load, publish",
    r"(?<!in\s)(?<!in-)(?<!\s\s)flights?": "in-flight step",
    r"in line(?! with)": "waiting",
    r"knows (?:no|nothing|none)|does not know": "independent of, does not use",
    r"lent|lends?|lending": "allocate, lease",
    r"(?:make|makes|free|their|its|there is) room": "free pages, free memory",
}
WORDS = {re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE): instead for pattern, instead in REPLACED.items()}


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The strings and comments of a source file, with their lines."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def offences(line: int, text: str) -> list[str]:
    return [
        f"line {line + text[: found.start()].count(chr(10))}: {found.group()!r}: write {instead}"
        for word, instead in WORDS.items()
        for found in word.finditer(text)
    ]


def test_the_words_are_found() -> None:
    said = "What lies below is told to whoever waits.\nTwo trips, one parcel; a round trip is none."
    assert len(offences(1, said)) == 5
    assert offences(1, "a round-trip of an in-flight step") == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src" / "kvloom")))
def test_sources_use_the_vocabulary(path: Path) -> None:
    assert [one for line, text in prose(path) for one in offences(line, text)] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_use_the_vocabulary(path: Path) -> None:
    assert offences(1, path.read_text(encoding="utf-8")) == []
