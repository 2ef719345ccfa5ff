"""Tools for tests of tiers, inside and outside this package.

    conformance.py       TierConformance: the tests every tier must pass; needs pytest
    fault_injection.py   tiers and files that fail on purpose

Import the suite from `kvloom.tiers.testing.conformance`: this package itself does not import pytest.
"""

from .fault_injection import Faults, FaultyFiles, FaultyTier

__all__ = ["Faults", "FaultyFiles", "FaultyTier"]
