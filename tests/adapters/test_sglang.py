"""kvloom's tiers below SGLang's HiCache.

The tests use SGLang's own host pools, cache controller, failure injector and storage backends, without a GPU. `make
test-sglang` installs SGLang in build/sglang.
"""

from __future__ import annotations

import pytest

from tests.adapters.peer_env import run_units

pytestmark = pytest.mark.slow


def test_units() -> None:
    """The storage backend, in the environment of SGLang."""
    run_units("sglang", "sglang", "tests/adapters/sglang_units.py")
