"""Layout: the fields that layers store per token, and the arrangement of the pages of all layers in slabs.

layer_spec    LayerSpec: fields and visibility of one layer
pool_layout   PoolLayout: groups of layers, page sizes, the slab
context_part  ContextPart: the tokens of a block that one of several ranks stores
tensor_part   TensorPart: the bytes of a page that one of several ranks stores
"""

from .context_part import WHOLE, ContextPart
from .layer_spec import DTYPE_BYTES, PROMPT, QUANTISED, Field, LayerSpec, Order, Visibility, attention_fields
from .pool_layout import HASH_TOKENS, MAX_WASTE, PageGroup, PoolLayout
from .tensor_part import PageRange, TensorPart, divided_specs

__all__ = [
    "DTYPE_BYTES",
    "HASH_TOKENS",
    "MAX_WASTE",
    "PROMPT",
    "QUANTISED",
    "WHOLE",
    "ContextPart",
    "Field",
    "LayerSpec",
    "Order",
    "PageGroup",
    "PageRange",
    "PoolLayout",
    "TensorPart",
    "Visibility",
    "attention_fields",
    "divided_specs",
]
