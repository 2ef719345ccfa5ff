"""A request of a client, while the router looks for a worker and forwards the answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .fleet import now
from .prompt_keys import PromptKeys

__all__ = ["FORWARDED", "Call"]

FORWARDED = (
    "authorization",
    "x-api-key",
    "content-type",
    "accept",
    "x-request-id",
    "traceparent",
    "anthropic-version",
)
"""Headers of a request that workers get."""


@dataclass(slots=True, eq=False)
class Call:
    """One request of a client."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    raw: bytes
    model: str = ""
    tenant: str = ""
    at: float = field(default_factory=now)
    keys: PromptKeys | None = None
    hashes: dict[str, list[int]] = field(default_factory=dict)
    """Block hashes by worker."""
    lengths: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Cached tokens by worker and medium, when a worker was chosen."""
    tried: set[str] = field(default_factory=set)
    refused: bool = False
    """A living worker refused the call, as it has too much work."""
    failures: int = 0
    """Workers that failed while they had the call."""
    waited: float = 0.0
    """Seconds without a worker."""
    lossy: bool = False

    @property
    def is_stream(self) -> bool:
        return self.body.get("stream") is True

    @property
    def session(self) -> str | None:
        """The name of the client's session, or None."""
        for found in (self.body.get("session_id"), self.headers.get("x-session-id"), self.body.get("user")):
            if isinstance(found, str) and found:
                return f"{self.tenant}\0{found}"
        return None
