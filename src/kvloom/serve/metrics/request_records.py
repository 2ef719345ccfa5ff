"""Records of recent requests: names and numbers that explain hits and misses. A record never contains text, keys or
token ids.

The last MAX_RECORDS records are kept. `/kvloom/requests` returns `RequestRecord.to_dict`, and `kvloom explain`
reads this endpoint.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvloom.serve.words import POOL
from kvloom.serve.worker import RequestProgress

__all__ = ["RequestRecord", "RequestRecords", "explain_miss"]

MAX_RECORDS = 1000


@dataclass(slots=True, eq=False)
class RequestRecord:
    """The record of one HTTP request that generates tokens.

    | field                                | meaning                                                                                  |
    |--------------------------------------|------------------------------------------------------------------------------------------|
    | `prompts`                            | number of tokens of each prompt, by the id of the prompt in the engine                   |
    | `arrived`                            | wall-clock time of arrival                                                               |
    | `started`, `first_token`, `finished` | times on the monotonic clock; 0 means "not yet"                                          |
    | `finish_reasons`                     | finish reason of each finished answer                                                    |
    | `error_code`                         | code of the error response, or None                                                      |
    | `progress`                           | the engine's latest report on each prompt, by the same id as in `prompts`                |
    | `request_id`                         | id of the HTTP request, from the header x-request-id                                     |
    | `refused_slo`                        | objective and predicted times of a request that was refused because of its objective     |
    | `adapter`                            | name of its LoRA adapter, or None                                                        |
    """

    id: str
    tenant: str
    prompts: dict[int, int]
    answers: int
    max_tokens: int
    stream: bool
    arrived: float
    started: float
    endpoint: str = ""
    first_token: float = 0.0
    finished: float = 0.0
    output_tokens: int = 0
    is_disconnected: bool = False
    error_code: str | None = None
    finish_reasons: list[str] = field(default_factory=list)
    progress: dict[int, RequestProgress] = field(default_factory=dict)
    request_id: str = ""
    model: str = ""
    refused_slo: dict[str, Any] | None = None
    adapter: str | None = None

    @property
    def state(self) -> str:
        if self.finished:
            return "failed" if self.error_code is not None else "finished"
        return "running" if self.progress else "waiting"

    @property
    def prompt_tokens(self) -> int:
        return sum(self.prompts.values())

    @property
    def cached_tokens(self) -> int:
        return sum(progress.cached_tokens for progress in self.progress.values())

    @property
    def reused_tokens(self) -> int:
        """Number of prompt tokens whose K and V were copied from documents."""
        return sum(progress.reused_tokens for progress in self.progress.values())

    @property
    def hit_tokens(self) -> Counter[str]:
        """Number of cached prompt tokens, by the tier that had them."""
        found: Counter[str] = Counter()
        for progress in self.progress.values():
            found.update(progress.hits)
        return found

    @property
    def load_seconds(self) -> float:
        """Seconds of loading from tiers, summed over the prompts. The seconds of a prompt are the time from the start
        of its first load to the end of its last load.
        """
        loads = [progress.loads for progress in self.progress.values() if progress.loads]
        return sum(max(load[2] for load in each) - min(load[1] for load in each) for each in loads)

    @property
    def queue_seconds(self) -> float | None:
        """Seconds from the arrival of the request to the start of its first prompt, or None if no prompt has started."""
        begun = [progress.started for progress in self.progress.values()]
        return max(0.0, min(begun) - self.started) if begun else None

    @property
    def ttft_seconds(self) -> float | None:
        """Seconds until the first token was sent to the client. If the response is not streamed, seconds until the
        first token was computed. None if there is no token yet.
        """
        seen = [progress.first_token for progress in self.progress.values() if progress.first_token]
        first_token = self.first_token or min(seen, default=0.0)
        return max(0.0, first_token - self.started) if first_token else None

    @property
    def seconds(self) -> float:
        """Seconds from arrival to the end, or until now."""
        return (self.finished or time.monotonic()) - self.started

    @property
    def finish_reason(self) -> str | None:
        if not self.finished:
            return None
        if self.error_code is not None:
            return self.error_code
        return "cancelled" if self.is_disconnected else "+".join(dict.fromkeys(self.finish_reasons)) or None

    @property
    def largest_miss(self) -> RequestProgress | None:
        """The progress of the prompt with the most tokens that were not cached. None if no prompt has started."""
        return max(self.progress.values(), key=lambda s: self.prompts[s.id] - s.cached_tokens, default=None)

    @property
    def slo(self) -> dict[str, Any] | None:
        """Objective, predicted times and actual times of the slowest prompt, in milliseconds. None if the request has
        no objective."""
        found = [progress.slo for progress in self.progress.values() if progress.slo is not None]
        return max(found, key=lambda slo: slo["actual_ttft_ms"] or 0.0, default=self.refused_slo)

    def waterfall(self) -> list[dict[str, Any]]:
        """Return the phases of the request: queue, load, prefill and decode. They are ordered by prompt (numbered from
        0), then by start. `start_s` and `end_s` are seconds since the arrival. A load also has the name of its tier. If
        a phase still runs, its end is the present time.
        """
        now = self.finished or time.monotonic()
        phases: list[dict[str, Any]] = []

        def add(prompt: int, name: str, start: float, end: float, tokens: int | None, tier: str = "") -> None:
            start = max(start, self.started)
            phases.append({
                "prompt": prompt, "phase": name, "tier": tier, "tokens": tokens,
                "start_s": round(start - self.started, 6), "end_s": round(max(start, end) - self.started, 6),
            })  # fmt: skip

        for number, id_ in enumerate(self.prompts):
            progress = self.progress.get(id_)
            if progress is None:
                add(number, "queue", self.started, now, None)
                continue
            add(number, "queue", self.started, progress.looked_up or progress.started, None)
            for tier, start, end, tokens in progress.loads:
                add(number, "load", start, end, tokens, tier)
            for start, end, tokens in progress.chunks:
                add(number, "prefill", start, end, tokens)
            computed = progress.chunks[-1][1] if progress.chunks else progress.started
            if not progress.first_token and not self.finished:
                add(number, "prefill", computed, now, None)
            if progress.first_token:
                alone = self.output_tokens if len(self.prompts) == 1 else None
                add(number, "decode", progress.first_token, now, alone)
        return sorted(phases, key=lambda phase: (phase["prompt"], phase["start_s"]))

    def to_dict(self, operator: bool) -> dict[str, Any]:
        """Return the record as plain data for JSON. With `operator` (a caller that may see all tenants), the miss
        reason may state that another tenant has the missing prefix.
        """
        progress = self.largest_miss
        stopped = None
        if progress is not None:
            word, text = explain_miss(progress, self.prompts[progress.id], operator)
            stopped = {"at_token": progress.miss_position, "reason": word, "text": text}
        return {
            "id": self.id,
            "request_id": self.request_id,
            "model": self.model,
            "adapter": self.adapter,
            "tenant": self.tenant,
            "state": self.state,
            "arrived": round(self.arrived, 3),
            "queue_s": _rounded(self.queue_seconds),
            "ttft_s": _rounded(self.ttft_seconds),
            "total_s": _rounded(self.seconds),
            "prompts": len(self.prompts),
            "answers": self.answers,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "cached_tokens": self.cached_tokens,
            "reused_tokens": self.reused_tokens,
            "approximate": self.reused_tokens > 0,
            "computed_tokens": self.prompt_tokens - self.cached_tokens - self.reused_tokens,
            "hits": [{"tier": tier, "tokens": tokens} for tier, tokens in self.hit_tokens.items()],
            "stopped": stopped,
            "preemptions": sum(progress.preemptions for progress in self.progress.values()),
            "draft_tokens": sum(progress.draft_tokens for progress in self.progress.values()),
            "accepted_tokens": sum(progress.accepted_tokens for progress in self.progress.values()),
            "finish_reason": self.finish_reason,
            "slo": self.slo,
        }


class RequestRecords:
    """The last `max_records` requests, by id. Not thread-safe."""

    def __init__(self, max_records: int = MAX_RECORDS) -> None:
        self._max_records = max_records
        self._ring: OrderedDict[str, RequestRecord] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ring)

    def add(self, record: RequestRecord) -> None:
        """Add a record. Drops the oldest record above the limit."""
        self._ring[record.id] = record
        if len(self._ring) > self._max_records:
            self._ring.popitem(last=False)

    def find(self, id_: str, tenant: str | None) -> RequestRecord | None:
        """Return the record with the id `id_`. If there is none, return the newest record whose request had `id_` in
        the header x-request-id. Return None if there is no such record, or if `tenant` may not see it. If `tenant` is
        None, all records are visible. O(records).
        """
        found = self._ring.get(id_)
        if found is not None:
            return found if tenant in (None, found.tenant) else None
        return next((one for one in self.latest(len(self), tenant) if id_ and one.request_id == id_), None)

    def latest(
        self, count: int, tenant: str | None, model: str | None = None, until: float | None = None
    ) -> list[RequestRecord]:
        """Return the newest records of `model` that `tenant` may see, of requests that arrived at the Unix time `until`
        or before. None means any model, any tenant, or now. O(records)."""
        seen = (
            one
            for one in reversed(self._ring.values())
            if tenant in (None, one.tenant)
            and model in (None, one.model)
            and (until is None or one.arrived <= until)
        )
        return [one for _, one in zip(range(count), seen, strict=False)]


def explain_miss(progress: RequestProgress, length: int, operator: bool) -> tuple[str, str]:
    """Return the miss reason of a prompt of `length` tokens, and a sentence with the position and reason of the
    miss. The reason may be that another tenant has the pages, but only with `operator` (a caller that may see
    all tenants).
    """
    reason = "other tenant" if operator and progress.in_other_tenant else progress.miss_reason
    at, found = progress.miss_position, progress.cached_tokens
    if not reason:
        return "", "It is loading pages; its lookup has not ended yet."
    when = (
        "" if progress.evicted_at is None else f" {_duration(progress.started - progress.evicted_at)} earlier"
    )
    policy = "" if progress.policy is None else f" by policy {progress.policy}"
    in_tiers = ", and no tier supplied them" if set(progress.hits) - {POOL} else ""
    further = "the prompt matches further, but"
    clauses: Mapping[str, str] = {
        "complete": "all but the last token were cached, and the last is always computed",
        "never seen": f"no earlier request {'went on' if at else 'began'} with these tokens{in_tiers}",
        "evicted": f"the next pages were evicted{when}{policy}{in_tiers}",
        "other tenant": "only another tenant has the first block, and tenants never share pages",
        "snapshot missing": f"{further} no state snapshot was cached there",
        "window page missing": f"{further} pages of a sliding or chunked window were evicted",
        "media missing": f"{further} pages of an earlier image were evicted",
        "reading off": "the request disabled reading the cache",
    }
    meanwhile = (
        f" Of the tokens before it, {at - found:,} were computed while pages of the others were loaded."
        if at > found
        else ""
    )
    end = f"The lookup ended at token {at:,} of {length:,}: {clauses.get(reason, reason)}."
    return reason.replace(" ", "_"), end + meanwhile


def _duration(seconds: float) -> str:
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.1f} s"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
