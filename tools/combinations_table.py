"""Writes the table of refused combinations into docs/combinations.md: `python tools/combinations_table.py`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from kvloom.combinations import REFUSED

__all__ = ["FILE", "main", "table"]

FILE = Path(__file__).parent.parent / "docs" / "combinations.md"


def table() -> str:
    """Return one line per refused combination: where it is checked, the two features, and the error."""
    lines = ["| checked for each | feature | not with | error |", "|---|---|---|---|"]
    for one in REFUSED.values():
        text = re.sub(r"\{\w+(!r)?\}", "…", one.text).replace("|", "\\|")
        lines.append(f"| {one.where} | {one.feature} | {one.other} | {text} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    text = FILE.read_text(encoding="utf-8")
    place = re.compile(r"(?<=<!-- refused -->\n).*?(?=<!-- /refused -->)", re.DOTALL)
    FILE.write_text(place.sub(lambda _: table(), text), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
