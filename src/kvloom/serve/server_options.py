"""Options of a server and of its models, and their checks."""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvloom.combinations import refused
from kvloom.events_wire import offset_port

from .api import is_loopback
from .auth import ApiKeys, Limits
from .https import https_settings
from .worker import Start, WatchdogLimits

__all__ = ["ChatOptions", "ModelOptions", "ServerOptions", "resolve", "shared_start", "with_own_events"]

SMALLEST_PART = 8
"""If models share memory, the pool of an idle model is never shrunk below 1 / SMALLEST_PART of the model's equal share.
"""
METRICS_AUTH = ("auto", "key", "open")


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """The chat template of a model, and the parsers of its answers. Without `template`, the model's own template is
    used."""

    template: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str | None = None


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """One model: the start options of its engine, its name in requests, and its chat options. If `name` is None, the
    model has the name of its folder. If `chat` is None, the chat options of the server apply.
    """

    start: Start
    name: str | None = None
    completes_code: bool = False
    """Whether the model completes code instead of chats. This selects the example request that the server prints."""
    chat: ChatOptions | None = None

    @property
    def served_name(self) -> str:
        return self.name or Path(self.start.model).name or self.start.model


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The options of a server. `record` is the file of a traffic recording, and `otlp` is the URL to which
    OpenTelemetry traces are sent. Raises ValueError for invalid options, such as a public host without API keys.
    """

    models: tuple[ModelOptions, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    keys: ApiKeys = field(default_factory=lambda: ApiKeys({}))
    limits: Limits = field(default_factory=Limits)
    drain_seconds: float = 30.0
    watchdog: WatchdogLimits = field(default_factory=WatchdogLimits)
    chat: ChatOptions = field(default_factory=ChatOptions)
    allow_chat_template: bool = False
    record: str | None = None
    otlp: str | None = None
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the server; "*" is any."""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    """`ssl_certfile` and `ssl_keyfile` are the certificate and key for HTTPS. With `ssl_ca_certs`, clients must present
    a certificate that one of these authorities has signed.
    """
    quiet: bool = False
    """If set, no start-up message is printed."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Additional model names that requests may use: alias → name of the model."""
    memory: int | None = None
    """Bytes that the pools of all models share. None means that each pool keeps its own size."""
    model_folders: tuple[Path, ...] = ()
    """Folders below which the API may load models."""
    lora_folders: tuple[Path, ...] = ()
    """Folders below which the API may load LoRA adapters."""
    metrics_auth: str = "auto"
    """When /metrics requires a key: "key" (always), "open" (never), or "auto" (if other machines can reach the server).
    """

    def __post_init__(self) -> None:
        resolve(self.host, self.port)
        names = [model.served_name for model in self.models]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"models have the same name {', '.join(sorted(twice))}: give each a --name")
        for model in self.models:
            if taken := set(_adapter_names(model.start)) & {*names, *self.aliases}:
                raise ValueError(
                    f"--lora {', '.join(sorted(taken))} is the name of a model already: give another one"
                )
        adapters = [one for model in self.models for one in _adapter_names(model.start)]
        if twice := {name for name in adapters if adapters.count(name) > 1}:
            raise ValueError(
                f"--lora: two adapters have the same name {', '.join(sorted(twice))}: rename one"
            )
        for alias, name in self.aliases.items():
            if alias in names:
                raise ValueError(f"--alias {alias} is the name of a model already: give another one")
            if name not in [*names, *adapters]:
                raise ValueError(f"--alias {alias}={name}: no such model; use {' or '.join(names)}")
        if not self.keys and not is_loopback(self.host):
            raise ValueError(refused("public host, no keys", host=self.host))
        if not self.keys and "*" in self.cors_origins:
            raise ValueError(refused("any origin, no keys"))
        for origin in self.cors_origins:
            if origin != "*" and re.fullmatch(r"https?://[^\s/?#@]+", origin) is None:
                raise ValueError(
                    f"--cors-origin {origin!r} is not an origin: write it like https://example.org:8443"
                )
        https_settings(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)
        if self.metrics_auth not in METRICS_AUTH:
            raise ValueError(f"metrics_auth {self.metrics_auth!r} must be one of {', '.join(METRICS_AUTH)}")
        if self.metrics_auth == "key" and not self.keys:
            raise ValueError("--metrics-auth key requires API keys: use --api-keys FILE")
        if not 0 <= self.port < 65536:
            raise ValueError(f"port {self.port} must be 0 to 65535")
        if not 0 <= self.drain_seconds < math.inf:
            raise ValueError(f"drain_seconds {self.drain_seconds} must be finite and not negative")

    @property
    def metrics_need_key(self) -> bool:
        if self.metrics_auth == "auto":
            return bool(self.keys) and not is_loopback(self.host)
        return self.metrics_auth == "key"

    @property
    def has_many(self) -> bool:
        """Whether the server may have several models. If so, metrics and health contain the model name."""
        return len(self.models) > 1 or self.memory is not None

    def record_file(self, model: str) -> str | None:
        """Return the file of a model's traffic recording. With several models, the name of the model is inserted
        before the suffix.
        """
        if self.record is None or not self.has_many:
            return self.record
        path = Path(self.record)
        return str(path.with_name(f"{path.stem}.{model.replace('/', '_')}{path.suffix}"))


def _adapter_names(start: Start) -> list[str]:
    """Return the names of the LoRA adapters in the settings of an engine."""
    return [str(one).partition("=")[0] for one in start.settings.get("lora") or ()]


def shared_start(start: Start, memory: int, share: int) -> Start:
    """Return `start` with the pool sizes of a model that shares `memory` bytes with other models. Its pool starts with
    `share` bytes, and may grow to all of the memory.
    """
    least = start.settings.get("min_pool_bytes")
    least = share // SMALLEST_PART if least is None else min(least, share)
    sizes = {"pool_bytes": share, "max_pool_bytes": memory, "min_pool_bytes": least}
    return msgspec.structs.replace(start, settings={**start.settings, **sizes}, share_bytes=share)


def with_own_events(settings: dict[str, Any], number: int, name: str) -> dict[str, Any]:
    """Return the engine settings of one model, with its own event addresses. The index of the model, `number`, is added
    to the event ports, so that each model has separate ports. In the topic, `name` replaces `{model}`, and the host
    name replaces `{host}`. Raises ValueError for other placeholders.
    """
    if settings.get("kv_events") is None:
        return settings
    ports = {name: offset_port(settings.get(name), number) for name in ("kv_events", "kv_events_replay")}
    given = settings.get("kv_events_topic", "")
    topic = given.replace("{model}", name).replace("{host}", socket.gethostname())
    if "{" in given.replace("{model}", "").replace("{host}", ""):
        raise ValueError(
            f"kv_events_topic {given!r} may contain {{model}} and {{host}}, and no other placeholder"
        )
    return {**settings, **ports, "kv_events_topic": topic}


def resolve(host: str, port: int) -> Any:
    """Return the first address of a host. Raises ValueError if the host has no address."""
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(
            f"host {host!r} is neither an IP address nor a known name ({error.strerror}); "
            "use an address of this machine, such as 127.0.0.1"
        ) from None
