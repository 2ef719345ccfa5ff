"""A torch dispatch mode in which the result of a tensor row is bit-identical in any batch.

    with BatchInvariant():
        model(...)

The functions of `products` replace matrix products and sums along rows. Element-wise operations, row-wise operations
and data movement still run in torch. Any other operation raises ValueError with its name. The mode does not intercept
kvloom's own kernels. Dispatch takes a few microseconds of CPU time per operation. A captured graph runs without
dispatch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from .products import grouped_product, product, row_cumsum, row_sum

__all__ = ["BatchInvariant"]

aten = torch.ops.aten

# fmt: off
DATA_MOVEMENT = frozenset((
    "_local_scalar_dense", "_pin_memory", "_to_copy", "_unsafe_view", "alias", "arange", "argmax", "argmin",
    "as_strided", "cat", "clone", "constant_pad_nd", "contiguous", "copy", "copy_", "detach", "detach_", "embedding",
    "empty", "empty_like", "empty_strided", "expand", "eye", "fill", "fill_", "full", "full_like", "gather",
    "index", "index_copy", "index_copy_", "index_fill", "index_fill_", "index_put", "index_put_",
    "index_select", "is_pinned", "item", "lift_fresh", "lift_fresh_copy", "linspace", "masked_fill",
    "masked_fill_", "masked_scatter", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros",
    "one_hot", "ones", "ones_like", "pad", "permute", "record_stream", "repeat", "repeat_interleave",
    "reshape", "resize_", "roll", "scatter", "scatter_", "select", "select_scatter", "set_", "slice",
    "slice_scatter", "split", "split_with_sizes", "squeeze", "stack", "t", "transpose", "tril", "triu",
    "unbind", "unfold", "unsqueeze", "view", "zero_", "zeros", "zeros_like",
))
# fmt: on
"""Operations that only copy, move or view values."""
ROW_WISE = frozenset(
    [
        "_fused_rms_norm",
        "index_add",
        "_log_softmax",
        "_softmax",
        "all",
        "amax",
        "amin",
        "any",
        "max",
        "min",
        "native_layer_norm",
        "sort",
        "topk",
        "nonzero",
        "bincount",
        "histc",
    ]
)
"""Operations that compute each row separately and in the same way, or that only compare and count. In models,
`index_add` adds at most once to each element, so its order does not matter."""


ELEMENT_WISE = frozenset(("complex", "floor_divide", "polar"))
"""Element-wise operations that torch does not tag as element-wise."""


def _mean(x: torch.Tensor, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> torch.Tensor:
    size = 1
    for place in _dims(x, dim):
        size *= x.shape[place]
    return (_sum(x.float(), dim, keepdim) / size).to(dtype or x.dtype)


def _sum(x: torch.Tensor, dim: Any, keepdim: bool = False, *, dtype: Any = None) -> torch.Tensor:
    dims = _dims(x, dim)
    if not x.is_floating_point():
        # Integers: the order of the sum does not matter.
        exact: torch.Tensor = aten.sum.dim_IntList(x, dims, keepdim, dtype=dtype)
        return exact
    rest = [place for place in range(x.dim()) if place not in dims]
    summed = row_sum(x.permute(*rest, *dims).flatten(len(rest)) if dims != [x.dim() - 1] else x)
    if keepdim:
        summed = summed.view([1 if i in dims else size for i, size in enumerate(x.shape)])
    return summed.to(dtype or x.dtype)


def _dims(x: torch.Tensor, dim: Any) -> list[int]:
    given = range(x.dim()) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    return sorted(place % x.dim() for place in given)


def _cumsum(x: torch.Tensor, dim: int, *, dtype: Any = None) -> torch.Tensor:
    if not x.is_floating_point():
        exact: torch.Tensor = aten.cumsum(x, dim, dtype=dtype)
        return exact
    return row_cumsum(x.transpose(dim, -1)).transpose(dim, -1).to(dtype or x.dtype)


def _logsumexp(x: torch.Tensor, dim: Any, keepdim: bool = False) -> torch.Tensor:
    top = x.amax(dim, keepdim=True)
    summed = _sum((x - top).exp(), dim, keepdim)
    return summed.log() + (top if keepdim else top.squeeze(dim))


def _addmm(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    if (beta, alpha) == (1, 1) and bias.dim() == 1:
        return product(a, b, bias)
    return bias * beta + product(a, b) * alpha


def _bmm_out(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(product(a, b))


def _grouped(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: Any = None,
    out_dtype: Any = None,
) -> torch.Tensor:
    if offs is None or bias is not None or a.dim() != 2 or b.dim() != 3 or out_dtype not in (None, a.dtype):
        raise ValueError("batch_invariant: this form of a grouped product is not supported")
    return grouped_product(a, b, offs)


REPLACEMENTS: dict[OpOverload, Callable[..., torch.Tensor]] = {
    aten.mm.default: product,
    aten.bmm.default: product,
    aten.bmm.out: _bmm_out,
    aten.addmm.default: _addmm,
    aten._grouped_mm.default: _grouped,
    aten.mean.dim: _mean,
    aten.sum.dim_IntList: _sum,
    aten.cumsum.default: _cumsum,
    aten.logsumexp.default: _logsumexp,
}


@lru_cache(maxsize=4096)
def _is_batch_invariant(operation: OpOverload) -> bool:
    name = operation._schema.name.rpartition("::")[2]
    return (
        torch.Tag.pointwise in operation.tags
        or operation.is_view
        or name in DATA_MOVEMENT
        or name.rstrip("_") in ROW_WISE | ELEMENT_WISE
    )


class BatchInvariant(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which the results of a tensor row do not depend on the other rows of the batch. An operation
    that could break this raises ValueError.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        ours = REPLACEMENTS.get(func)
        if ours is not None:
            return ours(*args, **kwargs)
        if _is_batch_invariant(func):
            return func(*args, **kwargs)
        with self:  # checks the parts of a composite operation
            found = func.decompose(*args, **kwargs)
        if found is NotImplemented:
            raise ValueError(
                f"this model calls {func}, which is not known to be batch-invariant: run it "
                "without batch_invariant"
            )
        return found
