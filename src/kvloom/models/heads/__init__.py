"""Heads: small modules beside a target that draft tokens from its hidden states.

| file    | content                                                  |
|---------|----------------------------------------------------------|
| head    | `Head`: the interface                                    |
| mtp     | multi-token-prediction heads in the target's checkpoint  |
| eagle   | EAGLE-3 heads in folders of their own                    |
| tensors | reading some tensors of a checkpoint                     |
"""

from .eagle import EagleHead, load_eagle_head, new_eagle_head
from .head import Head
from .mtp import MTPHead, load_mtp_head

__all__ = ["EagleHead", "Head", "MTPHead", "load_eagle_head", "load_mtp_head", "new_eagle_head"]
