"""Whisper's rule for time stamps: which tokens may follow, so that a text is divided into segments.

    <|0.00|> Hello <|1.20|> <|1.20|> there <|2.40|>        a segment begins and ends with a time stamp

A time stamp is a token. Its id grows with the time, in steps of 0.02 seconds. The rule is that of transformers'
`generate(return_timestamps=True)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["TimestampRule"]


@dataclass(frozen=True, slots=True)
class TimestampRule:
    """`first` is the token of 0.00 seconds; all larger ids are time stamps. `eos` is the end-of-sequence token; smaller
    ids are text. The first time stamp of an answer is at most `max_initial` steps after 0.00."""

    first: int
    eos: int
    max_initial: int | None = None

    @classmethod
    def of(cls, settings: Any) -> TimestampRule | None:
        """Return the rule of a generation config, or None if its model has no time stamps."""
        without = getattr(settings, "no_timestamps_token_id", None)
        eos = settings.eos_token_id
        eos = eos[0] if isinstance(eos, list) else eos
        if without is None or (eos is None and settings.bos_token_id is None):
            return None
        most = getattr(settings, "max_initial_timestamp_index", None)
        return cls(int(without) + 1, int(eos or settings.bos_token_id), None if most is None else int(most))

    def apply(self, logits: torch.Tensor, rows: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Mask tokens in place. Each entry of `rows` is a tuple: a row number of `logits`, and the output tokens of its
        request so far. Does not wait for the device."""
        for row, output in rows:
            self._mask(logits[row], output)

    def _mask(self, scores: torch.Tensor, output: Sequence[int]) -> None:
        first = self.first
        scores[first - 1] = -math.inf  # the token "no time stamps"
        ends = len(output) > 0 and output[-1] >= first
        begins = len(output) < 2 or output[-2] >= first
        if ends and begins:  # text must follow
            scores[first:] = -math.inf
        elif ends:  # the end of a segment: the begin of the next one or the end of the text must follow
            scores[: self.eos] = -math.inf
        last = next((token for token in reversed(output) if token >= first), None)
        if last is not None:  # time does not run backwards, and a segment is not empty
            scores[first : last + (not ends or begins)] = -math.inf
        if not output:
            scores[:first] = -math.inf
            if self.max_initial is not None:
                scores[first + self.max_initial + 1 :] = -math.inf
        logprobs = scores.float().log_softmax(-1)
        likely = logprobs[first:].logsumexp(-1) > logprobs[:first].amax(-1)
        scores[:first].masked_fill_(likely, -math.inf)
