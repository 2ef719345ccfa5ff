"""Mixture of experts as grouped matrix products. For every token, the result is the weighted sum of the outputs of
its selected experts.

    fused_moe(x [tokens, dim], index [tokens, picked], weights [tokens, picked], gate_up [experts, 2 * inner, dim],
              down [experts, dim, inner]) → [tokens, dim]

CPU tensors run in torch (the oracle). CUDA tensors run in Triton without waiting for the device, so that graphs can
capture the call. Results are rounded after the same operations as in Hugging Face's modeling code.
`models/fusion/moe.py` replaces modules by these functions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from kvloom.kernels.fused import Activation, act_and_mul

__all__ = [
    "Routing",
    "Tile",
    "candidate_tiles",
    "choose_experts",
    "choose_tile",
    "expert_outputs",
    "fused_moe",
    "sum_outputs",
]

SHARED_MEMORY = 200 << 10
"""Bytes of shared memory that the tiles of a program may use. This is slightly less than the 227 KiB of an H200."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile sizes of the two products. A tile has `rows` rows and `columns` columns. A row is a pair of token and
    expert, and a column is an output of the weights. A tile sums `depth` inputs at a time.

    In the first product, a tile computes `columns` columns of the gate and the same number of columns of the up
    projection. With `described`, weights are read by tensor descriptors.
    """

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int
    described: bool = True

    def with_fitting_stages(self, itemsize: int) -> Tile:
        """Return the tile, with fewer pipeline stages if not all of its stages fit into shared memory."""
        stage = (self.rows + 2 * self.columns) * self.depth * itemsize
        stages = max(1, min(self.stages, SHARED_MEMORY // stage))
        return Tile(self.rows, self.columns, self.depth, stages, self.warps, self.described)

    def for_down(self) -> Tile:
        """Return the tile for the down projection. The down projection is one product instead of two, so the tile
        has twice as many columns."""
        return Tile(self.rows, 2 * self.columns, self.depth, self.stages, self.warps, self.described)


TILES = (
    (8, Tile(16, 64, 128, 4, 4)),
    (24, Tile(32, 64, 128, 3, 4)),
    (48, Tile(64, 64, 64, 4, 4)),
    (1 << 62, Tile(128, 128, 64, 4, 8)),
)
"""(largest mean number of pairs per expert, tile). With few pairs, reading weights takes most of the time. A tile then
has more rows than an expert has pairs on average, so that the weights of an expert are usually read once."""
CHUNKS = (512, 4096)
"""Number of pairs that one program sorts: the first value if a call has at most that many pairs, else the second."""
EXACT_TILE = Tile(32, 32, 32, 2, 4, described=False)


def choose_tile(pairs: int, count: int, dtype: torch.dtype) -> Tile:
    """Return the tile for `pairs` pairs of token and expert, over `count` experts. Reads no device memory."""
    if dtype == torch.float32:
        return EXACT_TILE
    return next(tile for most, tile in TILES if pairs <= most * count).with_fitting_stages(dtype.itemsize)


def candidate_tiles(x: torch.Tensor) -> list[Tile]:
    """Return every tile that inputs with x's dtype may use."""
    if x.dtype == torch.float32:
        return [EXACT_TILE]
    return [tile.with_fitting_stages(x.dtype.itemsize) for _, tile in TILES]


def fused_moe(
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: Activation = "silu",
    tile: Tile | None = None,
) -> torch.Tensor:
    """Return the weighted sum of `down(act(gate) * up)` over the selected experts of each token. `tile` overrides the
    choice on a GPU.
    """
    count, both, dim = gate_up.shape
    if both % 2 or down.shape != (count, dim, both // 2) or x.shape[-1] != dim or x.ndim != 2:
        raise ValueError(
            f"x {tuple(x.shape)}, gate and up {tuple(gate_up.shape)}, down {tuple(down.shape)}: they must be [tokens, dim], "
            "[experts, 2 * inner, dim] and [experts, dim, inner]"
        )
    if index.shape != weights.shape or index.ndim != 2 or len(index) != len(x):
        raise ValueError(
            f"index {tuple(index.shape)} and weights {tuple(weights.shape)}: both must have one row for each of {len(x)} tokens, of equal size"
        )
    parts = expert_outputs(x, index, gate_up, down, activation, tile)
    return sum_outputs(parts, weights, x.dtype)


def sum_outputs(
    parts: torch.Tensor,
    weights: torch.Tensor,
    dtype: torch.dtype,
    into: torch.Tensor | None = None,
    shared: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the weighted sum of the outputs [tokens * picked, dim] of each token's experts, in `dtype`. With `into`
    [tokens, dim], add the sum to `into` in place and return `into`.

    `shared` has the outputs [tokens, dim] of shared experts and the inputs [tokens, 1] of their gates. The sum then
    also has these outputs, times the sigmoid of their gate."""
    shape = len(weights), parts.shape[1]
    if shared is not None and (shared[0].shape != shape or shared[1].numel() != shape[0]):
        sizes = tuple(shared[0].shape), tuple(shared[1].shape)
        raise ValueError(
            f"shared outputs and gates of {sizes[0]} and {sizes[1]} must be {shape} and one per token"
        )
    if into is not None and (into.shape != shape or not into.is_contiguous()):
        raise ValueError(f"into {tuple(into.shape)} must be contiguous and have the shape {shape}")
    if parts.is_cuda:
        from . import triton_moe

        dense = None if shared is None else (shared[0].contiguous(), shared[1].contiguous())
        return triton_moe.sum_parts(parts, weights.contiguous(), into, dense)
    found = (parts.view(*weights.shape, -1) * weights[..., None]).sum(1).to(dtype)
    if shared is not None:
        found += shared[1].view(-1, 1).sigmoid() * shared[0]
    return found if into is None else into.add_(found)


def expert_outputs(
    x: torch.Tensor,
    index: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: Activation = "silu",
    tile: Tile | None = None,
) -> torch.Tensor:
    """Return the outputs of the selected experts of each token, [tokens * picked, dim]. `fused_moe` calls this
    function, and then adds the outputs of each token."""
    if x.is_cuda:
        return launch(x, index, gate_up, down, activation, tile)
    return _plain(x, index, gate_up, down, activation)


def _plain(
    x: torch.Tensor, index: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, activation: Activation
) -> torch.Tensor:
    picked = index.shape[1]
    order = torch.argsort(index.reshape(-1), stable=True)
    parts = torch.empty((len(order), x.shape[1]), dtype=x.dtype)
    ends = torch.bincount(index.reshape(-1), minlength=len(gate_up)).cumsum(0).tolist()
    begin = 0
    for expert, end in enumerate(ends):
        if end > begin:
            mine = order[begin:end]
            both = functional.linear(x[mine // picked], gate_up[expert])
            parts[mine] = functional.linear(act_and_mul(both, activation), down[expert])
        begin = end
    return parts


def launch(
    x: torch.Tensor,
    index: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: Activation = "silu",
    tile: Tile | None = None,
) -> torch.Tensor:
    """Compute `expert_outputs` with Triton kernels: three launches, or four if there are many (token, expert) pairs.
    Does not check the arguments, because `fused_moe` has checked them."""
    from . import triton_moe as kernels

    picked, pairs, count = index.shape[1], index.numel(), len(gate_up)
    if not pairs:
        return x.new_empty((0, x.shape[1]))
    if tile is None:
        tile = choose_tile(pairs, count, x.dtype)
    if x.stride(1) != 1:
        x = x.contiguous()
    index = index.contiguous()
    # Enough tiles for any selection of experts.
    most = pairs // tile.rows + min(pairs, count)
    rows = torch.empty(most * tile.rows, dtype=torch.int32, device=x.device)
    owners = torch.empty(most, dtype=torch.int32, device=x.device)
    tiles = torch.empty(1, dtype=torch.int32, device=x.device)
    chunk = CHUNKS[0] if pairs <= CHUNKS[0] else CHUNKS[1]  # few sizes, because each size is compiled
    bins = max(128, 1 << (count - 1).bit_length())
    counts = torch.empty((-(-pairs // chunk), bins), dtype=torch.int32, device=x.device)
    if len(counts) > 1:
        kernels.count_pairs(index, counts, chunk)
    kernels.order_pairs(index, counts, rows, owners, tiles, count, chunk, tile.rows)
    hidden = kernels.gate_up(x, gate_up, rows, owners, tiles, picked, activation, tile)
    return kernels.down(hidden, down, rows, owners, tiles, pairs, tile.for_down())


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router selects `picked` experts per token from its logits.

    | field        | meaning                                                                                    |
    |--------------|--------------------------------------------------------------------------------------------|
    | sigmoid      | true: the score of an expert is the sigmoid of its logit; false: the softmax of all logits |
    | groups, kept | experts are divided into `groups` groups, and selected only from the best `kept` of them   |
    | best         | groups are ranked by the sum of their `best` largest scores (1 or 2)                       |
    | normalised   | true: weights are divided by (sum of the token's weights + `eps`)                          |
    | factor       | the weights are multiplied by this number                                                  |

    The weights of a token are the scores of its selected experts. They are normalised first, and then multiplied
    by `factor`.
    """

    picked: int
    sigmoid: bool = False
    groups: int = 1
    kept: int = 1
    best: int = 1
    normalised: bool = False
    eps: float = 0.0
    factor: float = 1.0


def choose_experts(
    logits: torch.Tensor, routing: Routing, dtype: torch.dtype, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the experts of each token from `logits` [tokens, experts]. Return their weights [tokens, picked] in
    `dtype`, and their indices. `bias` [experts] is added to the scores for the selection, but not to the weights.
    Among experts with equal scores, a GPU selects the first, and a CPU may select any."""
    tokens, experts = logits.shape
    each = experts // routing.groups
    if not 0 < routing.picked <= routing.kept * each or each * routing.groups != experts:
        raise ValueError(
            f"cannot select {routing.picked} experts from {routing.kept} of {routing.groups} groups of {experts} experts: "
            "give at least 1, at most all of the selected groups"
        )
    if logits.is_cuda:
        from . import triton_moe

        return triton_moe.choose_experts(logits.contiguous(), routing, dtype, bias)
    scores = logits.float().sigmoid() if routing.sigmoid else functional.softmax(logits.float(), -1)
    choice = scores if bias is None else scores + bias
    if routing.groups > 1:
        grouped = choice.view(tokens, routing.groups, each)
        best = grouped.topk(routing.best, -1)[0].sum(-1).topk(routing.kept, -1)[1]
        allowed = torch.zeros(tokens, routing.groups, dtype=torch.bool).scatter_(1, best, True)
        choice = grouped.masked_fill(~allowed[..., None], -torch.inf).view(tokens, experts)
    index = choice.topk(routing.picked, -1)[1]
    weights = scores.gather(1, index)
    if routing.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.eps)
    return (weights * routing.factor).to(dtype), index
