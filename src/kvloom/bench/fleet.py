"""Processes of a fleet for benchmarks: workers and a router on loopback, which end with the benchmark."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

__all__ = ["Process", "free_port", "ready", "start_router", "start_workers", "token_times"]


async def ready(session: Any, url: str, seconds: float = 60.0) -> None:
    """Wait until a URL answers with status 200."""
    async with asyncio.timeout(seconds):
        while True:
            try:
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                pass
            await asyncio.sleep(0.1)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


class Process:
    """A child process that ends with the `with` block."""

    def __init__(self, command: list[str]) -> None:
        self._command = command

    def __enter__(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(self._command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return self._process

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)


def start_workers(
    stack: ExitStack, model: str, flags: Sequence[Sequence[str]], pool: str, pin: bool
) -> list[str]:
    """Start a worker for each entry of `flags`, which has the worker's additional command-line arguments. Return the
    URLs of the workers. Each worker runs with `--threads 1`. With `pin`, every worker has a core of its own, if there
    are enough cores."""
    cores = sorted(os.sched_getaffinity(0)) if pin else []
    urls = []
    for number, more in enumerate(flags):
        port = free_port()
        command = [sys.executable, "-m", "kvloom.cli", "serve", model, "--port", str(port)]
        command += ["--pool", pool, "-q", "--threads", "1", "--drain-seconds", "0", *more]
        process = stack.enter_context(Process(command))
        if cores:  # the engine process starts later, and inherits the core
            os.sched_setaffinity(process.pid, {cores[number % len(cores)]})
        urls.append(f"http://127.0.0.1:{port}")
    return urls


async def start_router(session: Any, stack: ExitStack, urls: Sequence[str]) -> str:
    """Start a router over the workers, wait until all workers are alive, and return its URL."""
    port = free_port()
    flags = [word for url in urls for word in ("--worker", url)]
    command = [sys.executable, "-m", "kvloom.cli", "route", "--port", str(port), "--log-level", "error"]
    stack.enter_context(Process([*command, *flags]))
    router = f"http://127.0.0.1:{port}"
    await ready(session, f"{router}/health", 60)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        async with session.get(f"{router}/workers") as answer:
            if all(one["alive"] for one in (await answer.json())["workers"]):
                return router
        await asyncio.sleep(0.1)
    raise RuntimeError("a worker is not alive after 60 s")


def token_times(gaps: Sequence[float], ttfts: Sequence[float]) -> dict[str, Any]:
    """Return statistics of the seconds between tokens and of the times to first token."""
    p50, p99 = np.quantile(gaps, (0.5, 0.99))
    return {
        "tokens": len(gaps),
        "mean_tbt_ms": 1e3 * float(np.mean(gaps)),
        "p50_tbt_ms": 1e3 * float(p50),
        "p99_tbt_ms": 1e3 * float(p99),
        "max_tbt_ms": 1e3 * max(gaps),
        "mean_ttft_ms": 1e3 * float(np.mean(ttfts)),
    }
