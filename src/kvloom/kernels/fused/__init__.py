"""Small operations between a model's matrix products, one launch each.

| file        | holds                                                                      | kernels                            |
|-------------|----------------------------------------------------------------------------|------------------------------------|
| operations  | RMS norms, gated activations, rotary embedding, products of a single row   | triton_operations, triton_linear   |
| argmax      | the position of each row's largest value: greedy sampling                  | triton_argmax                      |
| step_layout | a decode step's tokens, positions, slots and block tables                  | triton_step_layout                 |
"""

from .argmax import row_argmax
from .operations import Activation, Norm, Normed, add_norm, gated, linear, rms_norm, rms_norms, rotate
from .step_layout import FIELDS, Singles, fields_of, lay_out

__all__ = [
    "FIELDS",
    "Activation",
    "Norm",
    "Normed",
    "Singles",
    "add_norm",
    "fields_of",
    "gated",
    "lay_out",
    "linear",
    "rms_norm",
    "rms_norms",
    "rotate",
    "row_argmax",
]
