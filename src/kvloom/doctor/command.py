"""`kvloom doctor`: checks an installation and prints the result. For each problem, prints one line that repairs it."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import kvloom
from kvloom.arguments import Parser
from kvloom.config_file import apply_configuration

from .hardware import inspect_hardware
from .limits import inspect_limits
from .packages import EXTRAS, package_problems, packages
from .problem import Problem

__all__ = ["arguments", "report", "run"]

NOT_READY = 1
EMBEDDED = "models/embedded/llama/model.safetensors"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to a parser."""
    parser.epilog = (
        "The exit code is 0 if `kvloom generate` and `kvloom serve` would work, and 1 otherwise. "
        "A warning does not change the exit code."
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file of the server (default: $KVLOOM_CONFIG)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print the report. Return 0 if the commands would work, and 1 otherwise."""
    found = report(args.config)
    print(json.dumps(found, indent=2)) if args.json else _print(found)
    return 0 if found["ready"] else NOT_READY


def report(config: str | None = None) -> dict[str, Any]:
    """Return the installed packages, the hardware and kernels that will be used, the system's limits, and all problems.
    `config` is the server's configuration file. Changes nothing. Takes about three seconds if torch is installed,
    because this function imports torch."""
    required = packages()
    versions = {one.name: one.version for one in required}
    hardware = inspect_hardware(versions.get("xxhash") is not None, versions.get("triton"))
    rdma = any(versions.get(name) for name in ("nixl", "mooncake-transfer-engine"))
    tiers, problems = _configured_tiers(config)
    limits, limit_problems = inspect_limits(tiers, rdma)
    problems += package_problems(required, bool(hardware.gpus)) + hardware.problems + limit_problems
    folder = Path(kvloom.__file__).parent
    if not (folder / EMBEDDED).is_file():
        what = f"the embedded model is missing ({EMBEDDED}): kvloom serve without a MODEL cannot start"
        problems.append(Problem(what, "pip install --force-reinstall --no-deps kvloom", ("kvloom serve",)))
    problems.sort(key=lambda one: not one.blocks)
    return {
        "version": _version(),
        "folder": str(folder),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "ready": not any(one.blocks for one in problems),
        "extras": [
            {
                "name": extra or "kvloom",
                "adds": adds,
                "installed": all(
                    one.version for one in required if one.extra == extra and one.name != "triton"
                ),
                "packages": [
                    {
                        "name": one.name,
                        "version": one.version,
                        "supported": one.supported,
                        "state": one.state,
                    }
                    for one in required
                    if one.extra == extra
                ],
            }
            for extra, adds in EXTRAS.items()
        ],
        "gpus": [asdict(one) for one in hardware.gpus],
        "kernels": [asdict(one) for one in hardware.kernels],
        "limits": [asdict(one) | {"shown": one.shown()} for one in limits],
        "problems": [asdict(one) for one in problems],
    }


def _version() -> str | None:
    try:
        return version("kvloom")
    except PackageNotFoundError:
        return None


def _configured_tiers(config: str | None) -> tuple[list[str], list[Problem]]:
    """Return the tiers that the configuration file and the environment set for `kvloom serve`. If the configuration
    cannot be read, return no tiers and one problem."""
    from kvloom.serve import serve_command

    parser = Parser(prog="kvloom serve")
    serve_command.arguments(parser)
    try:
        _, found = apply_configuration("serve", parser, [] if config is None else [f"--config={config}"])
    except (OSError, ValueError) as error:
        fix = "correct it, or unset KVLOOM_CONFIG; `kvloom config show` prints every value"
        return [], [Problem(f"the configuration cannot be read: {error}", fix, ("kvloom serve",))]
    words = found["tiers"].words if "tiers" in found else ()
    return [word.removeprefix("--tier=") for word in words], []


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from kvloom.core import format_bytes

    console = Console(soft_wrap=True, markup=False, highlight=False)
    name = f"kvloom {found['version'] or '(not installed, from a source folder)'}"
    console.print(f"{name}, Python {found['python']}, {found['platform']}, {found['folder']}\n")
    table = Table("extra", "installed", box=None, pad_edge=False)
    table.add_column("packages", overflow="fold")
    table.add_column("adds")
    for extra in found["extras"]:
        parts = [f"{one['name']} {one['version'] or '-'}" for one in extra["packages"]]
        table.add_row(extra["name"], "yes" if extra["installed"] else "no", ", ".join(parts), extra["adds"])
    console.print(table)
    console.print()
    table = Table("hardware", "", box=None, pad_edge=False, show_header=False)
    for gpu in found["gpus"]:
        memory = f"{format_bytes(gpu['memory'])}, {format_bytes(gpu['free_memory'])} free"
        table.add_row("GPU", f"{gpu['name']}, {memory}, compute capability {gpu['capability']}")
    if not found["gpus"]:
        table.add_row("GPU", "none: models run on the CPU")
    for kernel in found["kernels"]:
        table.add_row(kernel["name"], kernel["detail"])
    for limit in found["limits"]:
        table.add_row(limit["name"], f"{limit['shown']} ({limit['detail']})")
    console.print(table)
    console.print()
    for problem in found["problems"]:
        blocked = " and ".join(problem["blocks"])
        console.print(f"{f'error ({blocked} will not work)' if blocked else 'warning'}: {problem['what']}")
        console.print(f"  fix: {problem['fix']}")
    verdict = (
        "kvloom generate and kvloom serve will work." if found["ready"] else "Repair the errors above first."
    )
    console.print(verdict)
    sys.stdout.flush()
