"""Policies by name, also from packages outside this one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvloom.core import POLICIES, make_policy

from .world import make_world

POLICY = '''
"""A policy that evicts the deepest entry first."""


class DeepestFirst:
    name = "deepest"

    def priority(self, entry, now):
        return (-entry.depth,)

    def on_insert(self, entry, now):
        pass

    on_hit = on_evict = on_insert
'''


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create a package with an entry point, like an installer does."""
    (tmp_path / "outside_policies.py").write_text(POLICY)
    info = tmp_path / "outside_policies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-policies\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvloom.policies]\ndeepest = outside_policies:DeepestFirst\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "outside_policies", raising=False)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_is_made_by_its_name(name: str) -> None:
    assert make_policy(name).name == name


@pytest.mark.usefixtures("outside")
def test_a_policy_from_another_package_decides_evictions() -> None:
    assert make_policy("deepest").name == "deepest"
    world = make_world("full", 20, policy="deepest")
    assert world.cache.account("").queue.policy.name == "deepest"


@pytest.mark.usefixtures("outside")
def test_an_unknown_policy_is_refused_with_all_known_names() -> None:
    assert "outside_policies" not in sys.modules
    with pytest.raises(
        ValueError, match=r"unknown eviction policy 'best'; known: lru, .*, adaptive, deepest"
    ):
        make_policy("best")
    assert "outside_policies" not in sys.modules, "an entry point is loaded only when its name is asked for"
