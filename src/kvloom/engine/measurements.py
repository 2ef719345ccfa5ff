"""Lists the settings that measurements change while the engine runs, with their present values and the reasons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["MeasuredSetting", "measured_settings"]


@dataclass(frozen=True, slots=True)
class MeasuredSetting:
    """A setting and its present value, in `unit`. `reason` contains the measurements that led to the value.

    | name         | the value is                                                                          |
    |--------------|---------------------------------------------------------------------------------------|
    | `chunk`      | the largest number of prompt tokens of a step                                         |
    | `snapshots`  | tokens between state snapshots; 0 means only where prompts end or branch              |
    | `drafts`     | the largest number of draft tokens of a request in one step; 0 while drafts are off   |
    | `pool`       | the bytes of an elastic pool                                                          |
    """

    name: str
    value: int
    unit: str
    reason: str
    is_fixed: bool = False


def measured_settings(engine: Engine) -> list[MeasuredSetting]:
    """Return the measured settings that apply to this engine."""
    scheduler = engine.scheduler
    chunk = scheduler.chunk
    size = scheduler.token_budget if chunk.tokens is None else chunk.tokens
    found = [MeasuredSetting("chunk", size, "tokens", chunk.reason, chunk.is_fixed)]
    interval = engine.cache.snapshot_interval
    if interval is not None:
        found.append(
            MeasuredSetting("snapshots", interval.tokens, "tokens", interval.reason, interval.is_fixed)
        )
    if engine.speculation is not None:
        found.append(_drafts(engine))
    if engine.pool_size is not None:
        found.append(
            MeasuredSetting(
                "pool",
                engine.pool_size.pool_bytes,
                "bytes",
                "set by an operator" if engine.pool_rule is None else engine.pool_rule.reason,
                engine.pool_rule is None,
            )
        )
    return found


def _drafts(engine: Engine) -> MeasuredSetting:
    speculation = engine.speculation
    assert speculation is not None
    if speculation.controller is None:
        return MeasuredSetting("drafts", speculation.longest, "tokens", "fixed", is_fixed=True)
    reasons = speculation.controller.reasons
    text = "; ".join(f"{name}: {why}" for name, why in reasons.items()) or "nothing is measured yet"
    return MeasuredSetting("drafts", speculation.longest, "tokens", text)
