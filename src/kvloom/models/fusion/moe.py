"""Mixtures of experts in Hugging Face modules, computed as grouped matrix products.

| found in a model                                              | replaced by                                       |
|---------------------------------------------------------------|---------------------------------------------------|
| experts with `gate_up_proj`, `down_proj` of [expert, out, in] | two grouped products; the host does not wait      |
| routers: softmax or sigmoid of one product, top-k             | the product, and one launch for all the rest      |
| blocks of a router, experts, and shared experts               | the two rows above; the last launch also adds the |
|                                                               | residual                                          |

Each replacement is first compared on random input. A module with different results is not changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional

from kvloom.kernels.fused import Activation, linear_float32
from kvloom.kernels.moe import (
    Routing,
    candidate_tiles,
    choose_experts,
    expert_outputs,
    fused_moe,
    sum_outputs,
)
from kvloom.models.paged import is_dense_weight

__all__ = ["FusedBlock", "fuse_block", "fuse_experts", "fuse_router"]

ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh")
ROUTER_TOLERANCE = 1e-5
"""Largest relative difference between the results of a router and of its fused form. Tensor cores round float32 sums
more coarsely than other arithmetic units."""


def fuse_experts(module: Any) -> bool:
    """Replace the experts of a module by grouped products if the results are the same. Return whether they were
    replaced.
    """
    if getattr(module, "_is_expert_parallel", False):
        return False  # its calls need all ranks
    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    if gate_up is None or not is_dense_weight(gate_up) or gate_up.ndim != 3:
        return False
    if down is None or not is_dense_weight(down):
        return False
    count, both, dim = gate_up.shape
    if down.shape != (count, dim, both // 2) or not (gate_up.is_contiguous() and down.is_contiguous()):
        return False
    draw = torch.Generator().manual_seed(dim)
    picked = min(2, count)
    # Some rows have large values, so that the test notices a clamp in the gate.
    sizes = torch.tensor([1.0, 1.0, 8.0, 64.0, 512.0])
    x = (torch.randn(5, dim, generator=draw) * sizes[:, None]).to(gate_up.device, gate_up.dtype)
    index = torch.stack([torch.randperm(count, generator=draw)[:picked] for _ in x]).to(x.device)
    weights = torch.rand(5, picked, generator=draw).to(x.device, x.dtype)
    try:
        wanted = module(x, index, weights)
    except (TypeError, RuntimeError):
        return False  # the module has other arguments, so it is not changed
    for activation in ACTIVATIONS:
        # Try every tile size. This also compiles its kernel before serving.
        found = (fused_moe(x, index, weights, gate_up, down, activation, tile) for tile in candidate_tiles(x))
        if all(_same_rows(each, wanted) for each in found):
            # Each call reads the weights from the module, because loading weights may replace the tensors.
            module.forward = _FusedExperts(module, activation)
            return True
    return False


class _FusedExperts:
    """The fused forward of experts."""

    def __init__(self, module: Any, activation: Activation) -> None:
        self._module, self._activation = module, activation

    def outputs(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the selected experts of each token, [tokens * picked, dim]."""
        gate_up, down = self._module.gate_up_proj, self._module.down_proj
        return expert_outputs(x, index, gate_up, down, self._activation)

    def __call__(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate_up, down = self._module.gate_up_proj, self._module.down_proj
        return fused_moe(x, index, weights, gate_up, down, self._activation)


def fuse_router(module: Any) -> bool:
    """Replace a router's forward by a product and one launch that selects experts. The forward is replaced only if
    the launch selects the same experts. Return whether it was replaced."""
    weight, picked = getattr(module, "weight", None), getattr(module, "top_k", None)
    if weight is None or not is_dense_weight(weight) or weight.ndim != 2 or not isinstance(picked, int):
        return False
    bias, buffers = getattr(module, "e_score_correction_bias", None), list(module.buffers())
    known = not buffers or (len(buffers) == 1 and buffers[0] is bias and bias.shape == weight.shape[:1])
    if set(dict(module.named_parameters())) != {"weight"} or not known:
        return False
    draw = torch.Generator().manual_seed(picked)
    x = torch.randn(5, weight.shape[1], generator=draw).to(weight.device, weight.dtype)
    own = None if bias is None else bias.clone()
    if bias is not None:
        # A bias of zeros would hide whether the module uses its bias.
        bias.copy_(torch.rand(bias.shape, generator=draw))
    try:
        logits, scores, index = module(x)
        if logits.shape != (5, len(weight)) or scores.shape != (5, picked) or index.shape != scores.shape:
            return False
        for routing in _candidates(module):
            for exact in (False, True):
                fused = _FusedRouter(module, routing, scores.dtype, exact)
                # Try the oracle first: otherwise every form of the kernel would be compiled.
                if not fused.agrees(*fused.oracle(x), logits, scores, index):
                    continue
                if fused.agrees(*fused(x), logits, scores, index):
                    module.forward = fused
                    return True
    except (TypeError, ValueError, RuntimeError):
        return False
    finally:
        if bias is not None:
            bias.copy_(own)
    return False


def _candidates(module: Any) -> Iterator[Routing]:
    """Yield the values of `Routing` that are consistent with a router's attributes, the usual ones first."""
    base = Routing(module.top_k, factor=float(getattr(module, "routed_scaling_factor", None) or 1.0))
    groups, kept = getattr(module, "num_group", None) or 1, getattr(module, "topk_group", None) or 1
    ways = [base]
    if groups > 1:
        ways = [replace(base, groups=groups, kept=kept, best=best) for best in (2, 1)] + ways
    for sigmoid in (False, True):
        for way in ways:
            for normalised in (True, False):
                yield replace(way, sigmoid=sigmoid, normalised=normalised, eps=1e-20 if sigmoid else 0.0)


class _FusedRouter:
    """The fused forward of a router. With `exact`, logits are computed in float32."""

    def __init__(self, module: Any, routing: Routing, dtype: torch.dtype, exact: bool) -> None:
        self._module, self._routing, self._dtype, self._exact = module, routing, dtype, exact
        self._own = module.forward

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        x = x.reshape(-1, x.shape[-1])
        return (linear_float32 if self._exact else functional.linear)(x, self._module.weight)

    def __call__(self, x: torch.Tensor, *more: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if any(each is not None for each in more):
            return self._own(x, *more)  # type: ignore[no-any-return]
        logits, bias = self._logits(x), getattr(self._module, "e_score_correction_bias", None)
        return logits, *choose_experts(logits, self._routing, self._dtype, bias)

    def oracle(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the results that a call of this router should have. Torch on a CPU selects the experts."""
        logits, bias = self._logits(x), getattr(self._module, "e_score_correction_bias", None)
        bias = None if bias is None else bias.cpu()
        weights, index = choose_experts(logits.cpu(), self._routing, self._dtype, bias)
        return logits, weights.to(x.device), index.to(x.device)

    @staticmethod
    def agrees(
        found: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, logits: torch.Tensor, scores: torch.Tensor,
        index: torch.Tensor,
    ) -> bool:  # fmt: skip
        """Return whether a fused router and the router itself have the same results. `found`, `weights` and `chosen`
        are the logits, weights and experts of the fused router. `logits`, `scores` and `index` are those of the
        router itself.

        Among experts with equal logits, the two may select different ones. The logits of the selected experts are
        therefore compared, not their indices."""
        if found.dtype != logits.dtype or weights.dtype != scores.dtype:
            return False
        wanted, got = (logits.gather(1, each).sort(-1) for each in (index, chosen))
        if not torch.equal(wanted[0], got[0]):
            return False
        pairs = (scores.gather(1, wanted[1]), weights.gather(1, got[1])), (logits, found)
        return all(_same_rows(own, new, ROUTER_TOLERANCE) for own, new in pairs)


class FusedBlock:
    """The fused forward of a mixture of experts: router, experts, and shared experts if there are any. If `into` is
    given, the result is added to that tensor. Shared experts may have a gate (Qwen): a linear layer with one output,
    whose sigmoid multiplies their result.

    In a CUDA graph, shared experts run at the same time as the other experts, on a stream of their own.
    """

    adds = True
    """The forward can add its result to a tensor."""

    def __init__(self, module: Any, shared: Any) -> None:
        self._module, self._shared = module, shared
        self._shared_gate = getattr(module, "shared_expert_gate", None)

    def __call__(self, x: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        target = None if into is None else into.view(-1, into.shape[-1])
        side, gated = None, None
        if self._shared is not None:
            side = _side_stream(flat) if target is not None else None
            with nullcontext() if side is None else torch.cuda.stream(side):
                if self._shared_gate is None:
                    target = self._shared.forward(flat, into=target)
                else:
                    gated = self._shared.forward(flat), self._shared_gate(flat)
        _, weights, index = self._module.gate(flat)
        outputs = self._module.experts.forward.outputs(flat, index)
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)
        return sum_outputs(outputs, weights, x.dtype, target, gated).view(x.shape)


_SIDE_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(x: torch.Tensor) -> torch.cuda.Stream | None:
    """Return a second stream that starts after the work queued on the current stream. Return None unless a CUDA graph
    is being captured: without a graph, the host launches kernels too slowly for two streams to overlap."""
    if not x.is_cuda or not torch.cuda.is_current_stream_capturing():
        return None
    side = _SIDE_STREAMS.get(x.device)
    if side is None:
        side = _SIDE_STREAMS[x.device] = torch.cuda.Stream(x.device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    return side


def fuse_block(module: Any) -> bool:
    """Replace the forward of a block of router, experts, and possibly shared experts by a `FusedBlock`. Return whether
    it was replaced. The parts of the block must already be fused. The block is replaced only if both forwards compute
    the same results."""
    gate: Any = getattr(module, "gate", None)
    experts: Any = getattr(module, "experts", None)
    if not isinstance(getattr(experts, "forward", None), _FusedExperts):
        return False
    if not isinstance(getattr(gate, "forward", None), _FusedRouter):
        return False
    shared = getattr(module, "shared_experts", getattr(module, "shared_expert", None))
    if shared is not None and not getattr(getattr(shared, "forward", None), "adds", False):
        return False
    weight = experts.gate_up_proj
    x = torch.randn(1, 5, weight.shape[2], generator=torch.Generator().manual_seed(5)).to(weight)
    fused = FusedBlock(module, shared)
    try:
        wanted = module(x)
        if not isinstance(wanted, torch.Tensor) or not _same_rows(fused(x), wanted):
            return False
        if not _same_rows(fused(x, into=x.clone()), x + wanted):
            return False
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return False
    module.forward = fused
    return True


def _same_rows(a: torch.Tensor, b: torch.Tensor, least: float = 0.0) -> bool:
    """Return whether two results are equal up to rounding in every tensor row. The allowed relative difference is 8
    times the eps of the dtype, or `least` if `least` is larger."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    distance = (a.double() - b.double()).norm(dim=-1)
    near = max(least, 8 * torch.finfo(a.dtype).eps)
    return bool((distance <= near * b.double().norm(dim=-1)).all())
