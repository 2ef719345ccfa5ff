"""A request of a client, while the router looks for a worker and forwards the answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

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
"""Headers of a client's request that are forwarded to workers."""


@dataclass(slots=True, eq=False)
class Call:
    """One request of a client.

    - `raw`, `body`: its body as bytes, and as parsed JSON.
    - `at`: the time of its arrival.
    - `keys`: its prompt.
    - `tried`: the names of the workers to which the request was sent.
    - `lossy`: the request accepts pages that a tier re-encoded.
    """

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    raw: bytes
    model: str = ""
    adapter: str | None = None
    """Name of the LoRA adapter of `model`. None means the base model."""
    tenant: str = ""
    at: float = field(default_factory=now)
    keys: PromptKeys | None = None
    hashes: dict[str, list[int]] = field(default_factory=dict)
    """Block hashes of the prompt, by worker. Workers with different roots have different hashes."""
    lengths: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Numbers of cached prompt tokens by worker, one number per medium. Set when a worker is chosen."""
    tried: set[str] = field(default_factory=set)
    refused: bool = False
    """Whether a living worker refused the call because it had too much work."""
    failures: int = 0
    """Number of workers that failed while they had the call."""
    waited: float = 0.0
    """Seconds that the call has waited because no worker could take it."""
    lossy: bool = False
    encoders: list[tuple[str, int]] = field(default_factory=list)
    """Encode workers that were chosen for the images of the call, each with the number of images. Empty after the first
    token.
    """

    @property
    def is_stream(self) -> bool:
        return self.body.get("stream") is True

    def with_fields(self, more: dict[str, Any]) -> bytes:
        """Return the request's JSON with the additional fields `more`. If possible, the fields are appended to the
        bytes that the client sent, so that the prompt is not encoded as JSON again.
        """
        if not more:
            return self.raw
        if not self.body or not self.body.keys().isdisjoint(more):
            return msgspec.json.encode({**self.body, **more})
        return self.raw.rstrip()[:-1] + b"," + msgspec.json.encode(more)[1:]

    @property
    def session(self) -> str | None:
        """The tenant and name of the client's session, or None. The name is the field `session_id`, otherwise the
        header x-session-id, otherwise the field `user`.
        """
        for found in (self.body.get("session_id"), self.headers.get("x-session-id"), self.body.get("user")):
            if isinstance(found, str) and found:
                return f"{self.tenant}\0{found}"
        return None
