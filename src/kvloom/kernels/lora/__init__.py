"""The low-rank terms of LoRA adapters, for batches in which every token may use another adapter.

| file        | content                                                              |
|-------------|----------------------------------------------------------------------|
| interface   | `add_low_rank`, the stacked weights, and the adapters of a step      |
| triton_lora | the two grouped products of `add_low_rank` on a GPU                  |
"""

from .interface import MIN_RANK, AdapterRows, LowRankWeights, add_low_rank

__all__ = ["MIN_RANK", "AdapterRows", "LowRankWeights", "add_low_rank"]
