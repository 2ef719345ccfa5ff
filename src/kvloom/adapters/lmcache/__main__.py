"""The command that copies the files of LMCache's `fs` adapter into tiers.

python -m kvloom.adapters.lmcache /var/lmcache --tier disk:/nvme/kv:1TiB
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from .fs_files import import_files


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Return 1 if a file was not stored."""
    parser = argparse.ArgumentParser(prog="python -m kvloom.adapters.lmcache", description=__doc__)
    parser.add_argument("folder", type=Path, help="base_path of LMCache's fs adapter")
    parser.add_argument("--tier", action="append", required=True, help="URL of a tier; may be repeated")
    parser.add_argument("--namespace", default="", help="the setting namespace of the adapter")
    parser.add_argument("--load-seconds", type=float, default=60.0, help="longest wait for a slow tier")
    given = parser.parse_args(arguments)
    params = {"tiers": given.tier, "namespace": given.namespace, "load_seconds": given.load_seconds}
    try:
        found = import_files(given.folder, params)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(json.dumps(asdict(found)))
    return 1 if found.failed else 0


if __name__ == "__main__":
    sys.exit(main())
