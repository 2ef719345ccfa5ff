"""The version of another engine with which an adapter is tested."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

__all__ = ["EngineVersion"]


@dataclass(frozen=True)
class EngineVersion:
    """The version of an engine (`tested`) with which an adapter is tested. `packages` are the names under which pip may
    have installed the engine. `check` compares only as many numbers as `tested` has: for "0.32", it also accepts
    0.32.1.
    """

    engine: str
    adapter: str
    packages: tuple[str, ...]
    tested: str

    def check(self) -> None:
        """Log a warning if the installed engine is newer than the tested version. Raises ImportError if the engine is
        missing or older.
        """
        wanted = f"{self.packages[0]}=={self.tested}"
        if len(_numbers(self.tested)) < 3:
            wanted += ".*"
        found = self.installed()
        if found is None:
            raise ImportError(
                f"{self.adapter} needs {self.engine} {self.tested}, and {self.engine} is not installed: "
                f"pip install {wanted}"
            )
        here, there = _numbers(self.tested), _numbers(found)[: len(_numbers(self.tested))]
        if there < here:
            raise ImportError(
                f"{self.adapter} needs {self.engine} {self.tested} or newer, found {found}: pip install {wanted}"
            )
        if there > here:
            logging.getLogger(f"kvloom.{self.packages[0]}").warning(
                "%s is tested with %s %s, found %s. If it fails, install %s, or a newer kvloom",
                self.adapter,
                self.engine,
                self.tested,
                found,
                wanted,
            )

    def installed(self) -> str | None:
        """Return the version of the installed engine, or None if it is not installed."""
        for package in self.packages:
            try:
                return version(package)
            except PackageNotFoundError:
                continue
        return None

    def installed_minor(self) -> str:
        """Return the major and minor version of the installed engine, such as "0.32"."""
        return ".".join((self.installed() or "").split(".")[:2])


def _numbers(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (0, 5, 23) for "0.5.23.post1"."""
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
