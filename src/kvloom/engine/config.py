"""Settings of an engine: what `LLM`, the CLI and the server pass on. Values only; imports no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvloom.core import Tenant
from kvloom.models.specs import KVDtype
from kvloom.tiers import OpenTier
from kvloom.tiers.transfers import TransferConfig

from .sampling import GrammarLimits

__all__ = ["EngineConfig", "OffloadConfig"]


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """How pages are loaded from tiers."""

    load: Literal["auto", "always"] = "auto"
    """"always": wait for every page that a tier has. "auto": load or recompute, whichever is faster."""
    deadline_seconds: tuple[float, float] = (0.1, 5.0)
    """Shortest and longest deadline of a load, in seconds; between them, twice the time to compute the same tokens."""
    wait_share: float = 0.04
    """Longest time that a request may lose by waiting for pages, as a share of the time to compute its prompt."""
    transfers: TransferConfig = field(default_factory=TransferConfig)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. The defaults suit a model on its own device."""

    pool_bytes: int | None = None
    """Bytes of the page pool; None: the rest of `memory_fraction` after weights and steps."""
    memory_fraction: float = 0.9
    """Share of the device's memory that weights, steps and the pool may use together."""
    block_tokens: int = 16
    """Tokens of a block."""
    token_budget: int | None = None
    """Most prompt tokens of a step; None: 8,192 on a GPU, 2,048 on a CPU."""
    max_running: int | None = None
    """Most running requests; None: 512 on a GPU, 256 on a CPU."""
    max_context: int | None = None
    """Most tokens of a sequence; None: the model's limit."""
    kv_dtype: KVDtype | None = None
    """Data type of K and V in the pool; None: that of the model."""
    kv_scales: str | os.PathLike[str] = "dynamic"
    """Scales for int8 and fp8: "dynamic", "checkpoint", or a file from `kvloom calibrate`."""
    batch_invariant: bool = False
    """Make a request's results bit-identical whatever other requests are in its batch, on a GPU too."""
    ahead: bool | None = None
    """Launch a step before the tokens of the previous one have arrived; None: on a GPU only."""
    cuda_graphs: bool = True
    """Replay steps from CUDA graphs, on a GPU."""
    grammar_limits: GrammarLimits = field(default_factory=GrammarLimits)
    """Time and memory that one grammar may use."""
    tenants: Sequence[Tenant] = ()
    """Tenants with a quota or a weight of their own."""
    tiers: Sequence[str | OpenTier] = ()
    """Tiers, nearest first: `host:64GiB`, `disk:/path:1TiB`."""
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    """How pages are loaded from the tiers."""
