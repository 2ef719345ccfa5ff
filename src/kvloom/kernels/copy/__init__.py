"""Copies of whole pages: inside the pool, and between the pool and host memory.

`copier` has `copy_pages` and `Copier`. `reference` is the oracle in plain torch. `triton_copy` is the kernel.
"""

from .copier import Copier, FinishedEvent, Ids, Method, copy_pages

__all__ = ["Copier", "FinishedEvent", "Ids", "Method", "copy_pages"]
