"""What a server takes before it says no, and the counting of what it has taken."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvloom.serve.api.errors import bad_request, busy, draining

__all__ = ["Gate", "Limits"]


@dataclass(frozen=True, slots=True)
class Limits:
    """`answers` may be made or wait at once; seconds are those a client may take to send a request's head, to send its body,
    and to read what it is sent; `unread_characters` of a stream may wait for its reader; bodies that are being read may have
    `bodies` times the bytes of one together. A chat template may use `template_seconds` of CPU time for one request."""

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


class Gate:
    """Counts answers that are being made or wait. `shut`: no more come in; `empty` is set while there are none."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.inside = 0
        self.requests = 0
        self.shut = False
        self.empty = asyncio.Event()
        self.empty.set()

    @contextmanager
    def entered(self, answers: int) -> Iterator[None]:
        """Let a request for so many answers in, until the block ends. Raises ApiError where there is no place."""
        if self.shut:
            raise draining()
        if answers > self.most:
            raise bad_request(
                f"{answers} answers were asked for at once, and {self.most} may: ask for fewer", "n"
            )
        if self.inside + answers > self.most:
            raise busy(answers, self.inside, self.most)
        self.inside += answers
        self.requests += 1
        self.empty.clear()
        try:
            yield
        finally:
            self.inside -= answers
            self.requests -= 1
            if not self.requests:
                self.empty.set()
