"""Writes the tables of refused combinations and of tested pairs into docs/combinations.md: `python
tools/combinations_table.py`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.engine.feature_matrix import EXCLUDED, FACTORS, WHAT

from kvloom.combinations import REFUSED

__all__ = ["FILE", "main", "matrix_tables", "table"]

FILE = Path(__file__).parent.parent / "docs" / "combinations.md"


def table() -> str:
    """Return one line per refused combination: where it is checked, the two features, and the error."""
    lines = ["| checked for each | feature | not with | error |", "|---|---|---|---|"]
    for one in REFUSED.values():
        lines.append(f"| {one.where} | {one.feature} | {one.other} | {_text(one.text)} |")
    return "\n".join(lines) + "\n"


def matrix_tables() -> str:
    """Return the features that are tested in pairs, and the pairs that are refused instead."""
    lines = ["| feature | values | meaning |", "|---|---|---|"]
    for name, levels in FACTORS.items():
        lines.append(f"| {name} | {', '.join(levels)} | {WHAT[name]} |")
    lines += ["", "These pairs are refused. Tests check each error.", ""]
    lines += ["| pair | error |", "|---|---|"]
    pairs: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    order = list(FACTORS)
    for pair, key in EXCLUDED.items():
        (a, x), (b, y) = sorted(pair, key=lambda level: order.index(level[0]))
        pairs.setdefault((a, b, key), {}).setdefault(x, []).append(y)
    for (a, b, key), found in pairs.items():
        first, second = ", ".join(found), ", ".join(next(iter(found.values())))
        lines.append(f"| {a} {first}; {b} {second} | {_text(REFUSED[key].text)} |")
    return "\n".join(lines) + "\n"


def _text(error: str) -> str:
    return re.sub(r"\{\w+(!r)?\}", "…", error).replace("|", "\\|")


def main() -> int:
    text = FILE.read_text(encoding="utf-8")
    for name, content in (("refused", table()), ("matrix", matrix_tables())):
        place = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)", re.DOTALL)
        text = place.sub(content.replace("\\", r"\\"), text)
    FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
