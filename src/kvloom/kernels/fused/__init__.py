"""Small operations between the matrix products of a model. Each is one launch.

| file        | content                                                               | kernels                          |
|-------------|-----------------------------------------------------------------------|----------------------------------|
| operations  | RMS norms, gated activations, rotary embedding, single-token products | triton_operations, triton_linear |
| argmax      | the index of the largest value of each tensor row (greedy sampling)   | triton_argmax                    |
| step_layout | a decode step's tokens, positions, slots and block tables             | triton_step_layout               |
"""

from .argmax import row_argmax
from .operations import (
    Activation,
    GateOrder,
    NormForm,
    RMSNorm,
    act_and_mul,
    add_norm,
    apply_rotary,
    gated_rms_norm,
    linear,
    linear_float32,
    rms_norm,
    rms_norms,
)
from .step_layout import ROW_FIELDS, StepLayout, field_count, lay_out_step

__all__ = [
    "ROW_FIELDS",
    "Activation",
    "GateOrder",
    "NormForm",
    "RMSNorm",
    "StepLayout",
    "act_and_mul",
    "add_norm",
    "apply_rotary",
    "field_count",
    "gated_rms_norm",
    "lay_out_step",
    "linear",
    "linear_float32",
    "rms_norm",
    "rms_norms",
    "row_argmax",
]
