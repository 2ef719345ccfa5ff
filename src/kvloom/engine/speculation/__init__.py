"""Speculative decoding: proposers guess draft tokens, one step verifies them, and a controller decides how many to
use.

    draft.py         Draft: the tokens that a proposer guesses, as a chain or a tree
    proposer.py      Proposer: the interface of everything that proposes drafts
    draft_model.py   DraftModelProposer: drafts from a small model that shares the pool
    head.py          HeadProposer: drafts from the target's hidden states
    lookup.py        NGramProposer, SuffixProposer: drafts from earlier tokens, without weights
    token_index.py   TokenIndex: where n-grams occur in a growing list of tokens
    verifier.py      draft_positions, accepted_places: find the draft tokens that the sampler chooses
    controller.py    Controller: how many draft tokens a request gets, and when speculation is off
    speculation.py   Speculation: the interface for the engine, and counters

A step computes k draft tokens after each request's last token and samples at all k + 1 positions. Draft tokens are
accepted up to the first token that differs from the sample. A draft may be a tree, of which one path is accepted. The
sampler's noise depends on seed, position and token only, so the output is the same as without speculation, greedy or
sampled. See docs/speculation.md.

Names are imported on first use, so that reading settings does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .controller import Acceptance, Controller, Estimate, StepCosts
    from .draft import NO_DRAFT, Draft
    from .draft_model import DraftModelProposer, load_draft
    from .head import HeadProposer, load_head
    from .lookup import NGramProposer, SuffixProposer
    from .proposer import DraftedRequest, DraftRunner, Proposer
    from .speculation import Speculation, SpeculationStats, longest_draft
    from .token_index import TokenIndex
    from .verifier import DraftPosition, accepted_places, draft_positions

__all__ = [
    "NO_DRAFT",
    "Acceptance",
    "Controller",
    "Draft",
    "DraftModelProposer",
    "DraftPosition",
    "DraftRunner",
    "DraftedRequest",
    "Estimate",
    "HeadProposer",
    "NGramProposer",
    "Proposer",
    "Speculation",
    "SpeculationStats",
    "StepCosts",
    "SuffixProposer",
    "TokenIndex",
    "accepted_places",
    "draft_positions",
    "load_draft",
    "load_head",
    "longest_draft",
]

_MODULES = {
    "controller": ("Acceptance", "Controller", "Estimate", "StepCosts"),
    "draft": ("NO_DRAFT", "Draft"),
    "draft_model": ("DraftModelProposer", "load_draft"),
    "head": ("HeadProposer", "load_head"),
    "lookup": ("NGramProposer", "SuffixProposer"),
    "proposer": ("DraftRunner", "DraftedRequest", "Proposer"),
    "speculation": ("Speculation", "SpeculationStats", "longest_draft"),
    "token_index": ("TokenIndex",),
    "verifier": ("DraftPosition", "accepted_places", "draft_positions"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
