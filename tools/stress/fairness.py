"""The time to first token of one tenant while another tenant floods the server: `python -m tools.stress.fairness`.

Two tenants with equal weights use one server with the embedded model. One of them, the victim, sends short prompts, one
after another. The rounds take turns, so that a change of the machine's speed affects all of them:

| round    | the other tenant                                                             |
|----------|------------------------------------------------------------------------------|
| alone    | sends nothing                                                                |
| half     | sends nothing, and the engine is stopped half of the time: the victim's fair |
|          | share of the machine                                                         |
| streams  | keeps 400 streams of 1,000 tokens open                                       |
| priority | the same, with priority 1,000,000,000                                        |
| n        | keeps two requests open, each with 600 answers of 1,000 tokens               |

The run fails if the p99 of a flood is more than twice the p99 of the round "half". With `--router`, clients send
everything through a router. The clients of the flood are another process of low priority, because they share the
processors with the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np

from .chaos import Server, free_port
from .fuzz import wait_healthy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

VICTIM, FLOOD = "fairness-key-victim", "fairness-key-flood"
MODEL = "kvloom-llama"
STREAMS = 400
ROUNDS: dict[str, dict[str, Any] | None] = {
    "alone": None,
    "half": None,
    "streams": {},
    "priority": {"priority": 10**9},
    "n": {"n": 600},
}
STOP_SECONDS = 0.01
"""Seconds for which the engine runs, and then is stopped, in the round "half"."""
GOAL = 2.0


class Fairness:
    """One run. `seconds` has the times to first token by round."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.seconds: dict[str, list[float]] = {name: [] for name in ROUNDS}
        self._chance = random.Random(given.seed)

    async def run(self) -> dict[str, list[float]]:
        with tempfile.TemporaryDirectory(prefix="kvloom-fairness-") as name:
            folder = Path(name)
            servers = self._servers(folder)
            for one in servers:
                one.start()
            try:
                for one in servers:
                    await asyncio.to_thread(wait_healthy, one)
                await self._run(servers[0], servers[-1].url)
            finally:
                for one in reversed(servers):
                    one.stop()
        return self.seconds

    def _servers(self, folder: Path) -> list[Server]:
        keys = folder / "keys.json"
        keys.write_text(json.dumps({VICTIM: "victim", FLOOD: "flood"}))
        keys.chmod(0o600)
        port, router = free_port(), free_port()
        kvloom = [sys.executable, "-m", "kvloom.cli"]
        serve = [*kvloom, "serve", MODEL, "--port", str(port), "-q", "--threads", "1", "--pool", "256MiB"]
        serve += ["--api-keys", str(keys), "--max-queue", "4096", "--max-answers", "1024"]
        serve += ["--silent-seconds", "120"]
        made = [Server("server", port, serve, folder / "server.log")]
        if self.given.router:
            route = [*kvloom, "route", "--port", str(router), "--worker", made[0].url, "--worker-key", VICTIM]
            made.append(Server("router", router, route, folder / "router.log"))
        return made

    async def _run(self, server: Server, url: str) -> None:
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            await self._first_token(session, url)
            for _ in range(self.given.turns):
                for name, fields in ROUNDS.items():
                    async with self._flood(url, fields), self._half_speed(server, name == "half"):
                        for _ in range(self.given.probes):
                            self.seconds[name].append(await self._first_token(session, url))
                            await asyncio.sleep(0.05)
                    await asyncio.sleep(2)

    async def _first_token(self, session: aiohttp.ClientSession, url: str) -> float:
        """Return the seconds until the first token of a new prompt of the victim."""
        prompt = "".join(self._chance.choice("abcdefgh ") for _ in range(60))
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "ignore_eos": True, "stream": True}
        headers = {"Authorization": f"Bearer {VICTIM}"}
        began = time.monotonic()
        async with session.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            first = 0.0
            async for line in answer.content:
                if line.startswith(b"data: ") and not first:
                    first = time.monotonic() - began
        return first

    @asynccontextmanager
    async def _flood(self, url: str, fields: dict[str, Any] | None) -> AsyncIterator[None]:
        """Keep the requests of the other tenant open."""
        if fields is None:
            yield
            return
        command = [sys.executable, "-m", "tools.stress.fairness", "--flood", url, json.dumps(fields)]
        process = await asyncio.create_subprocess_exec(*command)
        try:
            await asyncio.sleep(self.given.settle)
            assert process.returncode is None, "the flood has ended"
            yield
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    @asynccontextmanager
    async def _half_speed(self, server: Server, is_half: bool) -> AsyncIterator[None]:
        """Stop the engine process half of the time."""
        if not is_half:
            yield
            return
        (engine,) = server.engines()

        async def alternate() -> None:
            while True:
                for number in (signal.SIGSTOP, signal.SIGCONT):
                    os.kill(engine, number)
                    await asyncio.sleep(STOP_SECONDS)

        task = asyncio.create_task(alternate())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            os.kill(engine, signal.SIGCONT)


async def flood(url: str, fields: dict[str, Any]) -> None:
    """Keep the requests of the flooding tenant open, without an end."""
    os.nice(10)
    body = {
        "model": MODEL,
        "max_tokens": 1000,
        "ignore_eos": True,
        "stream": True,
        "temperature": 1,
        **fields,
    }
    headers = {"Authorization": f"Bearer {FLOOD}"}
    chance = random.Random(0)
    timeout = aiohttp.ClientTimeout(total=None)

    async def stream(session: aiohttp.ClientSession) -> None:
        while True:
            sent = {**body, "prompt": "".join(chance.choice("abcdefgh ") for _ in range(60))}
            async with session.post(f"{url}/v1/completions", json=sent, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
                async for _ in answer.content:
                    pass

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        await asyncio.gather(*(stream(session) for _ in range(2 if "n" in fields else STREAMS)))


def main() -> int:
    """Run the command. Return 1 if a tenant waits longer than the goal allows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=4, help="turns of all rounds (default %(default)s)")
    parser.add_argument("--probes", type=int, default=50, help="requests of the victim in a round")
    parser.add_argument("--settle", type=float, default=10, help="seconds from the flood to the first probe")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--router", action="store_true", help="send everything through a router")
    parser.add_argument("--flood", nargs=2, metavar=("URL", "FIELDS"), help="only flood the server at URL")
    given = parser.parse_args()
    if given.flood is not None:
        asyncio.run(flood(given.flood[0], json.loads(given.flood[1])))
    found = asyncio.run(Fairness(given).run())
    p99 = {name: float(np.percentile(seconds, 99)) for name, seconds in found.items()}
    is_over = False
    for name, seconds in found.items():
        ratio = p99[name] / p99["half"]
        is_over |= ROUNDS[name] is not None and ratio > GOAL
        print(
            f"{name:10} {len(seconds)} requests: p50 {np.median(seconds):.3f} s, p99 {p99[name]:.3f} s, "
            f"{ratio:.2f} times half"
        )
    return int(is_over)


if __name__ == "__main__":
    raise SystemExit(main())
