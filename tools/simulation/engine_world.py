"""Runs a scenario on a real engine: scheduler, prefix cache, offload manager, tier queues, host, disk and store tiers.

Only the model, the files, the store and the device copies are replaced. After every step the world checks:

| invariant | how                                                                                              |
|-----------|--------------------------------------------------------------------------------------------------|
| tokens    | every token equals the one that the model computes without pages                                  |
| pages     | `KVCache.check()` recounts all references, and no tenant exceeds its quota                        |
| ends      | after the faults end, every request finishes, and only a cancelled one with "cancelled"           |
| leaks     | then no page is in use, no page in host memory is leased, and `close` ends every thread           |
"""

from __future__ import annotations

import gc
import hashlib
import math
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

import kvloom.engine.engine as engine_module
import kvloom.engine.offload.manager as manager_module
import kvloom.engine.offload.open_tiers as open_tiers_module
import kvloom.engine.target_runner as runner_module
from kvloom.core import CacheControl, CheckpointPolicy, KVCache, Pin, PoolLayout, Tenant
from kvloom.engine import Engine, EngineConfig, OffloadConfig, Request, SamplingParams
from kvloom.engine.execution.kv_memory import KVMemory
from kvloom.kernels.copy import copy_pages
from kvloom.tiers import DiskConfig, DiskTier, OpenTier
from kvloom.tiers.remote import RemoteConfig, store_tier

from .faults import DeviceCopies, FaultRates, SimulatedFiles, SimulatedStore
from .scenario import Scenario
from .stand_in_model import LAYERS, VOCABULARY, Oracle, StandInModel, StandInRunner
from .virtual_threads import VirtualThreads

__all__ = ["EngineWorld", "InvariantError", "Outcome", "run_engine_scenario"]

CHECK_STEPS = 5
MAX_IDLE_STEPS = 600
"""After so many steps without a new output token, requests are stuck. These steps take 100 s of virtual time or more."""
SHM = "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: PTH112


class InvariantError(AssertionError):
    """Raised if an invariant does not hold."""


@dataclass
class Outcome:
    """The result of a scenario. `digest` is the same for every run of the same scenario."""

    steps: int = 0
    switches: int = 0
    requests: int = 0
    tokens: int = 0
    virtual_seconds: float = 0.0
    injected: dict[str, int] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)
    loaded_tokens: int = 0
    preemptions: int = 0
    restarts: int = 0
    digest: str = ""


@dataclass(eq=False)
class _Tracked:
    request: Request
    expected: list[int]
    arguments: dict[str, Any]
    control: CacheControl
    prompt: tuple[int, ...]
    verified: int = 0
    is_cancelled: bool = False


class EngineWorld:
    """One scenario in progress."""

    def __init__(self, scenario: Scenario, threads: VirtualThreads) -> None:
        self.scenario, self.threads = scenario, threads
        self.settings = scenario.settings
        self.faults = FaultRates(threads)
        self.layout = PoolLayout.build(LAYERS[self.settings["layers"]], self.settings["block_tokens"])
        self.oracle = Oracle(self.layout)
        self.store_values: dict[bytes, bytes] = {}
        self.folder = tempfile.mkdtemp(prefix="kvloom-simulation-", dir=SHM)
        self.open: list[_Tracked] = []
        self.done: list[_Tracked] = []
        self.pins: list[Pin] = []
        self.outcome = Outcome()
        self._disk: DiskTier | None = None
        self._files: SimulatedFiles | None = None
        self._digest = hashlib.blake2b(digest_size=8)
        stems = random.Random("stems")
        self._stems = [[stems.randrange(1, VOCABULARY) for _ in range(400)] for _ in range(5)]
        self.engine = self._open_engine()

    # -- the engine -------------------------------------------------------------------------------

    def _open_engine(self) -> Engine:
        settings, layout = self.settings, self.layout
        longest = settings["longest"]
        slabs = layout.slab_bytes_for(longest + layout.block_tokens, states=2) // layout.slab_bytes
        slabs = 1 + int(settings["sequences"] * slabs)
        pool = slabs * layout.slab_bytes
        names = [f"tenant {i}" for i in range(len(settings["tenants"]))]
        tenants = tuple(
            Tenant(
                name,
                quota=None
                if one["quota"] is None
                else max(int(one["quota"] * pool), pool // slabs * (slabs // 2)),
                weight=one["weight"],
                firm=one["firm"],
            )
            for name, one in zip(names, settings["tenants"], strict=True)
        )
        unit = layout.slab_bytes * 4096 // math.gcd(layout.slab_bytes, 4096)
        block = sum(g.page_stride * g.runs for g in layout.groups)
        host_bytes = max(unit, -(-settings["host_blocks"] * block // unit) * unit)
        writes = dict(zip(("host", "disk", "store"), settings["write"], strict=True))
        tiers: list[Any] = []
        for name in settings["tiers"]:
            if name == "host":
                tiers.append(f"host:{host_bytes}?write={writes['host']}")
            elif name == "disk":
                tiers.append(OpenTier(self._open_disk(block), writes["disk"]))
            else:
                tiers.append(OpenTier(self._open_store(block), writes["store"]))
        config = EngineConfig(
            pool_bytes=pool,
            block_tokens=settings["block_tokens"],
            token_budget=settings["token_budget"],
            max_running=settings["max_running"],
            ahead=settings["ahead"],
            speculate=settings["speculate"],
            checkpoint_every=settings["checkpoint_every"],
            eviction_policy=settings["policy"] if settings["policy"] != "learned" else "slru",
            tenants=tenants,
            tiers=tiers,
            offload=OffloadConfig(settings["load"]),
        )
        engine = Engine(StandInModel(settings["layers"]), config)
        if not settings["admission"]:
            engine.scheduler.admission = None
        runner: Any = engine.runner
        runner.on_run = self._on_step
        runner.fails_after = self._step_failure
        return engine

    def _open_disk(self, block: int) -> DiskTier:
        config = DiskConfig(
            self.folder,
            capacity=max(1 << 16, 60 * block),
            segment_bytes=max(1 << 14, 8 * block),
            compression=self.settings["compression"],
            readers=2,
            direct=False,
        )
        made: list[SimulatedFiles] = []

        def files(directory: int) -> SimulatedFiles:
            made.append(SimulatedFiles(directory, self.faults))
            return made[-1]

        rates, self.faults.rates = self.faults.rates, {}  # opening must succeed
        try:
            self._disk = DiskTier(config, files)
        finally:
            self.faults.rates = rates
        self._files = made[0]
        return self._disk

    def _open_store(self, block: int) -> Any:
        rates, self.faults.rates = self.faults.rates, {}
        config = RemoteConfig(60 * block, compression=self.settings["compression"], readers=1, writers=1)
        try:
            return store_tier("store", config, lambda: SimulatedStore(self.store_values, self.faults))
        finally:
            self.faults.rates = rates

    def _on_step(self, tokens: int) -> None:
        seconds = 0.001 + 0.0002 * tokens
        if self.faults.happens("step_slow"):
            seconds += 2 * self.threads.random.random()
        self.threads.sleep(seconds)

    def _step_failure(self, works: Any) -> int | None:
        if self.faults.happens("step_fail"):
            return self.threads.random.randrange(len(works) + 1)
        return None

    # -- operations -------------------------------------------------------------------------------

    def apply(self, operation: list[Any]) -> None:
        verb = operation[0]
        if verb == "add":
            self._add(operation[1])
        elif verb == "steps":
            for _ in range(operation[1]):
                self.step()
        elif verb == "cancel":
            if self.open:
                tracked = self.open[operation[1] % len(self.open)]
                tracked.is_cancelled = True
                self.engine.cancel(tracked.request)
                self._collect()
        elif verb == "faults":
            self.faults.rates = dict(operation[1])
        elif verb == "sleep":
            self.threads.sleep(operation[1])
            if self.engine.offload is not None:
                with suppress(RuntimeError):
                    self.engine.offload.poll()
        elif verb == "pin":
            every = self.open + self.done
            if every:
                tracked = every[operation[1] % len(every)]
                self.pins.append(self.engine.pin(tracked.prompt, operation[2], tracked.control))
        elif verb == "session":
            name = f"session {operation[2]}"
            if operation[1] == "end":
                self.engine.end_session(name)
            else:
                self.engine.expect_session(name)
        elif verb == "restart":
            self._restart(operation[1])
        else:
            raise ValueError(f"unknown operation {operation!r}")

    def _add(self, given: dict[str, Any]) -> None:
        own = random.Random(f"own {given['own'][0]}")
        stem, size = given["stem"]
        prompt = self._stems[stem][:size] + [own.randrange(1, VOCABULARY) for _ in range(given["own"][1])]
        tenant = given.get("tenant")
        if "follows" in given and self.done:
            last = self.done[-1 - given["follows"] % len(self.done)]
            longer = [*last.request.tokens, *prompt[-3:]]
            if len(longer) + given["max_tokens"] <= self.settings["longest"]:
                prompt, tenant = longer, last.arguments.get("tenant")
        control = CacheControl(
            tenant="" if tenant is None else f"tenant {tenant}",
            session=None if "session" not in given else f"session {given['session']}",
            read=given.get("read", True),
            store=given.get("store", True),
        )
        self._start(tuple(prompt), control, {**given, "tenant": tenant}, ())

    def _start(
        self, prompt: tuple[int, ...], control: CacheControl, given: dict[str, Any], resume: tuple[int, ...]
    ) -> None:
        n = given.get("n", 1)
        params = SamplingParams(
            max_tokens=given["max_tokens"],
            ignore_eos=given.get("ignore_eos", False),
            n=n,
            temperature=1.0 if n > 1 else 0.0,
            top_k=1 if n > 1 else 0,
            seed=1,
        )
        root = self.engine.cache.match(prompt, control).root_hash
        try:
            request = self.engine.add(
                prompt, params, control, given.get("priority", 0), resume=resume if n == 1 else ()
            )
        except ValueError:
            self._count("refused")
            return
        expected = self.oracle.continuation(root, prompt, params.max_tokens, params.ignore_eos)
        self.open.append(_Tracked(request, expected, given, control, prompt))
        self.outcome.requests += 1

    def step(self) -> None:
        try:
            self.engine.step()
        except RuntimeError as error:
            if "injected" not in str(error):
                raise
        self.outcome.steps += 1
        self._collect()
        if self.outcome.steps % CHECK_STEPS == 0:
            self.check()
        self._check_threads()

    def _check_threads(self) -> None:
        """Raise InvariantError if an exception ended a thread."""
        for name, why in self.threads.errors:
            raise InvariantError(f"the thread {name} ended with {why!r}") from why

    def _collect(self) -> None:
        """Verify new tokens, and remove finished requests."""
        still = []
        for tracked in self.open:
            for sample in tracked.request.family:
                output = sample.output
                wanted = tracked.expected
                if output != wanted[: len(output)]:
                    at = next(
                        i
                        for i, (a, b) in enumerate(zip(output, [*wanted, *[None] * 99], strict=False))
                        if a != b
                    )
                    raise InvariantError(
                        f"request {sample.order} has token {output[at]} at output {at} of {len(output)}, expected "
                        f"{wanted[at : at + 1]}; prompt of {len(tracked.prompt)} tokens, cached {sample.cached_tokens}, "
                        f"{sample.preemptions} preemptions, hits {sample.hits}"
                    )
            if all(sample.finish_reason is not None for sample in tracked.request.family):
                self._finish(tracked)
            else:
                still.append(tracked)
        self.open = still

    def _finish(self, tracked: _Tracked) -> None:
        for sample in tracked.request.family:
            why, output = sample.finish_reason, sample.output
            self._count(str(why))
            self._digest.update(f"{sample.order} {why} {output} {self.threads.now:.6f};".encode())
            self.outcome.tokens += len(output)
            self.outcome.preemptions += sample.preemptions
            if why in ("length", "stop"):
                if output != tracked.expected:
                    raise InvariantError(
                        f"request {sample.order} finished by {why!r} after {len(output)} of {len(tracked.expected)} tokens"
                    )
            elif why == "cancelled" and tracked.is_cancelled:
                pass
            elif why == "no_room" and (self.pins or any(one["weight"] for one in self.settings["tenants"])):
                pass  # pinned pages, and pages within the share of another tenant, cannot be evicted
            else:
                raise InvariantError(f"request {sample.order} finished by {why!r}, which nothing asked for")
        self.done.append(tracked)

    def _count(self, why: str) -> None:
        self.outcome.finished[why] = self.outcome.finished.get(why, 0) + 1

    def check(self) -> None:
        """Check the pages of the pool."""
        cache = self.engine.cache
        cache.check()
        for account in cache.inspect.accounts.values():
            quota = account.tenant.quota
            if quota is not None and account.in_use > quota:
                raise InvariantError(
                    f"tenant {account.tenant.name!r} uses {account.in_use} bytes; its quota is {quota}"
                )

    def _restart(self, kind: str) -> None:
        """End the engine and open another one. Unfinished requests continue there with the tokens that they have, as a
        router continues them on another worker."""
        self.pins.clear()
        waiting = [(one, tuple(one.request.output)) for one in self.open]
        if kind == "close":
            self._collect_loads()
            self.engine.close(10.0)
            rates, self.faults.rates = self.faults.rates, {}
            self.threads.sleep(300)  # hung calls end
            self.faults.rates = rates
            if self.threads.alive:
                raise InvariantError(f"threads run after close: {self.threads.alive}")
        else:
            self._collect_loads()
            self.threads.forget_threads()
        self._release_disk()
        self.outcome.restarts += 1
        self.open = []
        self.engine = self._open_engine()
        for tracked, output in waiting:
            if tracked.is_cancelled:
                continue
            if len(output) >= len(tracked.expected):
                continue
            self._start(tracked.prompt, tracked.control, tracked.arguments, output)

    def _collect_loads(self) -> None:
        if self.engine.offload is not None:
            self.outcome.loaded_tokens += self.engine.offload.stats.loaded_tokens

    def _release_disk(self) -> None:
        """Close the files of a disk tier that was killed, as the system does at the end of a process."""
        if self._disk is None or self._files is None:
            return
        for fd in list(self._files.open_files):
            os.close(fd)
        self._files.open_files.clear()
        for name in ("_lock_file", "_directory"):
            with suppress(OSError):
                os.close(getattr(self._disk, name))
        self._disk = None

    # -- the end ----------------------------------------------------------------------------------

    def drain(self) -> None:
        """End the faults, finish every request, and check that nothing leaks."""
        self.faults.rates = {}
        self.faults.threads.sleep(15)  # pins end
        for pin in self.pins:
            self.engine.cache.unpin(pin)
        idle_steps, last = 0, (-1, -1)
        while self.engine.busy and idle_steps < MAX_IDLE_STEPS:
            self.step()
            open_tokens = sum(len(sample.tokens) for one in self.open for sample in one.request.family)
            progress = self.outcome.tokens + open_tokens, len(self.open)
            idle_steps = idle_steps + 1 if progress == last else 0
            last = progress
            if idle_steps:
                self.threads.sleep(min(1.0, 1e-4 * 1.1**idle_steps))
        if self.engine.busy or self.open:
            states = [
                (
                    one.request.order,
                    len(one.request.tokens),
                    one.request.computed,
                    one.request.sequence is not None,
                )
                for one in self.open
            ]
            raise InvariantError(f"requests do not end: (order, tokens, computed, runs) = {states}")
        engine = self.engine
        offload = engine.offload
        for _ in range(2000):
            engine.apply_copies()
            if offload is None:
                break
            offload.poll()
            if not (offload.is_retaining_pages or offload._jobs or offload._hand_overs):
                break
            self.threads.sleep(0.01)
        self.check()
        stats = engine.cache.stats()
        if stats["in_use_pages"]:
            raise InvariantError(f"{stats['in_use_pages']} pages are in use although no request is left")
        if offload is not None:
            self._check_host(offload)
        self._collect_loads()
        engine.close(10.0)
        self.threads.sleep(120)
        if self.threads.alive:
            raise InvariantError(f"threads run after close: {self.threads.alive}")
        self._check_threads()

    def _check_host(self, offload: Any) -> None:
        """Check that no page of host memory is leased, once all transfers have ended."""
        self.threads.sleep(100)
        offload.poll()
        slots = offload.host.index.slots
        leased = int((slots.refs > 0).sum())
        if leased:
            raise InvariantError(f"{leased} pages of host memory are leased although no transfer runs")

    def close(self) -> None:
        """Remove the files of the world."""
        self._release_disk()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.outcome.switches = self.threads.switches
        self.outcome.virtual_seconds = self.threads.now - 1000
        self.outcome.injected = dict(self.faults.injected)
        self._digest.update(f"{self.outcome.steps} {self.threads.switches} {self.threads.now:.6f}".encode())
        self.outcome.digest = self._digest.hexdigest()


def _kv_memory(model: StandInModel, config: EngineConfig, draft: Any = None, lora: Any = None) -> KVMemory:
    """Allocate the pool of the stand-in model. Its bytes are not zero, like those of new memory on a GPU."""
    layout = PoolLayout.build(LAYERS[model.kind], config.block_tokens)
    assert config.pool_bytes is not None
    assert config.max_running is not None
    slabs = layout.slabs_in(config.pool_bytes)
    buffer = torch.full((slabs * layout.slab_bytes,), 0xA5, dtype=torch.uint8)
    cache = KVCache(
        layout,
        slabs=slabs,
        model=f"stand-in {model.kind}",
        max_sequences=config.max_running,
        max_tokens=512,
        tenants=config.tenants,
        policy=config.eviction_policy,
        checkpoint_policy=CheckpointPolicy(
            before_last=True, every_blocks=-(-config.checkpoint_every // config.block_tokens)
        ),
    )
    return KVMemory(layout, buffer, None, cache, None, None, 512, None, False)


@contextmanager
def _replaced(scenario: Scenario, threads: VirtualThreads, world: list[EngineWorld]) -> Iterator[None]:
    """Replace the model, the device copies and the copies inside the pool."""

    class Copies(DeviceCopies):
        delay = scenario.settings["copy_delay"]

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.faults = made_faults()

    pending: list[FaultRates] = []

    def made_faults() -> FaultRates:
        if world:
            return world[0].faults
        return pending[0]

    def faulty_copy(buffer: Any, stride: int, source: Any, target: Any) -> None:
        if world and world[0].faults.happens("copy_fail"):
            copy_pages(buffer, stride, source[: len(source) // 2], target[: len(source) // 2])
            raise RuntimeError("CUDA error (injected)")
        copy_pages(buffer, stride, source, target)

    original = EngineWorld._open_engine

    def open_engine(self: EngineWorld) -> Engine:
        pending[:] = [self.faults]
        return original(self)

    with ExitStack() as stack:
        for target, name, value in (
            (runner_module, "ModelRunner", StandInRunner),
            (engine_module, "allocate_kv_memory", _kv_memory),
            (engine_module, "copy_pages", faulty_copy),
            (manager_module, "HostPages", Copies),
            (open_tiers_module, "STAGING_BYTES", {False: 1 << 20, True: 1 << 20}),
            (EngineWorld, "_open_engine", open_engine),
        ):
            stack.enter_context(patch.object(target, name, value))
        yield


def run_engine_scenario(scenario: Scenario) -> Outcome:
    """Run a scenario. Raises InvariantError, or the exception of the engine, if an invariant does not hold."""
    threads = VirtualThreads(f"threads {scenario.seed}")
    world: list[EngineWorld] = []
    was_enabled = gc.isenabled()
    gc.disable()  # a finaliser must not run at a time that depends on the machine
    try:
        with threads.installed(), _replaced(scenario, threads, world):
            try:
                world.append(EngineWorld(scenario, threads))
                for operation in scenario.operations:
                    world[0].apply(operation)
                world[0].drain()
                return world[0].outcome
            finally:
                for one in world:
                    one.close()
    finally:
        if was_enabled:
            gc.enable()
