"""Runs a scenario on a real router: application, proxy, queue, scorer, index, subscribers, HTTP client and health checks.

Only the workers, the connections to them, the clients and the clock are replaced (`stand_in_worker`). The world checks:

| invariant | how                                                                                             |
|-----------|-------------------------------------------------------------------------------------------------|
| tokens    | a complete answer has every token once, and a broken answer is the beginning of the right one   |
| ends      | each request ends by its deadline, with a complete answer or with an error that says why        |
| index     | after the faults, the index has exactly the blocks that the worker has                          |
| leaks     | then the queue is empty, no request counts as open, and `close` ends every task and connection  |
| recovers  | then a further request gets a complete answer                                                   |
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import random
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import zmq.asyncio

import kvloom.cluster.router.fleet as fleet_module
import kvloom.cluster.router.proxy as proxy_module
from kvloom.cluster.router.application import RouterApplication
from kvloom.cluster.router.fleet import Fleet
from kvloom.cluster.router.prompt_keys import PromptReader
from kvloom.cluster.router.proxy import Proxy, ProxyOptions

from .engine_world import InvariantError
from .scenario import Scenario
from .stand_in_worker import (
    MODEL,
    Connection,
    EventContext,
    Faults,
    Session,
    StandInWorker,
    answer_tokens,
    text_of,
)
from .virtual_loop import VirtualLoop

__all__ = ["RouterOutcome", "RouterWorld", "run_router_scenario"]

PATH = "/v1/completions"
LATE_SECONDS = 6.0
"""A request may end so many seconds after its deadline, because connecting to a worker may take 5 seconds."""
DISCONNECT_SECONDS = 1.0
"""The router must end a request so many seconds after its client has disconnected."""
SETTLE_SECONDS = 30.0
"""After this time without faults, all late batches, replays and health checks are done."""


@dataclass
class RouterOutcome:
    """The result of a scenario. `digest` is the same for every run of the same scenario."""

    turns: int = 0
    requests: int = 0
    tokens: int = 0
    virtual_seconds: float = 0.0
    injected: dict[str, int] = field(default_factory=dict)
    finished: dict[str, int] = field(default_factory=dict)
    continued_streams: int = 0
    failovers: int = 0
    deaths: int = 0
    digest: str = ""


class _Client:
    """A client with one request. `slow` is the time that its connection needs for each part of the answer."""

    def __init__(self, arguments: dict[str, Any], prompt: list[int]) -> None:
        self._loop = asyncio.get_running_loop()
        self.prompt, self.tenant = prompt, arguments.get("tenant", "")
        self.tokens = answer_tokens(prompt, arguments["max_tokens"])
        body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": arguments["max_tokens"]}
        body |= {name: arguments[name] for name in ("stream", "tenant") if name in arguments}
        if "session" in arguments:
            body["session_id"] = arguments["session"]
        self._body, self.is_stream = json.dumps(body).encode(), "stream" in arguments
        self._slow: float = arguments.get("slow", 0.0)
        self._disconnect: float = arguments.get("disconnect", math.inf)
        self._at = self._loop.time()
        self._waited = 0.0
        self._has_body = self._is_gone = False
        self.status, self._data = 0, b""
        self.result = ""

    async def run(self, application: RouterApplication, deadline: float) -> None:
        """Send the request, and check the answer."""
        scope = {"type": "http", "method": "POST", "path": PATH, "headers": [(b"host", b"localhost")]}
        await application(scope, self._receive, self._send)
        took = self._loop.time() - self._at
        if self._is_gone:
            self.result = "disconnected"
            if took > self._disconnect + DISCONNECT_SECONDS:
                raise InvariantError(
                    f"a request ended {took - self._disconnect:g} s after its client had disconnected"
                )
            return
        if took - self._waited > deadline + LATE_SECONDS:
            raise InvariantError(f"a request took {took:g} s, {self._waited:g} s of them for a slow client")
        self.result = self._check()

    def _check(self) -> str:
        """Check the answer. Return "complete" or the code of the error."""
        text, right = "", text_of(self.tokens)
        if self.status != 200:
            error = json.loads(self._data)["error"]
            if self.status not in (429, 502, 503) or not error["message"]:
                raise InvariantError(f"unexpected status {self.status}: {self._data!r}")
            return str(error["code"])
        if not self.is_stream:
            text = json.loads(self._data)["choices"][0]["text"]
        else:
            *events, end, rest = self._data.split(b"\n\n")
            if end != b"data: [DONE]" or rest:
                raise InvariantError(f"the stream has no end: {self._data[-80:]!r}")
            reasons = []
            for event in events:
                found = json.loads(event.removeprefix(b"data: "))
                if "error" in found:
                    if not right.startswith(text):
                        raise InvariantError(f"a broken answer is {text!r} instead of {right!r}")
                    return f"{found['error']['code']} in the stream"
                for choice in found["choices"]:
                    if "token_ids" in choice:
                        raise InvariantError("the client did not ask for token ids")
                    text += choice["text"]
                    reasons.append(choice["finish_reason"])
            if reasons.count("length") != 1 or reasons[-1] != "length":
                raise InvariantError(f"the stream has the finish reasons {reasons}")
        if text != right:
            raise InvariantError(f"an answer is {text!r} instead of {right!r}")
        return "complete"

    async def _receive(self) -> dict[str, Any]:
        if not self._has_body:
            self._has_body = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        if self._disconnect == math.inf:
            await self._loop.create_future()
        await asyncio.sleep(self._at + self._disconnect - self._loop.time())
        self._is_gone = True
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        # Like uvicorn: first wait until the connection can take more data, then write.
        if self._is_gone:
            return
        if self._slow:
            began = self._loop.time()
            try:
                await asyncio.sleep(self._slow)
            finally:
                self._waited += self._loop.time() - began
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self._data += message["body"]


class RouterWorld:
    """One scenario in progress."""

    def __init__(self, scenario: Scenario, loop: VirtualLoop) -> None:
        self.scenario, self.settings, self._loop = scenario, scenario.settings, loop
        self.faults = Faults(f"faults {scenario.seed}")
        settings = self.settings
        self.workers = [
            StandInWorker(number, self.faults, settings["capacity"], settings["foreign"][number])
            for number in range(settings["workers"])
        ]
        self._by_host = {worker.host: worker for worker in self.workers}
        self.errors: list[str] = []
        self._clients: list[tuple[_Client, asyncio.Task[None]]] = []
        self._repairs: list[asyncio.Task[None]] = []
        self._options = ProxyOptions(
            settings["inflight"], settings["queue"], settings["attempts"], settings["deadline"], settings["silent"],
            settings["route"], settings["wait"],
        )  # fmt: skip
        texts = random.Random("texts")
        self._stems, self._own = (
            [[texts.randrange(1, 900) for _ in range(64)] for _ in range(count)] for count in (4, 13)
        )
        loop.connect = self._connect
        loop.set_exception_handler(
            lambda _, context: self.errors.append(f"{context['message']}: {context.get('exception')!r}")
        )

    def event_context(self) -> EventContext:
        return EventContext(self._by_host, self.faults)

    async def _connect(self, protocol: Any, host: str, _: int) -> Connection:
        worker = self._by_host[host]
        if self.faults.happens("slow_connect"):
            await asyncio.sleep(self.faults.delay(8, 60, 120))
        if worker.is_down:
            raise ConnectionRefusedError("down")
        return Connection(worker, protocol, self.faults)

    # -- operations -------------------------------------------------------------------------------

    async def run(self) -> RouterOutcome:
        """Run all operations, end the faults, and check the invariants."""
        self.fleet = Fleet(Session(self._by_host, self.faults))  # type: ignore[arg-type]
        self.proxy = Proxy(self.fleet, PromptReader(self.fleet), self._options)
        self.application = RouterApplication(self.fleet, self.proxy)
        for worker in self.workers:
            self.fleet.add(worker.url)
        for operation in self.scenario.operations:
            await self.apply(operation)
            self._raise_errors()
        await self._drain()
        await self._close()
        return self._outcome()

    async def apply(self, operation: list[Any]) -> None:
        """Run one operation."""
        verb, *arguments = operation
        if verb == "send":
            self._start(arguments[0])
        elif verb == "sleep":
            await asyncio.sleep(arguments[0])
        elif verb == "faults":
            self.faults.rates = arguments[0]
        else:
            worker = self.workers[arguments[0] % len(self.workers)]
            if verb == "evict":
                worker.clear()
            else:
                self.faults.injected[verb] += 1
                self._repairs.append(asyncio.create_task(getattr(self, f"_{verb}")(worker, arguments[1])))

    def _start(self, arguments: dict[str, Any]) -> _Client:
        (stem, length), (own, more) = arguments["stem"], arguments["own"]
        client = _Client(arguments, self._stems[stem][:length] + self._own[own][:more])
        self._clients.append(
            (client, asyncio.create_task(client.run(self.application, self._options.deadline_seconds)))
        )
        return client

    async def _kill(self, worker: StandInWorker, seconds: float) -> None:
        worker.kill()
        await asyncio.sleep(seconds)
        worker.start()

    async def _freeze(self, worker: StandInWorker, seconds: float) -> None:
        worker.frozen_until = max(worker.frozen_until, self._loop.time() + seconds)
        await worker.thaw()

    async def _remove(self, worker: StandInWorker, seconds: float) -> None:
        await self.fleet.remove(worker.url)
        await asyncio.sleep(seconds)
        self.fleet.add(worker.url)

    # -- checks -----------------------------------------------------------------------------------

    def _raise_errors(self) -> None:
        if self.errors:
            raise InvariantError(self.errors[0])
        for _, task in self._clients:
            if task.done() and (error := task.exception()) is not None:
                raise error

    async def _drain(self) -> None:
        """End the faults, wait for all requests, and check that the router has recovered."""
        self.faults.rates = {}
        options = self._options
        longest = options.deadline_seconds + options.wait_seconds + 60
        tasks = [*self._repairs, *(task for _, task in self._clients)]
        if tasks:
            _, open_ = await asyncio.wait(tasks, timeout=longest)
            self._raise_errors()
            if open_:
                raise InvariantError(f"{len(open_)} requests do not end")
        for task in self._repairs:
            task.result()
        await asyncio.sleep(SETTLE_SECONDS)
        for worker in self.workers:
            worker.store(self._own[12][:16], "")  # a further batch, so that the router notices a gap
        await asyncio.sleep(SETTLE_SECONDS)
        self._check_index()
        last = self._start({"stem": [0, 16], "own": [0, 1], "max_tokens": 3, "stream": True})
        await asyncio.sleep(SETTLE_SECONDS)
        self._raise_errors()
        if last.result != "complete":
            raise InvariantError(f"a request after all faults ended with {last.result or 'nothing'}")
        queue = self.proxy.queue
        if queue.running or queue.waiting:
            raise InvariantError(
                f"the queue counts {queue.running} running and {queue.waiting} waiting requests"
            )
        for known in self.fleet.workers.values():
            load = self.fleet.models[MODEL].scorer.loads[known.name]
            counts = (len(known.streams), len(load.requests), load.waiting, load.tokens, load.waiting_tokens, load.decoding_tokens)  # fmt: skip
            if any(counts):
                raise InvariantError(f"the router counts open requests on an idle worker: {counts}")

    def _check_index(self) -> None:
        """Compare the index with the caches of the workers, block by block. Expected blocks count, too."""
        index = self.fleet.models[MODEL].index
        announced = dict.fromkeys(one for worker in self.workers for one in worker.announced)
        workers = [worker for worker in self.workers if not worker.is_foreign]
        for one in announced:
            found = index.lengths([one])
            for worker in workers:
                if any(found[worker.url]) and one not in worker.cache:
                    raise InvariantError(f"the index has a block that {worker.host} does not have")
                if not any(found[worker.url]) and one in worker.cache:
                    raise InvariantError(f"the index lacks a block of {worker.host}")
        for worker in workers:
            count = index.counts(worker.url)["GPU"]
            if count > len(worker.cache):
                raise InvariantError(f"the index counts {count} blocks, and a worker has {len(worker.cache)}")

    async def _close(self) -> None:
        self.proxy.replicator.close()
        await self.fleet.close()
        await asyncio.sleep(1)
        self._raise_errors()
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if left:
            raise InvariantError(f"{len(left)} tasks are left: {left[0].get_coro()}")
        for worker in self.workers:
            if worker.connections:
                raise InvariantError(f"{len(worker.connections)} connections are left")

    def _outcome(self) -> RouterOutcome:
        counts = self.proxy.counts
        results = [f"{client.result} {client.status}" for client, _ in self._clients]
        digest = hashlib.blake2b(
            json.dumps([results, self._loop.turns, self._loop.time()]).encode(), digest_size=8
        )
        return RouterOutcome(
            self._loop.turns,
            len(self._clients),
            sum(len(client.tokens) for client, _ in self._clients if client.result == "complete"),
            self._loop.time(),
            dict(sorted(self.faults.injected.items())),
            dict(Counter(client.result for client, _ in self._clients)),
            counts.continued_streams,
            counts.failovers,
            self.fleet.deaths,
            digest.hexdigest(),
        )


def run_router_scenario(scenario: Scenario) -> RouterOutcome:
    """Run a scenario. Raises InvariantError, or the exception of the router, if an invariant does not hold."""
    loop = VirtualLoop()
    world = RouterWorld(scenario, loop)
    clock = SimpleNamespace(monotonic=loop.time, time=loop.time)
    chance = random.Random(scenario.seed)
    with ExitStack() as stack:
        stack.callback(loop.close)
        for target, name, value in (
            (fleet_module, "time", clock),
            (proxy_module, "secrets", SimpleNamespace(randbits=chance.getrandbits)),
            (zmq.asyncio, "Context", world.event_context),
        ):
            stack.enter_context(patch.object(target, name, value))
        run = loop.create_task(world.run())
        try:
            return loop.run_until_complete(run)
        finally:
            loop.set_exception_handler(lambda *_: None)
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.wait(left, timeout=60))
