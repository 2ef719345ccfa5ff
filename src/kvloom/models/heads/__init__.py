"""Heads: small modules beside a target that draft tokens from its hidden states.

| file    | content                                                                  |
|---------|--------------------------------------------------------------------------|
| head    | `Head`: the interface                                                    |
| mtp     | multi-token-prediction heads in the target's checkpoint                  |
| tensors | reading some tensors of a checkpoint                                     |
"""

from .head import Head
from .mtp import MTPHead, load_mtp_head

__all__ = ["Head", "MTPHead", "load_mtp_head"]
