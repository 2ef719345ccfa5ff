"""Models that run on pages only with transformers' own cache, one sequence after the other.

Most models run once on the packed tokens of a step, and their attention reads pages (`attention`). Some
models cannot: their attention is written inside their modules, adds a bias or a mask of its own, or selects
tokens. Such a model runs once for each sequence of a step:

    fill    a cache (`sequence_cache`) gets the visible K and V, and the states, from pages. In an encoder-decoder
            model, it also gets the K and V of the encoder's tokens
    run     the modeling code computes the sequence's new tokens with this cache, as in `generate()`
    store   new K and V, and the new states, are written to pages

Pages, prefix cache, tiers and quantised K and V work as for other models. A step takes longer, because its
sequences are not computed together. There are no CUDA graphs.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

from kvloom.models.specs import ModelError

from .cross_attention import read_field
from .pages import Pages
from .sequence_cache import EncoderDecoderSequenceCache, SequenceCache, forward_arguments, new_cache

__all__ = ["run_separately", "runs_separately"]

MARK = "runs_separately"
"""Name of the attribute that `run_separately` sets in a model that it has changed."""
TRIAL_PARTS = (5, 1, 1, 6)
"""Sizes in tokens of the parts into which `try_splits` splits a prompt."""


def runs_separately(model: Any) -> bool:
    """Return whether the sequences of a step run one after the other, with transformers' own cache."""
    return getattr(model, MARK, False)


def run_separately(model: Any) -> None:
    """Make a model compute a step one sequence at a time. Repeated calls are allowed. The first call tests the model:
    it computes a short prompt, whole and in several parts. Raises ModelError if the logits differ even when the parts
    are computed token by token."""
    if runs_separately(model):
        return
    forward = _Separate(model)
    forward.try_splits()
    setattr(model, MARK, True)
    model.forward = forward


class _Separate:
    """The forward of a model whose sequences run one after the other."""

    def __init__(self, model: Any) -> None:
        self._model, self._inner = model, model.forward
        self._singly = False
        """Whether modeling code continues a sequence only with single tokens."""
        self.__signature__ = inspect.signature(model.forward)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        pages = keywords.get("pages") or keywords.get("cache_params")
        if not isinstance(pages, Pages):
            return self._inner(*args, **keywords)
        batch = pages.batch
        if batch.trees is not None or (batch.drafts and pages.has_states):
            raise ModelError(f"{type(self._model).__name__} cannot compute draft trees, or states of drafts")
        caches, logits = [], []
        for row, (begin, end) in enumerate(pairwise(batch.bounds)):
            start = batch.sizes[row] - (end - begin)
            cache = new_cache(self._model)
            if isinstance(cache, EncoderDecoderSequenceCache):
                _fill_encoder(pages, cache, row, self._model.dtype)
            if start:
                _fill(pages, cache, row, start, self._model.dtype)
            logits.append(self.compute(cache, batch.tokens[begin:end], start))
            _store_states(pages, cache, row)
            caches.append(cache)
        _store_tokens(pages, caches)
        every, keep = torch.cat(logits), keywords.get("logits_to_keep", 0)
        return SimpleNamespace(logits=(every[keep] if isinstance(keep, torch.Tensor) else every)[None])

    def compute(self, cache: SequenceCache, tokens: torch.Tensor, start: int) -> torch.Tensor:
        """Return the logits of new tokens, from position `start` on, and add the tokens to the cache."""
        singly = start and self._singly
        logits = []
        for at in range(0, len(tokens), 1 if singly else len(tokens)):
            part = tokens[None, at : at + 1] if singly else tokens[None]
            result = self._inner(**forward_arguments(self._model, part, start + at), **cache.arguments())
            cache.take_result(result)
            logits.append(result.logits[0])
        return torch.cat(logits)

    @torch.inference_mode()
    def try_splits(self) -> None:
        """Compute a prompt in one part and in several parts, to learn how the model can continue a sequence. Some
        modeling code can continue its states only with single tokens. Raises ModelError if the logits differ even
        with single tokens, for example because attention is not causal. Such a model cannot resume a cached prefix."""
        weight = self._model.get_input_embeddings().weight
        half = len(weight) // 2  # avoids special tokens, which often have the first ids
        tokens = half + torch.arange(sum(TRIAL_PARTS), device=weight.device) * 3 % half
        whole = self.compute(new_cache(self._model), tokens, 0)
        limit = float(whole.std()) * torch.finfo(whole.dtype).eps ** 0.5
        try:
            difference = self._difference(whole, tokens)
        except Exception:  # noqa: BLE001 (modeling code checks its arguments in many ways)
            difference = float("inf")
        if difference <= limit:
            return
        self._singly = True
        difference = self._difference(whole, tokens)
        if not difference <= limit:
            raise ModelError(
                f"{type(self._model).__name__} computes other logits if a prompt is split: they differ by "
                f"{difference:.2g} on average, and the limit is {limit:.2g}. Its code in this version of transformers "
                "cannot resume a prefix"
            )

    def _difference(self, whole: torch.Tensor, tokens: torch.Tensor) -> float:
        """Return the mean difference between the logits of a prompt computed at once (`whole`) and computed in
        several parts."""
        cache, found, start = new_cache(self._model), [], 0
        for part in torch.split(tokens, list(TRIAL_PARTS)):
            found.append(self.compute(cache, part, start))
            start += len(part)
        return float((whole - torch.cat(found)).abs().mean())


def _fill(pages: Pages, cache: SequenceCache, row: int, start: int, dtype: torch.dtype) -> None:
    """Copy the data of one sequence from pages to an empty cache: K and V of the tokens that are visible at position
    `start`, and the states. `row` is the index of the sequence in the step."""
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


def _fill_encoder(pages: Pages, cache: EncoderDecoderSequenceCache, row: int, dtype: torch.dtype) -> None:
    """Copy the K and V of the encoder's tokens from media pages to an empty cache. Does nothing for a sequence without
    an encoder input, as in a trial step."""
    seen = pages.batch.seen
    if seen is None or not len(seen.parts[row].real):
        return
    part = seen.parts[row]
    cache.fill_encoder(
        {
            layer: (
                read_field(view.fields, "k", part.pages[column], part.real, dtype),
                read_field(view.fields, "v", part.pages[column], part.real, dtype),
            )
            for layer, (view, column) in pages.cross_views.items()
        }
    )


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
