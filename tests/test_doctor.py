"""`kvloom doctor` in processes that have everything, that lack a package, and that lack the native extensions."""

import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from kvloom.doctor.hardware import EXTENSIONS
from kvloom.doctor.limits import inspect_limits
from kvloom.doctor.packages import EXTRAS, Package, in_range, package_problems, packages

SOURCE = Path(__file__).parent.parent / "src"
NOTHING_HEAVY = "assert not {'transformers', 'triton', 'uvicorn', 'ray', 'vllm'} & {*sys.modules}; "


def doctor(
    *words: str, hidden: tuple[str, ...] = (), check: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process that cannot import `hidden`. `check` runs after the command."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({hidden!r})); from kvloom.cli import main; "
        f"code = main(['doctor', *{words!r}]); {check}sys.exit(code)"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


def problems(done: subprocess.CompletedProcess[str], about: str) -> list[dict[str, Any]]:
    return [one for one in json.loads(done.stdout)["problems"] if about in one["what"]]


def test_with_everything_it_is_ready_and_imports_nothing_heavy() -> None:
    done = doctor("--json", check=NOTHING_HEAVY)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["ready"] is True
    assert not [one for one in found["problems"] if one["blocks"]]
    engine = next(one for one in found["extras"] if one["name"] == "engine")
    assert engine["installed"]
    assert {one["name"]: one["state"] for one in engine["packages"]}["torch"] == "ok"


def test_the_json_has_its_schema() -> None:
    found = json.loads(doctor("--json").stdout)
    shape = {
        "version": str, "folder": str, "python": str, "platform": str, "ready": bool,
        "extras": list, "gpus": list, "kernels": list, "limits": list, "problems": list,
    }  # fmt: skip
    assert {name: type(value) for name, value in found.items()} == shape
    rows = {
        "extras": {"name", "adds", "installed", "packages"},
        "gpus": {"name", "memory", "free_memory", "capability"},
        "kernels": {"name", "used", "detail"},
        "limits": {"name", "value", "unit", "detail", "shown"},
        "problems": {"what", "fix", "blocks"},
    }
    for name, keys in rows.items():
        assert all(row.keys() == keys for row in found[name]), name
    assert [one["name"] for one in found["extras"]] == [name or "kvloom" for name in EXTRAS]
    for extra in found["extras"]:
        assert extra["packages"], extra["name"]
        assert all(one.keys() == {"name", "version", "supported", "state"} for one in extra["packages"])
    kernels = {one["name"] for one in found["kernels"]}
    assert {"Triton", "FlashAttention-3", "FlashInfer", "cuDNN"} | {
        part for part, _ in EXTENSIONS.values()
    } <= kernels
    assert {"open files", "locked memory", "free disk"} <= {one["name"] for one in found["limits"]}


@pytest.mark.parametrize(
    "needed",
    [
        {"uvicorn": "serve"},
        pytest.param({"torch": "engine"}, marks=pytest.mark.slow),
        pytest.param(
            {
                "msgspec": "serve",
                "transformers": "engine",
                "jinja2": "serve",
                "starlette": "serve",
                "httptools": "serve",
                "safetensors": "engine",
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=", ".join,
)
def test_needed_packages_that_are_missing_end_with_one(needed: dict[str, str]) -> None:
    done = doctor("--json", hidden=tuple(needed))
    assert (done.returncode, done.stderr) == (1, "")
    assert json.loads(done.stdout)["ready"] is False
    for module, extra in needed.items():
        (found,) = (one for one in problems(done, "not installed") if module in one["what"])
        assert found["fix"] == f"pip install 'kvloom[{extra}]'"
        assert ("kvloom generate" in found["blocks"]) == (extra == "engine")


@pytest.mark.slow
def test_the_text_names_the_remedy() -> None:
    shown = doctor(hidden=("uvicorn",))
    assert shown.returncode == 1
    assert "error (kvloom serve will not work): uvicorn is not installed" in shown.stdout
    assert "fix: pip install 'kvloom[serve]'" in shown.stdout


@pytest.mark.slow
def test_an_optional_package_may_be_missing() -> None:
    done = doctor("--json", hidden=("llguidance", "PIL", "uvloop"))
    assert done.returncode == 0
    extras = {one["name"]: one["installed"] for one in json.loads(done.stdout)["extras"]}
    assert not extras["grammar"]
    assert not extras["vision"]
    assert [one["blocks"] for one in problems(done, "uvloop")] == [[]]


@pytest.mark.slow
def test_without_the_extensions_it_names_what_replaces_them(tmp_path: Path) -> None:
    shutil.copytree(
        SOURCE, tmp_path / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__", "hybrid", "*.egg-info")
    )
    done = doctor("--json", PYTHONPATH=str(tmp_path / "src"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["folder"] == str(tmp_path / "src" / "kvloom")
    kernels = {one["name"]: one for one in found["kernels"]}
    for module, (part, fall_back) in EXTENSIONS.items():
        assert kernels[part] == {"name": part, "used": False, "detail": fall_back}
        (problem,) = problems(done, f"{module} is not built")
        assert problem["fix"].endswith("--no-binary kvloom kvloom")
    assert (
        len(problems(doctor("--json", hidden=("xxhash",), PYTHONPATH=str(tmp_path / "src")), "no tier can"))
        == 1
    )


@pytest.mark.slow
def test_a_damaged_installation_is_not_ready(tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "embedded", "*.egg-info")
    shutil.copytree(SOURCE, tmp_path / "src", ignore=ignored)
    broken = tmp_path / "src" / "kvloom" / "core" / f"_native{sys.implementation.cache_tag}.so"
    for file in broken.parent.glob("*.so"):
        file.write_bytes(b"no library")
    broken.with_name("_native.abi3.so").write_bytes(b"no library")
    done = doctor("--json", PYTHONPATH=str(tmp_path / "src"))
    assert done.returncode == 1
    assert len(problems(done, "kvloom.core._native cannot be loaded")) == 1
    assert [one["blocks"] for one in problems(done, "embedded model is missing")] == [["kvloom serve"]]


@pytest.mark.slow
def test_a_bad_configuration_is_a_problem_of_the_server(tmp_path: Path) -> None:
    file = tmp_path / "kvloom.toml"
    file.write_text("[serve]\nprot = 8001\n")
    done = doctor("--json", "--config", str(file))
    assert done.returncode == 1
    assert [one["blocks"] for one in problems(done, "prot")] == [["kvloom serve"]]


@pytest.mark.slow
def test_the_folder_of_a_configured_tier_is_checked(tmp_path: Path) -> None:
    done = doctor("--json", KVLOOM_TIER=f"host:1MiB disk:{tmp_path}/kv:900000TiB")
    assert done.returncode == 0
    (found,) = problems(done, f"{tmp_path}/kv has")
    assert found["blocks"] == []
    assert not (tmp_path / "kv").exists()


@pytest.mark.slow
def test_a_low_limit_of_open_files_is_a_warning() -> None:
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (600, 600)); "
        "from kvloom.cli import main; sys.exit(main(['doctor', '--json']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0
    (found,) = problems(done, "at most 600 files")
    assert "ulimit -Hn 4352" in found["fix"]
    assert "--max-connections 344" in found["fix"]


def test_locked_memory_matters_only_for_network_cards() -> None:
    def about_memory(rdma: bool) -> list[str]:
        return [one.what for one in inspect_limits((), rdma)[1] if "locked" in one.what]

    assert about_memory(False) == []
    locked = next(one.value for one in inspect_limits((), True)[0] if one.name == "locked memory")
    assert bool(about_memory(True)) == (locked is not None and locked < 64 << 20)


@pytest.mark.parametrize(
    ("version", "supported", "state"),
    [
        ("2.13.0+cpu", ">=2.11,<2.14", "ok"),
        ("2.11", ">=2.11,<2.14", "ok"),
        ("2.10.9", ">=2.11,<2.14", "too old"),
        ("2.14.0", ">=2.11,<2.14", "untested"),
        ("2.14.0a1", ">=2.11,<2.14", "untested"),
        ("0.32.0", "==0.32.0", "ok"),
        ("0.31", "==0.32.0", "too old"),
        ("0.32.1", "==0.32.0", "untested"),
        ("5.0", "", "ok"),
    ],
)
def test_versions_are_compared_with_the_supported_range(version: str, supported: str, state: str) -> None:
    assert in_range(version, supported) == state


def test_an_old_package_blocks_and_a_new_one_warns() -> None:
    def found(version: str | None) -> list[tuple[str, bool]]:
        one = Package("torch", "engine", ">=2.11,<2.14", version)
        return [(problem.fix, bool(problem.blocks)) for problem in package_problems([one], on_gpu=False)]

    assert found("2.12.1") == []
    assert found("2.9.0") == [("pip install 'torch>=2.11,<2.14'", True)]
    assert found("2.15.0") == [("pip install 'torch>=2.11,<2.14'", False)]
    assert found(None) == [("pip install 'kvloom[engine]'", True)]


def test_the_missing_packages_of_an_extra_are_one_problem() -> None:
    missing = [Package(name, "serve", ">=1", None) for name in ("uvicorn", "jinja2", "uvloop")]
    found = package_problems(missing, on_gpu=False)
    assert [one.what for one in found] == ["uvicorn, jinja2 are not installed", "uvloop is not installed"]
    assert [bool(one.blocks) for one in found] == [True, False]


def test_triton_is_needed_on_a_gpu_alone() -> None:
    missing = Package("triton", "engine", ">=3.6,<3.10", None)
    assert package_problems([missing], on_gpu=False) == []
    assert [one.blocks for one in package_problems([missing], on_gpu=True)] == [
        ("kvloom generate", "kvloom serve")
    ]


def test_every_extra_for_users_has_packages() -> None:
    found = packages()
    assert {one.extra for one in found} == set(EXTRAS)
    assert {one.name: one.supported for one in found}["torch"] == ">=2.11,<2.14"


def test_a_checkout_that_is_not_installed_has_the_same_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> set[tuple[str, str, str]]:
        return {(one.name, one.extra, one.supported) for one in packages()}

    def missing(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    installed = found()
    monkeypatch.setattr("kvloom.doctor.packages.requires", missing)
    assert found() == installed
