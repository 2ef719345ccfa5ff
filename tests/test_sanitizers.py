"""The native code, built with AddressSanitizer and UndefinedBehaviorSanitizer. A child process runs the tests of the
native code on a copy of the package, so that the installed libraries stay as they are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CORE_AND_TIERS = [
    "tests/test_native_boundary.py",
    "tests/core/test_native_loops.py",
    "tests/core/test_block_hash.py",
    "tests/tiers/test_checksums.py",
    "tests/tiers/test_byte_stream.py",
]
KERNELS = ["tests/kernels/test_fused.py", "tests/models/test_fused_attention.py"]
KERNEL_BOUNDARY = ["tests/kernels/test_cpu_boundary.py"]
FLAGS = ["-shared", "-fPIC", "-O1", "-g", "-fno-omit-frame-pointer"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


def runtime(name: str) -> str:
    """Return the path of a sanitizer's library. Skips the test without a compiler that has it."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed: the native code cannot be built with sanitizers")
    path = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    if not Path(path.stdout.strip()).is_absolute():
        pytest.skip(f"gcc has no {name}: the native code cannot be built with sanitizers")
    return path.stdout.strip()


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Build all native code with sanitizers beside a copy of the package. Return the environment of a process that
    imports this copy."""
    libraries = [runtime("libasan.so"), runtime("libubsan.so")]
    include = sysconfig.get_paths()["include"]
    if not (Path(include) / "Python.h").exists():
        pytest.skip(f"{include} has no Python.h: the native code cannot be built")
    source = tmp_path_factory.mktemp("sanitized")
    shutil.copytree(
        ROOT / "src" / "kvloom", source / "kvloom", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for extension in project["tool"]["setuptools"]["ext-modules"]:
        (path,) = extension["sources"]
        target = (source / path.removeprefix("src/")).with_suffix(".abi3.so")
        macros = [f"-D{name}={value}" for name, value in extension["define-macros"]]
        options = [one for one in extension["extra-compile-args"] if one != "-O3"]
        command = [
            "gcc",
            *FLAGS,
            *SANITIZERS,
            *macros,
            *options,
            f"-I{include}",
            str(ROOT / path),
            "-o",
            str(target),
            "-lm",
        ]
        subprocess.run(command, check=True)
    return {
        **os.environ,
        "PYTHONPATH": f"{source}{os.pathsep}{ROOT}",
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",  # the interpreter itself keeps memory until the end
        "PYTHONMALLOC": "malloc",  # the interpreter's own allocator hides overflows of small objects
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
    }


def run(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        check=False,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=540,
    )


OVERFLOW = """
import ctypes
from kvloom.kernels import _cpu
memory = ctypes.create_string_buffer(64)
assert "sanitized" in _cpu.__file__
_cpu.multiply(*[ctypes.addressof(memory)] * 3, 1, 0, 64, 64, 64, False)
"""


@pytest.mark.slow
def test_the_sanitizers_are_active(sanitized: dict[str, str]) -> None:
    result = run(["-c", OVERFLOW], sanitized)
    assert result.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in result.stderr, result.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "tests",
    [CORE_AND_TIERS, KERNELS, KERNEL_BOUNDARY],
    ids=["core and tiers", "kernels", "boundary of kernels"],
)
def test_the_sanitizers_find_nothing(sanitized: dict[str, str], tests: list[str]) -> None:
    result = run(["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests], sanitized)
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    assert "passed" in result.stdout
    assert "runtime error" not in result.stdout + result.stderr
