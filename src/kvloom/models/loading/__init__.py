"""Models from names: checkpoints or random weights, checked before any weight is read.

`loader` reads configs, weights and tokenizers. `probe` runs a model's code without weights, to check that it can run
on pages. `fingerprint` distinguishes models that could compute different keys and values.
"""

from .fingerprint import model_fingerprint
from .loader import LoadFormat, choose_device, load, refusal, transformers_config

__all__ = ["LoadFormat", "choose_device", "load", "model_fingerprint", "refusal", "transformers_config"]
