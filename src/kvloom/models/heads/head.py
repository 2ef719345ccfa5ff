"""The interface of draft heads. A head is one decoder layer that drafts tokens from the hidden states of a target
model.

    input of token n    its embedding, and the hidden state of token n - 1
    output              logits of token n + 1, and the head's own hidden state of token n

If the target has computed token n - 1, the head uses the target's hidden state, which is exact. Otherwise it uses
its own hidden state.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["Head", "States", "collect_outputs", "own_or_shared"]

States = Callable[[], torch.Tensor]
"""A function that returns the hidden states [tokens, size] of one execution of a model. Call it after the
execution."""


class Head(nn.Module, ABC):
    """A draft head. `model` is a Hugging Face model with one layer, which gets the result of `join` as its
    embeddings."""

    def __init__(self, model: Any, state_size: int) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        self.state_size = state_size
        """Number of values of a hidden state."""

    @abstractmethod
    def join(self, tokens: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """Return the input of the head's layer. `tokens` are token ids, and `before` are the hidden states of the
        tokens before them."""

    @abstractmethod
    def target_states(self, decoder: Any) -> AbstractContextManager[States]:
        """Return a context for one run of the target, whose decoder is `decoder`. The context yields a function.
        After the run, this function returns the target's hidden states."""

    @abstractmethod
    def own_states(self) -> AbstractContextManager[States]:
        """Return a context for one run of the head. The context yields a function. After the run, this function
        returns the head's own hidden states."""

    def target_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Convert logits of the draft vocabulary to logits of the target's vocabulary. If the vocabularies are the
        same, return `logits` unchanged."""
        return logits


@contextmanager
def collect_outputs(modules: Iterable[Any], copies: bool = False) -> Iterator[list[torch.Tensor]]:
    """A context that collects the outputs of `modules` in a list. Each output is [tokens, size], for all packed
    tokens of a step. With `copies`, outputs are copied, because later modules may overwrite them."""
    found: list[torch.Tensor] = []

    def collect(_: Any, __: Any, output: Any) -> None:
        states = output if isinstance(output, torch.Tensor) else output[0]
        found.append(states[0].clone() if copies else states[0])

    hooks = [module.register_forward_hook(collect) for module in modules]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def own_or_shared(module: Any, own: torch.Tensor | None) -> Any:
    """Return the module that the head uses. This is the target's `module`, unless the head has a different matrix
    `own`. In that case, return a copy of `module` with the matrix `own`."""
    if own is None or (
        own.shape == module.weight.shape and torch.equal(own.to(module.weight), module.weight)
    ):
        return module
    found = copy.copy(module)
    found._parameters = dict(module._parameters)
    found.weight = nn.Parameter(own.to(module.weight), requires_grad=False)
    return found
