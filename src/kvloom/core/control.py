"""The caching options and the objective of a request, and the checkpoint policy of a cache. They are immutable and are
validated when created."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["PUBLIC_TENANT", "CacheControl", "CheckpointPolicy", "Objective", "RetainRange"]

PUBLIC_TENANT = "public prefixes"
"""Name of the account of public prefixes, in the pool and in tiers. No tenant may have this name."""


@dataclass(frozen=True, slots=True)
class RetainRange:
    """The eviction priority of tokens [start, stop) for `ttl` seconds. Tokens with a positive priority are evicted
    later than other tokens. Tokens with a negative priority are evicted earlier. If `stop` is None, the range has no
    end. If `ttl` is None, the priority does not expire."""

    start: int = 0
    stop: int | None = None
    priority: int = 1
    ttl: float | None = None

    def __post_init__(self) -> None:
        if self.start < 0 or (self.stop is not None and self.stop <= self.start):
            raise ValueError(
                f"token range [{self.start}, {self.stop}) is empty or negative; give 0 <= start < stop"
            )
        if self.ttl is not None and self.ttl <= 0:
            raise ValueError(f"ttl {self.ttl} is not positive; give seconds, or None for no limit")


@dataclass(frozen=True, slots=True)
class CacheControl:
    """Caching options of one request.

    - `tenant`, `adapter` and `salt` are part of the root of the block hashes.
    - With `store`, computed blocks are published, so that other requests can hit them.
    - With `read`, cached blocks are looked up.
    - `session` identifies the session for `KVCache.end_session`.
    - `retain` sets eviction priorities of token ranges.
    - `lossy` accepts pages that a tier re-encoded to int8 or fp8. Lossy requests share blocks only with lossy requests.

    The first `public_tokens` tokens are a public prefix, rounded down to whole blocks (`public_length`). Its blocks are
    hashed without tenant and salt, and all tenants that mark the same tokens share them. Later blocks depend on tenant
    and salt. `KVCache` needs `public_bytes` for such requests.

    `documents` are token ranges [start, end) of the prompt, in order. An engine with `reuse_documents` may reuse the K
    and V of such a range from another place in a prompt. The cache itself ignores them.
    """

    tenant: str = ""
    adapter: str = ""
    salt: str = ""
    store: bool = True
    read: bool = True
    session: str | None = None
    retain: tuple[RetainRange, ...] = ()
    lossy: bool = False
    public_tokens: int = 0
    documents: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        last = 0
        for start, end in self.documents:
            if not last <= start < end:
                raise ValueError(
                    f"document [{start}, {end}) is empty, or begins before token {last}; give ranges in order, "
                    "without overlap"
                )
            last = end
        if self.public_tokens < 0:
            raise ValueError(f"public_tokens {self.public_tokens} is negative; give a number of tokens, or 0")
        if self.tenant == PUBLIC_TENANT:
            raise ValueError(f"tenant name {PUBLIC_TENANT!r} is reserved; choose another name")


@dataclass(frozen=True, slots=True)
class Objective:
    """The objective of a request, in milliseconds. None means no limit.

    - `ttft_ms` limits the time from arrival to the first token.
    - `tbt_ms` limits the mean time between tokens.
    - `deadline_ms` limits the time from arrival until the whole answer is complete. A request with a deadline may wait
      until it can meet the other two limits. `ttft_ms` then counts from the end of this wait.
    """

    ttft_ms: float | None = None
    tbt_ms: float | None = None
    deadline_ms: float | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"slo: {name} {value} must be a positive number of milliseconds")

    def __bool__(self) -> bool:
        return any(getattr(self, name) is not None for name in self.__slots__)

    def over(self, default: Objective) -> Objective:
        """Return this objective, with each value that is None replaced by the value of `default`."""
        mine = (getattr(self, name) for name in self.__slots__)
        return Objective(
            *(
                value if value is not None else getattr(default, name)
                for name, value in zip(self.__slots__, mine, strict=True)
            )
        )


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """When sequences take checkpoints. Only models with windows or states need checkpoints.

    | field          | a checkpoint is taken                                                                   |
    |----------------|-----------------------------------------------------------------------------------------|
    | `prompt_end`   | at the end of the prompt                                                                |
    | `before_last`  | one token before the end of the prompt, instead of at `prompt_end`. Only if the         |
    |                | prompt is longer than a block                                                           |
    | `turn_end`     | when the sequence closes                                                                |
    | `branch`       | at the first token of the prompt that differs from the tokens in the tree               |
    | `every_blocks` | after every `every_blocks` blocks; 0 means never                                        |

    A hit never contains the last token of a prompt. An identical prompt can therefore resume at a `before_last`
    checkpoint, but not at the end of the prompt. In models with states, `before_last` makes one more step necessary,
    which computes one token. In models with windows and no states, `before_last` adds a second checkpoint after the
    last full block of the prompt. Tiers store full blocks only, so a prompt can resume at this checkpoint from a tier.
    """

    prompt_end: bool = True
    before_last: bool = False
    turn_end: bool = True
    branch: bool = True
    every_blocks: int = 0
    is_measured: bool = False
    """In models with states, `every_blocks` is only the first value, and `SnapshotInterval` changes it."""

    def __post_init__(self) -> None:
        if self.every_blocks < 0:
            raise ValueError(f"every_blocks {self.every_blocks} is negative; 0 disables periodic checkpoints")
