"""Recurrent layers over packed rows: states are read from pages and written back to pages in one call.

`interface` has the five layer kinds and their equations, `rows` the rows of a step, `reference` the oracle in plain torch,
`triton_conv`, `triton_scan`, `triton_ssd` and `triton_delta` the kernels, `triton_rows` their common parts.
"""

from .interface import causal_conv, delta_rule, linear_scan, mamba1_scan, mamba2_scan
from .rows import STEP_TOKENS, StateRows

__all__ = [
    "STEP_TOKENS",
    "StateRows",
    "causal_conv",
    "delta_rule",
    "linear_scan",
    "mamba1_scan",
    "mamba2_scan",
]
