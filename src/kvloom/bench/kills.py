"""`kvloom bench kills` kills workers, engines and routers under load (`kill -9`), and counts wrong and lost answers.

Workers and routers run on loopback, and are started again after a kill. Clients send requests with known answers:
streamed and whole answers, greedy and with a seed. If a router dies, its client sends the request to another router,
like a client behind a load balancer. An answer is wrong if it differs from the known answer. A request is lost if it
has no answer at its deadline, or if a living router returns an error. If an answer is wrong, or a request is lost, the
exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvloom.arguments import number, whole

from .fleet import free_port, ready

__all__ = ["main"]

PROMPTS = 8


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="kvloom bench kills", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add(
        "--model",
        default="kvloom-llama",
        metavar="MODEL",
        help="model of the workers (default: kvloom-llama)",
    )
    add("--kills", type=whole(1), default=50, metavar="N", help="processes to kill (default: 50)")
    add("--workers", type=whole(2), default=3, metavar="N", help="workers that answer (default: 3)")
    add("--prefill", type=whole(0), default=1, metavar="N", help="prefill workers; 0: every worker does both (default: 1)")  # fmt: skip
    add("--routers", type=whole(2), default=2, metavar="N", help="routers (default: 2)")
    add("--clients", type=whole(1), default=4, metavar="N", help="requests at once (default: 4)")
    add("--tokens", type=whole(1), default=64, metavar="N", help="tokens of an answer (default: 64)")
    add("--pause", type=number(0), default=1.0, metavar="S", help="seconds between kills (default: 1)")
    add("--deadline", type=number(1), default=120.0, metavar="S", help="seconds in which an answer must come (default: 120)")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="seed of the choice of victims (default: 0)")
    add("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    found = asyncio.run(_run(args))
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        kills = ", ".join(f"{count} {kind}" for kind, count in found["kills"].items())
        print(f"kills     {kills}; in {found['seconds']:.0f} s")
        print(f"answers   {found['answers']}, wrong {found['wrong']}, lost {found['lost']}")
        print(
            f"routers   {found['router_retries']} requests sent again after the death of a router, "
            f"{found['continued_streams']} streams continued, {found['failovers']} failovers"
        )
        print(f"longest   {found['longest']:.1f} s, median {found['median']:.2f} s")
        for error in found["errors"]:
            print(f"error     {error}")
    return 1 if found["wrong"] or found["lost"] else 0


@dataclass(slots=True)
class _Server:
    """A process that is started again on the same port after a kill."""

    kind: str
    port: int
    command: list[str]
    process: subprocess.Popen[bytes] | None = None
    deaths: list[float] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(self.command, env=environment, stderr=subprocess.DEVNULL)

    def kill(self, engine: bool = False) -> None:
        """Kill the server, or only its engine process, with `kill -9`."""
        assert self.process is not None
        self.deaths.append(time.monotonic())
        if engine:
            for child in _children(self.process.pid):
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            return
        self.process.kill()
        self.process.wait(30)
        self.start()

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(15)


def _children(pid: int) -> list[int]:
    """Return the process ids of a server's engine processes: all its child processes except Python's resource
    tracker."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(word) for word in task.read_text().split()]
    return [child for child in found if _is_engine(child)]


def _is_engine(pid: int) -> bool:
    try:
        return b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _servers(args: argparse.Namespace) -> list[_Server]:
    shared = [free_port() for _ in range(args.prefill)]
    python = [sys.executable, "-m", "kvloom.cli"]
    servers = []
    for place in range(args.prefill + args.workers):
        port = free_port()
        events = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        command = [
            *python,
            "serve",
            args.model,
            "--port",
            str(port),
            "--pool",
            "64MiB",
            "-q",
            "--threads",
            "1",
        ]
        command += ["--drain-seconds", "0", "--kv-events", events[0], "--kv-events-replay", events[1]]
        if place < args.prefill:
            command += ["--role", "prefill", "--tier", f"host:64MiB?share={shared[place]}"]
        elif args.prefill:
            command += ["--role", "decode", "--tier", "host:64MiB"]
            for one in shared:
                command += ["--tier", f"peer://127.0.0.1:{one}?optional=1&write=back"]
        servers.append(_Server("prefill" if place < args.prefill else "worker", port, command))
    named = [word for server in servers for word in ("--worker", server.url)]
    for _ in range(args.routers):
        port = free_port()
        command = [*python, "route", "--port", str(port), "--log-level", "error", *named]
        command += ["--deadline-seconds", str(args.deadline), "--wait-seconds", str(args.deadline)]
        servers.append(_Server("router", port, command))
    return servers


def _calls(model: str, tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """Return requests with known answers: short and long prompts, greedy and seeded, completions and chats."""
    rng = random.Random(7)
    calls: list[tuple[str, dict[str, Any]]] = []
    for place in range(PROMPTS):
        text = "".join(rng.choice("abcdefghij ") for _ in range(60 if place % 2 else 500))
        body: dict[str, Any] = {"model": model, "max_tokens": tokens, "ignore_eos": True}
        body |= {"temperature": 0} if place % 3 else {"temperature": 1.0, "seed": place}
        if place % 4 == 3:
            calls.append(("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": text}]}))
        else:
            calls.append(("/v1/completions", {**body, "prompt": text}))
    return calls


class _Clients:
    """Sends requests to the routers and compares each answer with its known answer."""

    def __init__(self, session: Any, routers: list[_Server], args: argparse.Namespace) -> None:
        self._session, self._routers, self._args = session, routers, args
        self.expected: list[str] = []
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.times: list[float] = []
        self.answers = self.wrong = self.lost = self.retries = 0
        self.errors: list[str] = []
        self.is_done = False

    async def run(self, number: int) -> None:
        """Send the requests of one client, one after the other, until all kills are done. `number` is the number of the
        client."""
        turn = number
        while not self.is_done:
            turn += 1
            await self._one(turn % len(self.calls), turn)

    async def _one(self, which: int, turn: int) -> None:
        path, body = self.calls[which]
        began = time.monotonic()
        why = ""
        while time.monotonic() < began + self._args.deadline:
            router = self._routers[turn % len(self._routers)]
            turn += 1
            at = time.monotonic()
            try:
                text = await self.ask(router.url, path, body, stream=bool(turn % 3))
            except _RefusedError as error:
                why = str(error)
                break
            except (OSError, _BrokenError) as error:
                # An answer may be cut only if its router died. A client behind a load balancer then sends the request to the next router.
                why = f"{type(error).__name__}: {error}"
                if not self._died(router, at):
                    break
                self.retries += 1
                await asyncio.sleep(0.05)
                continue
            self.answers += 1
            self.times.append(time.monotonic() - began)
            if text != self.expected[which]:
                self.wrong += 1
                self.errors.append(f"request {which}: {text[:60]!r} is not {self.expected[which][:60]!r}")
            return
        self.lost += 1
        self.errors.append(f"request {which} after {time.monotonic() - began:.1f} s: {why}")

    @staticmethod
    def _died(router: _Server, since: float) -> bool:
        """Return whether a router died later than 30 seconds before the time `since`. A router needs up to 30 seconds
        to start again."""
        return any(death > since - 30 for death in router.deaths)

    async def ask(self, url: str, path: str, body: dict[str, Any], stream: bool) -> str:
        """Return the text of an answer. Raises OSError or _BrokenError for a broken connection, _RefusedError for an
        error."""
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=self._args.deadline)
        try:
            async with self._session.post(
                url + path, json={**body, "stream": stream}, timeout=timeout
            ) as answer:
                if answer.status != 200:
                    raise _RefusedError(f"status {answer.status}: {(await answer.text())[:200]}")
                if not stream:
                    return _text((await answer.json())["choices"][0])
                parts, is_complete = [], False
                async for line in answer.content:
                    if line.startswith(b"data: [DONE]"):
                        is_complete = True
                    elif line.startswith(b"data: "):
                        event = json.loads(line[6:])
                        if "error" in event:
                            raise _RefusedError(str(event["error"].get("message")))
                        parts += [_text(choice) for choice in event["choices"]]
                if not is_complete:
                    raise _BrokenError("the stream ended early")
                return "".join(parts)
        except aiohttp.ClientError as error:
            raise _BrokenError(f"{type(error).__name__} {error}") from None


class _BrokenError(Exception):
    """The connection to a router broke."""


class _RefusedError(Exception):
    """A router answered with an error."""


def _text(choice: dict[str, Any]) -> str:
    found = choice.get("text")
    if found is None:
        found = (choice.get("message") or choice.get("delta") or {}).get("content")
    return str(found or "")


async def _run(args: argparse.Namespace) -> dict[str, Any]:
    import aiohttp

    servers = _servers(args)
    workers = [server for server in servers if server.kind != "router"]
    routers = [server for server in servers if server.kind == "router"]
    try:
        for server in servers:
            server.start()
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True)
        ) as session:
            for server in servers:
                await ready(session, f"{server.url}/health", 300)
            async with session.get(f"{workers[0].url}/v1/models") as answer:
                model = (await answer.json())["data"][0]["id"]
            clients = _Clients(session, routers, args)
            clients.calls = _calls(model, args.tokens)
            last = workers[-1].url
            clients.expected = [await clients.ask(last, path, body, False) for path, body in clients.calls]
            began = time.monotonic()
            running = [asyncio.create_task(clients.run(place)) for place in range(args.clients)]
            counters = {"continued_streams": 0, "failovers": 0}
            kills = await _kill(session, servers, args, counters)
            clients.is_done = True
            await asyncio.gather(*running)
            for router in routers:
                await _count(session, router.url, counters)
            return {
                "kills": kills,
                "seconds": time.monotonic() - began,
                "answers": clients.answers,
                "wrong": clients.wrong,
                "lost": clients.lost,
                "router_retries": clients.retries,
                **counters,
                "longest": max(clients.times, default=0.0),
                "median": float(np.median(clients.times)) if clients.times else 0.0,
                "errors": clients.errors[:20],
            }
    finally:
        for server in servers:
            server.stop()


async def _kill(
    session: Any, servers: list[_Server], args: argparse.Namespace, counters: dict[str, int]
) -> dict[str, int]:
    """Kill one process after each pause, and return the number of kills by kind. The kinds take turns: workers,
    engine processes of workers, routers and prefill workers. The process of a kind is chosen at random. At least
    two processes always stay healthy: one router, and one worker that is not a prefill worker.
    """
    rng = random.Random(args.seed)
    kinds = ["worker", "engine", "router", *(["prefill"] if args.prefill else [])]
    kills = dict.fromkeys(kinds, 0)
    for place in range(args.kills):
        kind = kinds[place % len(kinds)]
        able: list[_Server] = []
        while not able:
            await asyncio.sleep(args.pause)
            alike = [server for server in servers if server.kind == ("worker" if kind == "engine" else kind)]
            able = [server for server in alike if await _is_healthy(session, server.url)]
            if kind != "prefill" and len(able) < 2:
                able = []
        victim = rng.choice(able)
        if kind == "router":
            await _count(session, victim.url, counters)
        victim.kill(engine=kind == "engine")
        kills[kind] += 1
        print(f"kill {place + 1}: {kind} {victim.port}", file=sys.stderr)
    return kills


async def _is_healthy(session: Any, url: str) -> bool:
    import aiohttp

    try:
        async with session.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=3)) as answer:
            return bool(answer.status == 200)
    except (OSError, TimeoutError, aiohttp.ClientError):
        return False


async def _count(session: Any, url: str, counters: dict[str, int]) -> None:
    """Add the counters of a router to the totals in `counters`. This must happen before the router is killed, because
    its counters are then lost."""
    import aiohttp

    with suppress(OSError, aiohttp.ClientError, TimeoutError):
        async with session.get(f"{url}/metrics", timeout=aiohttp.ClientTimeout(total=3)) as answer:
            for line in (await answer.text()).splitlines():
                for name in counters:
                    if line.startswith(f"kvloom_router_{name}_total "):
                        counters[name] += int(float(line.rpartition(" ")[2]))
