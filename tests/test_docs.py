"""The code in the documents runs as it stands there."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from kvloom.arguments import Parser
from kvloom.cli import COMMANDS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


@pytest.mark.parametrize("page", sorted(p.name for p in DOCS.glob("*.md")))
def test_python_examples_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    namespace: dict[str, object] = {}
    for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(example, page, "exec"), namespace)  # noqa: S102
        promised = re.findall(r"^# (stopped at .*)$", example, re.MULTILINE)
        assert [line for line in capsys.readouterr().out.splitlines() if line] == promised


def commands() -> list[str]:
    """Every line of the documents that begins with `kvloom COMMAND`, as one would type it."""
    found: dict[str, None] = {}
    for page in (ROOT / "README.md", *sorted(DOCS.glob("*.md"))):
        blocks = re.findall(
            r"^```(.*?)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        )
        for block in [text for kind, text in blocks if kind in ("", "console")]:
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True) if "kvloom " in line else []
                if words[:1] == ["kvloom"] and words[1] in COMMANDS:
                    found[shlex.join(words[1:])] = None
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
