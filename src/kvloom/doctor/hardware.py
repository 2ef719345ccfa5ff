"""GPUs, and the kernels and libraries that will run on this machine."""

from __future__ import annotations

import os
import shutil
import warnings
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path

import kvloom

from .problem import Problem

__all__ = ["Gpu", "Hardware", "Kernel", "inspect_hardware"]

EXTENSIONS = {
    "kvloom.core._native": ("bookkeeping", "Python loops"),
    "kvloom.tiers._native": ("checksums of tiers", "the package xxhash"),
    "kvloom.kernels._cpu": ("small operations on CPUs", "torch"),
}
"""Native extensions: what each computes, and what replaces it if it was not built."""
DRIVER = Path("/proc/driver/nvidia/version")
BOTH = ("kvloom generate", "kvloom serve")
NO_GPU = "not used: no GPU"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device. Memory is in bytes."""

    name: str
    memory: int
    free_memory: int
    capability: str


@dataclass(frozen=True, slots=True)
class Kernel:
    """A part of the computation, or a library that can compute it. `used` is False if a fall-back runs instead,
    or if this machine does not need the part or library. `detail` states what runs, or why nothing does."""

    name: str
    used: bool
    detail: str


@dataclass
class Hardware:
    """The GPUs of this machine, the kernels that will run, and the problems of both."""

    gpus: list[Gpu] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def inspect_hardware(xxhash: bool, triton: str | None) -> Hardware:
    """Return the GPUs and kernels of this machine, with their problems. `xxhash` states whether the package xxhash
    is installed. `triton` is Triton's version, or None. Imports torch if it is installed, which takes seconds.
    Imports attention libraries if there is a GPU."""
    found = Hardware()
    _inspect_extensions(found, xxhash)
    if find_spec("torch") is not None:
        _inspect_torch(found, triton)
    return found


def _inspect_extensions(found: Hardware, xxhash: bool) -> None:
    folder = Path(kvloom.__file__).parent
    for module, (part, fall_back) in EXTENSIONS.items():
        parent = folder / module.split(".")[1]
        spec = PathFinder.find_spec(module, [str(parent)])  # does not import the package around it
        reason = "is not built"
        try:
            if spec is not None:
                module_from_spec(spec)
                reason = ""
        except ImportError as error:
            reason = f"cannot be loaded ({error})"
        found.kernels.append(Kernel(part, not reason, f"native, {module}" if not reason else fall_back))
        if reason:
            missing = fall_back == "the package xxhash" and not xxhash
            effect = (
                "no tier can be opened"
                if missing
                else f"kvloom uses {fall_back} instead, which takes more time"
            )
            found.problems.append(Problem(f"the extension {module} {reason}: {effect}", _rebuild(folder)))


def _rebuild(folder: Path) -> str:
    """Return how to build the extensions of the package in `folder`, which may be in a checkout."""
    checkout = folder.parents[1]
    what = "--no-binary kvloom kvloom"
    if (checkout / "pyproject.toml").exists():
        what = f"--editable {checkout}"
    return f"install gcc, then: pip install --force-reinstall --no-deps {what}"


def _inspect_torch(found: Hardware, triton: str | None) -> None:
    try:
        import torch
    except (ImportError, OSError) as error:
        fix = "pip install --force-reinstall torch, with a build for this machine"
        found.problems.append(Problem(f"torch is installed but cannot be imported: {error}", fix, BOTH))
        return
    if not torch.cuda.is_available():
        if DRIVER.exists() and torch.version.cuda is None:
            what = f"this machine has an NVIDIA driver, but torch {torch.__version__} is a build without CUDA"
            found.problems.append(
                Problem(what, "pip install --force-reinstall torch, from an index with CUDA builds")
            )
        elif DRIVER.exists():
            what = f"torch {torch.__version__} for CUDA {torch.version.cuda} finds no GPU, although a driver is there"
            found.problems.append(
                Problem(what, "see nvidia-smi; update the driver, or install torch for its CUDA")
            )
        found.kernels += [
            Kernel("attention", True, "torch and native loops, on the CPU"),
            *(Kernel(name, False, NO_GPU) for name in ("Triton", "FlashAttention-3", "FlashInfer", "cuDNN")),
        ]
        return
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        found.gpus.append(Gpu(about.name, total, free, f"{about.major}.{about.minor}"))
    found.kernels.append(Kernel("Triton", triton is not None, triton or "not installed"))
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        what = "there is no C compiler, and Triton compiles the launchers of its kernels with one"
        found.problems.append(Problem(what, "apt-get install gcc libc6-dev, or set CC", BOTH))
    _inspect_libraries(found)
    cudnn = torch.backends.cudnn
    version = cudnn.version() if cudnn.is_available() else None  # type: ignore[no-untyped-call]
    found.kernels.append(
        Kernel("cuDNN", version is not None, str(version) if version else "not in this torch")
    )


def _inspect_libraries(found: Hardware) -> None:
    """Add to `found` the attention libraries that prefill may use. Imports them only if a package that contains one of
    them is installed."""
    from kvloom.kernels.attention import prefill_libraries

    names: dict[str, str] = {}
    candidates = prefill_libraries.MODULES
    if any(find_spec(module.split(".")[0]) is not None for module in candidates):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                names = {
                    one.name: "used where it is faster" for one in prefill_libraries.installed_libraries()
                }
            except ValueError as error:  # the environment variable names an unknown module
                fix = f"unset {prefill_libraries.ENVIRONMENT_VARIABLE}, or correct it"
                found.problems.append(Problem(str(error), fix, BOTH))
        for one in seen:
            if "cannot be used" in str(one.message):
                fix = (
                    f"reinstall it for this torch, or exclude it in {prefill_libraries.ENVIRONMENT_VARIABLE}"
                )
                found.problems.append(Problem(str(one.message), fix))
    for name in ("FlashAttention-3", "FlashInfer"):
        found.kernels.append(
            Kernel(name, name in names, names.get(name, "not installed: Triton's kernels run"))
        )
