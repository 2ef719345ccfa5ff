"""`kvloom bench routing` compares routers, which send the same sessions of agents to several real workers on loopback.

`agent_sessions` creates the load. In each round, all routers get the same sessions, one router after the other. The
order of the routers changes with the round. All routers use the same worker processes, and each run starts a new router
process. The prompts of each run begin with different words, so that no run hits pages of another run.

The hit rate is the share of cached prompt tokens that the workers report. With prefill workers, pages that decode
workers pulled from prefill workers count as cached. The report also states the hit rates that two other caches would
have for the same prompts: an unlimited cache, and a single LRU cache as large as all pools together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from kvloom.arguments import number, size, whole
from kvloom.core import HASH_BYTES, HASH_TOKENS, hash_chain, token_bytes
from kvloom.models.specs import folder_of
from kvloom.replay import Request, Traffic, number_blocks, replay

from .agent_sessions import AgentLoad, Session, Turn, shared_tokens
from .fleet import Process, free_port, ready

__all__ = ["main"]

ROUTERS = ("kv", "round-robin", "smg")
OUTPUT_TOKENS = 4
MEANS = ("hit_rate", "mean_ttft", "p50_ttft", "p99_ttft", "ideal_hit_rate", "one_pool_hit_rate")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvloom bench routing", description=(__doc__ or "").splitlines()[0])
    load = AgentLoad()
    add = parser.add_argument
    add(
        "--model",
        default="kvloom-draft",
        metavar="MODEL",
        help="model of the workers (default: kvloom-draft)",
    )
    add("--workers", type=whole(1), default=4, metavar="N", help="workers (default: 4)")
    prefill = "prefill workers; the other workers then only decode (default: 0: every worker does both)"
    add("--prefill", type=whole(0), default=0, metavar="N", help=prefill)
    pool = "page pool of a worker (default: 6MiB); a small one evicts pages of idle sessions"
    add("--pool", type=size, default=6 << 20, metavar="SIZE", help=pool)
    add(
        "--sessions",
        type=whole(1),
        default=load.sessions,
        metavar="N",
        help=f"sessions of a round (default: {load.sessions})",
    )
    add(
        "--projects",
        type=whole(1),
        default=load.projects,
        metavar="N",
        help=f"projects of the sessions (default: {load.projects})",
    )
    add(
        "--turns",
        type=number(1),
        default=load.turns,
        metavar="N",
        help=f"turns of a session, median (default: {load.turns:g})",
    )
    add(
        "--tokens",
        type=number(1),
        default=load.tokens,
        metavar="N",
        help=f"tokens that a turn adds, median (default: {load.tokens:g})",
    )
    add(
        "--idle",
        type=number(0),
        default=load.idle,
        metavar="S",
        help=f"seconds between turns, median (default: {load.idle:g})",
    )
    add(
        "--seconds",
        type=number(0),
        default=load.seconds,
        metavar="S",
        help=f"time in which sessions start (default: {load.seconds:g})",
    )
    add(
        "--rounds",
        type=whole(1),
        default=1,
        metavar="N",
        help="rounds, each with other sessions (default: 1)",
    )
    add("--seed", type=whole(0), default=0, metavar="N", help="seed of the sessions (default: 0)")
    add(
        "--router", action="append", default=[], choices=ROUTERS, help="repeatable (default: kv, round-robin)"
    )
    smg = "path of the program smg, for --router smg (SGLang's gateway, cache_aware)"
    add("--smg", metavar="PROGRAM", help=smg)
    add("--json", action="store_true", help="print JSON")
    return parser


def main(argv: list[str]) -> int:
    """Print the figures of each router, or JSON."""
    parser = _parser()
    args = parser.parse_args(argv)
    if "smg" in args.router and args.smg is None:
        parser.error("--router smg needs --smg PROGRAM: the path of SGLang's gateway")
    rounds = asyncio.run(_run(args))
    found = _summary(rounds)
    if args.json:
        print(json.dumps({"rounds": rounds, "summary": found}, indent=2))
        return 0
    for one in found:
        print(
            f"{one['router']:12} hit rate {one['hit_rate']:.1%}, TTFT mean {1e3 * one['mean_ttft']:.0f} ms, "
            f"p50 {1e3 * one['p50_ttft']:.0f} ms, p99 {1e3 * one['p99_ttft']:.0f} ms, {one['requests']} requests, "
            f"{one['errors']} errors" + (f", {one['hand_overs']} prompts handed over" if args.prefill else "")
        )
    for one in found[1:]:
        (hits, hits_error), (ttft, ttft_error) = one["hit_rate_difference"], one["mean_ttft_difference"]
        print(
            f"{one['router']:12} minus {found[0]['router']}, over {one['rounds']} rounds: hit rate {1e2 * hits:+.1f} ± "
            f"{1e2 * hits_error:.1f} points, TTFT mean {1e3 * ttft:+.0f} ± {1e3 * ttft_error:.0f} ms (standard error)"
        )
    print(
        f"for comparison: an unlimited cache {found[0]['ideal_hit_rate']:.1%}, one LRU cache as large as all pools "
        f"{found[0]['one_pool_hit_rate']:.1%}"
    )
    return 0


async def _run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of every router in every round."""
    import aiohttp

    load = AgentLoad(args.sessions, args.projects, args.turns, args.tokens, args.idle, args.seconds)
    routers = list(dict.fromkeys(args.router or ROUTERS[:2]))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = []
        shared = [free_port() for _ in range(args.prefill)]
        for number_ in range(args.prefill + args.workers):
            port, events, replay_port = free_port(), free_port(), free_port()
            flags = ["--pool", str(args.pool), "-q", "--threads", "1", "--drain-seconds", "0"]
            flags += _role_flags(number_, shared)
            flags += ["--kv-events", f"tcp://127.0.0.1:{events}"]
            flags += ["--kv-events-replay", f"tcp://127.0.0.1:{replay_port}"]
            command = [sys.executable, "-m", "kvloom.cli", "serve", args.model, "--port", str(port), *flags]
            stack.enter_context(Process(command))
            urls.append(f"http://127.0.0.1:{port}")
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            for url in urls:
                await ready(session, f"{url}/health", 300)
            async with session.get(f"{urls[-1]}/kvloom/worker") as answer:
                offer = (await answer.json())["models"][0]
            blocks = args.workers * args.pool // (offer["bytes_per_token"] * HASH_TOKENS)
            await _warm_up(session, urls, offer["id"])
            print(f"{len(urls)} workers are ready", file=sys.stderr)
            found = []
            for round_ in range(args.rounds):
                for at in range(len(routers)):
                    router = routers[(round_ + at) % len(routers)]
                    sessions = load.draw(args.seed + round_, f"run {round_ * len(routers) + at}:")
                    with ExitStack() as running:
                        url = _start(running, router, urls, args.smg, folder_of(args.model), folder)
                        await ready(session, f"{url}/health", 60)
                        await asyncio.sleep(2)
                        client = _Client(session, url, offer["id"])
                        await client.run(sessions)
                        one = {"router": router, "round": round_, **client.result(blocks)}
                        one["hand_overs"] = await _hand_overs(session, url, router)
                    found.append(one)
                    print(json.dumps(one), file=sys.stderr)
    return found


def _role_flags(number: int, shared: list[int]) -> list[str]:
    """Return the flags for a worker's role. The first workers are prefill workers and share their pages at the
    ports `shared`."""
    if not shared:
        return []
    if number < len(shared):
        return ["--role", "prefill", "--tier", f"host:128MiB?share={shared[number]}"]
    peers = [word for port in shared for word in ("--tier", f"peer://127.0.0.1:{port}?optional=1&write=back")]
    return ["--role", "decode", "--tier", "host:128MiB", *peers]


async def _hand_overs(session: Any, url: str, router: str) -> int:
    """Return how many prompts a router handed to prefill workers. For routers other than kvloom's, the number is 0."""
    if router == "smg":
        return 0
    async with session.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    name = "kvloom_router_hand_overs_total "
    return int(float(next(line for line in lines if line.startswith(name)).removeprefix(name)))


def _start(
    stack: ExitStack, router: str, urls: list[str], smg: str | None, tokenizer: str, folder: Path
) -> str:
    port = free_port()
    if router == "smg":
        assert smg is not None
        command = [smg, "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "cache_aware"]
        command += [
            "--prometheus-host",
            "127.0.0.1",
            "--prometheus-port",
            str(free_port()),
            "--worker-urls",
            *urls,
        ]
        log = (folder / "smg.log").open("wb")
        process = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))
        stack.callback(process.wait)
        stack.callback(process.terminate)
    else:
        flags = [word for url in urls for word in ("--worker", url)]
        command = [sys.executable, "-m", "kvloom.cli", "route", "--port", str(port), "--route", router]
        if (Path(tokenizer) / "tokenizer.json").is_file():
            command += ["--tokenizer", tokenizer]
        stack.enter_context(Process([*command, "--log-level", "error", *flags]))
    return f"http://127.0.0.1:{port}"


async def _warm_up(session: Any, urls: list[str], model: str) -> None:
    """Send a prompt to each worker, because the first steps of a process are slow."""
    prompt = next(AgentLoad(sessions=1).draw(0, "warm-up")[0].walk()).prompt
    await asyncio.gather(*(_Client(session, url, model).send(prompt) for url in urls))


class _Client:
    """Sends the turns of sessions to one router, and records prompts and times to first token in the order of
    sending."""

    def __init__(self, session: Any, url: str, model: str) -> None:
        self._session, self._url, self._model = session, url, model
        self.prompts: list[str] = []
        self.times: list[float] = []
        self.prompt_tokens = self.cached_tokens = self.errors = 0

    async def run(self, sessions: Sequence[Session]) -> None:
        began = time.perf_counter()

        async def one(session: Session) -> None:
            await asyncio.sleep(session.at - (time.perf_counter() - began))
            await self._turns(session.turns)

        await asyncio.gather(*(one(session) for session in sessions))

    async def _turns(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            await asyncio.sleep(turn.idle)
            await self.send(turn.prompt)
            await asyncio.gather(*(self._turns(branch) for branch in turn.branches))

    async def send(self, prompt: str) -> None:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self.prompts.append(prompt)
        first, usage = 0.0, None
        began = time.perf_counter()
        async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
            async for line in answer.content:
                if answer.status == 200 and line.startswith(b"data: {"):
                    first = first or time.perf_counter() - began
                    usage = json.loads(line[6:]).get("usage") or usage
        if usage is None:
            self.errors += 1
            return
        self.times.append(first)
        self.prompt_tokens += usage["prompt_tokens"]
        self.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    def result(self, blocks: int) -> dict[str, Any]:
        """Return the figures. `blocks` is the size of all pools together, in blocks."""
        hits, total = shared_tokens(self.prompts)
        times = self.times or [0.0]
        p50, p99 = np.quantile(times, (0.5, 0.99))
        return {
            "hit_rate": self.cached_tokens / max(1, self.prompt_tokens),
            "mean_ttft": float(np.mean(times)),
            "p50_ttft": float(p50),
            "p99_ttft": float(p99),
            "requests": len(self.times),
            "errors": self.errors,
            "ideal_hit_rate": hits / max(1, total),
            "one_pool_hit_rate": _one_pool(self.prompts, blocks),
        }


def _one_pool(prompts: Sequence[str], blocks: int) -> float:
    """Return the hit rate of `prompts` in a single LRU cache with `blocks` blocks. Answers do not enter this cache."""
    rows = [
        hash_chain(bytes(HASH_BYTES), token_bytes([ord(word[0]) for word in prompt.split()]))
        for prompt in prompts
    ]
    found, distinct = number_blocks([[int.from_bytes(one[:8], "big") for one in row] for row in rows])
    requests = [Request(float(at), row, len(row), 0, 0) for at, row in enumerate(found)]
    return replay(Traffic(tuple(requests), HASH_TOKENS, distinct), blocks).hit_rate


def _summary(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the means over the rounds, for each router. `hit_rate_difference` and `mean_ttft_difference` compare
    the router with the first router in the same rounds. Each is a pair: the mean of the differences, and the
    standard error of this mean."""
    routers = list(dict.fromkeys(one["router"] for one in found))
    by = {name: [one for one in found if one["router"] == name] for name in routers}
    result = []
    for name, rounds in by.items():
        means = {key: float(np.mean([one[key] for one in rounds])) for key in MEANS}
        first = by[routers[0]]
        gains = {
            f"{key}_difference": _mean_and_error(
                [one[key] - base[key] for one, base in zip(rounds, first, strict=True)]
            )
            for key in ("hit_rate", "mean_ttft")
        }
        counts = {key: sum(one[key] for one in rounds) for key in ("requests", "errors", "hand_overs")}
        result.append({"router": name, "rounds": len(rounds), **means, **counts, **gains})
    return result


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    error = np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else 0.0
    return float(np.mean(values)), float(error)
