"""Writes new K and V to their slots. One call computes the rotary embedding, quantises, and writes.

`interface` checks a call and chooses the kernel. `reference` is the oracle in plain torch, and `triton_write` is
the kernel.
"""

from .interface import write
from .reference import Rotary, apply_rotary

__all__ = ["Rotary", "apply_rotary", "write"]
