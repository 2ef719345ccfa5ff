"""Recurrent layers over packed tokens. One call reads states from pages and writes the new states back.

`interface` has the five layer kinds and their equations. `rows` describes the sequences of a call. `reference` is
the oracle in plain torch. `triton_conv`, `triton_scan`, `triton_ssd` and `triton_delta` are the kernels, and
`triton_rows` has their common parts.
"""

from .interface import causal_conv, delta_rule, linear_scan, mamba1_scan, mamba2_scan
from .rows import STEP_TOKENS, ColumnRuns, DeltaGates, StateRows

__all__ = [
    "STEP_TOKENS",
    "ColumnRuns",
    "DeltaGates",
    "StateRows",
    "causal_conv",
    "delta_rule",
    "linear_scan",
    "mamba1_scan",
    "mamba2_scan",
]
