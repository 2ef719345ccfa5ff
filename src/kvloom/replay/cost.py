"""Estimates the waiting times of a replay on given hardware.

New prompt tokens are computed, and cached tokens are read from their tier. Requests wait for one of `devices` devices
in order of arrival. Decode takes a fixed time per token. All times come from a roofline (FLOPs and bytes divided by
rates). Use them to compare caches, not to predict latency.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from .simulator import Outcome
from .traffic import Traffic

__all__ = ["CostModel", "Load", "estimate"]

_READ_RATES = {"host": 50e9, "disk": 3.2e9, "remote": 10e9}


@dataclass(frozen=True, slots=True)
class CostModel:
    """The speed of a model with `parameters` active weights on devices with `flop_rate` FLOP/s.

    Each new token needs `attention_flops` FLOPs for each token before it. A tier reads `bytes_per_token` bytes per
    token, at `read_rates[tier]` bytes per second. `decode_seconds` is the time of a decode step with a full batch,
    divided by the number of its tokens. The defaults describe a dense 8B model in bf16 on one H200.
    """

    parameters: float = 8e9
    flop_rate: float = 450e12
    attention_flops: float = 4 * 32 * 4096
    bytes_per_token: float = 131072
    decode_seconds: float = 12.1e-3 / 256
    devices: int = 1
    read_rates: Mapping[str, float] = field(default_factory=lambda: dict(_READ_RATES))

    def __post_init__(self) -> None:
        for name in ("parameters", "flop_rate", "bytes_per_token"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} {getattr(self, name)} must be positive")
        if self.devices < 1:
            raise ValueError(f"devices {self.devices} must be at least 1")

    def prefill(self, new: float, before: float) -> float:
        """Return the seconds to compute `new` tokens after `before` earlier tokens."""
        flops = new * (2 * self.parameters + self.attention_flops * (before + new / 2))
        return flops / self.flop_rate

    def read(self, tier: str, tokens: float) -> float:
        """Return the seconds to load the pages of `tokens` tokens from a tier."""
        try:
            return tokens * self.bytes_per_token / self.read_rates[tier]
        except KeyError:
            known = ", ".join(sorted(self.read_rates))
            raise ValueError(f"no read rate for tier {tier!r}; known: {known}") from None


@dataclass(frozen=True, slots=True)
class Load:
    """Times to first token of a replay in seconds, and the throughput of the devices.

    `busy` is the time that the devices need, divided by the time of the trace. Above 1 the devices are overloaded, and
    waiting times grow without limit. `prefill_seconds` is the time to compute all new prompt tokens on one device.
    """

    mean_ttft: float
    p50_ttft: float
    p99_ttft: float
    busy: float
    requests_per_second: float
    tokens_per_second: float
    prefill_seconds: float

    def to_dict(self) -> dict[str, float]:
        return {
            "mean_ttft": self.mean_ttft,
            "p50_ttft": self.p50_ttft,
            "p99_ttft": self.p99_ttft,
            "busy": self.busy,
            "requests_per_second": self.requests_per_second,
            "tokens_per_second": self.tokens_per_second,
            "prefill_seconds": self.prefill_seconds,
        }


def estimate(traffic: Traffic, outcome: Outcome, model: CostModel) -> Load:
    """Return the times to first token of a replay, and the throughput that the devices can sustain."""
    if not traffic.requests:
        raise ValueError("the traffic contains no requests")
    free = [traffic.requests[0].at] * model.devices
    waits = []
    work = computing = 0.0
    tokens = 0
    block = traffic.block_tokens
    names = [tier.name for tier in outcome.tiers[1:]]
    for i, request in enumerate(traffic.requests):
        cached = outcome.hits[i] * block
        loading = 0.0
        for name, hits in zip(names, outcome.tier_hits, strict=True):
            loading += model.read(name, hits[i] * block)
            cached += hits[i] * block
        # The last token is always computed, and the last block of a prompt may be partial.
        cached = min(cached, request.prompt_tokens - 1)
        prefill = model.prefill(request.prompt_tokens - cached, cached)
        first = loading + prefill
        computing += prefill
        begin = max(request.at, heapq.heappop(free))
        busy = first + request.output_tokens * model.decode_seconds
        heapq.heappush(free, begin + busy)
        waits.append(begin + first - request.at)
        work += busy
        tokens += request.prompt_tokens + request.output_tokens
    ttft = np.array(waits)
    seconds = max(traffic.seconds, 1e-9)
    rate = model.devices / work if work else 0.0
    return Load(
        mean_ttft=float(ttft.mean()),
        p50_ttft=float(np.quantile(ttft, 0.5)),
        p99_ttft=float(np.quantile(ttft, 0.99)),
        busy=work / model.devices / seconds,
        requests_per_second=len(waits) * rate,
        tokens_per_second=tokens * rate,
        prefill_seconds=computing,
    )
