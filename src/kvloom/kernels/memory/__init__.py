"""The memory of the pool: views of layers, elastic backing, and calls of the CUDA driver.

`views` allocates a pool and returns the pages of every layer as views of its bytes. `elastic` maps and unmaps slabs
while serving. `cuda_driver` has the driver calls that torch does not offer. Names that need torch are imported on
first use, so that checking the driver does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .cuda_driver import Addresses, CudaDriver, CudaError, load_cuda_driver

if TYPE_CHECKING:
    from .elastic import ElasticBuffer, elastic_buffer, granularity
    from .views import LayerView, Order, allocate, layer_views

__all__ = [
    "Addresses",
    "CudaDriver",
    "CudaError",
    "ElasticBuffer",
    "LayerView",
    "Order",
    "allocate",
    "elastic_buffer",
    "granularity",
    "layer_views",
    "load_cuda_driver",
]

_FILES = {
    "elastic": ("ElasticBuffer", "elastic_buffer", "granularity"),
    "views": ("LayerView", "Order", "allocate", "layer_views"),
}


def __getattr__(name: str) -> Any:
    for file, names in _FILES.items():
        if name in names:
            return getattr(import_module(f".{file}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
