"""LoRA adapters on ranks. Rank 0 sends the weights of an adapter when the adapter gets a slot. With tensor
parallelism each rank keeps its part. With context parallelism each rank keeps all weights.

Ranks do not read the adapter's folder, because its files may have changed since rank 0 read them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from safetensors.torch import load, save

from kvloom.models.lora import AdapterSlots, LoraAdapter, LowRankPair

from .messages import LoadAdapter

__all__ = ["RankAdapters", "adapter_messages"]

MESSAGE_BYTES = 16 << 20
"""A message contains weights of about this many bytes, or one larger matrix."""


def adapter_messages(slot: int, adapter: LoraAdapter) -> Iterator[LoadAdapter]:
    """Yield the messages that load an adapter into a slot of every rank."""
    some: dict[str, torch.Tensor] = {}
    size = 0
    for layer, pair in adapter.pairs.items():
        for which, weight in (("A", pair.a), ("B", pair.b)):
            if some and size + weight.nbytes > MESSAGE_BYTES:
                yield LoadAdapter(slot, save(some), False)
                some, size = {}, 0
            some[f"{which} {layer}"] = weight.contiguous()
            size += weight.nbytes
    yield LoadAdapter(slot, save(some), True)


class RankAdapters:
    """The adapters in the process of a rank."""

    def __init__(self, slots: AdapterSlots | None) -> None:
        """`slots` is None if the engine has no adapters."""
        self._slots = slots
        self._weights: dict[str, torch.Tensor] = {}

    def run(self, message: LoadAdapter) -> None:
        """Collect the weights of an adapter. After its last message, copy the part of this rank to the slot."""
        self._weights |= load(message.tensors)
        if not message.is_last:
            return
        assert self._slots is not None
        weights, self._weights = self._weights, {}
        layers = [name[2:] for name in weights if name.startswith("A ")]
        pairs = {layer: LowRankPair(weights[f"A {layer}"], weights[f"B {layer}"]) for layer in layers}
        rank = max(len(pair.a) for pair in pairs.values())
        self._slots.load(message.slot, LoraAdapter("of rank 0", "", rank, pairs))
