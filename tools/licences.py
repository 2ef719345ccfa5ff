"""Writes the licences of the packages of requirements.lock into docs/security.md: `python tools/licences.py`.

The licences are those that the installed packages state.
"""

from __future__ import annotations

import re
from collections import defaultdict
from email.message import Message
from importlib import metadata
from pathlib import Path
from typing import cast

__all__ = ["FILE", "licences", "locked_packages", "main", "table"]

ROOT = Path(__file__).parent.parent
FILE = ROOT / "docs" / "security.md"
BEGIN, END = "<!-- licences: written by tools/licences.py -->\n", "<!-- end of licences -->\n"


def locked_packages() -> list[str]:
    """Return the names of the packages in requirements.lock."""
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    return sorted({line.partition("==")[0] for line in lines if re.match("[A-Za-z]", line)}, key=str.lower)


def licence_of(name: str) -> str | None:
    """Return the licence that an installed package states, or None if the package is not installed."""
    try:
        stated = cast(Message, metadata.metadata(name))  # the declared type lacks its methods
    except metadata.PackageNotFoundError:
        return None
    if "License-Expression" in stated:
        return stated["License-Expression"]
    classes = [
        line.rpartition(" :: ")[2] for line in stated.get_all("Classifier") or () if "License ::" in line
    ]
    if not classes:
        classes = [text.partition("\n")[0] for text in stated.get_all("License") or ()]
    return "; ".join(classes) or "not stated"


def licences() -> dict[str, list[str]]:
    """Return the locked packages by licence. Packages that this platform does not install have the licence ""."""
    found: dict[str, list[str]] = defaultdict(list)
    for name in locked_packages():
        found[licence_of(name) or ""].append(name)
    return found


def table() -> str:
    """Return a table of the licences, with their packages."""
    lines = ["| licence | packages |", "|---|---|"]
    for licence, names in sorted(licences().items(), key=lambda item: (-len(item[1]), item[0])):
        lines.append(f"| {licence or 'not installed on this platform'} | {', '.join(names)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Replace the table in the documentation."""
    text = FILE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    FILE.write_text(before + BEGIN + table() + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
