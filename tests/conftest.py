"""Profiles of the property tests: the same examples on every run, or (make fuzz) new ones each time."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile("plain", deadline=None, derandomize=True, max_examples=100, print_blob=True)
settings.register_profile(
    "fuzz", deadline=None, max_examples=2000, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("KVLOOM_HYPOTHESIS", "plain"))
