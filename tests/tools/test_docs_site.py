"""The site of the documentation: it builds without a warning, has every page, and loads nothing from other hosts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
MKDOCS = Path(os.environ.get("KVLOOM_MKDOCS", ROOT / "build" / "docs" / "bin" / "mkdocs"))
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]

needs_mkdocs = pytest.mark.skipif(
    not MKDOCS.exists(), reason="no MkDocs: `make docs` installs it in build/docs"
)


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(MKDOCS), "build", "--strict", "--site-dir", str(site)],
        cwd=root,
        env={"PATH": os.environ["PATH"], "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
@needs_mkdocs
def test_the_site_builds_without_a_warning_and_loads_nothing_from_other_hosts(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path / "site")
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    site = tmp_path / "site"
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / f"{page.stem}.html").exists(), page.name
    for name in ("index", "CONTRIBUTING", "CHANGELOG", "CODE_OF_CONDUCT", "SECURITY"):
        assert (site / f"{name}.html").exists()
    loads = re.compile(
        r"<(?:script|img|source|iframe)\b[^>]*\bsrc(?:set)?=[\"']?(?:https?:)?//|<link\b[^>]*href=[\"']?(?:https?:)?//"
    )
    for page in site.rglob("*.html"):
        assert not loads.findall(page.read_text(encoding="utf-8")), page.name
    styles = "".join(file.read_text(encoding="utf-8") for file in site.rglob("*.css"))
    assert not re.findall(r"url\([\"']?(?:https?:)?//|@import", styles)
    images = re.findall(r"src(?:set)?=\"?(images/[\w.-]+)", (site / "index.html").read_text(encoding="utf-8"))
    assert images
    assert all((site / image).exists() for image in images)


@pytest.mark.slow
@needs_mkdocs
@pytest.mark.parametrize("target", ["nothing.md", "scale.md#nothing", "../nothing.md"])
def test_a_broken_link_fails_the_build(target: str, tmp_path: Path) -> None:
    """A small site with the project's settings."""
    (tmp_path / "docs").mkdir()
    for name in ("docs/scale.md", *(page.name for page in ROOT.glob("*.md"))):
        (tmp_path / name).write_text("# A page\n", encoding="utf-8")
    (tmp_path / "docs" / "scale.md").write_text(f"# A page\n\n[a link]({target})\n", encoding="utf-8")
    (tmp_path / "tools").mkdir()
    for path in (Path("tools/docs_site.py"), Path("src/kvloom/serve/dashboard/page/icon.svg")):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:\n  - Start")[0]
    pages = "nav: [index.md, scale.md, CONTRIBUTING.md, CODE_OF_CONDUCT.md, SECURITY.md, CHANGELOG.md]\n"
    (tmp_path / "mkdocs.yml").write_text(settings + pages, encoding="utf-8")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert target.removeprefix("../") in done.stderr
    (tmp_path / "docs" / "scale.md").write_text("# A page\n", encoding="utf-8")
    assert build(tmp_path, tmp_path / "site").returncode == 0


def test_the_menu_has_every_page() -> None:
    menu = re.findall(r"^ +- ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(menu) == len(set(menu))
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    beside = {"index.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md", "CHANGELOG.md"}
    assert set(menu) == pages | beside


def test_a_list_begins_after_an_empty_line() -> None:
    """GitHub accepts a list that follows a sentence, MkDocs prints it as one paragraph."""
    wrong = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        wrong += [
            f"{page.name}: {found}"
            for found in re.findall(r"^[A-Za-z*`][^\n]*\n(?:[-*] |1\. )[^\n]*", text, re.MULTILINE)
        ]
    assert not wrong


def test_the_makefile_and_the_extra_have_one_version_of_mkdocs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (wanted,) = project["optional-dependencies"]["docs"]
    assert f"MKDOCS ?= {wanted}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
