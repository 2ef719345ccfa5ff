"""Models that run on pages only with transformers' own cache, one sequence after the other.

Most models run once on the packed tokens of a step, and their attention reads pages (`attention`). Some models cannot:
their attention is written inside their modules, adds a bias or a mask of its own, or selects tokens. For each sequence
of a step, such a model runs by itself:

    fill    a cache (`sequence_cache`) gets the visible K and V, and the states, from pages
    run     the modeling code computes the sequence's new tokens with this cache, as in `generate()`
    store   new K and V, and the new states, are written to pages

Pages, prefix cache, tiers and quantised K and V work as for other models. A step takes longer, because sequences do not
share it. There are no CUDA graphs.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import torch

from kvloom.models.specs import ModelError

from .pages import Pages
from .sequence_cache import SequenceCache, forward_arguments, new_cache

__all__ = ["run_separately", "runs_separately"]

MARK = "runs_separately"
"""The attribute of a model that `run_separately` has changed."""
SINGLE_TOKENS = frozenset({"prophetnet"})
"""Model types without states whose modeling code continues a sequence only with single tokens."""


def runs_separately(model: Any) -> bool:
    """Return whether the sequences of a step run one after the other, with transformers' own cache."""
    return getattr(model, MARK, False)


def run_separately(model: Any) -> None:
    """Make a model run each sequence of a step by itself. Repeated calls are allowed."""
    if not runs_separately(model):
        setattr(model, MARK, True)
        model.forward = _Separate(model)


class _Separate:
    """The forward of a model whose sequences run one after the other."""

    def __init__(self, model: Any) -> None:
        self._model, self._inner = model, model.forward
        self._continues_singly = model.config.model_type in SINGLE_TOKENS
        self.__signature__ = inspect.signature(model.forward)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        pages = keywords.get("pages") or keywords.get("cache_params")
        if not isinstance(pages, Pages):
            return self._inner(*args, **keywords)
        batch = pages.batch
        if batch.trees is not None or (batch.drafts and pages.has_states):
            raise ModelError(f"{type(self._model).__name__} cannot compute draft trees, or states of drafts")
        caches, logits, result = [], [], None
        for row, (begin, end) in enumerate(pairwise(batch.bounds)):
            start = batch.sizes[row] - (end - begin)
            cache = new_cache(self._model)
            if start:
                _fill(pages, cache, row, start, self._model.dtype)
            # Modeling code may continue a state only with single tokens.
            singly = start and (pages.has_states or self._continues_singly)
            step = 1 if singly else end - begin
            for at in range(begin, end, step):
                arguments = forward_arguments(
                    self._model, batch.tokens[None, at : at + step], start + at - begin
                )
                result = self._inner(**arguments, **cache.arguments())
                cache.take_result(result)
                logits.append(result.logits[0])
            _store_states(pages, cache, row)
            caches.append(cache)
        _store_tokens(pages, caches)
        every, keep = torch.cat(logits), keywords.get("logits_to_keep", 0)
        assert result is not None
        result.logits = (every[keep] if isinstance(keep, torch.Tensor) else every)[None]
        return result


def _fill(pages: Pages, cache: SequenceCache, row: int, start: int, dtype: torch.dtype) -> None:
    """Copy the visible tokens before position `start`, and the states, from pages to an empty cache."""
    for layer in pages.token_layers:
        window = cache.window(layer)
        first = 0 if window is None else max(0, start - window + 1)
        cache.fill_tokens(layer, pages.read_tokens(layer, row, first, start, dtype), start)
    states = {}
    for layer in pages.state_layers:
        view = pages.state_view(layer)
        page = int(pages.batch.states[view.group][view.run][row])
        states[layer] = {name: states_of[page][None].clone() for name, states_of in view.fields.items()}
    cache.fill_states(states)


def _store_states(pages: Pages, cache: SequenceCache, row: int) -> None:
    if not pages.has_states:
        return
    for layer, fields in cache.states().items():
        view = pages.state_view(layer)
        page = int(pages.batch.states[view.group][view.run][row])
        for name, state in fields.items():
            view.fields[name][page] = state[0].to(view.fields[name].dtype)


def _store_tokens(pages: Pages, caches: list[SequenceCache]) -> None:
    """Write the new keys and values of all sequences of a step to their slots."""
    for layer in pages.token_layers:
        keys, values = zip(*(cache.new_tokens(layer) for cache in caches), strict=True)
        pages.write_tokens(layer, torch.cat(keys), torch.cat(values))
        if layer in caches[0].index:
            parts = [part[0] for cache in caches for part in cache.index[layer]]
            pages.write_index(layer, torch.cat(parts))
