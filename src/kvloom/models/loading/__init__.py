"""Loads models by name, with weights of a checkpoint or random weights. The model is checked before any weight is
read.

`loader` reads configs, weights and tokenizers. `probe` runs the code of a model without weights, to check that it
can run on pages. `weight_reader` limits the memory of a load. `quantisation` prepares checkpoints with quantised
weights, and `packed_integers` dequantises GPTQ and AWQ weights. `fingerprint` identifies the weights, so that pages of
different models are never mixed.
"""

from .fingerprint import model_fingerprint, vision_fingerprint
from .loader import (
    BUILDING,
    LoadFormat,
    check_ranks,
    choose_device,
    divide_context,
    language_model_class,
    load,
    load_vision,
    progress_bars,
    refusal,
    shard_model,
    sharding_refusal,
    transformers_config,
)

__all__ = [
    "BUILDING",
    "LoadFormat",
    "check_ranks",
    "choose_device",
    "divide_context",
    "language_model_class",
    "load",
    "load_vision",
    "model_fingerprint",
    "progress_bars",
    "refusal",
    "shard_model",
    "sharding_refusal",
    "transformers_config",
    "vision_fingerprint",
]
