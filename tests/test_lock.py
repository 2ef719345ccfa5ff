"""requirements.lock: one hashed version of every package that `make setup` installs, within what pyproject.toml allows."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
LOCKED = re.split(r"\n(?=[a-zA-Z])", (ROOT / "requirements.lock").read_text(encoding="utf-8"))[1:]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def versions() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for entry in LOCKED:
        name, _, rest = entry.partition("==")
        found.setdefault(canonicalize_name(name), []).append(rest.split()[0])
    return found


@pytest.mark.parametrize("extra", ["", "engine", "serve", "grammar", "dev"])
def test_every_dependency_is_locked_to_a_version_that_the_project_allows(extra: str) -> None:
    lines = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    locked = versions()
    for requirement in map(Requirement, lines):
        name = canonicalize_name(requirement.name)
        if name == "torch":  # `make setup` installs it first, by name
            continue
        assert name in locked, f"{name} is not in requirements.lock: run `make lock`"
        assert any(requirement.specifier.contains(version) for version in locked[name])


def test_every_locked_package_has_hashes() -> None:
    assert len(LOCKED) > 50
    assert not [entry.split()[0] for entry in LOCKED if "--hash=sha256:" not in entry]


def test_the_lock_names_no_registry() -> None:
    assert not [entry for entry in LOCKED if "://" in entry]


def test_the_licence_of_every_locked_package_is_listed() -> None:
    text = (ROOT / "docs/security.md").read_text(encoding="utf-8")
    table = text.partition("<!-- licences")[2].partition("<!-- end of licences")[0]
    listed = {canonicalize_name(name) for name in re.findall(r"[\w.-]+(?=,| \|\n)", table)}
    assert not versions().keys() - listed, "run `python tools/licences.py`"


def test_the_bill_of_materials_adds_nothing_to_the_locked_environment() -> None:
    """Its tool has no hashes: an own environment keeps it, and its packages, out of the bill."""
    if shutil.which("make") is None:
        pytest.skip("no make: install GNU make")
    done = subprocess.run(
        ["make", "--dry-run", "sbom"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    tool = [line for line in done.stdout.splitlines() if "cyclonedx-bom" in line]
    assert tool
    assert not [line for line in tool if ".venv/" in line]
