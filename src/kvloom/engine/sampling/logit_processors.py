"""Changes logits before a token is sampled: penalties, biases, masked tokens and grammar masks.

All changes are sparse. The host sends positions and values without waiting, and the device scatters them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from .params import SamplingParams

__all__ = ["TokenCounts", "add_bias", "apply_grammar_mask", "apply_penalties", "mask_tokens", "to_device"]

Ints = npt.NDArray[np.int64]


class TokenCounts:
    """The distinct tokens of a request from position `start` on, and how often each occurs in the output."""

    __slots__ = ("_counts", "_ids", "_seen", "_size", "_slot_of")

    def __init__(self, start: int = 0) -> None:
        self._slot_of: dict[int, int] = {}
        self._ids: Ints = np.empty(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)
        self._seen, self._size = start, 0

    def update(self, tokens: Sequence[int], prompt: int) -> None:
        """Record the tokens that were appended to `tokens` since the last call. The first `prompt` tokens belong to the
        prompt and do not count as output. The time grows with the number of new tokens.
        """
        for i in range(self._seen, len(tokens)):
            token = tokens[i]
            slot = self._slot_of.setdefault(token, self._size)
            if slot == self._size:
                self._add(token)
            if i >= prompt:
                self._counts[slot] += 1
        self._seen = len(tokens)

    def copy(self) -> TokenCounts:
        """Return an independent copy."""
        other = TokenCounts(self._seen)
        other._slot_of, other._size = dict(self._slot_of), self._size
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        return other

    @property
    def ids(self) -> Ints:
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        return self._counts[: self._size]

    def _add(self, token: int) -> None:
        if self._size == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[self._size] = token
        self._size += 1


def apply_penalties(logits: torch.Tensor, rows: Sequence[tuple[int, SamplingParams, TokenCounts]]) -> None:
    """Lower the logits of tokens that already occur in their requests, in place. Each entry of `rows` is a tuple: a
    row number of `logits`, and the parameters and token counts of the row's request.

    `repetition_penalty` applies to tokens of prompt and output. Presence and frequency penalties apply to tokens of
    the output."""
    vocabulary = logits.shape[1]
    places = np.concatenate([counts.ids + row * vocabulary for row, _, counts in rows])
    lowered = np.concatenate(
        [
            params.presence_penalty * (counts.counts > 0) + params.frequency_penalty * counts.counts
            for _, params, counts in rows
        ]
    )
    factor = np.concatenate([np.full(len(t.ids), params.repetition_penalty) for _, params, t in rows])
    where = to_device(places, logits.device)
    values = to_device(np.stack([factor, lowered]).astype(np.float32), logits.device)
    flat = logits.view(-1)
    now = flat[where]
    now = torch.where(now > 0, now / values[0], now * values[0]) - values[1]
    flat.index_copy_(0, where, now)


def add_bias(logits: torch.Tensor, where: torch.Tensor, values: torch.Tensor) -> None:
    """Add `values` to logits in place. `where` are distinct positions in the flattened logits."""
    logits.view(-1).index_add_(0, where, values)


def mask_tokens(logits: torch.Tensor, rows: Sequence[tuple[int, Sequence[int]]]) -> None:
    """Set the logits of some tokens to minus infinity, in place, so that these tokens are never sampled. Each entry of
    `rows` is a tuple: a row number of `logits`, and the tokens to mask in this row."""
    vocabulary = logits.shape[1]
    places = [row * vocabulary + token for row, tokens in rows for token in tokens if token < vocabulary]
    if places:
        logits.view(-1).index_fill_(0, to_device(np.array(places), logits.device), -torch.inf)


def apply_grammar_mask(logits: torch.Tensor, rows: Sequence[int], bits: npt.NDArray[np.int32]) -> None:
    """Mask tokens in place, in those rows of the logits whose numbers are in `rows`. Masks all tokens whose bit in
    `bits` ([rows, words]) is not set. A word has the bits of 32 tokens. Tokens beyond the last word are masked.
    """
    device, vocabulary = logits.device, logits.shape[1]
    words = -(-vocabulary // 32)
    fitted = np.zeros((len(rows), words), dtype=np.int32)
    fitted[:, : bits.shape[1]] = bits[:, :words]
    sent = to_device(fitted, device)
    bit = torch.arange(32, device=device, dtype=torch.int32)
    allowed = ((sent[:, :, None] >> bit) & 1).view(len(rows), words * 32)[:, :vocabulary]
    if len(rows) == len(logits):
        logits.masked_fill_(allowed == 0, -torch.inf)
        return
    where = to_device(np.array(rows), device)
    logits.index_copy_(0, where, logits.index_select(0, where).masked_fill_(allowed == 0, -torch.inf))


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Copy an array to the device. Does not wait, because a GPU copies from pinned memory."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
