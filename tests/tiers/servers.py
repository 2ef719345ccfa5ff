"""Real servers for the tests of remote tiers: started on loopback, on a free port, ended by their id.

Tests of a server that is not installed are skipped; the reason states what to install.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 0.2).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def running(command: list[str], ready: Callable[[], bool], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ready, until the block ends."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 20
        while not ready():
            assert process.poll() is None, f"{command[0]} ended: {log.read_text(errors='replace')[-800:]}"
            assert time.monotonic() < deadline, (
                f"{command[0]} is not ready: {log.read_text(errors='replace')[-800:]}"
            )
            time.sleep(0.02)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)


@contextlib.contextmanager
def stopped(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """It hangs, until the block ends."""
    os.kill(process.pid, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + 5
        while _state(process.pid) != "T" and time.monotonic() < deadline:
            time.sleep(0.005)
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


def _state(pid: int) -> str:
    """Return the state of all its threads: T only if all are stopped."""
    states = {
        path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")
    }
    return states.pop() if len(states) == 1 else ""


def redis_command(port: int, folder: Path, *options: str) -> list[str]:
    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        pytest.skip("no redis-server or valkey-server: apt-get install redis-server")
    plain = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
    return [binary, "--port", str(port), *plain, *options]


@contextlib.contextmanager
def redis_server(folder: Path, *options: str, port: int = 0) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    port = port or free_port()
    command = redis_command(port, folder, *options)
    with running(command, lambda: answers(port), folder / "redis.log") as process:
        yield port, process


@contextlib.contextmanager
def mooncake_master(folder: Path, port: int = 0) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    pytest.importorskip(
        "mooncake.store",
        reason="no Mooncake: pip install mooncake-transfer-engine-non-cuda; apt-get install libibverbs1 libcurl4 libnuma1",
        exc_type=ImportError,
    )
    binary = Path(sys.executable).parent / "mooncake_master"
    port = port or free_port()
    options = [f"--rpc_port={port}", "--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
    command = [str(binary), *options, f"--metrics_port={free_port()}", "--client_ttl=2"]
    with running(command, lambda: answers(port), folder / "mooncake.log") as process:
        yield port, process


@contextlib.contextmanager
def s3_server(folder: Path, port: int = 0) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """An S3 store in memory, with its credentials in the environment."""
    for module in ("nixl._api", "boto3", "moto.server"):
        pytest.importorskip(
            module,
            reason="no S3 by NIXL: pip install --no-deps nixl nixl-cu12; pip install boto3 'moto[server]'",
            exc_type=ImportError,
        )
    port = port or free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running(command, lambda: answers(port), folder / "s3.log") as process:
        yield port, process


@contextlib.contextmanager
def s3_bucket(folder: Path, capacity: int) -> Iterator[str]:
    """The URL of a tier in an empty bucket, with credentials in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "someone")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with s3_server(folder) as (port, _):
            import boto3

            endpoint = f"http://127.0.0.1:{port}"
            client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
            client.create_bucket(Bucket="kvpages")
            yield f"s3://kvpages/ours?capacity={capacity}&endpoint={endpoint}&timeout=20"


@contextlib.contextmanager
def slow_gets(port: int, seconds: dict[str, list[float]]) -> Iterator[int]:
    """A proxy of an HTTP server that delays GETs of paths with a word in them by the given seconds, in order."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *said: Any) -> None:
            pass

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            ahead = HTTPConnection("127.0.0.1", port)
            ahead.request(self.command, self.path, body or None, dict(self.headers.items()))
            answer = ahead.getresponse()
            content = answer.read()
            for word, waits in seconds.items():
                if self.command == "GET" and word in self.path and waits:
                    time.sleep(waits.pop(0))
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(name, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", length or str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            ahead.close()

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on  # noqa: N815

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
