"""Measures how well the engine decides which part of a long prompt to load and which to recompute, for disks of any
speed. Needs no GPU.

    computing   a tiny model runs; the engine then sleeps until the step has taken as long as on a simulated GPU
    loading     a disk tier sleeps in each read, so that it has the simulated throughput
    result      time to first token if the engine decides, divided by the time to compute the whole prompt

The engine runs with its own scheduler, tiers, threads and clocks. On an overloaded machine, sleeps take too long, and
the result is wrong.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvloom.core import CacheControl
from kvloom.engine import Engine, EngineConfig, OffloadConfig, SamplingParams
from kvloom.tiers import DiskConfig, DiskTier, OpenTier
from kvloom.tiers.testing import Faults, FaultyTier
from kvloom.tiers.transfers import TierQueueConfig, TransferConfig

from .engine import log
from .page_placement import evict_host, evict_pool, wait_until_stored

__all__ = ["RATIOS", "SCENARIOS", "measure_load_or_recompute"]

RATIOS = (0.05, 0.1, 0.3, 0.6, 1.0, 3.0)
"""The tested throughputs of the disk, as multiples of the prefill throughput."""
SCENARIOS = {
    "known": "three prompts were loaded before",
    "unknown": "no prompt was loaded yet",
    "nothing": "no prompt was loaded or computed yet",
    "slower": "the disk was three times faster before",
    "cached": "the first quarter loads at once (page cache)",
}
"""The scenarios. A scenario states what happened before the measured prompt, and therefore which measurements the
engine has when the prompt arrives.
"""
PROMPT, BUDGET, SECONDS = 2048, 1024, 0.48
PIECE, PIECES = 1 << 12, 16
"""PIECE is the number of bytes of one read (two pages), and PIECES is the number of concurrent reads. With these
values, the prompt needs as many reads as a prompt of 16,384 tokens of an 8B model.
"""
BASE, GROWTH = 0.012, 0.45
"""BASE is a fixed time of each step, in seconds. The time per token grows over a prompt. Between its first and its last
token, it differs by GROWTH times the mean time per token.
"""
FIRST = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


class SimulatedDevice:
    """Simulates the speed of a device for an engine. The tiny model computes a step at once, and the engine gets the
    result only after the simulated time of the step."""

    def __init__(self, engine: Engine) -> None:
        self._step_ends: deque[float] = deque()
        self._run, self._process = engine.runner.run, engine.output_processor.process
        engine.runner.run = self.run  # type: ignore[method-assign, assignment]
        engine.output_processor.process = self.process  # type: ignore[method-assign, assignment]
        self.tokens: list[int] = []

    @staticmethod
    def seconds(tokens: int, position: int) -> float:
        """Return the simulated seconds of a step that computes `tokens` tokens from `position` on. The speed is set so
        that a prompt of PROMPT tokens, in full steps, takes SECONDS."""
        steps = PROMPT // BUDGET
        each = (SECONDS - steps * BASE) / PROMPT
        middle = (position + tokens / 2) / PROMPT - 0.5
        return BASE + tokens * each * (1 + GROWTH * middle)

    def run(self, works: Sequence[Any], *rest: Any) -> torch.Tensor:
        began = time.perf_counter()
        tokens, position = sum(len(work.tokens) for work in works), works[0].sequence.length
        logits = self._run(works, *rest)
        before = self._step_ends[-1] if self._step_ends else 0.0
        self._step_ends.append(max(began, before) + self.seconds(tokens, position))
        self.tokens.append(tokens)
        return logits

    def process(self, *given: Any) -> Any:
        time.sleep(max(0.0, self._step_ends.popleft() - time.perf_counter()))
        return self._process(*given)


class PacedEngine:
    """An engine whose disk tier is slowed down to a given speed, for measurements of load or recompute."""

    def __init__(self, model: Any, folder: Path, seed: int) -> None:
        self.faults = Faults()
        tier = FaultyTier(DiskTier(DiskConfig(folder, 256 << 20)), self.faults)
        lane = TierQueueConfig(max_inflight_bytes=PIECES * PIECE, batch_bytes=PIECE)
        offload = OffloadConfig(transfers=TransferConfig(queue=lane))
        tiers: list[str | OpenTier] = ["host:64MiB", OpenTier(tier)]
        config = EngineConfig(
            pool_bytes=64 << 20, tiers=tiers, offload=offload, token_budget=BUDGET, ahead=True
        )
        self.engine = Engine(model, config)
        self.device = SimulatedDevice(self.engine)
        self._rng = np.random.default_rng(seed)
        self.bytes = self.engine.layout.slab_bytes_for(PROMPT)

    def prompt(self) -> list[int]:
        return [int(token) for token in self._rng.integers(3, 60, PROMPT)]

    def first_token(self, tokens: list[int], read: bool) -> tuple[float, int, list[int]]:
        """Run a prompt, without cached pages if `read` is False. Return the seconds to its first token, its number of
        cached tokens, and the number of tokens that each step computed."""
        self.device.tokens = []
        began = time.perf_counter()
        request = self.engine.add(tokens, FIRST, CacheControl(read=read))
        while request.finish_reason is None:
            self.engine.step()
        took = time.perf_counter() - began
        self.engine.run()
        return took, request.cached_tokens or 0, self.device.tokens

    def store(self, tokens: list[int]) -> None:
        """Compute a prompt, so that the disk has its pages."""
        rate, self.faults.rate = self.faults.rate, 0.0
        self.first_token(tokens, read=False)
        assert self.engine.offload is not None
        wait_until_stored(self.engine.offload)
        self.faults.rate = rate

    def evict(self, tokens: list[int]) -> None:
        """Evict a prompt's pages from the pool and host memory, so that only the disk has them."""
        assert self.engine.offload is not None
        evict_pool(self.engine)
        evict_host(self.engine, self.engine.offload, tokens)

    def set_disk_ratio(self, ratio: float) -> None:
        self.faults.rate = ratio * self.bytes / SECONDS


def measure_load_or_recompute(
    ratios: Sequence[float] = RATIOS, scenarios: Sequence[str] = tuple(SCENARIOS), rounds: int = 3
) -> list[dict[str, Any]]:
    """Return one dictionary for each of `ratios` (disk throughput divided by prefill throughput) and each scenario.
    Times are median seconds to the first token.

    - `computed_s` is the time if the whole prompt is computed.
    - `auto_s` is the time if the engine decides which part to load.
    - `relative` is `auto_s` divided by `computed_s`.
    - `ideal` is the value of `relative` if computing and loading overlap perfectly.
    """
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, max_position_embeddings=2 * PROMPT,
        )
    )  # fmt: skip
    rows = []
    for ratio in ratios:
        for known in scenarios:
            times: dict[str, list[float]] = {"computed": [], "auto": []}
            cached, steps = [], []
            for round_ in range(rounds):
                found = _round(model, ratio, known, round_)
                times["computed"].append(found["computed"][0])
                times["auto"].append(found["auto"][0])
                cached.append(found["auto"][1])
                steps.append(found["auto"][2])
            computed, auto = (statistics.median(times[which]) for which in ("computed", "auto"))
            rows.append(
                {
                    "ratio": ratio, "known": known, "computed_s": computed, "auto_s": auto, "cached": cached,
                    "steps": steps, "relative": auto / computed, "ideal": 1 / (1 + ratio),
                }
            )  # fmt: skip
            log(
                f"load or recompute {len(rows)} of {len(ratios) * len(scenarios)}: disk {ratio:g}, {known}: {auto / computed:.2f}"
            )
    return rows


def _round(model: Any, ratio: float, known: str, seed: int) -> dict[str, tuple[float, int, list[int]]]:
    with tempfile.TemporaryDirectory() as folder:
        bench = PacedEngine(model, Path(folder), seed)
        tokens = bench.prompt()
        bench.store(tokens)
        if known == "nothing":
            bench.engine.close()
            bench = PacedEngine(model, Path(folder), seed)
            bench.prompt()
        if known in ("known", "slower", "cached"):
            bench.set_disk_ratio(ratio * (3 if known == "slower" else 1))
            for _ in range(3):
                other = bench.prompt()
                bench.store(other)
                bench.evict(other)
                bench.first_token(other, read=True)
        bench.set_disk_ratio(ratio)
        bench.evict(tokens)
        if known == "cached":
            bench.faults.burst = bench.bytes // 4
        found = {}
        order = ("computed", "auto") if seed % 2 and known != "nothing" else ("auto", "computed")
        for which in order:
            prompt = tokens if which == "auto" else bench.prompt()
            found[which] = bench.first_token(prompt, read=which == "auto")
        bench.engine.close()
        return found
