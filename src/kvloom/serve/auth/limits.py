"""What a server takes before it says no, and the counting of what it has taken."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvloom.serve.api.errors import above_share, bad_request, busy, draining

__all__ = ["Caps", "Gate", "Limits"]

PRESSURE = 4
"""A tenant may have so many times the free places of the gate open: one alone fills 4 of 5, and the rest stays for others."""


@dataclass(frozen=True, slots=True)
class Caps:
    """The most that a tenant's requests may ask for; None is no limit. `answers` of one request (n or best_of, times prompts),
    `open` answers of the tenant that run or wait, seconds of `ttl`, and `priority`."""

    answers: int | None = None
    open: int | None = None
    ttl: float | None = None
    priority: int | None = None

    def check(self, answers: int, ttl: float | None, priority: int | None) -> None:
        """Raise ApiError 400 where a request asks for more, with the limit."""
        least = min((cap for cap in (self.answers, self.open) if cap is not None), default=answers)
        if answers > least:
            raise bad_request(
                f"{answers} answers were asked for at once, and this key may have {least}: lower n, best_of or the number of prompts",
                "n",
            )
        if self.ttl is not None and ttl is not None and ttl > self.ttl:
            raise bad_request(
                f"ttl {ttl:g} exceeds the {self.ttl:g} seconds that this key may give: lower it", "ttl"
            )
        if self.priority is not None and priority is not None and priority > self.priority:
            raise bad_request(
                f"priority {priority} exceeds the {self.priority} that this key may give: lower it",
                "priority",
            )


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
    """Counts answers that are being made or wait. `shut`: no more come in; `empty` is set while there are none.

    Where `shared` by several tenants, none fills it: each may have 4 times the free places open, so that the more it is filled
    the fewer a tenant may have. Tenants that have many are refused first, and one that has none finds a place."""

    def __init__(self, most: int, shared: bool = False) -> None:
        self.most, self.shared = most, shared
        self.inside = 0
        self.requests = 0
        self.shut = False
        self.empty = asyncio.Event()
        self.empty.set()
        self._of: Counter[str] = Counter()

    @contextmanager
    def entered(self, answers: int, tenant: str = "", most_open: int | None = None) -> Iterator[None]:
        """Let a request of a tenant for so many answers in, until the block ends. Raises ApiError where there is no place, or
        the tenant would have more than its part or `most_open`."""
        if self.shut:
            raise draining()
        if answers > self.most:
            raise bad_request(
                f"{answers} answers were asked for at once, and {self.most} may: ask for fewer", "n"
            )
        if self.inside + answers > self.most:
            raise busy(answers, self.inside, self.most)
        self._refuse(answers, self._of[tenant], most_open)
        self.inside += answers
        self.requests += 1
        self._of[tenant] += answers
        self.empty.clear()
        try:
            yield
        finally:
            self.inside -= answers
            self.requests -= 1
            self._of[tenant] -= answers
            if not self._of[tenant]:
                del self._of[tenant]
            if not self.requests:
                self.empty.set()

    def _refuse(self, answers: int, open_: int, most: int | None) -> None:
        """Raise ApiError 429 where a tenant that has `open_` answers may not have more now."""
        if most is not None and open_ + answers > most:
            raise above_share(answers, open_, most)
        if not self.shared or not self.inside or (not open_ and answers == 1):
            return  # (what finds the gate empty, or is a tenant's first, takes nothing from others)
        fair = PRESSURE * (self.most - self.inside - answers)
        if open_ + answers > fair:
            raise above_share(answers, open_, max(open_, fair))
