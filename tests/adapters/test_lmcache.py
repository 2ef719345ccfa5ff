"""kvloom's tiers as an L2 adapter of LMCache.

The tests use LMCache's own storage manager, controllers, fault injector and `fs` adapter, without a GPU. `make
test-lmcache` installs LMCache in build/lmcache.
"""

from __future__ import annotations

import pytest

from tests.adapters.peer_env import run_units

pytestmark = pytest.mark.slow


def test_units() -> None:
    """The L2 adapter, in the environment of LMCache."""
    run_units("lmcache", "lmcache", "tests/adapters/lmcache_units.py")
