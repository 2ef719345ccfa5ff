"""The table of refused combinations is complete: checks take their errors from it, and the docs list all of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

import pytest

from kvloom.combinations import REFUSED
from tools import combinations_table

SOURCE = Path(__file__).parent.parent / "src" / "kvloom"
CHECKED = (
    "engine/config.py",
    "engine/engine.py",
    "engine/llm.py",
    "engine/sampling/params.py",
    "engine/execution/kv_memory.py",
    "serve/api/request_fields.py",
    "serve/serve_command.py",
    "serve/server_options.py",
)
"""Files that check settings and fields of requests."""
OWNERS = {"self", "fields", "params", "config", "args"}
BOUND = re.compile(
    r"\b(must|needs?|requires?|exceeds?|allows|differ|too small|outside|no such|already|does not fit)\b"
)
"""Words of an error that states a limit, or another setting that is missing: no combination is refused."""


def calls() -> Iterator[tuple[Path, ast.Call]]:
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "refused(" in text and path.name != "combinations.py":
            for node in ast.walk(ast.parse(text)):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Name)
                    and node.func.id == "refused"
                ):
                    yield path, node


def test_the_docs_have_the_generated_tables() -> None:
    text = combinations_table.FILE.read_text(encoding="utf-8")
    for table in (combinations_table.table(), combinations_table.matrix_tables()):
        assert table in text, "run: .venv/bin/python tools/combinations_table.py"


def test_every_entry_is_an_error_of_a_check_and_has_its_values() -> None:
    used = set()
    for path, call in calls():
        key = call.args[0]
        assert isinstance(key, ast.Constant), f"{path}:{call.lineno}: the key must be a constant"
        used.add(key.value)
        needed = {name for _, name, _, _ in Formatter().parse(REFUSED[str(key.value)].text) if name}
        assert {word.arg for word in call.keywords} == needed, f"{path}:{call.lineno}"
    assert used == set(REFUSED)


def settings_of(node: ast.expr) -> set[str]:
    """The settings that a condition reads."""
    return {
        found.attr
        for found in ast.walk(node)
        if isinstance(found, ast.Attribute) and isinstance(found.value, ast.Name) and found.value.id in OWNERS
    }


def unlisted(text: str) -> list[str]:
    """Errors below a condition on two settings that are neither of the table nor a limit."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.If) or len(settings_of(node.test)) < 2:
            continue
        for raised in (one for one in node.body if isinstance(one, ast.Raise) and one.exc is not None):
            if "refused(" not in ast.unparse(raised) and not BOUND.search(ast.unparse(raised)):
                found.append(f"line {raised.lineno}: {ast.unparse(raised)}")
    return found


@pytest.mark.parametrize("file", CHECKED)
def test_a_check_of_two_settings_takes_its_error_from_the_table(file: str) -> None:
    assert not unlisted((SOURCE / file).read_text(encoding="utf-8"))


def test_an_unlisted_combination_is_found() -> None:
    check = "if self.a and self.b:\n    raise ValueError({!r})"
    assert unlisted(check.format("a and b exclude each other"))
    assert not unlisted(check.format("a must be below b"))
