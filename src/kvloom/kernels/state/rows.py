"""The sequences of one call of a recurrent layer, and their checks. The tokens of all sequences are packed in one
tensor.

A `StateRows` is built once per step. All layers of one block table use the same object.

| field           | shape           | meaning                                                                        |
|-----------------|-----------------|--------------------------------------------------------------------------------|
| starts          | [sequences + 1] | index of each sequence's first token, then the index after the last token; two |
|                 |                 | equal neighbours mean a sequence without tokens                                |
| read            | [sequences]     | page of the state before the first token; 0: the sequence begins from zeros    |
| write           | [sequences]     | page for the last state, may be the `read` page; 0: it is not stored           |
| fresh           | [sequences]     | true: the sequence begins from zeros even if `read` is set, because that page  |
|                 |                 | was never written                                                              |
| longest         | host int        | largest number of tokens of a sequence; up to STEP_TOKENS, the call runs token |
|                 |                 | by token                                                                       |
| stored          | [sequences]     | GPU only: number of tokens (1 or more) after which the state is stored; None:  |
|                 |                 | after all tokens                                                               |
| batch_invariant | host bool       | whether results must have the same bits in any batch, and for any division of  |
|                 |                 | a sequence into chunks                                                         |

- Sequences run in parallel. A page that one sequence writes must not be read or written by another sequence of the
  call. The caller therefore splits a prompt at its snapshots and makes one call per part.
- A sequence without tokens stores the state from which it begins.
- Batch-invariant calls run token by token. The state is rounded to the dtype of its page after every token.
- Decode steps run faster in a separate call than together with long sequences.
- Tokens before the first and after the last value of `starts` are not computed, and their outputs are undefined.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["STEP_TOKENS", "ColumnRuns", "DeltaGates", "StateRows", "check_states", "check_tokens"]

STEP_TOKENS = 8
"""If every sequence has at most this many tokens (decode, draft verification), the call runs token by token, in one
pass over the state."""

_INTEGERS = (torch.int32, torch.int64)
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class ColumnRuns:
    """The columns of a tensor that are the channels of a convolution. Channel c is column
    `first[c // size] + c % size`. `first` has int32 multiples of 16, and `size` is a power of two of at least 16."""

    first: torch.Tensor
    size: int

    def columns(self) -> torch.Tensor:
        """Return the column of each channel."""
        return (self.first[:, None] + torch.arange(self.size, device=self.first.device)).flatten().long()


@dataclass(frozen=True, slots=True, eq=False)
class DeltaGates:
    """The weights of the gates of a delta rule, [value heads] each. The log decay of a token is
    -exp(a_log) * softplus(g + dt_bias), and its beta is sigmoid(beta)."""

    a_log: torch.Tensor
    dt_bias: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class StateRows:
    """The sequences of one call (see the table of this module). The constructor copies nothing and reads no device
    memory."""

    starts: torch.Tensor
    read: torch.Tensor
    write: torch.Tensor
    longest: int
    fresh: torch.Tensor | None = None
    batch_invariant: bool = False
    stored: torch.Tensor | None = None

    def __post_init__(self) -> None:
        parts = {"starts": self.starts, "read": self.read, "write": self.write}
        for name, part in parts.items():
            if part.dtype not in _INTEGERS or part.dim() != 1:
                raise ValueError(
                    f"{name} is one row of int32 or int64, got {part.dtype} {tuple(part.shape)}: convert it"
                )
        if not self.starts.numel() - 1 == self.read.numel() == self.write.numel() >= 1:
            raise ValueError(
                f"{self.starts.numel()} starts for {self.read.numel()} read and {self.write.numel()} write slots:"
                " give one more start than sequences, of which there is at least one"
            )
        for name, given in (("fresh", self.fresh), ("stored", self.stored)):
            if given is not None and given.shape != self.read.shape:
                raise ValueError(f"{name} {tuple(given.shape)} must be like read {tuple(self.read.shape)}")
        devices = {part.device for part in (*parts.values(), self.fresh, self.stored) if part is not None}
        if len(devices) > 1:
            raise ValueError(f"the rows are on {sorted(map(str, devices))}: put them on one device")
        if self.longest < 0:
            raise ValueError(f"longest is {self.longest}: give the most tokens a row may have, 0 or more")

    @property
    def sequences(self) -> int:
        return self.read.numel()

    @property
    def steps(self) -> bool:
        """Whether the kernels compute all sequences token by token. This is true if every sequence has at most
        STEP_TOKENS tokens, or if `stored` is set."""
        return self.longest <= STEP_TOKENS or self.stored is not None

    @classmethod
    def decode(cls, slots: torch.Tensor, tokens: int = 1) -> StateRows:
        """Return a `StateRows` for sequences of `tokens` tokens each. Sequence i reads and writes the state in page
        `slots[i]`.

        A sequence with page 0 is padding. It starts from zeros and stores nothing.
        """
        starts = torch.arange(0, (slots.numel() + 1) * tokens, tokens, dtype=torch.int32, device=slots.device)
        return cls(starts, slots, slots, tokens)


def check_states(states: torch.Tensor, shape: tuple[int, ...], name: str) -> None:
    """Raise ValueError if `states` has another shape than [pages, *shape], or if a page is not contiguous."""
    if tuple(states.shape[1:]) != shape or states.dim() != len(shape) + 1:
        raise ValueError(
            f"{name} of pages {tuple(states.shape)} must be [pages, {', '.join(map(str, shape))}]"
        )
    if states.shape[0] and not states[0].is_contiguous():
        raise ValueError(f"a page of {name} must be contiguous inside, got strides {states.stride()}")
    if states.dtype not in _FLOATS:
        raise ValueError(f"{name} are {states.dtype}: keep them in one of {', '.join(map(str, _FLOATS))}")


def check_tokens(rows: StateRows, **parts: tuple[torch.Tensor | None, tuple[int, ...]]) -> None:
    """Raise ValueError unless every tensor has its required shape and a float dtype, and is on the device of
    `rows`."""
    for name, (part, shape) in parts.items():
        if part is None:
            continue
        if tuple(part.shape) != shape:
            raise ValueError(f"{name} is {tuple(part.shape)}, but {shape} fits the other arguments")
        if part.device != rows.starts.device:
            raise ValueError(
                f"{name} is on {part.device}, the rows are on {rows.starts.device}: move one of them"
            )
        if part.dtype not in _FLOATS:
            raise ValueError(f"{name} is {part.dtype}: give one of {', '.join(map(str, _FLOATS))}")
