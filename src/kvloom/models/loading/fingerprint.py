"""The fingerprint of a model. Two models that could compute different keys and values have different fingerprints.

A fingerprint covers the config, and the name, shape, dtype and 64 values of every tensor. On a rank it covers the whole
model, so it is the same for every number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any

import torch

from kvloom.models.sharding import WholeModel, computed_buffers, sample_weight, whole_of

__all__ = ["model_fingerprint", "vision_fingerprint"]

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
    computed, whole = computed_buffers(model), whole_of(model)
    tensors = [
        each for each in (*model.named_parameters(), *model.named_buffers()) if each[0] not in computed
    ]
    config = model.config if whole is None else whole.config
    return _fingerprint(config, tensors, _IRRELEVANT_FIELDS, whole)


def vision_fingerprint(model: Any) -> str:
    """Return the fingerprint of a model's image part, which has 32 characters. The fingerprint does not depend on the
    text part of the model.
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


def _without(fields: dict[str, Any], ignored: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields of a config and of the configs inside it, except the `ignored` ones."""
    return {
        name: _without(value, ignored) if isinstance(value, dict) else value
        for name, value in fields.items()
        if name not in ignored
    }


def _fingerprint(
    config: Any,
    tensors: Iterable[tuple[str, torch.Tensor]],
    ignored: tuple[str, ...],
    whole: WholeModel | None = None,
) -> str:
    """Return the fingerprint of `tensors`. If they are the part of a rank, `whole` has the whole weights."""
    digest = blake2b(digest_size=16, person=b"kvloom.weights")
    fields = _without(config.to_dict(), ignored)
    digest.update(json.dumps(fields, sort_keys=True, default=str).encode())
    taken = []
    known = {} if whole is None else whole.weights
    for name, tensor in sorted(_plain(tensors), key=lambda item: item[0]):
        shape, sample = known[name] if name in known else (tuple(tensor.shape), sample_weight(tensor))
        digest.update(f"{name} {shape} {tensor.dtype}".encode())
        if sample.numel():
            taken.append(sample.to(tensor.device, tensor.dtype).view(torch.uint8))
    if taken:
        digest.update(torch.cat(taken).cpu().numpy().tobytes())
    return digest.hexdigest()
