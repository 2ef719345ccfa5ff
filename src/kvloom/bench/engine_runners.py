"""What `kvloom bench engine` runs its workloads on: what every runner is, and kvloom's own; the others are `engine_peers`.

Each is started on a shape and then given conversations; it says how long they took, what was said and what it saw. Drawing
tokens, rounds and reports are someone else's.
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
    "Turns",
    "release_memory",
    "synchronize",
]

Turns = list[list[list[int]]]
"""What was said: [conversation][turn] → tokens."""
CPU_POOL = 512 << 20


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says about how to run. None leaves a choice to the engine, or to memory."""

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


@dataclass(slots=True)
class Measurement:
    """Seconds from the first prompt's submission to the last token, what was said, and figures by name; on a CPU also
    the seconds that all its threads and processes computed. Copies to tiers that outlast the last token are not among the
    seconds: `drained_s` of the figures says how long they took."""

    seconds: float
    answers: Turns
    figures: dict[str, float] = field(default_factory=dict)
    processor: float | None = None


class Runner(Protocol):
    """`start_s`: seconds from no weights to ready to serve, Python's imports not counted; `version` and `notes` are for
    the report."""

    name: str
    version: str
    notes: dict[str, str]
    start_s: float

    def run(self, conversations: Sequence[Conversation], output: int) -> Measurement:
        """Serve every turn, each with exactly `output` greedy tokens; the next turn follows as soon as one ends."""
        ...

    def close(self) -> None:
        """Give its memory back."""
        ...


def synchronize(device: str) -> None:
    """Wait until the device has done what it was told."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def release_memory(device: str) -> None:
    """Let the device have the memory that nothing uses any more."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


class Kvloom:
    """kvloom's own engine, one step after the other."""

    name = "kvloom"
    batch_invariant = False

    def __init__(self, shape: str, options: Options) -> None:
        from kvloom.engine import Engine, EngineConfig, default_token_budget

        # Its modules are imported before the clock starts.
        build(hf_config(shape), SHAPES[shape].dtype, "meta")
        begin = time.perf_counter()
        self.device = options.device
        model = build(hf_config(shape), SHAPES[shape].dtype, options.device, options.seed)
        pool = options.pool or (None if options.device.startswith("cuda") else CPU_POOL)
        budget = options.token_budget or default_token_budget(
            torch.device(options.device)
        )  # as offline use has it
        config = EngineConfig(
            pool_bytes=pool,
            kv_dtype=options.kv_dtype,
            token_budget=budget,
            max_running=options.max_running,
            batch_invariant=self.batch_invariant,
            tiers=options.tiers,
        )
        self.engine = Engine(model, config)
        self.engine.prepare()
        synchronize(self.device)
        self.start_s = time.perf_counter() - begin
        gc.collect()
        gc.freeze()  # as the server's engine does: a full collection would stop a round for 0.2 s
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

    def run(self, conversations: Sequence[Conversation], output: int) -> Measurement:
        from kvloom.engine import Request, SamplingParams

        params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
        engine, peak = self.engine, PeakUsage(self.engine.cache)
        answers: Turns = [[] for _ in conversations]
        preemptions = steps = asked = cached = 0
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
            # A request may end without a token (no room): look at all of them where nothing came back.
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
                turn, later = len(answers[place]), conversations[place].later
                if turn <= len(later):
                    running[engine.add([*request.prompt, *answer, *later[turn - 1]], params)] = place
        seconds = time.perf_counter() - begin  # the last token is on the host, so the device has computed it
        computed = None if self.device.startswith("cuda") else time.process_time() - processor
        # Of what requests asked for, and began with: the cache's own counts hold what preempted ones looked up again, too.
        figures = {"steps": steps, "preemptions": preemptions, "hit_rate": cached / asked}
        if first is not None and len(conversations) == 1:
            figures["first_token_s"] = first
        if engine.offload is not None:
            figures["drained_s"] = self._drain(engine.offload)
        synchronize(self.device)
        return Measurement(seconds, answers, figures | peak.figures(), computed)

    def _drain(self, offload: OffloadManager) -> float:
        """Wait until pages have been copied to host memory that still were when the last token came; seconds it took."""
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
    """kvloom in its batch-invariant mode: what that costs."""

    name = "batch-invariant"
    batch_invariant = True
