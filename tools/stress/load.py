"""`make load`: thousands of open streams on one server with the embedded model, for a long time.

Tenants with different weights keep streams open. Some clients cancel, some disconnect without a word, and some read
slowly. Each greedy answer is compared with the first answer to the same prompt. The report has p50 and p99 of the first
token and of the pauses inside streams, by tenant, and memory, descriptors and threads over time.

A tenant waits for open streams / (requests per second of the tenant), which on a slow machine may be many minutes. The
checks therefore do not depend on the speed of the machine:

| check     | fails if                                                                                      |
|-----------|-----------------------------------------------------------------------------------------------|
| answers   | an answer is wrong, or a stream ends with an error                                            |
| ends      | for `--stall-seconds` no stream of the server gets a token, although streams are open         |
| order     | later requests of the same tenant overtake a request more often than the tenant has streams   |
| resources | memory grows after the first third, or descriptors or threads are left                        |
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
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from .chaos import Server, free_port

WEIGHTS = (1, 1, 2, 4)
MAX_GROWTH = 0.15
"""Largest growth of resident memory between the first third of the run and its end, as a fraction."""
MOST_PAUSES = 5
"""Number of longest pauses in the report."""


@dataclass(eq=False)
class _Sent:
    """A request that waits for its first token. `overtaken` counts later requests of its tenant that got theirs."""

    overtaken: int = 0


@dataclass
class Tenant:
    """One tenant of the run, and what its clients measured."""

    name: str
    weight: float
    streams: int = 0
    answers: int = 0
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    waiting: dict[_Sent, None] = field(default_factory=dict)
    """Requests without a first token, in the order in which they were sent."""
    overtaken: int = 0
    """How often later requests overtook one request, at most."""

    @property
    def key(self) -> str:
        return f"load-key-{self.name}"

    def sent(self) -> _Sent:
        """Record a request that is sent now."""
        request = _Sent()
        self.waiting[request] = None
        return request

    def began(self, request: _Sent) -> None:
        """Record the first token of a request."""
        for earlier in self.waiting:
            if earlier is request:
                break
            earlier.overtaken += 1
        self.gone(request)

    def gone(self, request: _Sent) -> None:
        """Record that a request no longer waits."""
        if self.waiting.pop(request, request) is None:
            self.overtaken = max(self.overtaken, request.overtaken)


class Load:
    """One run."""

    model = ""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.counts: Counter[str] = Counter()
        self.samples: list[dict[str, float]] = []
        self.errors: list[str] = []
        self.expected: dict[int, str] = {}
        self.longest: list[tuple[float, float, str, int]] = []
        """The longest pauses: seconds, time in the run, tenant, and number of the token after the pause."""
        self.open = 0
        chance = random.Random(given.seed)
        stems = ["".join(chance.choice("abcdefgh ") for _ in range(200)) for _ in range(8)]
        self.prompts = [
            stems[i % 8] + "".join(chance.choice("abcdefgh ") for _ in range(chance.randrange(10, 100)))
            for i in range(64)
        ]
        self.tenants = [Tenant("abcdefgh"[i], weight) for i, weight in enumerate(given.weights)]
        for number in range(given.streams):
            self.tenants[number % len(self.tenants)].streams += 1
        self.began = self.end = self.last_token = 0.0

    async def stream(self, session: aiohttp.ClientSession, url: str, number: int) -> None:
        """Keep one stream open: send a request, read its answer, and send the next."""
        chance = random.Random(f"{self.given.seed} stream {number}")
        tenant = self.tenants[number % len(self.tenants)]
        await asyncio.sleep(chance.random() * min(20, self.given.seconds / 5))
        while time.monotonic() < self.end:
            which = chance.randrange(len(self.prompts))
            draw = chance.random()
            behaviour = (
                "cancel" if draw < 0.06 else "disconnect" if draw < 0.1 else "slow" if draw < 0.15 else "read"
            )
            self.open += 1
            sent = tenant.sent()
            try:
                await self._one(session, url, tenant, sent, which, behaviour, chance)
            except (aiohttp.ClientError, OSError) as error:
                self.counts[f"broken: {type(error).__name__}"] += 1
                self.errors.append(f"request {which}: {error!r}")
            finally:
                self.open -= 1
                tenant.gone(sent)

    async def _one(
        self,
        session: aiohttp.ClientSession,
        url: str,
        tenant: Tenant,
        sent: _Sent,
        which: int,
        behaviour: str,
        chance: random.Random,
    ) -> None:
        body = {
            "model": self.model,
            "prompt": self.prompts[which],
            "max_tokens": self.given.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        began = last = time.monotonic()
        cut = chance.randrange(1, self.given.tokens) if behaviour in ("cancel", "disconnect") else -1
        parts: list[str] = []
        headers = {"Authorization": f"Bearer {tenant.key}"}
        async with session.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
            if answer.status == 429:
                self.counts["refused (429)"] += 1
                if "Retry-After" not in answer.headers:
                    self.errors.append("an answer with status 429 has no Retry-After")
                tenant.gone(sent)
                await asyncio.sleep(min(5.0, float(answer.headers.get("Retry-After", 1))))
                return
            if answer.status != 200:
                self.counts[f"status {answer.status}"] += 1
                self.errors.append(f"status {answer.status}: {(await answer.text())[:200]}")
                return
            async for line in answer.content:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    break
                now = self.last_token = time.monotonic()
                if parts:
                    self._record_pause(tenant, now, now - last, len(parts))
                else:
                    tenant.first.append(now - began)
                    tenant.began(sent)
                last = now
                event = json.loads(line[6:])
                if "error" in event:
                    self.errors.append(f"error in a stream: {event['error']}")
                    self.counts["error in a stream"] += 1
                    return
                parts += [choice["text"] for choice in event["choices"]]
                if len(parts) == cut:
                    self.counts[behaviour] += 1
                    if behaviour == "disconnect" and answer.connection is not None:
                        transport = answer.connection.transport
                        if transport is not None:
                            transport.abort()
                    return
                if behaviour == "slow":
                    await asyncio.sleep(0.2 * chance.random())
                    last = time.monotonic()
        text = "".join(parts)
        self.counts["answers"] += 1
        self.counts["tokens"] += self.given.tokens
        tenant.answers += 1
        tenant.tokens += self.given.tokens
        if text != self.expected.setdefault(which, text):
            self.counts["wrong"] += 1
            self.errors.append(f"request {which}: {text[:60]!r} is not {self.expected[which][:60]!r}")

    def _record_pause(self, tenant: Tenant, now: float, seconds: float, token: int) -> None:
        tenant.pauses.append(seconds)
        if len(self.longest) < MOST_PAUSES or seconds > self.longest[-1][0]:
            self.longest.append((seconds, now - self.began, tenant.name, token))
            self.longest = sorted(self.longest, reverse=True)[:MOST_PAUSES]

    async def watch(self, server: Server) -> None:
        """Record memory, descriptors and threads of the server."""
        while True:
            usage = server.usage()
            self.samples.append({"at": time.monotonic(), "open": self.open, **usage})
            await asyncio.sleep(max(1.0, self.given.seconds / 60))

    async def run(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="kvloom-load-") as folder:
            keys = Path(folder) / "keys.json"
            entries = {one.key: {"tenant": one.name, "weight": one.weight} for one in self.tenants}
            keys.write_text(json.dumps(entries))
            keys.chmod(0o600)
            port = free_port()
            command = [
                *(sys.executable, "-m", "kvloom.cli", "serve", "kvloom-llama", "--port", str(port), "-q"),
                *("--threads", "1", "--pool", "256MiB", "--api-keys", str(keys), "--max-queue", "4096"),
                *("--max-open", "4096", "--drain-seconds", "30"),
            ]
            server = Server("server", port, command, Path(folder) / "server.log")
            server.start()
            try:
                return await self._run(server)
            finally:
                server.stop()

    async def _run(self, server: Server) -> dict[str, Any]:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None)
        ) as session:
            until = time.monotonic() + 300
            while True:
                with suppress(aiohttp.ClientError, OSError):
                    headers = {"Authorization": f"Bearer {self.tenants[0].key}"}
                    async with session.get(f"{server.url}/v1/models", headers=headers) as answer:
                        listed = await answer.json() if answer.status == 200 else None
                    async with session.get(f"{server.url}/health") as answer:
                        if listed is not None and answer.status == 200:  # the engine has loaded its model
                            self.model = listed["data"][0]["id"]
                            break
                assert server.process is not None
                if server.process.poll() is not None:
                    text = await asyncio.to_thread(server.log.read_text)
                    raise RuntimeError(f"the server did not start: {text[-500:]}")
                if time.monotonic() > until:
                    raise TimeoutError("the server does not answer")
                await asyncio.sleep(0.2)
            idle = server.usage()
            self.began = self.last_token = time.monotonic()
            self.end = self.began + self.given.seconds
            watcher = asyncio.create_task(self.watch(server))
            await self._all_streams(session, server)
            seconds = time.monotonic() - self.began
            await asyncio.sleep(10)
            watcher.cancel()
            after = server.usage()
            drained = await asyncio.to_thread(self._drain, server)
        return self._report(idle, after, seconds, drained)

    async def _all_streams(self, session: aiohttp.ClientSession, server: Server) -> None:
        """Run all streams until they end. Give up if no stream gets a token for `--stall-seconds`."""
        streams = [
            asyncio.create_task(self.stream(session, server.url, number))
            for number in range(self.given.streams)
        ]
        pending = set(streams)
        while pending:
            _, pending = await asyncio.wait(pending, timeout=1)
            silent = time.monotonic() - self.last_token
            if self.open and silent > self.given.stall_seconds:
                self.errors.append(f"{self.open} streams are open, but none got a token for {silent:.0f} s")
                for one in pending:
                    one.cancel()
                break
        for error in await asyncio.gather(*streams, return_exceptions=True):
            if isinstance(error, Exception):
                raise error

    def _drain(self, server: Server) -> float | None:
        """Send SIGTERM. Return the seconds until the server ended, or None if it did not."""
        assert server.process is not None
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        try:
            server.process.wait(60)
        except subprocess.TimeoutExpired:
            return None
        return time.monotonic() - began

    def _report(
        self, idle: dict[str, int], after: dict[str, int], seconds: float, drained: float | None
    ) -> dict[str, Any]:
        third = [s["memory"] for s in self.samples if s["at"] - self.began >= seconds / 3]
        settled = max(third[: max(1, len(third) // 6)], default=0.0)
        peak = max(third, default=0.0)
        if settled and peak > settled * (1 + MAX_GROWTH):
            self.errors.append(
                f"memory grew from {settled / 1e6:.0f} MB to {peak / 1e6:.0f} MB after the first third"
            )
        for name, slack in (("descriptors", 24), ("threads", 16)):
            if after[name] > idle[name] + slack:
                self.errors.append(f"{after[name]} {name} after the run, {idle[name]} before it")
        if drained is None:
            self.errors.append("the server did not end within 60 s after SIGTERM")
        return {
            "seconds": round(seconds, 1),
            "streams": self.given.streams,
            "most_open": int(max((s["open"] for s in self.samples), default=0)),
            "counts": dict(sorted(self.counts.items())),
            "tokens_per_second": round(self.counts["tokens"] / seconds, 1),
            "first_token_s": _quantiles([value for one in self.tenants for value in one.first]),
            "pause_s": _quantiles([value for one in self.tenants for value in one.pauses]),
            "longest_pauses": [
                f"{pause:.2f} s at {at:.0f} s, tenant {tenant}, before token {token}"
                for pause, at, tenant, token in self.longest
            ],
            "tenants": {one.name: self._tenant_report(one, seconds) for one in self.tenants},
            "memory_mb": {
                "idle": idle["memory"] // 1_000_000,
                "after a third": round(settled / 1e6),
                "largest": round(peak / 1e6),
                "after": after["memory"] // 1_000_000,
            },
            "descriptors": {
                "idle": idle["descriptors"],
                "largest": int(max((s["descriptors"] for s in self.samples), default=0)),
                "after": after["descriptors"],
            },
            "threads": {"idle": idle["threads"], "after": after["threads"]},
            "drain_s": None if drained is None else round(drained, 1),
            "errors": self.errors[:20],
            "error_count": len(self.errors),
        }

    def _tenant_report(self, tenant: Tenant, seconds: float) -> dict[str, Any]:
        """Report the figures of a tenant, and check the order of its requests."""
        if tenant.overtaken > tenant.streams:
            self.errors.append(
                f"{tenant.overtaken} later requests of tenant {tenant.name} overtook one request; it has "
                f"{tenant.streams} streams"
            )
        total = sum(one.weight for one in self.tenants)
        return {
            "weight": f"{tenant.weight / total:.2f}",
            "tokens": f"{tenant.tokens / max(1, self.counts['tokens']):.2f}",
            "answers_per_second": round(tenant.answers / seconds, 2),
            # Little's law: with so many streams and answers, an answer takes so long on average.
            "expected_answer_s": round(tenant.streams * seconds / max(1, tenant.answers), 1),
            "overtaken": tenant.overtaken,
            "first_token_s": _quantiles(tenant.first),
            "pause_s": _quantiles(tenant.pauses),
        }


def _quantiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    p50, p99 = np.percentile(values, [50, 99]).tolist()
    return {"p50": round(p50, 3), "p99": round(p99, 3), "largest": round(max(values), 3)}


def main() -> int:
    """Run the command. Return 1 if a check failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1800, help="length of the run (default %(default)s)")
    parser.add_argument("--streams", type=int, default=2000, help="open streams (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer (default %(default)s)")
    parser.add_argument(
        "--weights",
        type=lambda text: [float(one) for one in text.split(",")],
        default=WEIGHTS,
        help="weights of the tenants, up to eight (default 1,1,2,4)",
    )
    parser.add_argument(
        "--stall-seconds",
        type=float,
        default=60,
        help="seconds without a token of any stream after which the run fails (default %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    import resource

    wanted = 2 * given.streams + 1024
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard), hard))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = asyncio.run(Load(given).run())
    if given.json:
        print(json.dumps(found, indent=1))
    else:
        for name, value in found.items():
            if name == "tenants":
                for tenant, figures in value.items():
                    print(f"tenant {tenant:13} {figures}")
            elif name != "errors":
                print(f"{name:20} {value}")
        for error in found["errors"]:
            print(f"FAILED: {error}")
    return 1 if found["error_count"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
