"""Reads cluster.toml, which lists the processes of a cluster and how many of each run.

[cluster]
name = "demo"                       # several clusters may share one Ray
ray = "auto"                        # address of Ray; "local" starts a Ray that ends with `kvloom deploy`
bind = "127.0.0.1"                  # "node": the address of the machine, for several machines
peer-secret = "/etc/kvloom/secret"  # with bind = "node": a secret that protects shared pages; on every machine
certificate = "/etc/kvloom/tls.crt" # for HTTPS: a file on every machine, with the certificate of this machine
certificate-key = "/etc/kvloom/tls.key"
authority = "/etc/kvloom/ca.crt"    # signed all certificates; workers refuse clients without such a certificate

[router]
port = 8080
replicas = 1                        # further routers use the next ports
[router.arguments]                  # arguments of `kvloom route`
affinity-seconds = 0.1

[workers.decode]
model = "meta-llama/Llama-3.1-8B-Instruct"
role = "decode"                     # prefill, decode, both or encode
replicas = 2
max-replicas = 6                    # if larger than replicas: the number of replicas follows the load
target-requests = 16                # scaling keeps about this many open requests per replica
gpus = 1
host-memory = "64GiB"               # other workers read the host memory of prefill and encode workers
[workers.decode.arguments]          # arguments of `kvloom serve`
pool = "60GiB"

If a cluster has encode workers, other workers of the same model ask them for the embeddings of images.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Certificates", "ClusterFile", "Group"]

ROLES = ("prefill", "decode", "both", "encode")
SHARE_PORT = 7400
"""First port at which workers share pages. Encode workers use the ports from ENCODE_PORT on."""
ENCODE_PORT = 7500
MOST_REPLICAS, LAST_PORT, MOST_NUMBER = 10_000, 65_535, 10**9
SURGE = 2
"""A group that shares pages has one port per replica, and this many more. In a rolling restart, old and new replicas
run at the same time and need separate ports.
"""
_KEYS = {
    "cluster": (
        "name", "ray", "bind", "peer-secret", "certificate", "certificate-key", "authority", "environment",
    ),
    "router": ("port", "replicas", "cpus", "drain-seconds", "start-seconds", "arguments"),
    "worker": (
        "model", "role", "replicas", "max-replicas", "target-requests", "cpus", "gpus", "host-memory",
        "share-port", "drain-seconds", "start-seconds", "scale-seconds", "arguments",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Group:
    """A group of equal processes: `kvloom serve` with one role, or `kvloom route`.

    - `start_seconds` is the time within which a process must be ready.
    - `drain_seconds` is the longest time for which a process that ends waits for its requests.
    - `scale_seconds` is the time after which a higher load adds a replica. A lower load removes a replica after 10
      times this time.
    """

    name: str
    command: str
    arguments: tuple[str, ...] = ()
    role: str = "both"
    replicas: int = 1
    max_replicas: int = 1
    target_requests: float = 16.0
    cpus: float = 1.0
    gpus: float = 0.0
    port: int = 0
    """First port of the routers. 0 means any free port."""
    host_memory: str | None = None
    share_port: int = SHARE_PORT
    drain_seconds: float = 30.0
    start_seconds: float = 600.0
    scale_seconds: float = 30.0

    @property
    def model(self) -> str:
        """Model of a group of workers."""
        return self.arguments[0]

    @property
    def shares(self) -> bool:
        """Whether other workers read pages from the replicas of this group."""
        return self.role in ("prefill", "encode")

    @property
    def share_ports(self) -> range:
        """Ports at which replicas of the group may share pages with other workers. Empty if they share no pages."""
        count = self.max_replicas + SURGE if self.shares else 0
        return range(self.share_port, self.share_port + count)


@dataclass(frozen=True, slots=True)
class Certificates:
    """Files of HTTPS, on every machine: the certificate of the machine, its key, and the authority that signed the
    certificates of all machines."""

    certificate: str
    key: str
    authority: str


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """A cluster: its routers and its groups of workers."""

    name: str
    router: Group
    workers: tuple[Group, ...]
    ray: str = "auto"
    bind: str = "127.0.0.1"
    peer_secret: str | None = None
    certificates: Certificates | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str) -> ClusterFile:
        """Read a file. Raises OSError if it cannot be read, and ValueError with the position of a mistake."""
        with Path(path).open("rb") as file:
            try:
                found = tomllib.load(file)
            except (ValueError, RecursionError) as error:  # not TOML, not UTF-8, or nested too deeply
                raise ValueError(f"{path}: {error}") from None
        try:
            return cls.from_dict(found)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> ClusterFile:
        """Build a cluster from the tables of a file. Raises ValueError for invalid values."""
        unknown = set(found) - {"cluster", "router", "workers"}
        if unknown:
            raise ValueError(f"unknown table [{min(unknown)}]; tables: cluster, router, workers")
        about = _table(found, "cluster", "cluster")
        router = _table(found, "router", "router")
        if not isinstance(found.get("workers"), dict) or not found["workers"]:
            raise ValueError("there are no workers: add a table such as [workers.decode]")
        workers = tuple(_worker(name, table) for name, table in found["workers"].items())
        environment = about.get("environment", {})
        if not isinstance(environment, dict):
            raise ValueError("[cluster] environment must be a table: [cluster.environment]")
        groups = cls(
            name=str(about.get("name", "kvloom")),
            router=Group(
                "router", "route", _words(router.get("arguments", {}), "[router.arguments]"),
                replicas=_whole(router, "replicas", 1, MOST_REPLICAS), max_replicas=_whole(router, "replicas", 1),
                port=_whole(router, "port", 8080, LAST_PORT), cpus=_number(router, "cpus", 1.0),
                drain_seconds=_number(router, "drain-seconds", 30.0),
                start_seconds=_number(router, "start-seconds", 60.0),
            ),
            workers=workers,
            ray=str(about.get("ray", "auto")),
            bind=str(about.get("bind", "127.0.0.1")),
            peer_secret=_text(about, "peer-secret", "[cluster]"),
            certificates=_certificates(about),
            environment={str(name): str(value) for name, value in environment.items()},
        )  # fmt: skip
        groups._check()
        return groups

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups, in the order in which they start: first the workers that share pages, then the other workers,
        then the routers."""
        order = {"encode": 0, "prefill": 1}
        return (*sorted(self.workers, key=lambda group: order.get(group.role, 2)), self.router)

    def page_sources(self, group: Group) -> list[Group]:
        """Return the prefill groups whose pages the replicas of a group read."""
        reads = group.host_memory is not None and not group.shares
        return [one for one in self.workers if reads and one.role == "prefill"]

    def encoders(self, group: Group) -> list[Group]:
        """Return the encode groups that encode the images of a group: those with the same model."""
        if group.command == "route" or group.role == "encode":
            return []
        return [one for one in self.workers if one.role == "encode" and one.model == group.model]

    def digest(self, group: Group) -> str:
        """Return a digest of all settings that affect the command lines of a group. If the digest differs from that of
        the running replicas, `kvloom deploy` restarts them."""
        read = [*self.page_sources(group), *self.encoders(group)]
        ports = [(one.role, one.share_port, len(one.share_ports)) for one in read]
        tls = None if self.certificates is None else asdict(self.certificates)
        common = [self.bind, self.peer_secret, tls, self.environment]
        text = json.dumps([asdict(group), ports, common], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _check(self) -> None:
        """Check the arguments of every group with the parser of its command. Raises ValueError if the command would
        refuse them.
        """
        from kvloom.cluster.router import command as route
        from kvloom.serve import serve_command as serve

        for group in (self.router, *self.workers):
            parser = _Parser(prog=f"kvloom {group.command}", add_help=False)
            (route if group.command == "route" else serve).arguments(parser)
            try:
                parser.parse_intermixed_args(list(group.arguments))
            except ValueError as error:
                raise ValueError(f"arguments of {group.name}: {error}") from None
        self._check_ports()
        if self.bind != "127.0.0.1" and self.peer_secret is None:
            shared = next((group.name for group in self.workers if group.host_memory), None)
            if shared is not None:
                raise ValueError(
                    f'bind = "{self.bind}" and host-memory of {shared} need peer-secret in [cluster]'
                )

    def _check_ports(self) -> None:
        """Raise ValueError if an encode worker and a prefill worker could listen on the same port to share their pages."""
        for group in self.workers:
            for other in self.workers:
                if group.role == "encode" and other.role == "prefill":
                    both = set(group.share_ports) & set(other.share_ports)
                    if both:
                        raise ValueError(
                            f"share-port of {group.name} and {other.name}: both may use port {min(both)}; choose ports "
                            f"that are {len(group.share_ports)} apart"
                        )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ValueError(message)


def _certificates(about: Mapping[str, Any]) -> Certificates | None:
    keys = ("certificate", "certificate-key", "authority")
    given = [about[key] for key in keys if key in about]
    if not given:
        return None
    if len(given) < len(keys) or not all(isinstance(one, str) for one in given):
        raise ValueError(f"[cluster] HTTPS needs the files {', '.join(keys)}")
    return Certificates(*given)


def _worker(name: str, table: Any) -> Group:
    if not isinstance(table, dict):
        raise ValueError(f"workers.{name} must be a table: [workers.{name}]")
    table = _table({name: table}, name, "worker", f"workers.{name}")
    where = f"[workers.{name}]"
    if not isinstance(table.get("model"), str):
        raise ValueError(f"{where} needs model: a folder, a name, or an embedded model")
    role = table.get("role", "both")
    if role not in ROLES:
        raise ValueError(f"{where} role {role!r} must be one of {', '.join(ROLES)}")
    replicas = _whole(table, "replicas", 1, MOST_REPLICAS)
    most = _whole(table, "max-replicas", replicas, MOST_REPLICAS)
    if most < replicas:
        raise ValueError(f"{where} max-replicas {most} is below replicas {replicas}")
    if role in ("prefill", "encode") and "host-memory" not in table:
        raise ValueError(
            f"{where} needs host-memory: workers with the role {role} share their pages from there"
        )
    share_port = ENCODE_PORT if role == "encode" else SHARE_PORT
    words = (str(table["model"]), *_words(table.get("arguments", {}), f"[workers.{name}.arguments]"))
    return Group(
        name, "serve", words, role, replicas, most,
        _number(table, "target-requests", 16.0), _number(table, "cpus", 1.0), _number(table, "gpus", 0.0), 0,
        _text(table, "host-memory", where), _whole(table, "share-port", share_port, LAST_PORT), _number(table, "drain-seconds", 30.0),
        _number(table, "start-seconds", 600.0), _number(table, "scale-seconds", 30.0),
    )  # fmt: skip


def _table(found: Mapping[str, Any], key: str, kind: str, where: str = "") -> dict[str, Any]:
    table = found.get(key, {})
    if not isinstance(table, dict):
        raise ValueError(f"{key} must be a table: [{key}]")
    unknown = set(table) - set(_KEYS[kind])
    if unknown:
        raise ValueError(f"unknown key {min(unknown)!r} in [{where or key}]; keys: {', '.join(_KEYS[kind])}")
    return table


def _whole(table: Mapping[str, Any], key: str, default: int, most: int | None = None) -> int:
    value = table.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} {value!r} must be a whole number of at least 1")
    if most is not None and value > most:
        raise ValueError(f"{key} {value} must be at most {most}")
    return value


def _number(table: Mapping[str, Any], key: str, default: float) -> float:
    value = table.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= MOST_NUMBER:
        raise ValueError(f"{key} {value!r} must be a number from 0 to {MOST_NUMBER}")
    return float(value)


def _text(table: Mapping[str, Any], key: str, where: str) -> str | None:
    value = table.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f'{where} {key} {value!r} must be a text in quotes, such as {key} = "…"')
    return value


def _words(table: Any, where: str) -> tuple[str, ...]:
    """Return a table of arguments as words of a command line. An argument with the value true becomes a flag without a
    value. An argument with a list of values is repeated for each value."""
    if not isinstance(table, dict):
        raise ValueError(f"{where} must be a table")
    words: list[str] = []
    for key, value in table.items():
        if value is False:
            continue
        if value is True:
            words.append(f"--{key}")
            continue
        for one in value if isinstance(value, list) else [value]:
            words += [f"--{key}", str(one)]
    return tuple(words)
