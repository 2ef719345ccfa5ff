"""Attention over pages. A plan is made once per step, and every layer runs it.

| files                  | content                                                                    |
|------------------------|----------------------------------------------------------------------------|
| plan, cpu_plan         | the interface `Plan`, the choice of an implementation, plans on a CPU      |
| mask, shape, reference | visible tokens, supported shapes, the oracle in plain torch                |
| decode, work_list      | `DecodePlan`: sequences with 1 to 64 queries, in CUDA graphs               |
| cascade                | finds page ranges that several sequences share, so that they are read once |
| prefill, prefill_*     | `PrefillPlan` and its backends: over pages, gathered, cuDNN, libraries     |
| dense                  | attention over packed K and V; the merge of two attention results          |
| cold                   | attention over pages in host memory, in pieces                             |
| batch_invariant        | plans whose results do not depend on the batch                             |
| triton_*               | the Triton kernels                                                         |

The span of a layer is its visibility rule (`core.Visibility`): full, sliding or chunked. Queries are packed: one
tensor has the queries of all sequences, one sequence after the other. A query row is one query head of one query
token.

To add a layer kind, add a number to `mask.SPAN_NUMBERS` and a branch to `triton_mask.first_visible`. The oracle and
the work lists made on the host need no change, because they call `Visibility.first_visible_each`.
`QueryRows.count_pairs` only estimates the number of query-key pairs for a new kind. `prefill_libraries` refuses
kinds that it does not list.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .cascade import SharedRun, SharedRuns, find_shared_runs, is_worth_sharing, visible_shared_runs
from .cold import KVPages, add_cold_attention
from .cpu_plan import ReferencePlan
from .dense import attend_dense, merge_many, merge_outputs, supports_dense
from .mask import FULL, Mask
from .plan import Plan, decode_plan, prefill_plan
from .prefill_backends import QueryRows
from .prefill_libraries import installed_libraries
from .reference import attend
from .shape import Shape, plan_capacity, split_dim

if TYPE_CHECKING:
    from .batch_invariant import BatchInvariantDecodePlan, BatchInvariantPrefillPlan
    from .decode import DecodePlan
    from .prefill import PrefillPlan

__all__ = [
    "FULL",
    "BatchInvariantDecodePlan",
    "BatchInvariantPrefillPlan",
    "DecodePlan",
    "KVPages",
    "Mask",
    "Plan",
    "PrefillPlan",
    "QueryRows",
    "ReferencePlan",
    "Shape",
    "SharedRun",
    "SharedRuns",
    "add_cold_attention",
    "attend",
    "attend_dense",
    "decode_plan",
    "find_shared_runs",
    "installed_libraries",
    "is_worth_sharing",
    "merge_many",
    "merge_outputs",
    "plan_capacity",
    "prefill_plan",
    "split_dim",
    "supports_dense",
    "visible_shared_runs",
]

_NEEDS_TRITON = {
    "DecodePlan": "decode",
    "BatchInvariantDecodePlan": "batch_invariant",
    "PrefillPlan": "prefill",
    "BatchInvariantPrefillPlan": "batch_invariant",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _NEEDS_TRITON:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f".{_NEEDS_TRITON[name]}", __name__), name)
