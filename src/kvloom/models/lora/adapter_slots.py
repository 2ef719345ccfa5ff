"""The adapters on the device: stacked weights in fixed buffers, as low-rank terms of the model's linear layers.

    slot 0   no adapter: the base model
    slot n   the weights of one adapter, in every linear layer that adapters may target

The buffers are allocated once, so that CUDA graphs stay valid when adapters are loaded and removed. A step without
adapters computes no terms. This module does not decide which adapter has a slot.

With tensor parallelism a rank has a part of each adapter. If the outputs of a layer are cut, the rank has the matching
rows of B. If the inputs of a layer are cut, the rank has the matching columns of A, and the sum over ranks also adds up
the terms.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kvloom.combinations import refused
from kvloom.kernels.lora import MIN_RANK, AdapterRows, LowRankWeights, add_low_rank
from kvloom.models.fusion import Product, product_of
from kvloom.models.paged import is_dense, keeps_latents
from kvloom.models.sharding import LayerCut, cut_of, is_summed

from .adapter_files import AdapterError, LoraAdapter, LowRankPair

__all__ = ["AdapterSlots"]

MAX_RANK = 512
OWNER = "_kvloom_adapter_slots"
"""Name of the attribute of a model that contains the `AdapterSlots` of the last step. The products of the model have
the terms of these slots."""
_LAYER = re.compile(r"(?:^|\.)((?:layers|h|blocks)\.\d+\..+)$")
"""The part of a layer's name that does not depend on the modules around the decoder."""
_VISION = re.compile(r"vision|visual|image|projector")
"""Names of modules that process images."""


class _LowRankTerm:
    """The low-rank term of one product. It is a `Term` of `models/fusion`."""

    def __init__(self, slots: AdapterSlots, weights: LowRankWeights) -> None:
        self._slots, self.weights = slots, weights
        self.is_called = False
        """Whether the product was computed since the engine started."""

    def add(self, x: torch.Tensor, out: torch.Tensor, part: int | None = None) -> None:
        self.is_called = True
        rows = self._slots.rows_of(x.shape[:-1].numel())
        if rows is not None:
            add_low_rank(out, x, self.weights, rows, part, self._slots.invariant)


class AdapterSlots:
    """Slots for `count` adapters of up to `rank` dimensions. With `targets`, adapters may change only linear layers
    with these names, such as q_proj. Fewer targets need less memory.

    Call `attach` after the model was fused. `rank` is rounded up to a power of two."""

    def __init__(self, model: Any, count: int, rank: int, targets: Sequence[str] = ()) -> None:
        if count < 1:
            raise ValueError(f"max_loras {count} must be at least 1")
        if not 1 <= rank <= MAX_RANK:
            raise ValueError(f"max_lora_rank {rank} must be from 1 to {MAX_RANK}")
        self._model, self.count = model, count
        self.rank = max(MIN_RANK, 1 << (rank - 1).bit_length())
        self._rows: tuple[AdapterRows, ...] = ()
        self.invariant = False
        """Whether the bits of a token's result must not depend on the other tokens of a step."""
        self._layers, self._refused = _find_layers(model)
        if targets:
            unknown = sorted(set(targets) - {name.rpartition(".")[2] for name in self._layers})
            if unknown:
                known = sorted({name.rpartition(".")[2] for name in self._layers})
                raise ValueError(
                    f"lora_targets {', '.join(unknown)}: the model has no such layers: use {', '.join(known)}"
                )
            kept = {name: one for name, one in self._layers.items() if name.rpartition(".")[2] in targets}
            for name in self._layers.keys() - kept.keys():
                self._refused[name] = (
                    f"layer {name} is not one of lora_targets ({', '.join(targets)}): add it there"
                )
            self._layers = kept
        if not self._layers:
            found = refused("lora, no linear layers", model=type(model).__name__)
            raise AdapterError(next(iter(self._refused.values()), found))
        self._places: dict[str, tuple[_LowRankTerm, int]] = {}
        self._terms: list[tuple[Product, _LowRankTerm]] = []

    @property
    def bytes(self) -> int:
        """Bytes of all slots, after `attach`."""
        return sum(weights.bytes for weights in self._weights)

    @property
    def _weights(self) -> list[LowRankWeights]:
        return [term.weights for _, term in self._terms]

    def attach(self) -> None:
        """Allocate the slots. A target layer is a layer that adapters may change. Each product that computes target
        layers gets one low-rank term, which all these layers share. Later calls have no effect."""
        if self._terms:
            return
        names = {id(layer): name for name, layer in self._layers.items()}
        for product in {id(one): one for one in map(product_of, self._layers.values())}.values():
            weight = product.weight
            weights = LowRankWeights(self.count, self.rank, weight.shape[1], product.sizes, weight)
            term = _LowRankTerm(self, weights)
            self._terms.append((product, term))
            for part, one in enumerate(product.layers):
                if id(one) in names:
                    self._places[names[id(one)]] = term, part

    @contextmanager
    def step(self, *rows: AdapterRows) -> Iterator[None]:
        """Return a context for one execution of the model, in which tokens use the adapters of `rows`. Without `rows`,
        no adapters are used. If ranks divide the tokens of a step, `rows` has two elements: one for layers that get all
        tokens, and one for layers that get only the tokens of this rank.

        On entry, the low-rank terms of this object's slots are set in the model, because several engines with their own
        slots may share the model.
        """
        if vars(self._model).get(OWNER) is not self:
            for product, term in self._terms:
                product.term = term
            vars(self._model)[OWNER] = self
        self._rows = rows
        try:
            yield
        finally:
            self._rows = ()

    def rows_of(self, tokens: int) -> AdapterRows | None:
        """Return the adapters of the tokens that a layer computes. `tokens` is their number. None if the step uses no
        adapter."""
        for rows in self._rows:
            if rows.count == tokens:
                return rows
        return self._rows[0] if self._rows else None  # `add_low_rank` refuses the layer

    def refuse_uncalled(self) -> None:
        """Refuse adapters for the layers that no step has called. Modeling code reads the weights of such layers
        directly, so an adapter would have no effect. Call this method after the first step."""
        for name, (term, _) in self._places.items():
            if not term.is_called:
                del self._layers[name]
                self._refused[name] = refused("lora, uncalled layer", layer=name)

    def check(self, adapter: LoraAdapter) -> None:
        """Raise AdapterError if an adapter does not fit the model or the slots."""
        if adapter.rank > self.rank:
            raise AdapterError(
                f"adapter {adapter.path} has rank {adapter.rank}, and the slots have rank {self.rank}: "
                "raise max_lora_rank (--max-lora-rank)"
            )
        self._pairs(adapter)

    def load(self, slot: int, adapter: LoraAdapter) -> None:
        """Copy the weights of an adapter to a slot. On a GPU the copies run after all steps that were launched
        before. Takes milliseconds per 100 MB of weights."""
        for weights in self._weights:
            weights.clear(slot)
        for name, pair in self._pairs(adapter).items():
            term, part = self._places[name]
            term.weights.load(slot, part, pair.a, pair.b)

    def _pairs(self, adapter: LoraAdapter) -> dict[str, LowRankPair]:
        """Return the weights of an adapter by the name of the layer in this model. If the layer is cut, return the part
        of this rank. Raises AdapterError if a layer is missing or has another shape."""
        found = {}
        for given, pair in adapter.pairs.items():
            name = self._name_of(given, adapter)
            if name in found:
                raise AdapterError(f"adapter {adapter.path}: two of its layers have the name {name}")
            layer, shapes = self._layers[name], (pair.a.shape[1], pair.b.shape[0])
            cut = cut_of(layer) or LayerCut(layer.in_features, layer.out_features, [], [])
            if shapes != (cut.inputs, cut.outputs):
                raise AdapterError(
                    f"adapter {adapter.path}: layer {given} has {shapes[0]} inputs and {shapes[1]} outputs, and the "
                    f"model's layer has {cut.inputs} and {cut.outputs}: it was trained on another model"
                )
            found[name] = LowRankPair(cut.of_inputs(pair.a), cut.of_outputs(pair.b))
        return found

    def _name_of(self, given: str, adapter: LoraAdapter) -> str:
        short = _short(given)
        if _VISION.search(given):
            raise AdapterError(f"adapter {adapter.path}: " + refused("lora, vision", layer=given))
        if short in self._layers:
            return short
        last = given.rpartition(".")[2]
        if last in ("lm_head", "embed_tokens", "wte"):
            reason = refused("lora, embeddings", layer=given)
        elif ".experts." in f".{given}.":
            reason = refused("lora, experts", layer=given)
        elif short in self._refused:
            reason = self._refused[short]
        else:
            known = sorted({name.rpartition(".")[2] for name in self._layers})
            reason = f"the model has no linear layer {given}: adapters may target {', '.join(known)}"
        raise AdapterError(f"adapter {adapter.path}: {reason}")


def _short(name: str) -> str:
    """Return the name of a layer from its decoder layer on, such as `layers.3.mlp.up_proj`. Other names are returned
    unchanged.
    """
    match = _LAYER.search(name)
    return name if match is None else match[1]


def _find_layers(model: Any) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Return two dictionaries by layer name. The first has the linear layers that adapters may target. The second
    has, for each refused linear layer, the reason why adapters may not target it."""
    decoder, output = model.get_decoder(), model.get_output_embeddings()
    layers: dict[str, nn.Linear] = {}
    refusals: dict[str, str] = {}
    cross = {
        id(part) for layer in decoder.modules() if hasattr(layer, "cross_attn") for part in layer.modules()
    }
    for owner_name, owner in decoder.named_modules():
        for name, layer in owner.named_children():
            if layer is output or not hasattr(layer, "in_features"):
                continue
            full = _short(f"{owner_name}.{name}".removeprefix("."))
            if not is_dense(layer) and not is_summed(layer):
                refusals[full] = refused("lora, quantised weights", layer=full)
            elif name == "kv_b_proj" and keeps_latents(owner):
                refusals[full] = refused("lora, kv_b_proj", layer=full)
            elif "CrossAttention" in type(owner).__name__ and name in ("k_proj", "v_proj"):
                refusals[full] = refused("lora, cross-attention", layer=full)
            elif id(owner) in cross:
                refusals[full] = refused("lora, cross-attention layer", layer=full)
            elif ".experts." in f".{full}.":
                refusals[full] = refused("lora, experts", layer=full)
            else:
                layers[full] = layer
    return layers, refusals
