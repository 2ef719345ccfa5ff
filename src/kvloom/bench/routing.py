"""`kvloom bench routing`: agent sessions over several real workers on loopback, for each router.

Every turn of a session repeats all earlier tokens and adds some. The routers use the same workers one after the other.
Each router has different sessions, so that it does not hit pages of another router. The hit rate is the fraction of
prompt tokens that were cached, as the workers report it. With prefill workers it includes the pages that a decode
worker pulled from them.
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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from kvloom.arguments import size, whole

from .router import Process, free_port, ready

__all__ = ["main"]

ROUTERS = ("kv", "round-robin", "smg")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="kvloom bench routing", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add(
        "--model",
        default="kvloom-llama",
        metavar="MODEL",
        help="model of the workers (default: kvloom-llama)",
    )
    add("--workers", type=whole(1), default=4, metavar="N", help="workers (default: 4)")
    prefill = "prefill workers; the other workers then only decode (default: 0: every worker does both)"
    add("--prefill", type=whole(0), default=0, metavar="N", help=prefill)
    pool = "page pool of a worker (default: 128MiB); a small one evicts pages of idle sessions"
    add("--pool", type=size, default=128 << 20, metavar="SIZE", help=pool)
    add("--sessions", type=whole(1), default=10, metavar="N", help="sessions per router (default: 10)")
    add("--turns", type=whole(1), default=6, metavar="N", help="turns of a session (default: 6)")
    add("--tokens", type=whole(1), default=256, metavar="N", help="tokens that a turn adds (default: 256)")
    add("--concurrency", type=whole(1), default=3, metavar="N", help="sessions at once (default: 3)")
    add(
        "--router", action="append", default=[], choices=ROUTERS, help="repeatable (default: kv, round-robin)"
    )
    add(
        "--smg",
        metavar="PROGRAM",
        help="path of the program smg, for --router smg (SGLang's gateway, cache_aware)",
    )
    add("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    found = asyncio.run(_run(args))
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    for one in found:
        print(
            f"{one['router']:12} hit rate {one['hit_rate']:.1%}, TTFT mean {1e3 * one['mean_ttft']:.0f} ms, "
            f"p99 {1e3 * one['p99_ttft']:.0f} ms, {one['requests']} requests, {one['errors']} errors"
            + (f", {one['hand_overs']} prompts handed over" if args.prefill else "")
        )
    return 0


async def _run(args: argparse.Namespace) -> list[dict[str, Any]]:
    import aiohttp

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = []
        shared = [free_port() for _ in range(args.prefill)]
        for number in range(args.prefill + args.workers):
            port, events, replay = free_port(), free_port(), free_port()
            flags = ["--pool", str(args.pool), "-q", "--threads", "1", "--drain-seconds", "0"]
            flags += _role_flags(number, shared)
            flags += [
                "--kv-events",
                f"tcp://127.0.0.1:{events}",
                "--kv-events-replay",
                f"tcp://127.0.0.1:{replay}",
            ]
            command = [sys.executable, "-m", "kvloom.cli", "serve", args.model, "--port", str(port), *flags]
            stack.enter_context(Process(command))
            urls.append(f"http://127.0.0.1:{port}")
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            for url in urls:
                await ready(session, f"{url}/health", 300)
            print(f"{len(urls)} workers are ready", file=sys.stderr)
            async with session.get(f"{urls[0]}/v1/models") as answer:
                model = (await answer.json())["data"][0]["id"]
            found = []
            for number, router in enumerate(dict.fromkeys(args.router or ROUTERS[:2])):
                with ExitStack() as running:
                    url = _start(running, router, urls, args.smg, folder)
                    await ready(session, f"{url}/health", 60)
                    await asyncio.sleep(2)
                    result = await _sessions(session, url, model, number, args)
                    found.append(
                        {"router": router, **result, "hand_overs": await _hand_overs(session, url, router)}
                    )
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
    """Return how many prompts a router gave to prefill workers. For routers other than kvloom's, it is 0."""
    if router == "smg":
        return 0
    async with session.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    name = "kvloom_router_hand_overs_total "
    return int(float(next(line for line in lines if line.startswith(name)).removeprefix(name)))


def _start(stack: ExitStack, router: str, urls: list[str], smg: str | None, folder: Path) -> str:
    port = free_port()
    if router == "smg":
        if smg is None:
            raise ValueError("--router smg needs --smg PROGRAM: the path of SGLang's gateway")
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
        stack.enter_context(Process([*command, "--log-level", "error", *flags]))
    return f"http://127.0.0.1:{port}"


async def _sessions(
    session: Any, url: str, model: str, number: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Run all sessions in a fixed order, `args.concurrency` of them at once."""
    rng = np.random.default_rng(1000 + number)
    places = asyncio.Semaphore(args.concurrency)
    times: list[float] = []
    counts = {"prompt": 0, "cached": 0, "errors": 0}
    prompts = [[str(t) for t in rng.integers(0, 10, args.tokens * args.turns)] for _ in range(args.sessions)]

    async def turn(name: int, count: int) -> None:
        text = f"session {number} {name}: " + "".join(prompts[name][: count * args.tokens])
        body = {
            "model": model,
            "prompt": text,
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        body["stream_options"] = {"include_usage": True}
        async with places:
            began = time.perf_counter()
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                if answer.status != 200:
                    counts["errors"] += 1
                    return
                first, usage = 0.0, None
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        first = first or time.perf_counter() - began
                        usage = json.loads(line[6:]).get("usage") or usage
        if usage is None:
            counts["errors"] += 1
            return
        times.append(first)
        counts["prompt"] += usage["prompt_tokens"]
        counts["cached"] += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    async def one(name: int) -> None:
        for count in range(1, args.turns + 1):
            await turn(name, count)
            await asyncio.sleep(0.05)

    await asyncio.gather(*(one(name) for name in range(args.sessions)))
    return {
        "hit_rate": counts["cached"] / max(1, counts["prompt"]),
        "mean_ttft": float(np.mean(times)) if times else 0.0,
        "p99_ttft": float(np.quantile(times, 0.99)) if times else 0.0,
        "requests": len(times),
        "errors": counts["errors"],
    }
