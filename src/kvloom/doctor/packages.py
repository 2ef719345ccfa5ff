"""Installed packages: their versions, the versions that kvloom supports, and what each extra adds.

The supported versions come from the metadata of kvloom, or from pyproject.toml in a checkout that is not installed.
This module finds packages without importing them.
"""

from __future__ import annotations

import platform
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

import kvloom

from .problem import Problem

__all__ = ["EXTRAS", "Package", "in_range", "package_problems", "packages"]

EXTRAS = {
    "": "every command",
    "engine": "kvloom generate, kvloom serve: models and kernels",
    "serve": "kvloom serve: the HTTP server",
    "grammar": "JSON schema, regex and grammars in requests",
    "tiers": "compression in tiers, checksums without the native extension",
    "cluster": "kvloom route, and events of workers",
    "ray": "kvloom deploy",
    "vision": "images in requests",
    "encryption": "encrypted pages in tiers",
    "nixl": "--tier nixl: RDMA and GPU-direct transfers",
    "mooncake": "--tier mooncake: Mooncake Store",
    "s3": "--tier s3: object stores",
    "otel": "--otlp: OpenTelemetry traces",
}
"""The extras that a user may want, with what each adds. The empty name stands for kvloom itself."""
NEEDED_BY = {
    "": ("kvloom generate", "kvloom serve"),
    "engine": ("kvloom generate", "kvloom serve"),
    "serve": ("kvloom serve",),
}
FALL_BACKS = ("uvloop", "shtab")
"""Packages that may be missing, although an extra in NEEDED_BY contains them. asyncio replaces uvloop, and only `kvloom
completion` needs shtab."""
MODULES = {
    "mooncake-transfer-engine": "mooncake",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter.otlp.proto.http",
    "opentelemetry-sdk": "opentelemetry.sdk",
    "pillow": "PIL",
    "pyzmq": "zmq",
}
"""The module of each package whose module does not have the package's name."""
OTHER_BUILDS = {"mooncake-transfer-engine": ("mooncake-transfer-engine-non-cuda",)}
_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:\[[^]]*\])?\s*\(?([^;()]*)\)?\s*(?:;(.*))?")
_TRITON_RANGE_EXTRA = "dev"


@dataclass(frozen=True, slots=True)
class Package:
    """A package that kvloom or one of its extras requires. `version` is None if the package is missing. `supported` is
    the range of versions, such as ">=2.11,<2.14"."""

    name: str
    extra: str
    supported: str
    version: str | None

    @property
    def state(self) -> str:
        """One of "ok", "missing", "too old" and "untested" (above the range)."""
        if self.version is None:
            return "missing"
        return in_range(self.version, self.supported)


def packages() -> list[Package]:
    """Return the packages of all extras in `EXTRAS`, and Triton as part of the extra engine. Imports none of them."""
    found = []
    for text in _requirements():
        parts = _REQUIREMENT.fullmatch(text.strip())
        if parts is None:
            continue
        name, supported, marker = parts[1].lower(), parts[2].replace(" ", ""), parts[3] or ""
        extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", marker)
        home = extra[1] if extra else ""
        if name == "triton" and home == _TRITON_RANGE_EXTRA and platform.system() == "Linux":
            home = "engine"
        elif home not in EXTRAS or (name == "uvloop" and platform.system() == "Windows"):
            continue
        bounds = sorted(filter(None, supported.split(",")), reverse=True)
        found.append(Package(name, home, ",".join(bounds), _installed(name)))
    order = list(EXTRAS)
    return sorted(found, key=lambda one: order.index(one.extra))


def package_problems(found: Iterable[Package], on_gpu: bool) -> list[Problem]:
    """Return the problems of packages. A missing package of an optional extra is not a problem. Triton is needed only
    on a GPU."""
    problems = []
    missing: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for one in found:
        if one.name == "triton" and not on_gpu:
            continue
        blocks = () if one.name in FALL_BACKS else NEEDED_BY.get(one.extra, ())
        wanted = f"pip install '{one.name}{one.supported}'"
        if one.state == "missing" and one.extra in NEEDED_BY:
            by_extra = (
                one.extra and one.name != "triton"
            )  # the extra does not name Triton, which torch brings
            remedy = f"pip install 'kvloom[{one.extra}]'" if by_extra else wanted
            missing.setdefault((remedy, blocks), []).append(one.name)
        elif one.state == "too old":
            what = f"{one.name} {one.version} is older than kvloom supports ({one.supported})"
            problems.append(Problem(what, wanted, blocks))
        elif one.state == "untested":
            what = f"{one.name} {one.version} is newer than kvloom is tested with ({one.supported})"
            problems.append(Problem(what, wanted))
    for (remedy, blocks), names in missing.items():
        verb = "is" if len(names) == 1 else "are"
        problems.append(Problem(f"{', '.join(names)} {verb} not installed", remedy, blocks))
    return problems


def in_range(found: str, supported: str) -> str:
    """Compare a version with a range such as ">=2.11,<2.14". Return "ok", "too old" or "untested". Only the numbers of
    the release are compared, so 2.14.0a1 is not below 2.14."""
    here = _numbers(found)
    for bound in filter(None, supported.split(",")):
        operator, limit = re.sub(r"[\w.*+!-]+$", "", bound).strip(), _numbers(bound)
        size = max(len(here), len(limit))
        left, right = (numbers + (0,) * (size - len(numbers)) for numbers in (here, limit))
        if left < right and operator in (">=", ">", "==", "~="):
            return "too old"
        if (operator == "<" and left >= right) or (operator in ("<=", "==") and left > right):
            return "untested"
    return "ok"


def _numbers(text: str) -> tuple[int, ...]:
    release = re.search(r"\d+(?:\.\d+)*", text)
    return tuple(int(number) for number in release[0].split(".")) if release else ()


def _requirements() -> list[str]:
    try:
        return requires("kvloom") or []
    except PackageNotFoundError:
        project = Path(kvloom.__file__).parents[2] / "pyproject.toml"
        if not project.is_file():
            return []
    table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    return [
        *table["dependencies"],
        *(
            f"{text.partition(';')[0]}; extra == '{extra}'"
            for extra, texts in table["optional-dependencies"].items()
            for text in texts
        ),
    ]


def _installed(name: str) -> str | None:
    """Return the version of a package, or None if its module is not found. Return "unknown" if the module is found, but
    not the metadata of its package."""
    try:
        if find_spec(MODULES.get(name, name)) is None:
            return None
    except (ImportError, ValueError, AttributeError):  # a parent of the module is missing, or hidden
        return None
    for build in (name, *OTHER_BUILDS.get(name, ())):
        try:
            return version(build)
        except PackageNotFoundError:
            continue
    return "unknown"
