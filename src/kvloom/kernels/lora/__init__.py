"""The low-rank terms of LoRA adapters, for batches in which every token may use another adapter.

| file            | content                                                            |
|-----------------|--------------------------------------------------------------------|
| interface       | `add_low_rank`, and its oracle in torch                            |
| stacked_weights | the weights of the adapters, and the adapters of a step's tokens   |
| triton_lora     | the two grouped products of `add_low_rank` on a GPU                |
"""

from .interface import add_low_rank
from .stacked_weights import MIN_RANK, AdapterRows, LowRankWeights

__all__ = ["MIN_RANK", "AdapterRows", "LowRankWeights", "add_low_rank"]
