"""The pool's memory: views of layers over it, elastic backing, and the CUDA driver's calls for both.

`views` allocates a pool and shows its bytes as pages of every layer, `elastic` maps and unmaps slabs while serving,
`cuda_driver` binds the driver calls that torch does not offer.
"""

from .cuda_driver import Addresses, CudaDriver, CudaError, load_cuda_driver
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
