"""Models that run on pages only with transformers' own cache, one sequence after the other.

Most models run once on the packed tokens of a step, and their attention reads pages (`attention`). Some models cannot:
their attention is written inside their modules, adds a bias or a mask of its own, or selects tokens. For each sequence
of a step, such a model runs by itself:

    fill    a `DynamicCache` gets K and V that are visible, and states, from pages
    run     the modeling code computes the sequence's new tokens with this cache, as in `generate()`
    store   new K and V, and the new states, are written to pages

Pages, prefix cache, tiers and quantised K and V work as for other models. A step takes longer, because sequences do not
share it. There are no CUDA graphs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from kvloom.kernels.memory import LayerView
from kvloom.models.specs import ModelError

from .pages import Pages

__all__ = [
    "RecordedCache",
    "cache_argument",
    "forward_arguments",
    "new_cache",
    "run_separately",
    "runs_separately",
    "state_tensors",
]

MARK = "runs_separately"
"""The attribute of a model that `run_separately` has changed."""


def runs_separately(model: Any) -> bool:
    """Return whether the sequences of a step run one after the other, with transformers' own cache."""
    return getattr(model, MARK, False)


@dataclass(slots=True)
class RecordedCache:
    """One sequence's cache: a `DynamicCache` of transformers (`cache`), and all that the model has passed to it.

    | field         | content                                                                    |
    |---------------|----------------------------------------------------------------------------|
    | written       | by layer: new keys and values [1, heads, tokens, dim], one pair per call    |
    | index         | by layer: new keys of an indexer [1, tokens, dim], one tensor per call      |
    """

    cache: Any
    written: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)
    index: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def tokens(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new keys and values of a layer, each [tokens, heads, dim]."""
        keys, values = zip(*self.written[layer], strict=True)
        return tuple(torch.cat(parts, 2)[0].transpose(0, 1) for parts in (keys, values))  # type: ignore[return-value]


def new_cache(config: Any) -> RecordedCache:
    """Return an empty cache for a model, with layers of the classes that `generate()` would use."""
    from transformers import DynamicCache

    recorded = RecordedCache(DynamicCache(config=config.get_text_config(decoder=True)))
    cache = recorded.cache
    update, update_indexer = cache.update, getattr(cache, "update_indexer", None)

    def record(key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        recorded.written.setdefault(layer_idx, []).append((key, value))
        return update(key, value, layer_idx, *args, **kwargs)

    def record_index(keys: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        recorded.index.setdefault(layer_idx, []).append(keys)
        return update_indexer(keys, layer_idx, *args, **kwargs)

    cache.update, cache.update_indexer = record, record_index
    for index, layer in enumerate(cache.layers):
        if hasattr(layer, "update_index"):  # the class of another indexer, with keys [1, 1, tokens, dim]
            layer.update_index = partial(_record_head, recorded, index, layer.update_index)
    return recorded


def _record_head(recorded: RecordedCache, index: int, update: Any, keys: torch.Tensor) -> Any:
    recorded.index.setdefault(index, []).append(keys[:, 0])
    return update(keys)


def forward_arguments(model: Any, tokens: torch.Tensor, start: int) -> dict[str, Any]:
    """Return the arguments that `generate()` would pass to compute `tokens` [1, tokens] from position `start` on."""
    names = inspect.signature(model.forward).parameters
    length = start + tokens.shape[1]
    arguments: dict[str, Any] = {"input_ids": tokens, "use_cache": True}
    if "position_ids" in names:
        arguments["position_ids"] = torch.arange(start, length, device=tokens.device)[None]
    if "attention_mask" in names:
        arguments["attention_mask"] = torch.ones((1, length), dtype=torch.int64, device=tokens.device)
    return arguments


def cache_argument(model: Any) -> str:
    """Return the name of the cache in the arguments of a model's forward."""
    names = inspect.signature(model.forward).parameters
    return "cache_params" if "cache_params" in names else "past_key_values"


def run_separately(model: Any) -> None:
    """Make a model run each sequence of a step by itself. Repeated calls are allowed."""
    if runs_separately(model):
        return
    setattr(model, MARK, True)
    model.forward = _Separate(model)


def state_tensors(layer: Any) -> Iterator[tuple[str, dict[int, torch.Tensor | None], int]]:
    """Yield the states of one layer of transformers' cache: the field name of our pages, and the place of the tensor."""
    for kind in ("conv", "recurrent"):
        states = getattr(layer, f"{kind}_states", None) or {}
        for number in states:
            yield (f"{kind}_{number}" if number else kind), states, number


class _Separate:
    """The forward of a model whose sequences run one after the other."""

    def __init__(self, model: Any) -> None:
        self._model, self._inner = model, model.forward
        self._argument = cache_argument(model)
        self.__signature__ = inspect.signature(model.forward)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        pages = keywords.get(self._argument)
        if not isinstance(pages, Pages):
            return self._inner(*args, **keywords)
        batch, keep = pages.batch, keywords.get("logits_to_keep", 0)
        if batch.trees is not None or (batch.drafts and pages.has_states):
            raise ModelError(f"{type(self._model).__name__} runs without draft trees and draft states")
        caches, logits, found = [], [], None
        for row, (begin, end) in enumerate(pairwise(batch.bounds)):
            start = batch.sizes[row] - (end - begin)
            recorded = new_cache(self._model.config)
            if start:
                _fill(self._model, pages, recorded.cache, row, start)
            # Modeling code may continue a state only with single tokens.
            step = 1 if pages.has_states and start else end - begin
            for at in range(begin, end, step):
                tokens = batch.tokens[None, at : at + step]
                arguments = forward_arguments(self._model, tokens, start + at - begin)
                found = self._inner(**arguments, **{self._argument: recorded.cache})
                logits.append(found.logits[0])
            caches.append(recorded)
            _store_states(pages, recorded.cache, row)
        _store_tokens(pages, caches)
        every = torch.cat(logits)
        found.logits = (every if isinstance(keep, int) and keep == 0 else every[keep])[None]
        return found


def _fill(model: Any, pages: Pages, cache: Any, row: int, start: int) -> None:
    """Copy the visible tokens before position `start`, and the states, from pages to an empty cache."""
    for index, layer in enumerate(cache.layers):
        if pages.has_tokens(index):
            window = getattr(layer, "sliding_window", None)
            first = 0 if window is None else max(0, start - window + 1)
            found = pages.read_tokens(index, row, first, start, model.dtype)
            if "latent" in found:  # one head, in two parts
                rank = model.config.get_text_config().kv_lora_rank
                both = found["latent"][:, None]
                found.update(k=both[..., :rank], v=both[..., rank:])
            key, value = (found[name].transpose(0, 1)[None] for name in ("k", "v"))
            layer.lazy_initialization(key, value)
            layer.keys, layer.values = key, value
            if window is not None:
                layer.cumulative_length = start
            if "index" in found:
                keys = found["index"][None]
                if hasattr(layer, "idx_keys"):
                    layer.idx_keys = keys[:, None]
                else:
                    layer.lazy_initialization_indexer(keys)
                    layer.indexer_keys = keys
        if pages.has_state(index):
            view = pages.state_view(index)
            page = _state_page(pages, view, row)
            for name, states, number in state_tensors(layer):
                if name in view.fields:
                    kind = f"{name.split('_')[0]}_states"
                    tensor = view.fields[name][page][None].clone()
                    layer.lazy_initialization(**{kind: tensor}, state_idx=number)
                    states[number].copy_(tensor)  # type: ignore[union-attr]
                    layer.has_previous_state[number] = True


def _store_states(pages: Pages, cache: Any, row: int) -> None:
    for index, layer in enumerate(cache.layers):
        if not pages.has_state(index):
            continue
        view = pages.state_view(index)
        page = _state_page(pages, view, row)
        for name, states, number in state_tensors(layer):
            if name in view.fields:
                view.fields[name][page] = states[number][0].to(view.fields[name].dtype)  # type: ignore[index]


def _store_tokens(pages: Pages, caches: list[RecordedCache]) -> None:
    """Write the new keys and values of all sequences of a step to their slots."""
    for index in caches[0].written:
        keys, values = zip(*(recorded.tokens(index) for recorded in caches), strict=True)
        pages.write_tokens(index, torch.cat(keys), torch.cat(values))
        if index in caches[0].index:
            parts = [part[0] for recorded in caches for part in recorded.index[index]]
            pages.write_index(index, torch.cat(parts))


def _state_page(pages: Pages, view: LayerView, row: int) -> int:
    return int(pages.batch.states[view.group][view.run][row])
