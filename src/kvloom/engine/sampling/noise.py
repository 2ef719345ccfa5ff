"""Random noise, computed as a hash of (seed, token count, vocabulary index).

    seed, count ──host──▶ two words per request ──device──▶ hash with each index ──▶ Gumbel noise [requests, vocabulary]

The token with the largest sum of logit and Gumbel noise is a sample from the softmax of the logits. The noise depends
only on the hash, so a request gets the same noise in every batch. The hash uses only integers, so it is also the same
on every device. The functions do not wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["gumbel", "index_words", "row_words"]

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MASK = (1 << 64) - 1


def row_words(seeds: Sequence[int], counts: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return two 32-bit words per request ([requests, 2]), computed from its seed (any integer) and its number of
    sampled tokens."""
    state = np.array([seed & MASK for seed in seeds], dtype=np.uint64)
    # The constants make seed 0 work like other seeds. The second word is a factor, so it must be odd.
    state = _mix64(_mix64(state + GOLDEN) + np.array(counts, dtype=np.uint64) * GOLDEN)
    words = np.stack([state >> np.uint64(32), state | np.uint64(1)], 1)
    return words.astype(np.uint32).view(np.int32)


def index_words(vocabulary: int, device: torch.device) -> torch.Tensor:
    """Return one 32-bit word for each token id of the vocabulary ([vocabulary], int32). Call this once: the result
    depends only on the size of the vocabulary."""
    mixed = _mix64(np.arange(1, vocabulary + 1, dtype=np.uint64) * GOLDEN)
    return torch.from_numpy((mixed >> np.uint64(32)).astype(np.uint32).view(np.int32)).to(device)


def gumbel(rows: torch.Tensor, indexes: torch.Tensor) -> torch.Tensor:
    """Return finite Gumbel noise ([requests, tokens], float32). `rows` is the result of `row_words`. `indexes` are
    the words of `index_words` for the tokens: [tokens] for all requests, or [requests, tokens]."""
    words = (indexes ^ rows[:, :1]).mul_(rows[:, 1:])  # int32 products wrap
    for shift, factor in ((16, 0x7FEB352D), (15, 0x2C1B3C6D)):
        words ^= (words >> shift).bitwise_and_((1 << (32 - shift)) - 1)
        words *= factor
    words ^= (words >> 16).bitwise_and_(0xFFFF)
    # Uniform numbers of 31 bits. Small numbers have full precision, because they become the largest noise.
    share = words.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return share.neg_().log1p_().neg_().log_().neg_()


def _mix64(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return state ^ (state >> np.uint64(31))
