"""Draft heads: small modules that draft tokens from the hidden states of a target model.

| file    | content                                                  |
|---------|----------------------------------------------------------|
| head    | `Head`: the interface                                    |
| mtp     | multi-token-prediction heads in the target's checkpoint  |
| eagle   | EAGLE-3 heads, each in a separate folder                 |
| tensors | reading some tensors of a checkpoint                     |
"""

from .eagle import EagleHead, load_eagle_head, new_eagle_head
from .head import Head
from .mtp import MTPHead, load_mtp_head

__all__ = ["EagleHead", "Head", "MTPHead", "load_eagle_head", "load_mtp_head", "new_eagle_head"]
