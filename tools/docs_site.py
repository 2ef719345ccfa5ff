"""A hook of MkDocs for the site of the documentation (mkdocs.yml). The pages work on GitHub as they are.

It adds the pages beside docs/ to the site, README.md as the first page. In these pages links lose their `docs/`, and in
pages of docs/ they lose their `../`. Sources that a page links become files of the site.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "index.md"} | {
    name: name for name in ("CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md", "CHANGELOG.md")
}
"""Pages beside docs/, with their names in the site."""
ICON = ROOT / "src" / "kvloom" / "serve" / "dashboard" / "page" / "icon.svg"
_FROM_ROOT = re.compile(r'(\]\(|src="|srcset=")docs/')
_FROM_DOCS = re.compile(r"\]\(\.\./([^)#\s]+)")


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages beside docs/, the icon, and the sources that pages link. Return the files of the site."""
    from mkdocs.structure.files import File

    for name, target in PAGES.items():
        text = _FROM_ROOT.sub(r"\1", (ROOT / name).read_text(encoding="utf-8"))
        files.append(File.generated(config, target, content=text))
    files.append(File.generated(config, "images/icon.svg", content=ICON.read_bytes()))
    linked = {
        name
        for page in (ROOT / "docs").glob("*.md")
        for name in _FROM_DOCS.findall(page.read_text(encoding="utf-8"))
        if name not in PAGES
    }
    for name in sorted(linked):
        files.append(File.generated(config, name, content=(ROOT / name).read_bytes()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the text of a page with links that fit the site."""
    return _FROM_DOCS.sub(lambda found: f"]({PAGES.get(found[1], found[1])}", markdown)
