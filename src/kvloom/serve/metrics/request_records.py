"""What is remembered of each request: names and numbers that explain how it went. Never text, keys or token ids.

A record lives in a bounded ring; the newest push the oldest out. `Record.shape` is what `/kvloom/requests` answers with and
`kvloom explain` reads.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvloom.core import NOT_CACHED
from kvloom.serve.worker.messages import Story

__all__ = ["Record", "Records", "stop_text"]

MOST = 1000
DEVICE = "device"


@dataclass(slots=True, eq=False)
class Record:
    """One HTTP request that generates. `prompts` are the tokens of each of its prompts, by the ids the engine knows them by;
    `arrived` is the time of day, `began` the monotonic clock's, on which `first` and `ended` are, too (0: not yet). `finishes`
    says how each answer that ended did, `failure` is the code of what it was refused with."""

    id: str
    tenant: str
    prompts: dict[int, int]
    answers: int
    max_tokens: int
    stream: bool
    arrived: float
    began: float
    endpoint: str = ""
    first: float = 0.0
    ended: float = 0.0
    output_tokens: int = 0
    gone: bool = False
    failure: str | None = None
    finishes: list[str] = field(default_factory=list)
    stories: dict[int, Story] = field(default_factory=dict)

    @property
    def state(self) -> str:
        if self.ended:
            return "failed" if self.failure is not None else "finished"
        return "running" if self.stories else "waiting"

    @property
    def prompt_tokens(self) -> int:
        return sum(self.prompts.values())

    @property
    def cached_tokens(self) -> int:
        return sum(story.cached for story in self.stories.values())

    @property
    def hits(self) -> Counter[str]:
        """Tokens that were found, by tier."""
        found: Counter[str] = Counter()
        for story in self.stories.values():
            found.update(story.hits)
        return found

    @property
    def queue_seconds(self) -> float | None:
        """Until the first of its prompts got work."""
        begun = [story.began for story in self.stories.values()]
        return max(0.0, min(begun) - self.began) if begun else None

    @property
    def first_seconds(self) -> float | None:
        """Until its first token was sent, or was there where nothing was to be sent yet."""
        seen = [story.first for story in self.stories.values() if story.first]
        first = self.first or min(seen, default=0.0)
        return max(0.0, first - self.began) if first else None

    @property
    def seconds(self) -> float:
        """From its beginning to its end, or so far."""
        return (self.ended or time.monotonic()) - self.began

    @property
    def finish_reason(self) -> str | None:
        if not self.ended:
            return None
        if self.failure is not None:
            return self.failure
        return "cancelled" if self.gone else "+".join(dict.fromkeys(self.finishes)) or None

    @property
    def costliest(self) -> Story | None:
        """Of its prompts, the one that left most to compute."""
        return max(self.stories.values(), key=lambda s: self.prompts[s.id] - s.cached, default=None)

    def shape(self, operator: bool) -> dict[str, Any]:
        """For JSON. Only an `operator` learns that another tenant has what this one missed."""
        story = self.costliest
        stopped = None
        if story is not None:
            word, text = stop_text(story, self.prompts[story.id], operator)
            stopped = {"at_token": story.stop, "reason": word, "text": text}
        return {
            "id": self.id,
            "tenant": self.tenant,
            "state": self.state,
            "arrived": round(self.arrived, 3),
            "queue_s": _rounded(self.queue_seconds),
            "ttft_s": _rounded(self.first_seconds),
            "total_s": _rounded(self.seconds),
            "prompts": len(self.prompts),
            "answers": self.answers,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "cached_tokens": self.cached_tokens,
            "hits": [{"tier": tier, "tokens": tokens} for tier, tokens in self.hits.items()],
            "stopped": stopped,
            "preemptions": sum(story.preemptions for story in self.stories.values()),
            "finish_reason": self.finish_reason,
        }


class Records:
    """The last `most` requests, by id. One thread."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._ring: OrderedDict[str, Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ring)

    def add(self, record: Record) -> None:
        """Remember a request; the oldest is forgotten where there are too many."""
        self._ring[record.id] = record
        if len(self._ring) > self._most:
            self._ring.popitem(last=False)

    def find(self, id_: str, tenant: str | None) -> Record | None:
        """A request, if `tenant` (None: everybody) may see it."""
        found = self._ring.get(id_)
        return found if found is not None and tenant in (None, found.tenant) else None

    def last(self, count: int, tenant: str | None) -> list[Record]:
        """The newest requests that `tenant` (None: everybody) may see, newest first. O(records)."""
        seen = (one for one in reversed(self._ring.values()) if tenant in (None, one.tenant))
        return [one for _, one in zip(range(count), seen, strict=False)]


def stop_text(story: Story, length: int, operator: bool) -> tuple[str, str]:
    """Why a prompt of `length` tokens hit no further: a word, and a sentence for people."""
    reason = "other tenant" if operator and story.elsewhere else story.reason
    if set(story.hits) - {DEVICE} and reason in NOT_CACHED:
        return "loaded", _loaded(story, length)
    at, left = story.stop, length - story.stop
    found = f"The first {at:,} of its {length:,} tokens were cached; " if at else "Nothing was cached: "
    unseen = "went on with the tokens after them" if at else "began with its tokens"
    pages = "the pages after them" if at else "its pages"
    known = "its tokens are known further than that, but"
    when = "" if story.left is None else f" {_ago(story.began - story.left)} before"
    policy = "" if story.policy is None else f", chosen by the policy {story.policy}"
    sentences: Mapping[str, str] = {
        "complete": f"Everything but the last token was cached ({at:,} of {length:,}); that one is always computed.",
        "never seen": f"{found}no earlier request {unseen}.",
        "evicted": f"{found}{pages} had been there, and left{when} to make room{policy}.",
        "other tenant": f"{found}another tenant has more of this prompt, and tenants never share pages.",
        "snapshot missing": f"{found}{known} no recurrent state was kept there, so {left:,} are computed.",
        "window page missing": f"{found}{known} pages of a sliding or chunked window had left, so {left:,} are computed.",
        "media missing": f"{found}{known} pages of an image before that point had left, so {left:,} are computed.",
        "reading off": "The request asked not to read the cache.",
    }
    return reason.replace(" ", "_"), sentences.get(reason, f"{found}{reason}.")


def _loaded(story: Story, length: int) -> str:
    """What came from tiers, of a prompt that the pool knew no more of."""
    came = " and ".join(f"{tokens:,} from {tier}" for tier, tokens in story.hits.items() if tier != DEVICE)
    here = story.hits.get(DEVICE, 0)
    pool = f"; {here:,} were in the pool" if here else ""
    meanwhile = (
        ", some while those came: waiting for all would have taken longer"
        if story.cached > story.stop
        else ""
    )
    return f"Of its {length:,} tokens came {came}{pool}; the other {length - story.cached:,} were computed{meanwhile}."


def _ago(seconds: float) -> str:
    for size, unit in ((3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.1f} s"


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
