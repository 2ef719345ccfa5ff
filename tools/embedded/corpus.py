"""The text that the embedded models learn from: sources and documentation of Python's standard library.

All of it is part of the Python distribution, under the PSF licence. Reads folders on this machine and needs no network.
Knows documents, not tokens.

| kind | from                                                                               |
|------|------------------------------------------------------------------------------------|
| lib  | the modules                                                                        |
| test | the regression tests (`test` and `tests` folders), more than half of what there is |
| doc  | reStructuredText sources of the manual                                             |
| chat | questions and answers cut from lib and doc: a docstring asks, its function answers |
"""

from __future__ import annotations

import ast
import hashlib
import random
import re
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["KINDS", "Document", "Turn", "gather", "packages", "sample", "stdlib"]

KINDS = ("lib", "doc", "test", "chat")
HELD_OUT = 50
"""One file in so many is held out, by the hash of its path: in every version of Python the same ones."""
NOVEL = 0.25
"""A file is kept if so much of its lines was in none before it: versions of Python share most of theirs."""
LEAK = 0.2
"""A file that shares so much of its lines with those held out (it was renamed, say) is not learned from."""
LINE = 12
"""Shorter lines (`return self`) say nothing about novelty."""
LONGEST_ANSWER = 48

_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "pydoc_data", "encodings", "data"}
_TESTS = {"test", "tests", "idle_test"}


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side of a conversation says."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Document:
    """One file, or one conversation (`turns`); `held_out` files are measured on and never learned."""

    path: str
    kind: str
    text: str
    held_out: bool
    turns: tuple[Turn, ...] = ()


def stdlib() -> Path:
    """The standard library of the Python that runs this."""
    return Path(sysconfig.get_paths()["stdlib"])


def packages() -> Path:
    """The folder of installed packages of the Python that runs this."""
    return Path(sysconfig.get_paths()["purelib"])


def sample(folder: Path, size: int, seed: int = 0) -> list[Document]:
    """Return modules of a folder, in random order, until they have `size` bytes. Each is of the kind "lib", and none is
    held out. Files that a person did not write (tables, data) are skipped."""
    files = sorted(path for path in folder.rglob("*.py") if not path.is_symlink())
    random.Random(seed).shuffle(files)
    found: list[Document] = []
    for path in files:
        if size <= 0:
            break
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        if text and _is_readable(text):
            found.append(Document(path.relative_to(folder).as_posix(), "lib", text, held_out=False))
            size -= len(text.encode())
    return found


def gather(folders: Iterable[Path]) -> list[Document]:
    """Documents of every folder (a standard library, or a manual's sources), the best version of Python first: what a
    later folder mostly repeats is left out. Raises ValueError for a folder with neither."""
    seen: set[int] = set()
    documents: list[Document] = []
    for folder in folders:
        documents += [doc for doc in _read(folder) if _is_novel(doc.text, seen)]
    held = {line for doc in documents if doc.held_out for line in _lines(doc.text)}
    documents = [doc for doc in documents if doc.held_out or not _leaks(doc.text, held)]
    talks = [talk for doc in documents if not doc.held_out for talk in _conversations(doc)]
    return documents + talks


def _read(folder: Path) -> Iterator[Document]:
    files = sorted(path for path in folder.rglob("*") if path.name.endswith((".py", ".rst", ".rst.txt")))
    if not files:
        raise ValueError(
            f"{folder} holds no .py, .rst or .rst.txt file: give a standard library or a manual's sources"
        )
    for path in files:
        relative = path.relative_to(folder)
        if path.is_symlink() or _SKIPPED & set(relative.parts):
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        if not _is_readable(text):
            continue
        code = path.name.endswith(".py")
        kind = ("test" if _TESTS & set(relative.parts) else "lib") if code else "doc"
        name = relative.as_posix().removesuffix(".txt")
        digest = hashlib.sha256(name.encode()).digest()
        yield Document(name, kind, text, held_out=int.from_bytes(digest[:4], "big") % HELD_OUT == 0)


def _is_readable(text: str) -> bool:
    """Whether someone wrote this: tables, data and stubs are not text."""
    lines = text.splitlines()
    return (
        len(text) >= 400
        and "\0" not in text
        and max(map(len, lines)) <= 1000
        and text.count("\\x") + text.count("\\u") < 2 * len(lines)
    )


def _lines(text: str) -> list[int]:
    return [hash(line) for raw in text.splitlines() if len(line := raw.strip()) >= LINE]


def _leaks(text: str, held: set[int]) -> bool:
    lines = _lines(text)
    return sum(line in held for line in lines) > LEAK * len(lines)


def _is_novel(text: str, seen: set[int]) -> bool:
    lines = _lines(text)
    new = sum(line not in seen for line in lines)
    seen.update(lines)
    return bool(lines) and new >= NOVEL * len(lines)


# Conversations: what gives the roles' tokens a meaning.


def _conversations(doc: Document) -> Iterator[Document]:
    pairs = {"lib": _functions, "doc": _descriptions}.get(doc.kind)
    if pairs is None:
        return
    for number, (question, answer) in enumerate(pairs(doc.text)):
        turns = (Turn("user", question), Turn("assistant", answer))
        yield Document(f"{doc.path}#{number}", "chat", "", False, turns)


def _functions(text: str) -> Iterator[tuple[str, str]]:
    """Each documented function of a module: what its docstring promises, and its source."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # written for another version of Python than this one
        return
    lines = text.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
            continue
        said = ast.get_docstring(node)
        if said is None or node.end_lineno is None or node.end_lineno - node.lineno > LONGEST_ANSWER:
            continue
        promise = " ".join(said.split("\n\n")[0].split())
        if not 20 <= len(promise) <= 300:
            continue
        forms = (
            "Write a Python function `{}`. {}",
            "Write `{}` in Python: {}",
            "Define a function `{}`.\n{}",
        )
        question = forms[len(promise) % len(forms)].format(node.name, promise)
        yield question, textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))


_DIRECTIVE = re.compile(
    r"^\.\. (?:function|class|exception|method|attribute|data):: (?P<name>[^\n]+)\n"
    r"(?:[ ]+(?::|[a-z_]+\()[^\n]*\n)*\n(?P<body>(?:[ ]{3}[^\n]*\n|\n)+)",
    re.MULTILINE,
)


def _descriptions(text: str) -> Iterator[tuple[str, str]]:
    """What the manual describes: its signature asks, the first paragraphs answer."""
    for found in _DIRECTIVE.finditer(text):
        body = textwrap.dedent(found["body"]).split("\n.. ")[0].strip()
        while len(body) > 800 and "\n\n" in body:
            body = body.rpartition("\n\n")[0]
        if 40 <= len(body) <= 800:
            forms = ("What does `{}` do?", "Explain `{}`.", "What is `{}` for?")
            yield forms[len(body) % len(forms)].format(found["name"].strip()), body
