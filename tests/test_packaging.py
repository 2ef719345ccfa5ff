"""The wheel: its tag, its models and its size; and shell completion, which needs a dependency of the package."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from kvloom.cli import COMMANDS
from kvloom.completion import full_parser

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MAX_WHEEL_BYTES = 20 << 20


def test_the_wheels_tag_is_that_of_its_libraries() -> None:
    tag = PROJECT["tool"]["distutils"]["bdist_wheel"]["py-limited-api"]
    assert PROJECT["project"]["requires-python"] == f">=3.{tag.removeprefix('cp3')}"
    for extension in PROJECT["tool"]["setuptools"]["ext-modules"]:
        assert extension["py-limited-api"]
        assert extension["define-macros"] == [
            ["Py_LIMITED_API", f"0x03{int(tag.removeprefix('cp3')):02X}0000"]
        ]


def test_the_package_has_the_default_model_and_no_large_others() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["kvloom"]
    package = ROOT / "src" / "kvloom"
    files = {file for pattern in patterns for file in package.glob(pattern)}
    assert package / "models/embedded/llama/model.safetensors" in files
    assert sum(file.stat().st_size for file in files) < MAX_WHEEL_BYTES


@pytest.mark.slow
def test_the_wheel_is_one_for_all_versions(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info", "hybrid")
    shutil.copytree(ROOT / "src", source / "src", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    code = f"from setuptools.build_meta import build_wheel; print(build_wheel({str(tmp_path)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert re.fullmatch(r"kvloom-[\d.]+-cp311-abi3-\w+\.whl", wheel.name)
    assert wheel.stat().st_size < MAX_WHEEL_BYTES
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    with_path = [name for name in names if str(tmp_path).encode() in archive.read(name)]
    assert not with_path, "the wheel depends on the folder in which it was built"
    assert {str(Path("kvloom") / file) for file in data_files()} <= names
    for folder in ("core", "kernels", "tiers"):
        assert [name for name in names if re.fullmatch(rf"kvloom/{folder}/_\w+\.abi3\.so", name)], folder


def data_files() -> list[Path]:
    """Files of the package that are neither sources nor built, except the embedded model for checkouts alone."""
    tracked = subprocess.run(
        ["git", "ls-files", "src/kvloom"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    ).stdout.split()
    inside = [Path(name).relative_to("src/kvloom") for name in tracked]
    return [file for file in inside if file.suffix not in (".py", ".c", ".h") and "hybrid" not in file.parts]


def test_every_data_file_is_in_the_package() -> None:
    package = ROOT / "src" / "kvloom"
    if not (ROOT / ".git").exists():
        pytest.skip("the list of files comes from git, and this is no checkout")
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["kvloom"]
    packed = {file.relative_to(package) for pattern in patterns for file in package.glob(pattern)}
    found = set(data_files())
    wanted = (
        "models/embedded/draft/config.json",
        "serve/grafana.json",
        "serve/dashboard/page/index.html",
        "py.typed",
    )
    assert {Path(name) for name in wanted} <= found
    assert found - packed == set(), "add a pattern to [tool.setuptools.package-data]"


def test_the_parser_of_completion_has_every_command() -> None:
    with pytest.raises(SystemExit):
        full_parser().parse_args(["nothing"])
    parsed = full_parser().parse_args(["plan", "llama-3-8b", "--context", "5"])
    assert (parsed.command, parsed.context) == ("plan", 5)
    assert all(f"    {name}" in full_parser().format_help() for name in COMMANDS)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.few(1)
def test_completion_scripts(shell: str) -> None:
    pytest.importorskip("shtab")
    done = subprocess.run(
        [sys.executable, "-m", "kvloom.cli", "completion", shell], capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "--log-format" in done.stdout.replace("-l log-format", "--log-format")
    if shell != "bash":
        return
    asks = "COMP_WORDS=(kvloom serve --log-f); COMP_CWORD=2; _shtab_kvloom; echo ${COMPREPLY[@]}"
    shown = subprocess.run(
        ["bash", "-c", f"{done.stdout}\n{asks}"], capture_output=True, text=True, timeout=30, check=False
    )
    assert shown.stdout.split() == ["--log-format"]
