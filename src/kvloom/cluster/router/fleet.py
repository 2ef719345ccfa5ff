"""The workers of a router: membership, health, and the models of each worker.

    --worker, --discover, /register ──▶ Worker ──▶ GET /kvloom/worker or /v1/models every second: health, models, load
                                          └──────▶ Subscriber: adds its events to the index of its model

A worker is dead after one failed request or two failed checks, until a check succeeds. Its streams continue on other
workers. The index keeps the blocks of a dead worker. When a check succeeds again, a snapshot replaces these blocks,
because the worker may have restarted. A worker also reports the name of its engine instance, so that the router notices
a restart between two checks.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvloom.core import HASH_TOKENS, Histogram, Objective, public_root_hash, root_hash
from kvloom.events_wire import GPU, CurveKey, EventBatch, Subscriber

from .fleet_index import FleetIndex, Group
from .scoring import Scorer, ScoringOptions, SpeedModel, WorkerLoad
from .worker_client import WorkerClient

__all__ = ["Fleet", "Offer", "ServedModel", "Worker"]

log = logging.getLogger("kvloom.router")
LATENCY_SECONDS = (0.0001, 0.00025, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08,
                   0.1, 0.15, 0.25, 0.5, 0.75, 1, 1.5, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 320, 640)  # fmt: skip
"""Bounds of the router's histograms, in seconds. The router's own time is below a millisecond, but a first token may
take minutes."""
CHECK_SECONDS = 1.0
CHECK_TIMEOUT = 3.0
DISCOVER_SECONDS = 2.0
FAILED_RESOLUTIONS = 5
"""A dead worker that was discovered is removed when this many consecutive name resolutions have not returned its
address."""
FAILED_CHECKS = 2
"""A worker is dead after this many failed checks in a row."""


@dataclass(frozen=True, slots=True)
class AdapterOffer:
    """A LoRA adapter of a worker: the digest that salts its block hashes, and its invocation tokens. Only an activated
    LoRA has invocation tokens. An activated LoRA applies to the last occurrence of these tokens in the prompt, and to
    all tokens after it."""

    digest: str
    invocation_tokens: tuple[int, ...] = ()


@dataclass(slots=True)
class Offer:
    """A model that one worker serves, as the worker reports it to the router.

    - `hash_model` is the model's name in block hashes. It is None if the worker is not kvloom (such as vLLM), or has
      not reported the name. The router then hashes the published tokens itself.
    - `capacity` is the size of the pool in tokens.
    - `events` and `replay` are the addresses of the event stream.
    """

    hash_model: str | None = None
    groups: tuple[Group, ...] = (Group(),)
    capacity: int = 0
    events: str | None = None
    replay: str | None = None
    events_need_key: bool = False
    """Whether the events are encrypted, so that the router needs the key file of the worker (--kv-events-key)."""
    role: str = "both"
    """Role of the worker: "prefill", "decode", "encode" or "both"."""
    peer: str | None = None
    """Address (`host:port`) at which other workers read the pages of this worker."""
    reads: tuple[str, ...] = ()
    """Addresses of the peers from which this worker reads pages."""
    encoders: tuple[str, ...] = ()
    """Addresses of the encode workers that this worker may ask."""
    load: dict[str, Any] = field(default_factory=dict)
    """Load, hits and tiers of the engine, from the last report of the worker."""
    step_times: tuple[float, ...] = ()
    """Coefficients of the worker's step times. Empty if the worker has not measured enough steps."""
    token_budget: int = 0
    objective: Objective = field(default_factory=Objective)
    """Objective for requests that set no objective."""
    adapters: dict[str, AdapterOffer] = field(default_factory=dict)
    """LoRA adapters of the model on this worker, by name."""
    block_tokens: int = HASH_TOKENS
    """Tokens of a block. A public prefix ends at the end of a block."""
    resident_adapters: frozenset[str] = frozenset()
    """Names of the adapters that have a slot on the worker's device."""
    instance: str = ""
    """A name that changes when the engine of the worker restarts. "" if the worker does not report one."""


@dataclass(slots=True)
class Sent:
    """Counters of the requests that this router sent to one worker, and a histogram of their times to first token.
    `expected_hit_tokens` is the number of prompt tokens that the router expected to be cached."""

    requests: int = 0
    prompt_tokens: int = 0
    expected_hit_tokens: int = 0
    failures: int = 0
    prefills: dict[str, int] = field(default_factory=dict)
    """On a prefill worker: the number of prompts that it computed for each answering worker. On an encode worker: the
    number of requests whose images it was chosen to encode, by answering worker.
    """
    ttft: Histogram = field(default_factory=lambda: Histogram(LATENCY_SECONDS))
    """Histogram of the times to first token of streams, in seconds."""


@dataclass(slots=True, eq=False)
class Worker:
    """One worker. `url` is "" for an instance whose events are followed, but which gets no requests."""

    name: str
    url: str
    origin: str = ""
    """If the worker was discovered: the URL whose host name resolved to its address."""
    is_alive: bool = False
    is_kvloom: bool = False
    models: dict[str, Offer] = field(default_factory=dict)
    encodes: dict[str, Offer] = field(default_factory=dict)
    """Models whose images this worker encodes. An encode worker answers no requests, so its `models` are empty."""
    given: dict[str, Offer] = field(default_factory=dict)
    """Models and event addresses that were stated when the worker was registered."""
    publishes: Offer = field(default_factory=Offer)
    """Event addresses from `--worker URL?events=…`. They apply to models without an entry in `given`, but not to
    adapters, which have no events of their own. A kvloom worker reports its addresses itself.
    """
    failed_checks: int = 0
    open_requests: int = 0
    """Number of open requests that the worker itself reports, including requests of other routers."""
    foreign_requests: int = 0
    """Number of open requests that other routers had sent when the worker last reported: `open_requests` minus the open
    requests of this router at that time.
    """
    streams: dict[Callable[[], None], None] = field(default_factory=dict)
    """Functions that abort the requests running on the worker, oldest first."""
    subscribers: dict[str, tuple[Subscriber, asyncio.Task[None]]] = field(default_factory=dict)
    check: asyncio.Task[None] | None = None
    sent: Sent = field(default_factory=Sent)

    def has_adapter(self, name: str) -> bool:
        """Return whether the worker has a LoRA adapter with this name."""
        return any(name in offer.adapters for offer in self.models.values())

    @property
    def answers(self) -> bool:
        """Whether the worker is alive and answers requests of clients. False for an encode worker, which only encodes
        images."""
        return self.is_alive and bool(self.models)


@dataclass(slots=True, eq=False)
class ServedModel:
    """One model of the fleet: its index of cached blocks on all workers, the scorer that chooses a worker, and the
    speed of prefills.
    """

    name: str
    index: FleetIndex
    scorer: Scorer
    speed: SpeedModel = field(default_factory=SpeedModel)
    texts: FleetIndex = field(default_factory=FleetIndex)
    """For prompts that cannot be tokenised: an index of the text prefixes that were sent to each worker."""


class Fleet:
    """Adds, checks and removes the workers of a router, and follows their events. Background tasks check the workers
    until `close`. Must be used by one event loop.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        options: ScoringOptions | None = None,
        key: str | None = None,
        events_key: CurveKey | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.session, self.client = session, WorkerClient(tls)
        self._events_key = events_key
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}
        """Headers of health checks. They contain the API key for checks, if workers require one."""
        self._discoveries: list[asyncio.Task[None]] = []
        self.workers: dict[str, Worker] = {}
        self.models: dict[str, ServedModel] = {}
        self.deaths = 0
        self._options = options

    # -- membership -------------------------------------------------------------------------------

    def add(self, url: str, name: str | None = None) -> Worker:
        """Add a worker by its HTTP address, and start to check it. Does nothing if the worker was already added."""
        name = name or url
        worker = self.workers.get(name)
        if worker is None:
            worker = self.workers[name] = Worker(name, url)
            if url:
                worker.check = asyncio.create_task(self._keep_checking(worker))
        return worker

    async def remove(self, name: str) -> bool:
        """Remove a worker. Its streams continue on other workers. Return whether the worker was known."""
        worker = self.workers.pop(name, None)
        if worker is None:
            return False
        if worker.check is not None:
            worker.check.cancel()
        self._died(worker, "unregistered")
        await self._withdraw(worker, *worker.models)
        return True

    async def close(self) -> None:
        """Stop all checks and subscriptions, and close idle connections."""
        for task in self._discoveries:
            task.cancel()
        for worker in self.workers.values():
            for one in (worker.check, *(task for _, task in worker.subscribers.values())):
                if one is not None:
                    one.cancel()
        self.client.close()

    # -- discovery ----------------------------------------------------------------------------------

    def discover(self, url: str) -> None:
        """Start a task that adds a worker for every address of the host name in `url`. The task regularly resolves the
        name again, adds new workers, and removes dead workers whose address has disappeared."""
        self._discoveries.append(asyncio.create_task(self._keep_discovering(url)))

    async def _keep_discovering(self, url: str) -> None:
        missing: dict[str, int] = {}
        while True:
            try:
                found = await self._resolve(url)
            except OSError as error:  # a host name without workers may have no address at all
                log.debug("resolving %s failed: %s", url, error)
                found = set()
            for one in found - self.workers.keys():
                self.add(one).origin = url
            known = [name for name, worker in self.workers.items() if worker.origin == url]
            missing = {name: missing.get(name, 0) + 1 for name in known if name not in found}
            for name, count in missing.items():
                # A name server may fail for a while: a worker that answers stays.
                if count >= FAILED_RESOLUTIONS and not self.workers[name].is_alive:
                    await self.remove(name)
            await asyncio.sleep(DISCOVER_SECONDS)

    @staticmethod
    async def _resolve(url: str) -> set[str]:
        """Return one URL for each address of the host name in `url`."""
        parts = urlsplit(url)
        loop = asyncio.get_running_loop()
        infos = await loop.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
        hosts = {f"[{info[4][0]}]" if ":" in str(info[4][0]) else info[4][0] for info in infos}
        return {f"{parts.scheme}://{host}:{parts.port or 80}" for host in hosts}

    def base_of(self, adapter: str) -> str | None:
        """Return the base model of a LoRA adapter that a living worker has, or None. O(workers)."""
        for worker in self.workers.values():
            if worker.is_alive:
                for model, offer in worker.models.items():
                    if adapter in offer.adapters:
                        return model
        return None

    def _alive(self, model: str, adapter: str | None) -> list[Worker]:
        """Return the living workers that serve a model and, if given, a LoRA adapter of this model."""
        return [
            worker
            for worker in self.workers.values()
            if worker.is_alive
            and worker.url
            and model in worker.models
            and (adapter is None or adapter in worker.models[model].adapters)
        ]

    def candidates(self, model: str, adapter: str | None = None) -> list[str]:
        """Return the names of living workers that answer requests for a model. If `adapter` is given, only workers with
        this LoRA adapter count. Prefill workers are included only if there are no others.
        """
        alive = self._alive(model, adapter)
        return [w.name for w in alive if w.models[model].role != "prefill"] or [w.name for w in alive]

    def prefill_workers(self, model: str, adapter: str | None = None) -> list[str]:
        """Return the names of living prefill workers of a model whose pages other workers can read."""
        alive = self._alive(model, adapter)
        return [w.name for w in alive if w.models[model].role == "prefill" and w.models[model].peer]

    def encode_workers(self, model: str, addresses: tuple[str, ...]) -> list[str]:
        """Return the names of living encode workers of a model that share their embeddings at one of `addresses`."""
        alive = [w for w in self.workers.values() if w.is_alive and model in w.encodes]
        return [w.name for w in alive if w.encodes[model].peer in addresses]

    # -- health -------------------------------------------------------------------------------------

    async def _keep_checking(self, worker: Worker) -> None:
        while True:
            try:
                await self.check(worker)
            except Exception:
                log.exception("checking %s failed", worker.name)
            await asyncio.sleep(CHECK_SECONDS)

    async def check(self, worker: Worker) -> None:
        """Query the state of a worker once, and update its health, models and load."""
        try:
            offers = await self._ask(worker)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError) as error:
            worker.failed_checks += 1
            if worker.failed_checks >= FAILED_CHECKS and worker.is_alive:
                self._died(worker, f"{type(error).__name__}: {error}")
            return
        may_have_restarted = worker.failed_checks > 0 or not worker.is_alive
        worker.failed_checks = 0
        worker.encodes = {model: offer for model, offer in offers.items() if offer.role == "encode"}
        is_reached, offers = bool(offers), {m: o for m, o in offers.items() if m not in worker.encodes}
        await self._withdraw(worker, *(model for model in worker.models if model not in offers))
        for model, offer in offers.items():
            known = worker.models.get(model)
            if known is None or (known.hash_model, known.events) != (offer.hash_model, offer.events):
                if known is not None:
                    await self._withdraw(worker, model)
                self._offer(worker, model, offer)
            else:
                # The role may change while serving.
                known.role, known.peer, known.load = offer.role, offer.peer, offer.load
                known.step_times, known.objective = offer.step_times, offer.objective
                known.encoders = offer.encoders
                known.adapters, known.resident_adapters = offer.adapters, offer.resident_adapters
                has_restarted = may_have_restarted or known.instance != offer.instance
                known.instance = offer.instance
                # A restarted worker numbers its batches from 0 again, so the subscriber might not notice the restart.
                # Request a snapshot. Workers that are not kvloom have no snapshots.
                if has_restarted and known.hash_model is not None and model in worker.subscribers:
                    self._follow(worker, model, known)
            load = self.models[model].scorer.loads.get(worker.name)
            if load is not None:
                load.adapters = set(offer.resident_adapters)
        if not worker.is_alive and is_reached:
            worker.is_alive = True
            log.info("worker %s is alive: %s", worker.name, ", ".join(offers or worker.encodes))

    async def _ask(self, worker: Worker) -> dict[str, Offer]:
        """Return the models that a worker serves. Raises if the worker is not healthy."""
        timeout = aiohttp.ClientTimeout(total=CHECK_TIMEOUT)
        async with self.session.get(
            f"{worker.url}/kvloom/worker", timeout=timeout, headers=self._headers
        ) as answer:
            if answer.status == 200:
                found = msgspec.json.decode(await answer.read())
                worker.is_kvloom = True
                worker.open_requests = int(found.get("open_requests", 0))
                worker.foreign_requests = max(0, worker.open_requests - len(worker.streams))
                return {one["id"]: _offer(one) for one in found["models"] if one["status"] == "ok"}
        async with self.session.get(f"{worker.url}/health", timeout=timeout) as answer:
            if answer.status != 200:
                raise ValueError(f"/health returned {answer.status}")
        async with self.session.get(
            f"{worker.url}/v1/models", timeout=timeout, headers=self._headers
        ) as answer:
            found = msgspec.json.decode(await answer.read())
        return {
            one["id"]: worker.given.get(one["id"]) or (Offer() if one.get("parent") else worker.publishes)
            for one in found["data"]
        }

    def failed(self, worker: Worker, why: str) -> None:
        """Mark a worker dead after a failed request, until a check succeeds."""
        if worker.is_alive:
            self._died(worker, why)

    def _died(self, worker: Worker, why: str) -> None:
        worker.is_alive = False
        worker.open_requests = worker.foreign_requests = 0
        self.deaths += 1
        log.warning("worker %s is dead: %s", worker.name, why)
        for abort in list(worker.streams):
            abort()
        for model in worker.models:
            served = self.models[model]
            if worker.name in served.scorer.loads:
                old = served.scorer.loads[worker.name]
                served.scorer.loads[worker.name] = WorkerLoad(old.capacity, served.speed)

    # -- what a worker serves -------------------------------------------------------------------------

    def _offer(self, worker: Worker, model: str, offer: Offer) -> None:
        served = self.models.get(model)
        if served is None:
            served = self.models[model] = ServedModel(model, FleetIndex(offer.groups), Scorer(self._options))
        worker.models[model] = offer
        is_foreign = offer.hash_model is None
        served.index.add(worker.name, not is_foreign, self.root(model, offer, "", ""))
        served.texts.add(worker.name)
        served.scorer.loads[worker.name] = WorkerLoad(offer.capacity, served.speed)
        if offer.events_need_key and self._events_key is None:
            log.warning(
                "events of %s need a key: start the router with the worker's --kv-events-key FILE; until then the router "
                "knows only the prompts that it sent itself",
                worker.name,
            )
        elif offer.events is not None:
            self._follow(worker, model, offer)

    def _follow(self, worker: Worker, model: str, offer: Offer) -> None:
        """Start to follow the events of a worker. The blocks that the worker has now replace those in the index."""
        served, earlier = self.models[model], worker.subscribers.pop(model, None)
        if earlier is not None:
            earlier[1].cancel()

        def apply(batch: EventBatch) -> None:
            served.index.apply(worker.name, batch)
            load = served.scorer.loads.get(worker.name)
            if load is not None:
                load.cached_tokens = served.index.counts(worker.name)[GPU] * HASH_TOKENS

        assert offer.events is not None
        key = self._events_key if offer.events_need_key else None
        subscriber = Subscriber(offer.events, offer.replay, apply, key=key)
        task = asyncio.create_task(subscriber.run())
        task.add_done_callback(_report)
        worker.subscribers[model] = subscriber, task

    async def _withdraw(self, worker: Worker, *models: str) -> None:
        """Stop following the events of models that a worker no longer serves, and remove the worker's blocks from the
        indexes of these models. Other tasks can run between the removals. If the call is cancelled, it removes all
        remaining blocks at once, and then ends.
        """
        removals: list[Iterator[None]] = []
        for model in models:
            worker.models.pop(model, None)
            following = worker.subscribers.pop(model, None)
            if following is not None:
                following[1].cancel()
            served = self.models.get(model)
            if served is not None:
                served.scorer.loads.pop(worker.name, None)
                removals += [index.remove(worker.name) for index in (served.index, served.texts)]
        steps = chain(*removals)
        try:
            for _ in steps:
                await asyncio.sleep(0)
        finally:
            deque(steps, maxlen=0)

    def register(self, name: str, url: str, model: str, offer: Offer) -> None:
        """Add an instance (worker) that a client registered with /register. An instance with a URL gets requests. For
        an instance without a URL, the router only follows its events."""
        worker = self.add(url, name)
        worker.given[model] = offer
        if not url:
            self._offer(worker, model, offer)

    @staticmethod
    def public_root(offer: Offer, lossy: bool = False, adapter: str | None = None) -> bytes | None:
        """Return the root (the hash before the first block) of the block hashes of public prefixes on a worker. Return
        None if the worker is not kvloom."""
        if offer.hash_model is None:
            return None
        found = None if adapter is None else offer.adapters.get(adapter)
        digest = "" if found is None or found.invocation_tokens else found.digest
        return public_root_hash(f"{offer.hash_model}, near" if lossy else offer.hash_model, digest)

    @staticmethod
    def root(
        model: str, offer: Offer, tenant: str, salt: str, lossy: bool = False, adapter: str | None = None
    ) -> bytes:
        """Return the root of a request's block hashes on a worker: the hash before the first block. With `lossy`, the
        request accepts pages that a tier re-encoded, which have another root. Requests with an activated LoRA have the
        root of the base model.
        """
        if offer.hash_model is None:
            return _root(f"foreign {model}", "", "")
        found = None if adapter is None else offer.adapters.get(adapter)
        digest = "" if found is None or found.invocation_tokens else found.digest
        return _root(f"{offer.hash_model}, near" if lossy else offer.hash_model, tenant, salt, digest)


@lru_cache(maxsize=4096)
def _root(model: str, tenant: str, salt: str, adapter: str = "") -> bytes:
    return root_hash(model, tenant, adapter, salt)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("following events failed: %r", task.exception())


def _offer(found: dict[str, Any]) -> Offer:
    """Parse one model in a reply of /kvloom/worker. Raises KeyError, TypeError or ValueError if the entry has
    missing or invalid fields."""
    if found["hash_tokens"] != HASH_TOKENS:
        raise ValueError(
            f"hash_tokens {found['hash_tokens']} is not {HASH_TOKENS}: another version of kvloom"
        )
    groups = tuple(Group(one["index"], one["kind"], one["window"]) for one in found["groups"])
    capacity = int(found["pool_bytes"]) // max(1, int(found["bytes_per_token"]))
    return Offer(
        found["hash_model"],
        groups or (Group(),),
        capacity,
        found["events"],
        found["replay"],
        bool(found.get("events_need_key")),
        found.get("role", "both"),
        found.get("peer"),
        tuple(found.get("reads") or ()),
        tuple(found.get("encoders") or ()),
        found.get("load") or {},
        tuple(float(one) for one in found.get("step_times") or ()),
        int(found.get("token_budget") or 0),
        Objective(found.get("slo_ttft"), found.get("slo_tbt")),
        {
            one["name"]: AdapterOffer(one["digest"], tuple(one.get("invocation_tokens") or ()))
            for one in found.get("adapters") or ()
        },
        int(found.get("block_tokens") or HASH_TOKENS),
        frozenset(found.get("resident_adapters") or ()),
        str(found.get("instance") or ""),
    )


def now() -> float:
    """Return the router's time in seconds."""
    return time.monotonic()
