"""The code in the documents runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("page", sorted(p.name for p in DOCS.glob("*.md")))
def test_python_examples_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    namespace: dict[str, object] = {}
    for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(example, page, "exec"), namespace)  # noqa: S102
        promised = re.findall(r"^# (stopped at .*)$", example, re.MULTILINE)
        assert [line for line in capsys.readouterr().out.splitlines() if line] == promised
