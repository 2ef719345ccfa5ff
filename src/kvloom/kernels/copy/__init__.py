"""Copies of whole pages: inside the pool, and between the pool and host memory.

`copier` has `copy_pages` and `Copier`. `range_copier` copies ranges of pages on one of several ranks. `reference` is the oracle in plain torch. `triton_copy` is the kernel.
"""

from .copier import Copier, FinishedEvent, Ids, Method, copy_pages
from .range_copier import RangeCopier

__all__ = ["Copier", "FinishedEvent", "Ids", "Method", "RangeCopier", "copy_pages"]
