"""The time of a tenant's request does not depend on what another tenant has sent.

`tests/serve/test_timing_attack.py` makes the same attack over HTTP. Here, attacker and victim use one engine, and the
test measures CPU time, so that other processes of a busy machine do not hide a difference. See there for the places.

$KVLOOM_TIMING_SAMPLES is the number of samples (default: 40).
"""

from __future__ import annotations

import os
import random
import statistics
import time
from pathlib import Path

import pytest

from kvloom.core import CacheControl
from kvloom.engine import Engine, SamplingParams
from tests.engine.test_offload import closed
from tests.engines import PATIENT, make_engine
from tests.models.zoo import tiny

SAMPLES = int(os.environ.get("KVLOOM_TIMING_SAMPLES", "40"))
CONTROLS = 20
LENGTH = 400
LAG = 3
"""Number of prompts that the victim sends after a prompt, before the attacker tries this prompt."""
BLOCK_BYTES = 8192
PROMPT_BYTES = (LENGTH // 16 + 2) * BLOCK_BYTES


def make(place: str, folder: Path) -> Engine:
    """Return an engine for one place. The smallest pool has space for two prompts, and small host memory for four."""
    pool = {"pool": 40, "eviction": 4}.get(place, 2) * PROMPT_BYTES
    small = ["host:1MiB", f"disk:{folder}:256MiB"]
    tiers = {"host": ["host:16MiB"], "disk": small, "prefetch": small}.get(place)
    model = tiny("llama", max_position_embeddings=1024)
    return make_engine(model, pool, **({} if tiers is None else {"tiers": tiers, "offload": PATIENT}))


class Attack:
    """Measures pairs of requests of `attacker`, directly after one another and in random order. The first one of a pair
    depends on a prompt of `victim`. `differences` has their differences in seconds of CPU time."""

    def __init__(self, engine: Engine, place: str, victim: str, attacker: str, seed: str) -> None:
        self._engine, self._place, self._victim, self._attacker = engine, place, victim, attacker
        self._rng = random.Random(seed)
        self._sent: list[list[int]] = []
        self.differences: list[float] = []
        self.cached = 0
        """Tokens that requests of the attacker found in the pool or in tiers."""

    @property
    def faster(self) -> int:
        """How often the request that depends on the victim's prompt is faster."""
        return sum(one < 0 for one in self.differences)

    def run(self, samples: int) -> None:
        for _ in range(samples):
            prompts = {True: self._victims_prompt(), False: self._prompt()}
            order = [True, False] if self._rng.random() < 0.5 else [False, True]
            times = {known: self._measure(prompts[known], known) for known in order}
            self.differences.append(times[True] - times[False])

    def _victims_prompt(self) -> list[int]:
        """Let the victim send a prompt. Return a prompt of the victim: with tiers, one whose pages have left the pool."""
        lag = {"pool": 0, "eviction": 0}.get(self._place, LAG)
        while len(self._sent) <= lag:
            self._sent.append(self._prompt())
            self._send(self._sent[-1], self._victim)
        return self._sent.pop(0)

    def _measure(self, prompt: list[int], known: bool) -> float:
        if self._place == "eviction":  # is the attacker's own prompt still cached after the victim's prompts?
            self._send(prompt, self._attacker)
            for _ in range(3):
                self._send(self._prompt(), self._victim)
            self._send(prompt if known else self._prompt(), self._victim)
        if self._place == "prefetch":
            self._engine.expect_session(_session(self._attacker, prompt))
            self._engine.run()
        return self._send(prompt, self._attacker)

    def _send(self, prompt: list[int], tenant: str) -> float:
        """Send a prompt, and return the CPU time until its first token."""
        control = CacheControl(tenant=tenant, session=_session(tenant, prompt))
        began = time.process_time()
        request = self._engine.add(prompt, SamplingParams(max_tokens=1, temperature=0), control)
        self._engine.run()
        taken = time.process_time() - began
        if tenant == self._attacker:
            self.cached += request.cached_tokens or 0
        return taken

    def _prompt(self) -> list[int]:
        return [self._rng.randrange(3, 64) for _ in range(LENGTH)]


def median_bounds(values: list[float]) -> tuple[float, float]:
    """Return a 95 % confidence interval of the median: two order statistics."""
    ordered = sorted(values)
    middle, width = len(ordered) / 2, 0.98 * len(ordered) ** 0.5
    return ordered[max(0, int(middle - width))], ordered[min(len(ordered) - 1, int(middle + width))]


def _session(tenant: str, prompt: list[int]) -> str:
    return f"{tenant} {prompt[:8]}"


@pytest.mark.slow
@pytest.mark.parametrize("place", ["pool", "host", "disk", "prefetch", "eviction"])
def test_times_do_not_reveal_what_another_tenant_sent(place: str, tmp_path: Path) -> None:
    engine = make(place, tmp_path)
    control = Attack(engine, place, "victim", "victim", "control")
    control.run(CONTROLS)
    attack = Attack(engine, place, "victim", "attacker", "attack")
    attack.run(SAMPLES)
    # The 95 % confidence interval of a share of one half has this width to each side.
    share, width = attack.faster / SAMPLES, 0.98 / SAMPLES**0.5
    own, other = (1e3 * statistics.median(one.differences) for one in (control, attack))
    least, most = (1e3 * one for one in median_bounds(attack.differences))
    print(
        f"{place}: control {control.faster} of {CONTROLS} faster, by {-own:.2f} ms; attacker {attack.faster} of "
        f"{SAMPLES} ({share:.3f}, 95 %: {share - width:.3f} to {share + width:.3f}), by {-other:.3f} ms "
        f"(95 %: {-most:.3f} to {-least:.3f})"
    )
    closed(engine)
    assert control.cached >= CONTROLS * LENGTH // 2, "a tenant's own prompts are cached"
    if place != "eviction":
        # Prompts of the attacker itself may have their first tokens in common, but never a block.
        assert attack.cached < 8 * SAMPLES
    if control.faster < CONTROLS * 0.8:
        pytest.skip("on this machine, even a cached prompt of the same tenant is not clearly faster")
    # By chance, half of the samples are faster. Four standard deviations happen once in 16,000 runs.
    assert abs(attack.faster - SAMPLES / 2) <= 4 * (SAMPLES / 4) ** 0.5
