"""The fingerprint of a model. Two models that could compute different keys and values have different fingerprints.

A fingerprint covers the config, and the name, shape, dtype and 64 values of every tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any

import torch

__all__ = ["model_fingerprint", "vision_fingerprint"]

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
_TEXT_PARTS = {"language_model", "lm_head"}
"""Modules of a multimodal model that process text only."""


def model_fingerprint(model: Any) -> str:
    """Return the fingerprint, which has 32 characters. Call this function before weights are fused. Takes some
    milliseconds on a GPU."""
    return _fingerprint(model.config, [*model.named_parameters(), *model.named_buffers()], _IRRELEVANT_FIELDS)


def vision_fingerprint(model: Any) -> str:
    """Return the fingerprint of a model's image part, which has 32 characters. It does not depend on the text part
    of the model.
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    parts = [one for one in tensors if not _TEXT_PARTS & set(one[0].split("."))]
    return _fingerprint(model.config, parts, (*_IRRELEVANT_FIELDS, "text_config", "tie_word_embeddings"))


def _plain(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors. A tensor of a subclass, such as a quantised weight, is yielded as its parts."""
    for name, tensor in tensors:
        flatten = getattr(tensor.data, "__tensor_flatten__", None)
        if flatten is None:
            yield name, tensor
        else:
            yield from _plain((f"{name}.{part}", getattr(tensor.data, part)) for part in flatten()[0])


def _fingerprint(config: Any, tensors: Iterable[tuple[str, torch.Tensor]], ignored: tuple[str, ...]) -> str:
    digest = blake2b(digest_size=16, person=b"kvloom.weights")
    fields = {k: v for k, v in config.to_dict().items() if k not in ignored}
    digest.update(json.dumps(fields, sort_keys=True, default=str).encode())
    taken = []
    for name, tensor in sorted(_plain(tensors), key=lambda item: item[0]):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.detach().reshape(-1)
        if flat.numel():
            taken.append(flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].contiguous().view(torch.uint8))
    if taken:
        digest.update(torch.cat(taken).cpu().numpy().tobytes())
    return digest.hexdigest()
