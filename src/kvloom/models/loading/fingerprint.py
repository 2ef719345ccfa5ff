"""The fingerprint of a model. Two models that could compute different keys and values have different fingerprints.

A fingerprint covers the config, and the name, shape, dtype and 64 values of every tensor.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

import torch

__all__ = ["model_fingerprint"]

SAMPLES = 64
_IRRELEVANT_FIELDS = (
    "_name_or_path",
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
    "use_cache",
)
"""Config fields that do not change results, or whose effect is part of the weights."""


def model_fingerprint(model: Any) -> str:
    """Return the fingerprint, which has 32 characters. Call this function before weights are fused. Takes some
    milliseconds on a GPU."""
    digest = blake2b(digest_size=16, person=b"kvloom.weights")
    config = {k: v for k, v in model.config.to_dict().items() if k not in _IRRELEVANT_FIELDS}
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    tensors = [*model.named_parameters(), *model.named_buffers()]
    taken = []
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.detach().reshape(-1)
        if flat.numel():
            taken.append(flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].contiguous().view(torch.uint8))
    if taken:
        digest.update(torch.cat(taken).cpu().numpy().tobytes())
    return digest.hexdigest()
