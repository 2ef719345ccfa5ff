"""Copies of whole pages: inside the pool, and between the pool and host memory.

`copier` has both interfaces and the three methods, `reference` the oracle in plain torch, `triton_copy` the kernel.
"""

from .copier import Copier, FinishedEvent, Ids, Method, copy_pages

__all__ = ["Copier", "FinishedEvent", "Ids", "Method", "copy_pages"]
