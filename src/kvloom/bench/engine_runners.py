"""Runners of `kvloom bench engine`: the Runner protocol, and the runners of kvloom. Peers are in `engine_peers`.

A runner builds a model shape, serves conversations, and returns times, answers and figures. The tokens of the
conversations come from `workloads`, and `engine_report` prints the results.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from .pool_usage import PeakUsage
from .shapes import SHAPES, build, hf_config
from .workloads import Conversation

if TYPE_CHECKING:
    from kvloom.engine import OffloadManager

__all__ = [
    "BatchInvariant",
    "Kvloom",
    "Measurement",
    "Options",
    "Runner",
    "Speculating",
    "Turns",
    "release_memory",
    "synchronize",
]

Turns = list[list[list[int]]]
"""Answers: [conversation][turn] → tokens."""
CPU_POOL = 512 << 20


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command line. If a value is None, the engine chooses it."""

    device: str = "cpu"
    seed: int = 0
    kv_dtype: str | None = None
    pool: int | None = None
    token_budget: int | None = None
    max_running: int | None = None
    tiers: tuple[str, ...] = ()
    compile: bool = False
    vllm_python: str = sys.executable
    max_length: int = 20480
    speculate: str = "off"


@dataclass(slots=True)
class Measurement:
    """The result of one run of a workload: the seconds from the first submission to the last token, the answers, and
    other figures by name.

    On a CPU, `processor` has the CPU seconds of all threads and processes. The time of copies to tiers after the last
    token is not part of `seconds`. It is the figure `drained_s`.
    """

    seconds: float
    answers: Turns
    figures: dict[str, float] = field(default_factory=dict)
    processor: float | None = None


class Runner(Protocol):
    """Runs conversations on one system. `start_s` is the time in seconds until the model is ready, without the time of
    Python imports. `version` and `notes` are printed in the report."""

    name: str
    version: str
    notes: dict[str, str]
    start_s: float

    def run(self, conversations: Sequence[Conversation], output: int) -> Measurement:
        """Answer every turn with exactly `output` greedy tokens. The next turn of a conversation starts as soon as the
        previous turn is answered.
        """
        ...

    def close(self) -> None:
        """Release the memory of the runner."""
        ...


def synchronize(device: str) -> None:
    """Wait until the device is idle."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def release_memory(device: str) -> None:
    """Release unused device memory."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


class Kvloom:
    """kvloom's engine, run step by step."""

    name = "kvloom"
    batch_invariant = False
    speculates = False

    def __init__(self, shape: str, options: Options) -> None:
        from kvloom.engine import Engine, EngineConfig, default_token_budget

        # Import its modules before timing.
        build(hf_config(shape), SHAPES[shape].dtype, "meta")
        begin = time.perf_counter()
        self.device = options.device
        model = build(hf_config(shape), SHAPES[shape].dtype, options.device, options.seed)
        pool = options.pool or (None if options.device.startswith("cuda") else CPU_POOL)
        budget = options.token_budget or default_token_budget(
            torch.device(options.device)
        )  # the budget of offline use
        config = EngineConfig(
            pool_bytes=pool,
            kv_dtype=options.kv_dtype,
            token_budget=budget,
            max_running=options.max_running,
            batch_invariant=self.batch_invariant,
            tiers=options.tiers,
            speculate=options.speculate if self.speculates else "off",
        )
        self.engine = Engine(model, config)
        self.engine.prepare()
        synchronize(self.device)
        self.start_s = time.perf_counter() - begin
        gc.collect()
        gc.freeze()  # like the server: a full collection would stop a round for 0.2 s
        self.version = "this checkout"
        self.notes = {
            "pool": _gib(self.engine.buffer.numel()),
            "weights": str(SHAPES[shape].dtype).removeprefix("torch."),
            "prompt tokens a step": str(self.engine.scheduler.token_budget),
        }
        if options.kv_dtype:
            self.notes["K and V"] = options.kv_dtype
        if options.tiers:
            self.notes["tiers"] = ", ".join(options.tiers)
        if self.speculates:
            self.notes["drafts"] = options.speculate

    def run(self, conversations: Sequence[Conversation], output: int) -> Measurement:
        from kvloom.engine import Request, SamplingParams

        params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
        engine, peak = self.engine, PeakUsage(self.engine.cache)
        answers: Turns = [[] for _ in conversations]
        preemptions = steps = asked = cached = drafted = accepted = 0
        first: float | None = None
        begin, processor = time.perf_counter(), time.process_time()
        running: dict[Request, int] = {
            engine.add(each.prompt, params): i for i, each in enumerate(conversations)
        }
        while running:
            touched = engine.step()
            steps += 1
            if touched and first is None:
                first = time.perf_counter() - begin
            peak.sample()
            # A request may finish without a token (pool full): check all if the step returned none.
            for request in touched or list(running):
                if request.finish_reason is None or request not in running:
                    continue
                place = running.pop(request)
                if request.finish_reason != "length":
                    raise RuntimeError(
                        f"a request of {len(request.prompt)} tokens ended as {request.finish_reason!r}, not at its length"
                    )
                answer = request.output
                answers[place].append(answer)
                preemptions += request.preemptions
                asked, cached = asked + len(request.prompt), cached + (request.cached_tokens or 0)
                drafted, accepted = drafted + request.draft_tokens, accepted + request.accepted_tokens
                turn, later = len(answers[place]), conversations[place].later
                if turn <= len(later):
                    running[engine.add([*request.prompt, *answer, *later[turn - 1]], params)] = place
        seconds = time.perf_counter() - begin  # the last token is on the host, so the device has computed it
        computed = None if self.device.startswith("cuda") else time.process_time() - processor
        # From requests: the cache's counters include lookups after preemptions.
        figures = {"steps": steps, "preemptions": preemptions, "hit_rate": cached / asked}
        if first is not None and len(conversations) == 1:
            figures["first_token_s"] = first
        if self.speculates:
            figures |= {"draft_tokens": drafted, "accepted_tokens": accepted}
        if engine.offload is not None:
            figures["drained_s"] = self._drain(engine.offload)
        synchronize(self.device)
        return Measurement(seconds, answers, figures | peak.figures(), computed)

    def _drain(self, offload: OffloadManager) -> float:
        """Wait until all pending copies to host memory are done. Return the seconds of the wait."""
        began = time.perf_counter()
        offload.flush()
        while offload.is_retaining_pages:
            offload.wait(0.001)
            offload.poll()
        return time.perf_counter() - began

    def close(self) -> None:
        self.engine.close()
        del self.engine
        gc.unfreeze()
        release_memory(self.device)


def _gib(size: int) -> str:
    return f"{size / 2**30:.4g} GiB"


class BatchInvariant(Kvloom):
    """kvloom in its batch-invariant mode."""

    name = "batch-invariant"
    batch_invariant = True


class Speculating(Kvloom):
    """Runs kvloom with speculative decoding, as set by `--speculate`."""

    name = "kvloom with drafts"
    speculates = True
