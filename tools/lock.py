"""Write requirements.lock: one version of everything that `make setup` installs, with the hashes of its files.

    python tools/lock.py            needs `uv` on the path

torch is left out, with the CUDA packages that its builds bring along: `make setup` installs it first, by name. Everything else is
installed with `pip --require-hashes`, so that a file that was changed in a registry is refused.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

__all__ = ["EXTRAS", "main"]

ROOT = Path(__file__).parent.parent
EXTRAS = ("engine", "serve", "grammar", "dev")
TORCH = "torch==2.13.0"
BROUGHT_BY_TORCH = re.compile(r"(torch|cuda-|nvidia-)")
HEAD = "# Written by tools/lock.py. Do not edit.\n"


def main() -> None:
    """Resolve the extras of pyproject.toml for every platform, and write the lock file."""
    command = ["uv", "pip", "compile", "pyproject.toml", *(f"--extra={extra}" for extra in EXTRAS)]
    command += ["--universal", "--python-version=3.11", "--generate-hashes", "--constraints=-"]
    command += ["--no-emit-index-url", "--no-header", "--no-annotate", "--quiet"]
    done = subprocess.run(command, cwd=ROOT, input=TORCH, text=True, capture_output=True, check=True)
    packages = re.split(r"\n(?=\S)", done.stdout.strip())
    kept = [package for package in packages if not BROUGHT_BY_TORCH.match(package)]
    (ROOT / "requirements.lock").write_text(HEAD + "\n".join(kept) + "\n", encoding="utf-8")
    print(f"requirements.lock: {len(kept)} packages")


if __name__ == "__main__":
    main()
