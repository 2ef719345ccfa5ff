"""Eviction policies by name. Other packages add policies through the entry point group `kvloom.policies`.

    [project.entry-points."kvloom.policies"]
    mine = "my_package:MyPolicy"

An entry point is a callable that returns a `Policy`. The entry point is loaded when its name is used. If a policy of
this package has the same name, the policy of this package is used.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from .adaptive import Adaptive
from .policies import FIFO, LFU, LRU, MRU, SLRU, CostAware, Policy, PriorityTTL

__all__ = ["DEFAULT_POLICY", "POLICIES", "POLICY_GROUP", "make_policy"]

POLICIES: dict[str, Callable[[], Policy]] = {
    "lru": LRU,
    "lfu": LFU,
    "fifo": FIFO,
    "mru": MRU,
    "slru": SLRU,
    "priority": PriorityTTL,
    "cost": CostAware,
    "adaptive": Adaptive,
}
"""The policies of this package."""
POLICY_GROUP = "kvloom.policies"
DEFAULT_POLICY = "adaptive"
"""The policy of a cache that names none."""


def make_policy(policy: str | Policy) -> Policy:
    """Return a new policy by name, or the given policy. Raises ValueError if the name is unknown."""
    if not isinstance(policy, str):
        return policy
    if policy in POLICIES:
        return POLICIES[policy]()
    outside = entry_points(group=POLICY_GROUP)
    for point in outside:
        if point.name == policy:
            made: Policy = point.load()()
            return made
    known = ", ".join([*POLICIES, *sorted(point.name for point in outside)])
    raise ValueError(f"unknown eviction policy {policy!r}; known: {known}")
