"""The limits of a server and of its tenants, and the counts of answers and bytes in progress."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvloom.serve.errors import above_share, bad_request, bodies_full, draining, queue_full

__all__ = ["PRESSURE", "BodyLimiter", "Caps", "HeldBody", "Limits", "RequestLimiter"]

PRESSURE = 4
"""A tenant may have at most PRESSURE times as many open answers as the server can still admit. If no other tenant has
open answers, a tenant can therefore use 4/5 of the limit. The same rule limits the bytes of bodies.
"""


@dataclass(frozen=True, slots=True)
class Caps:
    """Limits of one tenant. None means no limit.

    | field      | limit                                                                       |
    |------------|-----------------------------------------------------------------------------|
    | `answers`  | number of answers of one request: n or best_of, times the number of prompts |
    | `open`     | number of open answers of the tenant, running or waiting                    |
    | `ttl`      | largest `ttl` of a request, in seconds                                      |
    | `priority` | largest `priority` of a request                                             |
    | `public`   | False: requests may not mark a public prefix                                |
    """

    answers: int | None = None
    open: int | None = None
    ttl: float | None = None
    priority: int | None = None
    public: bool = False

    def check(self, answers: int, ttl: float | None, priority: int | None, public: bool = False) -> None:
        """Raise ApiError 400 if a request exceeds a limit. Also raise it if the request marks a public prefix
        (`public`) and the tenant may not mark one."""
        if public and not self.public:
            raise bad_request(
                "cache: this key may not mark a public prefix: omit public_tokens and public_messages, or let the "
                "operator add `public` to the key in --api-keys",
                "cache",
            )
        most = min((cap for cap in (self.answers, self.open) if cap is not None), default=answers)
        if answers > most:
            raise bad_request(
                f"{answers} answers exceed the limit of {most} for this key: lower n, best_of or the number of prompts",
                "n",
            )
        if self.ttl is not None and ttl is not None and ttl > self.ttl:
            raise bad_request(
                f"ttl {ttl:g} exceeds the limit of {self.ttl:g} seconds for this key: lower it", "ttl"
            )
        if self.priority is not None and priority is not None and priority > self.priority:
            raise bad_request(
                f"priority {priority} exceeds the limit of {self.priority} for this key: lower it", "priority"
            )


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one server.

    | field               | limit                                                                             |
    |---------------------|-----------------------------------------------------------------------------------|
    | `body_bytes`        | bytes of one request body                                                         |
    | `bodies`            | bytes of all bodies that are being read or encoded, in multiples of `body_bytes`  |
    | `connections`       | number of open connections                                                        |
    | `prompt_tokens`     | tokens of one prompt; None: only the limit of the model and its pool applies      |
    | `answers`           | number of running and waiting answers                                             |
    | `request_seconds`   | seconds for the arrival of a request's headers, and again for that of its body    |
    | `read_seconds`      | seconds for which a client may read nothing, or less than 1 KiB per second        |
    | `unread_characters` | characters of a stream that the client has not read                               |
    | `template_seconds`  | CPU seconds of the chat template for one request                                  |
    | `images`            | number of images of one request                                                   |
    | `image_bytes`       | encoded bytes of all images of one request                                        |
    | `image_pixels`      | pixels of all images of one request, as their headers state                       |
    | `image_folders`     | folders, with links resolved, whose images requests may name by file: URLs        |
    | `clips`             | number of audio clips of one request                                              |
    | `audio_bytes`       | encoded bytes of all audio clips of one request                                   |
    | `audio_seconds`     | duration of all audio clips of one request, as their headers state                |
    """

    body_bytes: int = 8 << 20
    bodies: int = 32
    connections: int = 4096
    prompt_tokens: int | None = None
    answers: int = 1280
    request_seconds: float = 30.0
    read_seconds: float = 60.0
    unread_characters: int = 1 << 20
    template_seconds: float = 2.0
    images: int = 16
    image_bytes: int = 16 << 20
    image_pixels: int = 1 << 25
    image_folders: tuple[Path, ...] = ()
    clips: int = 16
    audio_bytes: int = 16 << 20
    audio_seconds: float = 600.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, int | float) and not value > 0:
                raise ValueError(f"{name} {value} must be above 0")


class BodyLimiter:
    """Limits the bytes of all request bodies in memory. A body counts from its first byte until its prompt is
    encoded.

    If several tenants share the server, a tenant may use at most PRESSURE times the number of bytes that are still
    free.
    """

    def __init__(self, limit: int, shared: bool = False) -> None:
        self.limit, self.shared = limit, shared
        self.used = 0
        self.by_tenant: Counter[str] = Counter()

    @contextmanager
    def hold(self, tenant: str = "") -> Iterator[HeldBody]:
        """Count the bytes of one body until the `with` block ends. Call `HeldBody.add` for each chunk that arrives."""
        held = HeldBody(self, tenant)
        try:
            yield held
        finally:
            self.used -= held.bytes
            self.by_tenant[tenant] -= held.bytes
            if not self.by_tenant[tenant]:
                del self.by_tenant[tenant]


class HeldBody:
    """Counts the bytes of one request body that the server has received and not yet released."""

    def __init__(self, limiter: BodyLimiter, tenant: str) -> None:
        self._limiter, self._tenant = limiter, tenant
        self.bytes = 0

    def add(self, count: int) -> None:
        """Count bytes that arrived. Raises ApiError 429 if the bytes of all bodies, or of the tenant's bodies, exceed
        their limit."""
        limiter = self._limiter
        limiter.used += count
        limiter.by_tenant[self._tenant] += count
        self.bytes += count
        free = limiter.limit - limiter.used
        if free < 0 or (limiter.shared and limiter.by_tenant[self._tenant] > PRESSURE * free):
            raise bodies_full()


class RequestLimiter:
    """Counts the open answers of admitted requests. While `is_draining`, no request is admitted. `idle` is set while no
    admitted request is open.

    If several tenants share the server, a tenant may have at most PRESSURE times as many open answers as the server can
    still admit. Tenants with many open answers are therefore refused first. This limit does not apply while the server
    has no open answer, nor to a tenant's first open answer.
    """

    def __init__(self, limit: int, shared: bool = False) -> None:
        self.limit, self.shared = limit, shared
        self.in_progress = 0
        self.requests = 0
        self.is_draining = False
        self.idle = asyncio.Event()
        self.idle.set()
        self._open: Counter[str] = Counter()

    @contextmanager
    def admit(self, answers: int, tenant: str = "", max_open: int | None = None) -> Iterator[None]:
        """Admit a request with `answers` answers. The request counts until the `with` block ends. Raises ApiError if
        the request would exceed a limit: the limit of the server, the present limit of the tenant (see the class), or
        `max_open` open answers of the tenant.
        """
        if self.is_draining:
            raise draining()
        if answers > self.limit:
            raise bad_request(
                f"{answers} answers exceed the limit of {self.limit} at once: request fewer", "n"
            )
        if self.in_progress + answers > self.limit:
            raise queue_full(answers, self.in_progress, self.limit)
        self._check_tenant(answers, self._open[tenant], max_open)
        self.in_progress += answers
        self.requests += 1
        self._open[tenant] += answers
        self.idle.clear()
        try:
            yield
        finally:
            self.in_progress -= answers
            self.requests -= 1
            self._open[tenant] -= answers
            if not self._open[tenant]:
                del self._open[tenant]
            if not self.requests:
                self.idle.set()

    def _check_tenant(self, answers: int, open_answers: int, max_open: int | None) -> None:
        """Raise ApiError 429 if a tenant with `open_answers` open answers may not open more now."""
        if max_open is not None and open_answers + answers > max_open:
            raise above_share(answers, open_answers, max_open)
        if not self.shared or not self.in_progress or (not open_answers and answers == 1):
            return  # on an idle server, or for a tenant's first answer, other tenants lose nothing
        fair = PRESSURE * (self.limit - self.in_progress - answers)
        if open_answers + answers > fair:
            raise above_share(answers, open_answers, max(open_answers, fair))
