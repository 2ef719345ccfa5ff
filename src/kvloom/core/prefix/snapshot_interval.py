"""Chooses the number of tokens between state snapshots from the prompts that were looked up.

A model with recurrent layers resumes only at snapshots. Snapshots are taken where prompts end or branch. If a prompt leaves
the cached tokens elsewhere, the tokens after the last snapshot are computed again:

    cached tokens of the prompt    ├────────────────────────────────────┤ matched
    snapshots at ends, branches    ●               ●
                                                   └── computed again ──┘
    with an interval               ●     ◆     ◆   ●     ◆     ◆     ◆  └┘

The gain of an interval is the number of tokens that recent prompts would not have computed again. Its cost has two
parts: the tokens that could be computed in the time of the additional steps, and the hits that a full pool loses,
because snapshots displace other pages. Gain and cost are numbers of tokens. The interval with the largest difference is
best.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["SnapshotInterval"]

INTERVALS = (256, 512, 1024, 2048, 4096, 8192, 16384)
"""Intervals that are compared, in tokens. Multiples of every block size."""
SAMPLES, PERIOD = 256, 32
"""The last SAMPLES prompts are compared, after every PERIOD prompts."""
MARGIN = 0.01
"""The interval changes if that saves at least this share of the prompt tokens."""
USUAL_SNAPSHOTS = 2
"""Snapshots of a request without an interval: at the end of its prompt and of its answer."""


class _Sample(NamedTuple):
    """A prompt. All fields are numbers of tokens."""

    length: int
    matched: int
    resume: int
    base: int
    """The longest length at which the prompt could resume without periodic snapshots."""


class SnapshotInterval:
    """The number of tokens between periodic snapshots, `tokens`. 0 takes none.

    `state_bytes` are the bytes of a snapshot, and `token_bytes` those of a token in the pool. With `is_fixed`, the
    interval never changes."""

    def __init__(self, tokens: int, state_bytes: int, token_bytes: float, is_fixed: bool) -> None:
        self.tokens, self.is_fixed = tokens, is_fixed
        self.step_tokens = 0.0
        """Prompt tokens that take as long as one more step."""
        self.reason = "fixed" if is_fixed else "too few prompts have been looked up"
        """Why the interval has its value, with figures."""
        self._state_bytes, self._token_bytes = state_bytes, token_bytes
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES)
        self._until = PERIOD

    def observe(self, length: int, matched: int, resume: int, base: int, is_full: bool) -> bool:
        """Add a prompt of `length` tokens, of which `matched` are cached. The prompt resumed at `resume`, and could resume
        at `base` without periodic snapshots. `is_full` states whether new pages evict others. Return whether the
        interval has changed. O(1), and O(SAMPLES) after every PERIOD prompts."""
        if self.is_fixed:
            return False
        self._samples.append(_Sample(length, matched, resume, base))
        self._until -= 1
        if self._until:
            return False
        self._until = PERIOD
        return self._decide(is_full)

    def _decide(self, is_full: bool) -> bool:
        samples = self._samples
        price = self._price(samples) if is_full else 0.0
        net = {0: 0.0} | {
            every: self._net(every, samples, price) for every in (*INTERVALS, self.tokens) if every
        }
        best = max(net, key=lambda every: net[every])
        before = self.tokens
        if net[best] > net[before] + MARGIN * sum(one.length for one in samples):
            self.tokens = best
        lost = sum(one.matched - one.base for one in samples) / len(samples)
        kept = "no interval saves more" if not self.tokens else f"snapshots every {self.tokens:,} tokens save"
        figure = (
            ""
            if not self.tokens
            else f" {net[self.tokens] / len(samples):,.0f} tokens of a prompt, net of their cost"
        )
        self.reason = f"snapshots at ends and branches let a prompt compute {lost:,.0f} cached tokens again; {kept}{figure}"
        return self.tokens != before

    def _net(self, every: int, samples: Sequence[_Sample], price: float) -> float:
        """Return the tokens that the interval `every` saves over all samples, minus its cost. `price` is the number of hit
        tokens that a byte of the pool gives."""
        saved = sum(max(0, one.matched // every * every - one.base) for one in samples)
        taken = sum((one.length - one.resume) / every for one in samples)
        return saved - taken * (self.step_tokens + price * self._state_bytes)

    def _price(self, samples: Sequence[_Sample]) -> float:
        """Return the hit tokens per byte that recent prompts added to the pool."""
        new = sum(one.length - one.resume for one in samples)
        snapshots = USUAL_SNAPSHOTS * len(samples) + (new / self.tokens if self.tokens else 0)
        added = new * self._token_bytes + snapshots * self._state_bytes
        return sum(one.resume for one in samples) / added if added else 0.0
