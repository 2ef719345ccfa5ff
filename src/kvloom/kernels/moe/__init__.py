"""Mixture of experts: routing, and each token's experts as grouped products.

`interface` has the functions, their plain torch oracle and the choice of tiles; `triton_moe` the kernels.
"""

from .interface import Tile, candidate_tiles, choose_tile, fused_moe, topk_softmax

__all__ = ["Tile", "candidate_tiles", "choose_tile", "fused_moe", "topk_softmax"]
