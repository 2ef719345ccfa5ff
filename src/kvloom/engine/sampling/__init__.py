"""Sampling: turns logits into tokens, text and beams. This package does not depend on pages. It reads only the
`SamplingRequest` part of a request.

    params.py            SamplingParams: sampling parameters of a request
    defaults.py          GenerationDefaults: values of a model's generation config
    sampler.py           Sampler: one token for each position with logits
    logit_processors.py  penalties, biases and masks
    timestamps.py        TimestampRule: where Whisper may write time stamps
    noise.py             random noise that depends on the request's seed only
    logprobs.py          Logprobs: log-probabilities, on the device and as dictionaries
    beam_search.py       BeamSearch: chooses the beams that continue
    grammar_process.py   compiles grammars and computes masks in limited processes
    grammar.py           Grammars: tokens that a JSON schema, regular expression or grammar allows
    detokenizer.py       TextStream: text of growing outputs, and stop texts

Names are imported on first use, because the API process reads `SamplingParams` without loading torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .beam_search import BeamSearch, Successor, assign_slots
    from .defaults import GenerationDefaults, bad_tokens
    from .detokenizer import Detokenizer, TextStream
    from .grammar import Grammar, GrammarBusyError, GrammarLimits, Grammars, GrammarState, collect, fill
    from .logit_processors import TokenCounts, apply_grammar_mask, to_device
    from .logprobs import Logprob, Logprobs, TokenLogprobs
    from .params import Finish, SamplingParams
    from .sampler import SampledTokens, Sampler, SamplingRequest
    from .timestamps import TimestampRule

__all__ = [
    "BeamSearch",
    "Detokenizer",
    "Finish",
    "GenerationDefaults",
    "Grammar",
    "GrammarBusyError",
    "GrammarLimits",
    "GrammarState",
    "Grammars",
    "Logprob",
    "Logprobs",
    "SampledTokens",
    "Sampler",
    "SamplingParams",
    "SamplingRequest",
    "Successor",
    "TextStream",
    "TimestampRule",
    "TokenCounts",
    "TokenLogprobs",
    "apply_grammar_mask",
    "assign_slots",
    "bad_tokens",
    "collect",
    "fill",
    "to_device",
]

_MODULES = {
    "beam_search": ("BeamSearch", "Successor", "assign_slots"),
    "defaults": ("GenerationDefaults", "bad_tokens"),
    "detokenizer": ("Detokenizer", "TextStream"),
    "grammar": (
        "Grammar",
        "GrammarBusyError",
        "GrammarLimits",
        "GrammarState",
        "Grammars",
        "collect",
        "fill",
    ),
    "logit_processors": ("TokenCounts", "apply_grammar_mask", "to_device"),
    "logprobs": ("Logprob", "Logprobs", "TokenLogprobs"),
    "params": ("Finish", "SamplingParams"),
    "sampler": ("SampledTokens", "Sampler", "SamplingRequest"),
    "timestamps": ("TimestampRule",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
