"""Mixture of experts: routing, and the expert layers as grouped products.

`interface` has the functions, their torch oracle and the choice of tiles. `triton_moe` has the kernels.
"""

from .interface import Tile, candidate_tiles, choose_tile, fused_moe, topk_softmax

__all__ = ["Tile", "candidate_tiles", "choose_tile", "fused_moe", "topk_softmax"]
