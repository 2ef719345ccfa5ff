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

from kvloom.serve.https import client_context

from .cluster_file import ClusterFile, Group
from .members import members_of

__all__ = ["Replica", "by_load", "command_of"]

ANNOUNCE_SECONDS = 1.0
PEER_SECONDS = 60.0
"""Seconds that a worker waits, before it starts, for the first replica of a group that it reads from."""


def by_load(context: Any) -> tuple[int, dict[str, Any]]:
    """A scaling policy of Ray Serve. Return how many replicas to run: as many as give each replica at most
    `target-requests` open requests on average, and at least the configured minimum.
    """
    load = sum((context.aggregated_metrics.get("load") or {}).values())
    wanted = math.ceil(load / context.config.target_ongoing_requests)
    return max(wanted, context.capacity_adjusted_min_replicas), {}


def command_of(
    cluster: ClusterFile, group: Group, host: str, ports: list[int], peers: list[str], encoders: list[str]
) -> list[str]:
    """Return the command line of a replica. `ports` are the ports for HTTP, events, replay and shared pages.
    `peers` and `encoders` are the addresses at which prefill workers and encode workers share pages."""
    secret, tls = cluster.peer_secret, cluster.certificates
    words = [sys.executable, "-m", "kvloom.cli", group.command, *group.arguments]
    words += ["--host", host, "--port", str(ports[0])]
    if tls is not None:
        words += ["--ssl-certfile", tls.certificate, "--ssl-keyfile", tls.key]
    if group.command == "route":
        if tls is not None:
            words += ["--worker-ca-certs", tls.authority]
            words += ["--worker-certfile", tls.certificate, "--worker-keyfile", tls.key]
        return words
    if tls is not None:
        words += ["--ssl-ca-certs", tls.authority]
    words += ["--role", group.role, "--drain-seconds", f"{group.drain_seconds:g}"]
    key = "" if secret is None else f"secret={secret}"
    if group.shares:
        words += ["--tier", f"host:{group.host_memory}?share={host}:{ports[3]}{key and '&' + key}"]
    elif group.host_memory:
        words += ["--tier", f"host:{group.host_memory}"]
    for peer in peers:
        words += ["--tier", f"peer://{peer}?optional=1&write=back{key and '&' + key}"]
    for encoder in encoders:
        words += ["--encoder", f"peer://{encoder}{key and '?' + key}"]
    if group.role != "encode":
        words += ["--kv-events", f"tcp://{host}:{ports[1]}", "--kv-events-replay", f"tcp://{host}:{ports[2]}"]
    return words


class Replica:
    """Runs one process of a group. The constructor returns when the process is ready to serve."""

    def __init__(self, cluster: ClusterFile, group: Group) -> None:
        import ray

        self.group, self._ended = group, threading.Event()
        host = ray.util.get_node_ip_address() if cluster.bind == "node" else cluster.bind
        self._members = members_of(cluster.name)
        ports = [free_port(host) for _ in range(4)]
        self._claims: list[socket.socket] = []
        if group.port:
            # In a rolling restart, a new router waits for the port of an old router, because clients use this port.
            known = range(group.port, group.port + group.max_replicas)
            ports[0] = self._claim(host, known, group.start_seconds)
        if group.shares:
            ports[3] = self._claim(host, group.share_ports)
        peers, encoders = (
            self._addresses(groups) for groups in (cluster.page_sources(group), cluster.encoders(group))
        )
        tls = cluster.certificates
        self._tls = None if tls is None else client_context(tls.authority, tls.certificate, tls.key)
        self._url = f"{'http' if tls is None else 'https'}://{host}:{ports[0]}"
        self._about = {"command": group.command, "group": group.name, "host": host, "pid": os.getpid()}
        self._about["shares"] = [f"{host}:{port}" for port in group.share_ports]
        command = command_of(cluster, group, host, ports, peers, encoders)
        if group.command == "route":  # registered before the first request, which would be refused otherwise
            command += [word for url in self._workers() for word in ("--worker", url)]
        watched = [sys.executable, "-m", "kvloom.cluster.deploy.supervised", f"{group.drain_seconds + 5:g}"]
        self._process = subprocess.Popen(
            [*watched, *command], stdin=subprocess.PIPE, env={**os.environ, **cluster.environment}
        )
        self._wait_until_ready()
        ray.get(self._members.announce.remote(self._url, self._about), timeout=60)
        threading.Thread(target=self._announce, daemon=True).start()

    def _claim(self, host: str, ports: range, seconds: float = 0.0) -> int:
        """Return a port of a range, which no other replica on this machine uses. See `claim_port`."""
        port, claim = claim_port(host, ports, seconds)
        self._claims.append(claim)
        return port

    def _addresses(self, groups: list[Group]) -> list[str]:
        """Return the addresses at which replicas of some groups share pages. Waits up to PEER_SECONDS until each group
        has a replica."""
        names = {group.name for group in groups}
        end = time.monotonic() + PEER_SECONDS
        while names:
            found = [one for one in self._workers().values() if one["group"] in names]
            if names == {one["group"] for one in found} or time.monotonic() > end:
                return list(dict.fromkeys(address for one in found for address in one["shares"]))
            time.sleep(1)
        return []

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + self.group.start_seconds
        while True:
            with suppress(OSError):
                if self._is_ready():
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

    def _is_ready(self) -> bool:
        """Whether the process is healthy. A router is not healthy without workers, but counts as ready if the cluster
        has no running workers."""
        status = self._get("/health")[0]
        return status == 200 or (status == 503 and self.group.command == "route" and not self._register())

    def _get(self, path: str, body: Any = None) -> tuple[int, Any]:
        """Send a GET to the process or, with `body`, a POST. Return the status and the JSON of the response. Raises
        OSError if the process does not answer.
        """
        headers = {"content-type": "application/json"}
        key = os.environ.get("KVLOOM_ROUTER_KEY" if self.group.command == "route" else "KVLOOM_API_KEY")
        if key:
            headers["authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = Request(self._url + path, data, headers)  # the URL is http:// or https://, and ours
        try:
            with urlopen(request, timeout=5, context=self._tls) as answer:
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

    def _workers(self) -> dict[str, dict[str, Any]]:
        """Return the running workers of the cluster, by URL."""
        import ray

        found: dict[str, dict[str, Any]] = ray.get(self._members.living.remote("serve"), timeout=30)
        return found

    def _register(self) -> int:
        """Register new workers with the router and unregister missing workers. The router then has exactly the running
        workers of the cluster. Return their number.
        """
        living = set(self._workers())
        status, found = self._get("/workers")
        if status != 200:
            raise OSError(f"/workers returned {status}")
        known = {one["url"] for one in found["workers"]}
        for url in living - known:
            self._get("/register", {"url": url})
        for url in known - living:
            self._get("/unregister", {"url": url})
        return len(living)

    # -- called by Ray Serve ------------------------------------------------------------------------

    def check_health(self) -> None:
        """Raise if the process has ended or does not answer. Ray Serve then replaces the replica."""
        if self._process.poll() is not None:
            raise RuntimeError(f"{self.group.name} ended with status {self._process.returncode}")
        self._get("/health")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load of the replica. The load of a worker is its number of open requests. For an encode worker,
        the number of waiting images is added. The load is 0 for a router, and for a worker that does not answer.
        """
        if self.group.command == "route":
            return {"load": 0.0}
        try:
            status, found = self._get("/kvloom/worker")
        except OSError:
            return {"load": 0.0}
        if status != 200:
            return {"load": 0.0}
        images = sum(one["load"]["waiting"] for one in found["models"] if one["role"] == "encode")
        return {"load": float(found["open_requests"] + images)}

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


def free_port(host: str) -> int:
    """Return a free port."""
    with socket.create_server((host, 0)) as one:
        return int(one.getsockname()[1])


def claim_port(host: str, ports: range, seconds: float = 0.0) -> tuple[int, socket.socket]:
    """Return the first free port of a range, and a claim: an open socket that reserves the port for this process. Waits
    up to `seconds` for a free port. Raises OSError if none is free.

    While the claim is open, no other call on this machine returns the port. The claim is a Unix socket with an abstract
    name, which the kernel closes when the process ends. Without claims, two replicas that start at the same time could
    choose the same port.
    """
    end = time.monotonic() + seconds
    while True:
        for port in ports:
            claim = socket.socket(socket.AF_UNIX)
            try:
                claim.bind(f"\0kvloom deploy {host}:{port}")
                socket.create_server((host, port)).close()
            except OSError:
                claim.close()
            else:
                return port, claim
        if time.monotonic() >= end:
            raise OSError(f"no port from {ports.start} to {ports.stop - 1} is free on {host}")
        time.sleep(0.2)
