"""Batch-invariant torch operations. The result of a tensor row is bit-identical in any batch.

`mode` has a context manager that replaces torch's operations. `products` has the matrix products and sums that this
mode uses, and `triton_products` has their kernels. Batch-invariant attention is in `attention.batch_invariant`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .mode import BatchInvariant
    from .products import grouped_product, product, row_cumsum, row_sum

__all__ = ["BatchInvariant", "grouped_product", "product", "row_cumsum", "row_sum"]

_NEEDS_TRITON = {
    "BatchInvariant": "mode",
    "grouped_product": "products",
    "product": "products",
    "row_cumsum": "products",
    "row_sum": "products",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _NEEDS_TRITON:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f".{_NEEDS_TRITON[name]}", __name__), name)
