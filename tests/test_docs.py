"""The code in the documents runs as it stands there."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from kvloom.arguments import Parser
from kvloom.cli import COMMANDS
from tools import reference

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in DOCS.glob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_python_examples_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    namespace: dict[str, object] = {}
    for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(example, page, "exec"), namespace)  # noqa: S102
        promised = re.findall(r"^# (stopped at .*)$", example, re.MULTILINE)
        printed = [line for line in capsys.readouterr().out.splitlines() if line]
        assert printed == promised or (not promised and printed and "    print(" in example)


@pytest.mark.parametrize("page", PAGES)
def test_python_of_clients_compiles(page: str) -> None:
    """Examples without a language do not run: they need a package of another project, or a model of the reader."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for example in re.findall(r"^```\n((?:from|import) .*?)^```$", text, re.DOTALL | re.MULTILINE):
        compile(example, page, "exec")


@pytest.mark.parametrize("page", reference.PAGES)
def test_reference_pages_are_current(page: str) -> None:
    written = (DOCS / page).read_text(encoding="utf-8")
    assert written == reference.PAGES[page](), "run `python tools/reference.py`"


@pytest.mark.parametrize("page", PAGES)
def test_links_to_files_of_the_repository_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#\s]+)", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))
    missing = [
        link for link in links if "://" not in link and not ((ROOT / page).parent / link).resolve().exists()
    ]
    assert missing == []


def commands() -> list[str]:
    """Every line of the documents that begins with `kvloom COMMAND`, as one would type it."""
    found: dict[str, None] = {}
    for page in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        blocks = re.findall(
            r"^```(.*?)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        )
        for block in [text for kind, text in blocks if kind in ("", "console", "sh")]:
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True) if "kvloom " in line else []
                if words[:1] == ["kvloom"] and words[1] in COMMANDS:
                    found[shlex.join([word for word in words[1:] if word != "…"])] = None
    return list(found)


@pytest.mark.parametrize("command", commands())
def test_commands_are_understood(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvloom.arguments.shutil.which", str)  # interpreters that are not here
    name, *words = shlex.split(command)
    if name == "bench":
        import_module(f"kvloom.bench.{words[0]}")._parser().parse_args(words[1:])
        return
    parser = Parser()
    import_module(COMMANDS[name][0]).arguments(parser)
    parser.parse_args(words)


def migrations() -> list[tuple[str, str, str]]:
    """The rows of docs/migrating.md: the command of the table, the options of the other system, those of kvloom."""
    found, command = [], ""
    for line in (DOCS / "migrating.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if len(cells) != 3:
            continue
        if header := re.fullmatch(r"kvloom (\w+)", cells[1]):
            command = header[1]
        elif set(cells[0]) != {"-"}:
            found.append((command, cells[0], cells[1]))
    return found


@pytest.mark.parametrize("command", ["serve", "route"])
def test_options_of_other_systems_become_options_that_exist(command: str) -> None:
    parser = Parser()
    import_module(COMMANDS[command][0]).arguments(parser)
    known = {flag for action in parser._actions for flag in action.option_strings}
    rows = [(theirs, ours) for name, theirs, ours in migrations() if name == command]
    assert len(rows) > 3
    for theirs, ours in rows:
        flags = re.findall(r"`(--[a-z-]+)", ours)
        assert flags or ours in ("-", "first argument"), theirs
        assert set(flags) <= known, theirs


def test_options_in_the_sentences_of_the_migration_page_exist() -> None:
    text = (DOCS / "migrating.md").read_text(encoding="utf-8")
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("|"))
    remarks = " ".join(line.strip("|").split("|")[-1] for line in text.splitlines() if line.startswith("| "))
    known: set[str] = set()
    for command in ("serve", "route", "config", "plan"):
        parser = Parser()
        import_module(COMMANDS[command][0]).arguments(parser)
        known |= {flag for action in parser._actions for flag in action.option_strings}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", prose + remarks)) <= known
    for word in re.findall(r"`kvloom (\w+)", text):
        assert word in COMMANDS
