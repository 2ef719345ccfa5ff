"""Computes a lower bound of a workload's time on an H200. An operation takes the time to move its bytes or to compute
its FLOPs, whichever is longer. The bound is the sum over all operations. A pass is one forward pass of the model.

    operation  counted                                                  bytes                    FLOPs
    dense      every matrix but embeddings and head, over all tokens    weights, once per pass   2 per weight and token
    experts    the experts that the pass's tokens choose (expected)     their weights            2 per weight and choice
    head       logits of one position per request                       its weights              2 per weight and position
    attend     query-key pairs that each layer's visibility allows      K and V read             4 per head, dimension and pair
    state      recurrent states of all sequences                        states, read and written 0

The bound assumes that one pass computes all prompts, and that all requests then decode together. A shared prefix is
computed once, and read once per pass. All conversations are in the same turn. Norms, rotations, activations, sampling,
launches and the host take no time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvloom.core import LayerSpec, Visibility
from kvloom.models.specs import model_spec

from .shapes import build
from .workloads import Workload

__all__ = ["FLOP_RATE", "READ_RATE", "LowerBound", "Roofline"]

READ_RATE = 4.5e12
FLOP_RATE = 770e12


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One pass of the model over `rows` sequences. Each has `cached` cached tokens, and `new` tokens to compute.

    The sequences form `prefixes` groups. Sequences of one group share their first `shared` cached tokens.
    """

    rows: int
    cached: int
    new: int
    prefixes: int = 0
    shared: int = 0


@dataclass(frozen=True, slots=True)
class LowerBound:
    """The lower bound of a workload: seconds of prefill and of decode, FLOPs of prefill, and bytes that decode
    reads."""

    prefill: float
    decode: float
    prefill_flops: float
    decode_bytes: float

    @property
    def seconds(self) -> float:
        return self.prefill + self.decode


class Roofline:
    """Lower bounds of one model's workloads. The model is built on the meta device, which takes a second and no
    memory."""

    def __init__(self, config: Any, dtype: torch.dtype, kv_dtype: str | None = None) -> None:
        model = build(config, dtype, "meta")
        self.weight_bytes = dtype.itemsize
        embedding = model.get_input_embeddings().weight
        self.head = embedding.numel()  # counted in full whether tied or not
        apart = {id(embedding), id(model.get_output_embeddings().weight)}
        sizes = [
            (name, p.numel()) for name, p in model.named_parameters() if p.ndim > 1 and id(p) not in apart
        ]
        self.experts = sum(size for name, size in sizes if ".experts." in name)
        self.dense = sum(size for _, size in sizes) - self.experts
        self.count = int(getattr(config, "num_experts", 0) or 0) if self.experts else 0
        self.picked = int(config.num_experts_per_tok) if self.count else 0
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.pair_flops = 4 * config.num_attention_heads * width
        kept = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
        spec = model_spec(
            {**config.to_dict(), "dtype": str(dtype).removeprefix("torch.")}, None, kv_dtype or kept
        )
        self.layers: dict[LayerSpec, int] = {}
        for layer in spec.layers.values():
            self.layers[layer] = self.layers.get(layer, 0) + 1

    def of(self, work: Workload) -> LowerBound:
        """Return the lower bound of a workload."""
        prompts, decode = (
            np.array([self._cost(step) for step in steps], dtype=np.float64).reshape(-1, 3).sum(0).tolist()
            for steps in (self._prompts(work), self._decodes(work))
        )
        return LowerBound(prompts[0], decode[0], prompts[1], decode[2])

    def _turns(self, work: Workload) -> Iterator[tuple[int, int]]:
        """Yield the numbers of cached and of new tokens of each turn's prompt. The last token of an answer is not
        cached, so it is a new token of the next prompt."""
        before, new = work.prefix, work.prompt
        for _ in range(work.turns):
            yield before, new
            before += new + work.output - 1
            new = work.more + 1

    def _prompts(self, work: Workload) -> Iterator[ForwardPass]:
        if work.prefixes and not work.warm:
            yield ForwardPass(work.prefixes, 0, work.prefix)
        for before, new in self._turns(work):
            yield ForwardPass(work.requests, before, new, work.prefixes, work.prefix)

    def _decodes(self, work: Workload) -> Iterator[ForwardPass]:
        for before, new in self._turns(work):
            for step in range(work.output - 1):
                yield ForwardPass(work.requests, before + new + step, 1, work.prefixes, work.prefix)

    def _cost(self, step: ForwardPass) -> tuple[float, float, float]:
        """Return the seconds, FLOPs and bytes of a pass."""
        tokens = step.rows * step.new
        operations = [
            (self.dense * self.weight_bytes, 2.0 * self.dense * tokens),
            (self.head * self.weight_bytes, 2.0 * self.head * step.rows),
        ]
        if self.count:
            share = self.picked / self.count
            touched = 1 - (1 - share) ** tokens
            operations.append(
                (self.experts * touched * self.weight_bytes, 2.0 * self.experts * share * tokens)
            )
        for layer, count in self.layers.items():
            if layer.unit == "state":
                operations.append((2.0 * layer.bytes * step.rows * count, 0.0))
            else:
                read, pairs = tokens_read(layer.visibility, step)
                operations.append((read * layer.bytes * count, pairs * self.pair_flops * count))
        seconds = sum(max(moved / READ_RATE, flops / FLOP_RATE) for moved, flops in operations)
        return seconds, sum(flops for _, flops in operations), sum(moved for moved, _ in operations)


def tokens_read(span: Visibility, step: ForwardPass) -> tuple[int, int]:
    """Return how many tokens' K and V a layer reads in a pass, and the number of its query-key pairs. A token of a
    shared prefix is read only once for all sequences of its group."""
    positions = np.arange(step.cached, step.cached + step.new)
    pairs = int((positions + 1 - span.first_visible_each(positions)).sum()) * step.rows
    first, end = span.first_visible(step.cached), step.cached + step.new
    common = max(0, step.shared - first)
    return step.rows * (end - first - common) + step.prefixes * common, pairs
