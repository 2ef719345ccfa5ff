"""Mixture of experts: routing, and each token's experts as grouped products.

`interface` has the functions, their plain torch oracle and the choice of tiles; `triton_moe` the kernels.
"""

from .interface import Tile, choose, experts, tile_for, tiles_for

__all__ = ["Tile", "choose", "experts", "tile_for", "tiles_for"]
