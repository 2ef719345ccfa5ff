"""`kvloom bench disaggregation` compares prefill and decode workers with the same number of workers that do both.

    interference   time between the tokens of short streams while long prompts arrive, and the time to first token of
                   these prompts. A router sends the same load first to workers that do both, then to prefill and
                   decode workers
    hand-over      the prefill worker and the decode worker get the same prompt at the same time. The figure is the
                   time between their first tokens, divided by the time of the prefill. The workers have no other work

All workers are `kvloom serve` processes on loopback, with one thread each. With `--pin`, every worker has a separate
core, if there are enough cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from kvloom.arguments import whole

from .fleet import free_port, ready, start_router, start_workers, token_times

__all__ = ["main"]

STREAM_PROMPT, STREAM_TOKENS = 16, 2000
SETTLE_SECONDS = 2.0
"""Seconds to wait after the start of the streams, so that all of them get their first tokens."""
POOL = "256MiB"
VOCABULARY = 4000
"""Prompts have token ids below this number. The vocabulary of `kvloom-llama`, the model in the package, contains all of
these ids."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="kvloom bench disaggregation", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add(
        "--model",
        default="kvloom-llama",
        metavar="MODEL",
        help="model of the workers (default: kvloom-llama)",
    )
    add("--prefill", type=whole(1), default=1, metavar="N", help="prefill workers (default: 1)")
    add("--decode", type=whole(1), default=1, metavar="N", help="decode workers (default: 1)")
    add(
        "--streams",
        type=whole(1),
        default=2,
        metavar="N",
        help="streams during the long prompts (default: 2)",
    )
    add("--prompts", type=whole(1), default=6, metavar="N", help="long prompts (default: 6)")
    add("--concurrency", type=whole(1), default=2, metavar="N", help="long prompts at once (default: 2)")
    add(
        "--tokens", type=whole(300), default=4000, metavar="N", help="tokens of a long prompt (default: 4000)"
    )
    chunk = "prompt tokens of one step of workers that do both, and of prefill workers (default: 256)"
    add("--chunk", type=whole(16), default=256, metavar="N", help=chunk)
    add("--rounds", type=whole(1), default=3, metavar="N", help="hand-overs to measure (default: 3)")
    add("--pin", action="store_true", help="give every worker a core of its own")
    add("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    found = asyncio.run(_run(args))
    if args.json:
        print(json.dumps(found, indent=2))
        return 0
    for name in ("mixed", "split"):
        one = found[name]
        print(
            f"{name:6} time between tokens: mean {one['mean_tbt_ms']:.1f} ms, p50 {one['p50_tbt_ms']:.1f} ms, "
            f"p99 {one['p99_tbt_ms']:.1f} ms, longest {one['max_tbt_ms']:.1f} ms ({one['tokens']} tokens); "
            f"long prompts: TTFT mean {one['mean_ttft_ms']:.0f} ms, {one['seconds']:.1f} s in all"
        )
    print(f"p99 time between tokens, mixed / split: {found['p99_ratio']:.1f}")
    for one in found["hand_over"]:
        print(
            f"hand-over of {args.tokens} tokens: prefill {one['prefill_ms']:.0f} ms, exposed {one['exposed_ms']:.0f} ms "
            f"({one['exposed_share']:.1%}), {one['cached_tokens']} tokens pulled"
        )
    return 0


async def _run(args: argparse.Namespace) -> dict[str, Any]:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        count = args.prefill + args.decode
        chunk = ["--token-budget", str(args.chunk)]
        with ExitStack() as stack:
            urls = start_workers(stack, args.model, [chunk] * count, POOL, args.pin)
            mixed = await _interference(session, stack, urls, args, 0)
        with ExitStack() as stack:
            shared = [free_port() for _ in range(args.prefill)]
            peers = [
                word
                for port in shared
                for word in ("--tier", f"peer://127.0.0.1:{port}?optional=1&write=back")
            ]
            roles = [
                ["--role", "prefill", *chunk, "--tier", f"host:256MiB?share={port}"] for port in shared
            ] + [["--role", "decode", "--tier", "host:256MiB", *peers]] * args.decode
            urls = start_workers(stack, args.model, roles, POOL, args.pin)
            split = await _interference(session, stack, urls, args, 1)
            decode = urls[args.prefill]
            hand_over = [
                await _hand_over(session, urls[0], decode, shared[0], args.tokens, number)
                for number in range(args.rounds)
            ]
    return {
        "mixed": mixed,
        "split": split,
        "p99_ratio": mixed["p99_tbt_ms"] / split["p99_tbt_ms"],
        "hand_over": hand_over,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }


@dataclass(slots=True)
class _Load:
    """The streams and long prompts of one measurement."""

    session: Any
    url: str
    model: str
    arrivals: list[list[float]] = field(default_factory=list)
    """Times at which the tokens of each short stream arrived."""
    ttfts: list[float] = field(default_factory=list)

    async def stream(self, prompt: list[int], max_tokens: int, times: list[float]) -> None:
        """Stream an answer, and append the times of its tokens to `times`."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        async with self.session.post(f"{self.url}/v1/completions", json={**body, "stream": True}) as answer:
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}: {await answer.text()}")
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter())

    async def keep_streaming(self, prompt: list[int]) -> None:
        """Stream one answer after another, until the task is cancelled."""
        while True:
            self.arrivals.append([])
            await self.stream(prompt, STREAM_TOKENS, self.arrivals[-1])

    async def prompts(self, prompts: list[list[int]], concurrency: int) -> None:
        """Send long prompts, `concurrency` of them at once."""
        places = asyncio.Semaphore(concurrency)

        async def one(prompt: list[int]) -> None:
            async with places:
                began = time.perf_counter()
                times: list[float] = []
                await self.stream(prompt, 4, times)
                self.ttfts.append(times[0] - began)

        await asyncio.gather(*(one(prompt) for prompt in prompts))


async def _interference(
    session: Any, stack: ExitStack, urls: list[str], args: argparse.Namespace, seed: int
) -> dict[str, Any]:
    """Run streams and long prompts through a router over the workers."""
    for url in urls:
        await ready(session, f"{url}/health", 300)
    router = await start_router(session, stack, urls)
    async with session.get(f"{router}/v1/models") as answer:
        model = (await answer.json())["data"][0]["id"]
    rng = np.random.default_rng(seed)
    load = _Load(session, router, model)
    await load.prompts([rng.integers(3, VOCABULARY, args.tokens).tolist()], 1)  # warm up
    load.ttfts.clear()
    short = [rng.integers(3, VOCABULARY, STREAM_PROMPT).tolist() for _ in range(args.streams)]
    streams = [asyncio.create_task(load.keep_streaming(prompt)) for prompt in short]
    try:
        await asyncio.sleep(SETTLE_SECONDS)
        began = time.perf_counter()
        long = [rng.integers(3, VOCABULARY, args.tokens).tolist() for _ in range(args.prompts)]
        await load.prompts(long, args.concurrency)
        ended = time.perf_counter()
    finally:
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return _summary(load, began, ended)


def _summary(load: _Load, began: float, ended: float) -> dict[str, Any]:
    """Return statistics of two kinds of times: the times between tokens of the short streams, and the times to first
    token of the long prompts. Only tokens that arrived from `began` to `ended` count for the first kind."""
    gaps = [
        second - first
        for times in load.arrivals
        for first, second in pairwise(times)
        if began < second <= ended
    ]
    if not gaps:
        raise RuntimeError("the streams had no tokens while the long prompts ran: use more or longer prompts")
    return token_times(gaps, load.ttfts) | {"seconds": ended - began}


async def _hand_over(
    session: Any, prefill: str, decode: str, port: int, tokens: int, seed: int
) -> dict[str, Any]:
    """Send a prompt to both workers at once, and compare the times of their answers."""
    async with session.get(f"{prefill}/v1/models") as answer:
        model = (await answer.json())["data"][0]["id"]
    prompt = np.random.default_rng(100 + seed).integers(3, VOCABULARY, tokens).tolist()
    body = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    pull = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": port}

    async def ask(url: str, params: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        async with session.post(
            f"{url}/v1/completions", json={**body, "kv_transfer_params": params}
        ) as answer:
            found = await answer.json()
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}: {found}")
        return time.perf_counter(), found

    began = time.perf_counter()
    (first, _), (second, found) = await asyncio.gather(
        ask(prefill, {"do_remote_decode": True}), ask(decode, pull)
    )
    exposed = max(0.0, second - first)
    usage = found["usage"].get("prompt_tokens_details") or {}
    return {
        "prefill_ms": 1e3 * (first - began),
        "exposed_ms": 1e3 * exposed,
        "exposed_share": exposed / (first - began),
        "cached_tokens": usage.get("cached_tokens") or 0,
    }
