"""Tensor parallelism: the part of a model that one rank computes, and the sums between ranks. Context parallelism uses
the same groups of ranks.

    config ÷ N → a smaller model → each weight is cut to its shape → layers with cut inputs sum their outputs

| file         | content                                                                         |
|--------------|---------------------------------------------------------------------------------|
| shard_config | the config of one rank: heads, widths and state channels divided by N           |
| experts      | expert parallelism: the experts of one rank                                     |
| cuts         | the part of each weight that a rank loads                                       |
| ranks        | `Ranks`: the sums and gathers between ranks, with a time limit; `RankGroups`    |
| collectives  | puts the sums and gathers into a loaded model                                   |
| whole_model  | `WholeModel`: config and weights of the whole model, for fingerprints and pages  |

A rank's model is an ordinary Hugging Face model with fewer heads and narrower layers. Page layouts, kernels and
fusions therefore need no changes.
"""

from .collectives import LayerCut, cut_of, install_collectives, is_summed, ranks_of, set_ranks, split_head
from .cuts import Cuts, computed_buffers, find_cuts
from .experts import divide_experts, is_mixture
from .ranks import RankError, RankGroups, Ranks, Shard
from .shard_config import check_pages, shard_config
from .whole_model import WholeModel, sample_weight, set_whole, whole_of

__all__ = [
    "Cuts",
    "LayerCut",
    "RankError",
    "RankGroups",
    "Ranks",
    "Shard",
    "WholeModel",
    "check_pages",
    "computed_buffers",
    "cut_of",
    "divide_experts",
    "find_cuts",
    "install_collectives",
    "is_mixture",
    "is_summed",
    "ranks_of",
    "sample_weight",
    "set_ranks",
    "set_whole",
    "shard_config",
    "split_head",
    "whole_of",
]
