"""Hidden states of a target model, in the pages of the draft head that reads them.

    page of the head's layer   | K, V of 16 tokens | hidden states of 16 tokens |

A head computes a token from its embedding and the target's hidden state of the token before it. If that token was a
hit, the target does not compute it, and its hidden state would be missing. Hidden states are therefore a field of
the head's pages. They are cached, copied, offloaded and loaded with the head's K and V.
"""

from __future__ import annotations

import torch

from kvloom.core import Field
from kvloom.kernels.dtypes import TORCH_DTYPES
from kvloom.kernels.memory import LayerView
from kvloom.models.specs import HIDDEN_STATE

from .batch import Batch

__all__ = ["HiddenStates", "hidden_states_field"]


def hidden_states_field(size: int, dtype: torch.dtype) -> Field:
    """Return the field of a head's layer that stores one hidden state of `size` values for each token."""
    return Field(HIDDEN_STATE, (size,), next(name for name, known in TORCH_DTYPES.items() if known == dtype))


class HiddenStates:
    """Reads and writes the hidden states in the pages of one layer. Does not wait for the device."""

    def __init__(self, view: LayerView) -> None:
        self._group, self._run, self._states = view.group, view.run, view.fields[HIDDEN_STATE]

    def write(self, batch: Batch, states: torch.Tensor, at: torch.Tensor | None = None) -> None:
        """Write hidden states [tokens, size] to pages. Without `at`, there is one hidden state for each token of the
        step. With `at`, the hidden states belong to the tokens that have these indexes in the step."""
        pages, places = batch.pages[self._group][self._run], batch.places
        if at is not None:
            pages, places = pages[at], places[at]
        self._states[pages, places] = states.to(self._states.dtype)

    def write_last(
        self, batch: Batch, states: torch.Tensor, if_set: torch.Tensor, nodes: torch.Tensor | None = None
    ) -> None:
        """If the boolean `if_set` (on the device) is true, write the hidden states of some tokens to pages: the last
        token of each sequence, and the tokens that the mask `nodes` marks. `states` [tokens, size] has the hidden
        states of all tokens of the step. A CUDA graph can capture this method."""
        packed, rows = _rows_of(batch)
        is_last = batch.starts[1:][rows] == packed + 1
        is_last = if_set & (is_last if nodes is None else is_last | nodes)
        pages, places = batch.pages[self._group][self._run], batch.places
        before = self._states[pages, places]
        self._states[pages, places] = torch.where(is_last[:, None], states.to(before.dtype), before)

    def before(self, batch: Batch) -> torch.Tensor:
        """Return, for each token of a step, the hidden state of the token before it: [tokens, size]. The first token
        of a sequence gets zeros."""
        block, rows = self._states.shape[1], _rows_of(batch)[1]
        previous = batch.positions - 1 if batch.previous is None else batch.previous
        at = previous.clamp(min=0)
        pages = batch.tables[self._group][self._run][rows, at // block].long()
        return torch.where((previous >= 0)[:, None], self._states[pages, at % block], 0)


def _rows_of(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors with one entry per token of a step. The first is 0, 1, 2, and so on: the index of the token
    in the step. The second is the index, in the step, of the sequence to which the token belongs."""
    count = len(batch.tokens)
    packed = torch.arange(count, dtype=batch.starts.dtype, device=batch.tokens.device)
    rows = torch.bucketize(packed, batch.starts[1:], right=True).clamp(max=len(batch.lengths) - 1)
    return packed, rows
