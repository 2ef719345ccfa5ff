"""The cache of one sequence in the form that modeling code expects, outside pages.

`SequenceCache` has a `DynamicCache` of transformers. Families with states in other places have their own subclass:

| family         | states are                                            | class                 |
|----------------|-------------------------------------------------------|-----------------------|
| DeepSeek V4    | in a `DynamicCache`, as buffers beside compressed K   | `DeepseekV4Cache`     |
| Qwen4          | in a `DynamicCache`, with positions and token ids     | `Qwen4Cache`          |
| RWKV           | a list of tensors that `forward` takes and returns    | `RwkvCache`           |
| xLSTM          | tensors in a cache class of its own                   | `XlstmCache`          |
| RecurrentGemma | attributes of its modules; K and V are in a cache     | `RecurrentGemmaCache` |
| OpenAI GPT     | not kept: its attention gets a cache of K and V       | `OpenAIGPTCache`      |

Encoder-decoder models have an `EncoderDecoderSequenceCache`. It also has the K and V of the encoder's tokens.

All tensors of states have a first dim of 1, the batch.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

__all__ = [
    "EncoderDecoderSequenceCache",
    "SequenceCache",
    "cache_argument",
    "encoder_outputs",
    "forward_arguments",
    "new_cache",
]

States = dict[int, dict[str, torch.Tensor]]
"""Tensors by layer and field name."""


def cache_argument(model: Any) -> str:
    """Return the name of the argument in which a model's `forward` takes the cache."""
    names = inspect.signature(model.forward).parameters
    return "cache_params" if "cache_params" in names else "past_key_values"


def forward_arguments(model: Any, tokens: torch.Tensor, start: int) -> dict[str, Any]:
    """Return the arguments that `generate()` would pass to compute `tokens` [1, tokens] from position `start` on,
    without the cache."""
    names = inspect.signature(model.forward).parameters
    length = start + tokens.shape[1]
    if (
        model.config.is_encoder_decoder
    ):  # its decoder counts positions itself; other arguments are the encoder's
        return {"decoder_input_ids": tokens, "use_cache": True}
    arguments: dict[str, Any] = {"input_ids": tokens, "use_cache": True}
    if "position_ids" in names:
        arguments["position_ids"] = torch.arange(start, length, device=tokens.device)[None]
    if "attention_mask" in names:
        arguments["attention_mask"] = torch.ones((1, length), dtype=torch.int64, device=tokens.device)
    return arguments


class SequenceCache:
    """One sequence's K, V and states in a `DynamicCache`, with layers of the classes that `generate()` would use. It
    records the tokens that the model writes.

    | field   | content                                                                     |
    |---------|-----------------------------------------------------------------------------|
    | written | by layer: new keys and values [1, heads, tokens, dim], one pair per call     |
    | index   | by layer: new keys of an indexer [1, tokens, dim], one tensor per call       |
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.written: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self.index: dict[int, list[torch.Tensor]] = {}
        self.cache = cache = self._new_cache()
        cache.update = partial(self._record, cache.update)
        if hasattr(cache, "update_indexer"):
            cache.update_indexer = partial(self._record_index, cache.update_indexer)
        for number, layer in enumerate(cache.layers):
            if hasattr(layer, "update_index"):  # a layer class that has an indexer
                layer.update_index = partial(self._record_head, layer.update_index, number)

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._model.config.get_text_config(decoder=True))

    def _record(self, update: Any, key: Any, value: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.written.setdefault(layer_idx, []).append((key, value))
        return update(key, value, layer_idx, *args, **kwargs)

    def _record_index(self, update: Any, keys: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.index.setdefault(layer_idx, []).append(keys)
        return update(keys, layer_idx, *args, **kwargs)

    def _record_head(self, update: Any, number: int, keys: torch.Tensor) -> Any:
        self.index.setdefault(number, []).append(keys[:, 0])  # [1, 1, tokens, dim]
        return update(keys)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the model's forward that contain the cache."""
        return {cache_argument(self._model): self.cache}

    def take_result(self, result: Any) -> None:
        """Store the states that a forward has returned. Does nothing for models whose states are in the cache."""

    def new_tokens(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the new keys and values of a layer, each [tokens, heads, dim]."""
        keys, values = zip(*self.written[layer], strict=True)
        return torch.cat(keys, 2)[0].transpose(0, 1), torch.cat(values, 2)[0].transpose(0, 1)

    def token_shapes(self, layer: int) -> tuple[torch.Size, torch.Size]:
        """Return the shapes of new keys and values, each [1, heads, tokens, dim]."""
        return tuple(x.transpose(0, 1)[None].shape for x in self.new_tokens(layer))  # type: ignore[return-value]

    def window(self, layer: int) -> int | None:
        """Return the window of a layer in tokens, including the token that is computed next. None means that the
        layer keeps all tokens."""
        return getattr(self.cache.layers[layer], "sliding_window", None)

    def fill_tokens(self, layer: int, tokens: Mapping[str, torch.Tensor], length: int) -> None:
        """Set the visible tokens of a layer, in a sequence of `length` tokens. `tokens` has the fields "k" and "v",
        or "latent". For a layer with an indexer, `tokens` also has "index". Each field is [tokens, …]."""
        found = dict(tokens)
        if "latent" in found:  # one head, in two parts
            rank = self._model.config.get_text_config().kv_lora_rank
            both = found["latent"][:, None]
            found.update(k=both[..., :rank], v=both[..., rank:])
        key, value = (found[name].transpose(0, 1)[None] for name in ("k", "v"))
        held = self.cache.layers[layer]
        held.lazy_initialization(key, value)
        held.keys, held.values = key, value
        if self.window(layer) is not None:
            held.cumulative_length = length
        if "index" not in found:
            return
        keys = found["index"][None]
        if hasattr(held, "idx_keys"):
            held.idx_keys = keys[:, None]
        else:
            held.lazy_initialization_indexer(keys)
            held.indexer_keys = keys

    def states(self) -> States:
        """Return the states of all layers that have states."""
        found: States = {}
        for number, layer in enumerate(self.cache.layers):
            for kind in ("conv", "recurrent"):
                for place, state in (getattr(layer, f"{kind}_states", None) or {}).items():
                    if state is not None:
                        found.setdefault(number, {})[f"{kind}_{place}" if place else kind] = state
        return found

    def fill_states(self, states: States) -> None:
        """Set the states of all layers that have states. Copies them."""
        for number, fields in states.items():
            layer = self.cache.layers[number]
            for name, state in fields.items():
                kind, _, place = name.partition("_")
                at = int(place or 0)
                layer.lazy_initialization(**{f"{kind}_states": state}, state_idx=at)
                getattr(layer, f"{kind}_states")[at].copy_(state)
                layer.has_previous_state[at] = True


class DeepseekV4Cache(SequenceCache):
    """The cache of DeepSeek V4. Some layers also store one compressed entry for each window of `compress_rate` tokens.
    In pages, the last token of a window contains the entry, after the key. The inputs of the compressor that belong to
    an unfinished window are stored as a state."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._start = 0
        self._entries: dict[tuple[int, str], list[tuple[int, torch.Tensor]]] = {}
        for number, layer in enumerate(self.cache.layers):
            if hasattr(layer, "compressed_kv"):
                record = partial(self._record_entries, layer.update_compressor_states, number)
                layer.update_compressor_states = record

    def _record_entries(self, update: Any, number: int, name: str, entries: torch.Tensor) -> Any:
        first = self.cache.layers[number].entry_count[name]
        self._entries.setdefault((number, name), []).append((first, entries))
        return update(name, entries)

    def window(self, layer: int) -> int | None:
        return None if hasattr(self.cache.layers[layer], "compressed_kv") else super().window(layer)

    def new_tokens(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, held = super().new_tokens(layer)[0], self.cache.layers[layer]
        parts = [keys[..., :0]]
        for name in getattr(held, "compressed_kv", ()):
            calls = self._entries[layer, name]
            slots = keys.new_zeros((len(keys), 1, calls[0][1].shape[2]))
            for first, entries in calls:
                for number in range(entries.shape[1]):
                    slots[(first + number + 1) * held.compress_rate - 1 - self._start, 0] = entries[0, number]
            parts.append(slots)
        return keys, torch.cat(parts, -1)

    def fill_tokens(self, layer: int, tokens: Mapping[str, torch.Tensor], length: int) -> None:
        self._start, held = length, self.cache.layers[layer]
        dim = self._model.config.get_text_config().head_dim
        keys, rest = tokens["latent"][:, :dim][None, None], tokens["latent"][None, :, dim:]
        held.lazy_initialization(keys, keys)
        held.keys = held.values = keys[:, :, -held.sliding_window + 1 :]
        held.cumulative_length = length
        if not hasattr(held, "compressed_kv"):
            return
        rate = held.compress_rate
        at = 0
        for name, width in zip(held.compressed_kv, (dim, rest.shape[2] - dim), strict=False):
            held.compressed_kv[name] = rest[:, rate - 1 :: rate, at : at + width]
            held.entry_count[name] = length // rate
            at += width

    def states(self) -> States:
        found: States = {}
        for number, layer in enumerate(self.cache.layers):
            for name in getattr(layer, "compressed_kv", ()):
                fields = found.setdefault(number, {})
                for kind in ("kv", "gate"):
                    left = getattr(layer, f"buffer_{kind}")[name]
                    if left is None:
                        return {}
                    padded = left.new_zeros((1, layer.compress_rate, left.shape[2]))
                    padded[:, : left.shape[1]] = left
                    fields[f"{name}_{kind}"] = padded
                    if hasattr(layer, "overlap_kv"):
                        before = getattr(layer, f"overlap_{kind}")[name]
                        empty = left.new_zeros((1, layer.compress_rate, left.shape[2] // 2))
                        fields[f"{name}_overlap_{kind}"] = empty if before is None else before
        return found

    def fill_states(self, states: States) -> None:
        for number, fields in states.items():
            layer = self.cache.layers[number]
            for name in layer.compressed_kv:
                for kind in ("kv", "gate"):
                    left = self._start % layer.compress_rate
                    getattr(layer, f"buffer_{kind}")[name] = fields[f"{name}_{kind}"][:, :left]
                    if hasattr(layer, "overlap_kv") and self._start >= layer.compress_rate:
                        getattr(layer, f"overlap_{kind}")[name] = fields[f"{name}_overlap_{kind}"]


class RwkvCache(SequenceCache):
    NAMES = ("mlp_input", "input", "numerator", "denominator", "maximum")

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._states: list[torch.Tensor] | None = None

    def arguments(self) -> dict[str, Any]:
        return {"state": self._states}

    def take_result(self, result: Any) -> None:
        self._states = result.state

    def states(self) -> States:
        parts = self._states or []
        layers = parts[0].shape[2] if parts else 0
        return {
            i: {name: part[:, :, i] for name, part in zip(self.NAMES, parts, strict=True)}
            for i in range(layers)
        }

    def fill_states(self, states: States) -> None:
        layers = [states[i] for i in range(len(states))]
        self._states = [torch.stack([layer[name] for layer in layers], -1) for name in self.NAMES]


class XlstmCache(SequenceCache):
    NAMES = ("memory", "normaliser", "maximum")

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        made_by = vars(sys.modules[type(model).__module__])["xLSTMCache"]
        weight = next(model.parameters())
        self._own = made_by(model.config, 1, dtype=weight.dtype, device=weight.device)

    def arguments(self) -> dict[str, Any]:
        return {"cache_params": self._own}

    def states(self) -> States:
        return {i: dict(zip(self.NAMES, parts, strict=True)) for i, parts in self._own.rnn_state.items()}

    def fill_states(self, states: States) -> None:
        for i, fields in states.items():
            for name, part in zip(self.NAMES, self._own.rnn_state[i], strict=True):
                part.copy_(fields[name])


class RecurrentGemmaCache(SequenceCache):
    def __init__(self, model: Any) -> None:
        super().__init__(model)
        layers = enumerate(model.model.layers)
        self._modules = {
            i: layer.temporal_block for i, layer in layers if hasattr(layer.temporal_block, "rg_lru")
        }
        for module in self._modules.values():  # its own first states have the wrong size if lru_width is set
            weight, width = module.conv_1d.weight, module.lru_width
            module.conv1d_state = weight.new_zeros(1, width, module.conv1d_width - 1)
            module.rg_lru.recurrent_states = weight.new_zeros(1, width, dtype=torch.float32)

    def states(self) -> States:
        return {
            i: {"conv": module.conv1d_state, "recurrent": module.rg_lru.recurrent_states}
            for i, module in self._modules.items()
        }

    def fill_states(self, states: States) -> None:
        for i, fields in states.items():
            self._modules[i].conv1d_state = fields["conv"]
            self._modules[i].rg_lru.recurrent_states = fields["recurrent"]


class OpenAIGPTCache(SequenceCache):
    """The cache of OpenAI GPT, whose modeling code has none. Its attention modules get another `_attn`, which adds the
    new keys and values to the cache of the sequence that is computed."""

    def arguments(self) -> dict[str, Any]:
        for number, block in enumerate(self._model.transformer.h):
            block.attn._attn = partial(self._attend, block.attn, number)
        return {}

    def take_result(self, result: Any) -> None:
        for block in self._model.transformer.h:
            del block.attn._attn  # the method of its class is left

    def _attend(
        self, module: Any, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
    ) -> list[torch.Tensor]:
        """Return causal attention of new queries over all tokens. Keys are [1, heads, dim, tokens]."""
        keys, values = self.cache.update(key.transpose(2, 3), value, layer)
        new, every = query.shape[2], keys.shape[2]
        scores = query @ keys.transpose(2, 3)
        if module.scale:
            scores = scores / math.sqrt(value.shape[-1])
        later = torch.ones(new, every, dtype=torch.bool, device=scores.device).triu(every - new + 1)
        return [scores.masked_fill(later, -1e4).softmax(-1) @ values]


class Qwen4Cache(SequenceCache):
    """The cache of Qwen4. The first layer with an indexer also stores the positions of all tokens. One of the
    convolution states (`conv_2`) contains token ids."""

    def fill_tokens(self, layer: int, tokens: Mapping[str, torch.Tensor], length: int) -> None:
        super().fill_tokens(layer, tokens, length)
        kinds = self._model.config.get_text_config().layer_types
        if layer == kinds.index("indexed_attention"):
            positions = torch.arange(length, device=tokens["k"].device)
            self.cache.layers[layer].indexer_position_ids = positions.expand(3, 1, -1)

    def fill_states(self, states: States) -> None:
        ids = "conv_2"
        super().fill_states(
            {i: {n: x.long() if n == ids else x for n, x in parts.items()} for i, parts in states.items()}
        )


def encoder_outputs(states: torch.Tensor) -> Any:
    """Return the encoder's states [1, tokens, hidden] in the form that modeling code expects."""
    from transformers.modeling_outputs import BaseModelOutput

    found = BaseModelOutput(last_hidden_state=states)
    object.__setattr__(found, "router_logits", None)  # encoders with experts also return these
    return found


class EncoderDecoderSequenceCache(SequenceCache):
    """The cache of one sequence of an encoder-decoder model. All layers of the decoder have full attention.

    The decoder reads the encoder's output through cross attention. `fill_encoder` sets the K and V of the encoder's
    tokens. If they are not set, the model computes them from the encoder's hidden states, which `set_encoder_states`
    sets. A new cache has the hidden states of one token, which are zeros.
    """

    def __init__(self, model: Any) -> None:
        from transformers import DynamicCache, EncoderDecoderCache

        super().__init__(model)
        self._both = EncoderDecoderCache(self.cache, DynamicCache())
        self._states = self._blank_states(1)

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache()

    def _blank_states(self, tokens: int) -> torch.Tensor:
        weight: torch.Tensor = self._model.get_input_embeddings().weight
        return weight.new_zeros((1, 1, 1)).expand(1, tokens, self._model.config.hidden_size)

    def set_encoder_states(self, states: torch.Tensor) -> None:
        """Set the hidden states of the encoder [tokens, hidden]."""
        self._states = states[None]

    def fill_encoder(self, tokens: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Set the keys and values of the encoder's tokens by layer, each [heads, tokens, dim]."""
        for layer in sorted(tokens):
            key, value = tokens[layer]
            self._both.cross_attention_cache.update(key[None], value[None], layer)
            self._both.is_updated[layer] = True
            self._states = self._blank_states(key.shape[1])  # only their number is read

    def encoder_tokens(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Return the keys and values of the encoder's tokens by layer, each [tokens, heads, dim]."""
        layers = enumerate(self._both.cross_attention_cache.layers)
        return {i: (held.keys[0].transpose(0, 1), held.values[0].transpose(0, 1)) for i, held in layers}

    def arguments(self) -> dict[str, Any]:
        return {"past_key_values": self._both, "encoder_outputs": encoder_outputs(self._states)}

    def window(self, layer: int) -> int | None:
        return None

    def fill_tokens(self, layer: int, tokens: Mapping[str, torch.Tensor], length: int) -> None:
        key, value = (tokens[name].transpose(0, 1)[None] for name in ("k", "v"))
        type(self.cache).update(self.cache, key, value, layer)  # without a record


_CLASSES: dict[str, type[SequenceCache]] = {
    "deepseek_v4": DeepseekV4Cache,
    "qwen4_exp": Qwen4Cache,
    "qwen4_exp_text": Qwen4Cache,
    "openai-gpt": OpenAIGPTCache,
    "recurrent_gemma": RecurrentGemmaCache,
    "rwkv": RwkvCache,
    "xlstm": XlstmCache,
}


def new_cache(model: Any) -> SequenceCache:
    """Return an empty cache for one sequence of a model."""
    if model.config.is_encoder_decoder:
        return EncoderDecoderSequenceCache(model)
    return _CLASSES.get(model.config.model_type, SequenceCache)(model)
