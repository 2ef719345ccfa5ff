"""Mixture of experts: routing, and the expert layers as grouped products.

`interface` has the functions, their torch oracle and the choice of tiles. `triton_moe` has the kernels.
"""

from .interface import (
    Routing,
    Tile,
    candidate_tiles,
    choose_experts,
    choose_tile,
    expert_outputs,
    fused_moe,
    sum_outputs,
)

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
