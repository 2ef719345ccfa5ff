"""Limits of a server, and the count of answers in progress against them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvloom.serve.errors import bad_request, draining, queue_full

__all__ = ["Limits", "RequestLimiter"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one server.

    | field                | limit                                                              |
    |----------------------|--------------------------------------------------------------------|
    | `body_bytes`         | one request body                                                   |
    | `bodies`             | all bodies being read, in multiples of `body_bytes`                |
    | `answers`            | answers running or waiting                                         |
    | `request_seconds`    | time to send the head of a request, and again for its body         |
    | `read_seconds`       | time without reading from a stream                                 |
    | `unread_characters`  | unread text of a stream                                            |
    | `template_seconds`   | CPU time of the chat template for one request                      |
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

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} {value} must be above 0")


class RequestLimiter:
    """Counts answers in progress. `is_draining`: no request is admitted; `idle` is set while there are no requests."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_progress = 0
        self.requests = 0
        self.is_draining = False
        self.idle = asyncio.Event()
        self.idle.set()

    @contextmanager
    def admit(self, answers: int) -> Iterator[None]:
        """Admit a request for `answers` answers until the block ends. Raises ApiError if the limit is reached."""
        if self.is_draining:
            raise draining()
        if answers > self.limit:
            raise bad_request(
                f"{answers} answers exceed the limit of {self.limit} at once: request fewer", "n"
            )
        if self.in_progress + answers > self.limit:
            raise queue_full(answers, self.in_progress, self.limit)
        self.in_progress += answers
        self.requests += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.in_progress -= answers
            self.requests -= 1
            if not self.requests:
                self.idle.set()
