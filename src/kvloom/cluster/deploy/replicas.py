"""Replicas in Ray Serve. A replica is one process of `kvloom serve` or `kvloom route`.

Ray Serve calls three methods of a replica. If `check_health` raises, Ray Serve replaces the replica.
`record_autoscaling_stats` returns the load of the replica. In a rolling restart or a scale-down, `__del__` drains the
process. Requests do not pass through Ray.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from .cluster_file import Group
from .members import members_of

__all__ = ["Replica", "by_load", "command_of"]

ANNOUNCE_SECONDS = 1.0
PEER_SECONDS = 60.0
"""Seconds that a decode worker waits for the first prefill worker before it starts."""


def by_load(context: Any) -> tuple[int, dict[str, Any]]:
    """A scaling policy of Ray Serve. Returns the number of replicas with which each replica has about
    `target-requests` open requests. The result is at least the configured minimum.
    """
    load = sum((context.aggregated_metrics.get("load") or {}).values())
    wanted = math.ceil(load / context.config.target_ongoing_requests)
    return max(wanted, context.capacity_adjusted_min_replicas), {}


def command_of(group: Group, host: str, ports: list[int], peers: list[str], secret: str | None) -> list[str]:
    """Return the command line of a replica. `ports` are the ports for HTTP, events, replay and shared pages.
    `peers` are the addresses at which prefill workers share pages."""
    words = [sys.executable, "-m", "kvloom.cli", group.command, *group.arguments]
    words += ["--host", host, "--port", str(ports[0])]
    if group.command == "route":
        return words
    words += ["--role", group.role, "--drain-seconds", f"{group.drain_seconds:g}"]
    words += ["--kv-events", f"tcp://{host}:{ports[1]}", "--kv-events-replay", f"tcp://{host}:{ports[2]}"]
    key = "" if secret is None else f"&secret={secret}"
    if group.host_memory and group.role == "prefill":
        words += ["--tier", f"host:{group.host_memory}?share={host}:{ports[3]}{key}"]
    elif group.host_memory:
        words += ["--tier", f"host:{group.host_memory}"]
        for peer in peers:
            words += ["--tier", f"peer://{peer}?optional=1&write=back{key}"]
    return words


class Replica:
    """One process. The constructor returns when the process is ready to serve."""

    def __init__(
        self, cluster: str, group: Group, bind: str, secret: str | None, environment: dict[str, str]
    ) -> None:
        import ray

        self.group, self._ended = group, threading.Event()
        host = ray.util.get_node_ip_address() if bind == "node" else bind
        self._members = members_of(cluster)
        first = range(group.port, group.port + group.max_replicas + 16) if group.port else range(1)
        shares = group.share_ports if group.role == "prefill" else range(1)
        ports = [free_port(host, first), *(free_port(host) for _ in range(2)), free_port(host, shares)]
        peers = self._peers() if group.host_memory and group.role != "prefill" else []
        self._url = f"http://{host}:{ports[0]}"
        self._about = {"command": group.command, "group": group.name, "host": host, "pid": os.getpid()}
        if group.role == "prefill":
            self._about["peers"] = [f"{host}:{port}" for port in group.share_ports]
        command = command_of(group, host, ports, peers, secret)
        watched = [sys.executable, "-m", "kvloom.cluster.deploy.supervised", f"{group.drain_seconds + 5:g}"]
        self._process = subprocess.Popen(
            [*watched, *command], stdin=subprocess.PIPE, env={**os.environ, **environment}
        )
        self._wait_until_ready()
        ray.get(self._members.announce.remote(self._url, self._about), timeout=60)
        threading.Thread(target=self._announce, daemon=True).start()

    def _peers(self) -> list[str]:
        """Return the addresses at which prefill workers share their pages. Waits up to PEER_SECONDS until there is an
        address."""
        import ray

        end = time.monotonic() + PEER_SECONDS
        while True:
            found = ray.get(self._members.living.remote("serve"), timeout=30)
            peers = dict.fromkeys(peer for one in found.values() for peer in one.get("peers", ()))
            if peers or time.monotonic() > end:
                return list(peers)
            time.sleep(1)

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + self.group.start_seconds
        while True:
            with suppress(OSError):
                status = self._get("/health")[0]
                # A router is ready even without workers, because it starts first.
                if status == 200 or (status == 503 and self.group.command == "route"):
                    return
            if self._process.poll() is not None:
                raise RuntimeError(
                    f"{self.group.name}: the process ended with status {self._process.returncode}"
                )
            if time.monotonic() > end:
                self._process.terminate()
                raise RuntimeError(
                    f"{self.group.name}: not ready after start-seconds {self.group.start_seconds:g}"
                )
            time.sleep(0.2)

    def _get(self, path: str, body: Any = None) -> tuple[int, Any]:
        """Send a GET, or a POST of `body`. Return status and JSON. Raises OSError."""
        headers = {"content-type": "application/json"}
        key = os.environ.get("KVLOOM_ROUTER_KEY" if self.group.command == "route" else "KVLOOM_API_KEY")
        if key:
            headers["authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._url + path, data, headers)  # the URL is http:// and ours
        try:
            with urlopen(request, timeout=5) as answer:
                return answer.status, json.loads(answer.read() or b"null")
        except HTTPError as error:
            return error.code, None
        except (URLError, ValueError) as error:
            raise OSError(str(error)) from None

    def _announce(self) -> None:
        """Announce this process every second. If the process is a router, also register the workers with it."""
        while not self._ended.wait(ANNOUNCE_SECONDS):
            try:
                self._members.announce.remote(self._url, self._about)
                if self.group.command == "route":
                    self._register()
            except Exception as error:  # noqa: BLE001  Ray or the process may be away; the next round tries again
                print(f"{self.group.name}: {error}", file=sys.stderr)

    def _register(self) -> None:
        import ray

        living = set(ray.get(self._members.living.remote("serve"), timeout=10))
        status, found = self._get("/workers")
        if status != 200:
            raise OSError(f"/workers returned {status}")
        known = {one["url"] for one in found["workers"]}
        for url in living - known:
            self._get("/register", {"url": url})
        for url in known - living:
            self._get("/unregister", {"url": url})

    # -- called by Ray Serve ------------------------------------------------------------------------

    def check_health(self) -> None:
        """Raise if the process has ended or does not answer. Ray Serve then replaces the replica."""
        if self._process.poll() is not None:
            raise RuntimeError(f"{self.group.name} ended with status {self._process.returncode}")
        self._get("/health")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the number of open requests of a worker."""
        if self.group.command == "route":
            return {"load": 0.0}
        try:
            status, found = self._get("/kvloom/worker")
        except OSError:
            return {"load": 0.0}
        return {"load": float(found["open_requests"]) if status == 200 else 0.0}

    def __del__(self) -> None:
        """End the process when its requests have finished, at the latest after `drain-seconds`."""
        self._ended.set()
        process = getattr(self, "_process", None)
        if process is None:
            return
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(self.group.drain_seconds + 5)
        self._members.withdraw.remote(self._url)
        if process.stdin is not None:
            process.stdin.close()

    def address(self) -> str:
        """Return the URL of the process."""
        return self._url


def free_port(host: str, wanted: range = range(1)) -> int:
    """Return the first free port of a range. For range(1), return any free port. Raises OSError if none is free."""
    for port in wanted:
        with suppress(OSError), socket.create_server((host, port)) as one:
            return int(one.getsockname()[1])
    raise OSError(f"no port from {wanted.start} to {wanted.stop - 1} is free on {host}")
