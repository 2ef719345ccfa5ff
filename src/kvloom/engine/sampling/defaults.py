"""What the generation config of a model (`generation_config.json`) states about requests.

    values of requests      temperature, top_k, top_p, min_p, repetition_penalty, max_new_tokens, max_length
                            apply to what a request does not set
    rules for all requests  min_new_tokens, min_length; the sampler also applies suppressed tokens and bad words

Tokens that end a text are those of `eos_tokens`. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .params import SamplingParams

__all__ = ["GenerationDefaults", "bad_tokens"]

_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The default values of requests, and the shortest output. 0 means that the generation config has no such value.
    `max_length` and `min_length` also count the tokens of the prompt. In an encoder-decoder model, this is the prompt of
    the decoder."""

    values: Mapping[str, int | float] = field(default_factory=dict)
    max_new_tokens: int = 0
    max_length: int = 0
    min_new_tokens: int = 0
    min_length: int = 0

    @classmethod
    def of(cls, settings: Any) -> GenerationDefaults:
        """Read a generation config of transformers. None has no values."""
        found = {name: value for name in _NAMES if (value := getattr(settings, name, None)) is not None}
        sizes = {
            name: int(getattr(settings, name, None) or 0)
            for name in ("max_new_tokens", "max_length", "min_new_tokens", "min_length")
        }
        try:
            SamplingParams(**found)
        except ValueError as error:
            raise ValueError(f"the generation config of the model: {error}") from None
        return cls(found, **sizes)

    def max_tokens(self, prompt: int) -> int | None:
        """Return the default of `max_tokens` after `prompt` tokens, or None if there is none."""
        if self.max_new_tokens:
            return self.max_new_tokens
        return max(1, self.max_length - prompt) if self.max_length else None

    def params(self, prompt: int, **given: Any) -> SamplingParams:
        """Return the parameters of a request of `prompt` tokens that sets only `given`."""
        most = self.max_tokens(prompt)
        return SamplingParams(**{**({} if most is None else {"max_tokens": most}), **self.values, **given})

    def with_minimum(self, params: SamplingParams, prompt: int) -> SamplingParams:
        """Return `params` with the shortest output of the model, if they set no `min_tokens`."""
        least = min(max(self.min_new_tokens, self.min_length - prompt), params.max_tokens)
        if params.min_tokens or least <= 0 or params.pooling is not None:
            return params
        return replace(params, min_tokens=least)


def bad_tokens(settings: Any) -> list[int]:
    """Return the bad words of a generation config that have one token. Longer ones are not applied."""
    return [int(words[0]) for words in getattr(settings, "bad_words_ids", None) or () if len(words) == 1]
