"""The tables about ranks in docs/scale.md are those that the tool prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tools.rank_cost import context_lines, expert_lines, tensor_lines

PAGE = Path(__file__).parent.parent.parent / "docs" / "scale.md"


@pytest.mark.parametrize("lines", [tensor_lines, expert_lines, context_lines])
def test_the_page_has_the_figures_of_the_model(lines: Callable[[], Iterator[str]]) -> None:
    assert "\n".join(lines()) in PAGE.read_text(encoding="utf-8")
