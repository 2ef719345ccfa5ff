"""Reads LoRA adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors.

The digest of an adapter covers its config and all bytes of its weights. Two versions of an adapter have different
digests, even if they have the same name and path. This module does not depend on a base model.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvloom.combinations import refused

__all__ = ["AdapterError", "LoraAdapter", "LowRankPair", "read_adapter"]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"^(?:base_model\.model\.)?(?P<layer>.+)\.lora_(?P<which>[AB])(?:\.[^.]+)?\.weight$")
_IRRELEVANT_FIELDS = ("base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type")
"""Config fields that do not change results."""


class AdapterError(ValueError):
    """An adapter that cannot be read, or does not fit the base model."""


class LowRankPair(NamedTuple):
    """The weights of one linear layer: `a` [rank, inputs] and `b` [outputs, rank]. `b` includes the scale."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LoraAdapter:
    """One version of an adapter. `pairs` has the weights by name of the linear layer. `digest` identifies config and
    weights.

    If `invocation_tokens` is not empty, the adapter is an activated LoRA. The adapter then applies to the last
    occurrence of these tokens in the prompt, and to all tokens after it."""

    path: str
    digest: str
    rank: int
    pairs: dict[str, LowRankPair]
    invocation_tokens: tuple[int, ...] = ()


def read_adapter(folder: str | Path) -> LoraAdapter:
    """Return the adapter in a folder. Reads the whole file of weights. Raises AdapterError if a file is missing or
    damaged, or if kvloom does not support this kind of adapter."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    path = Path(folder)
    fields = _config(path)
    _check_config(fields, path)
    file = path / WEIGHTS
    if not file.is_file():
        other = path / "adapter_model.bin"
        hint = f"; {other.name} is a pickle, which is never read: convert it to safetensors" * other.is_file()
        raise AdapterError(f"adapter {path}: the folder has no {WEIGHTS}{hint}")
    data = file.read_bytes()
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise AdapterError(f"adapter {path}: {WEIGHTS} cannot be read: {error}") from error
    kept = {name: value for name, value in sorted(fields.items()) if name not in _IRRELEVANT_FIELDS}
    digest = blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=16, person=b"kvloom.lora")
    digest.update(data)
    pairs = _pairs(tensors, fields, path)
    return LoraAdapter(
        str(path),
        digest.hexdigest(),
        max(len(pair.a) for pair in pairs.values()),
        pairs,
        _invocation_tokens(fields, path),
    )


def _config(path: Path) -> dict[str, Any]:
    file = path / CONFIG
    if not file.is_file():
        raise AdapterError(f"adapter {path}: there is no {CONFIG}: give the folder of a PEFT adapter")
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise AdapterError(f"adapter {path}: {CONFIG} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise AdapterError(f"adapter {path}: {CONFIG} is not a JSON object")
    return fields


def _check_config(fields: dict[str, Any], path: Path) -> None:
    """Raise AdapterError for a kind of adapter that kvloom does not support."""
    kind = fields.get("peft_type", "LORA")
    if kind != "LORA":
        raise AdapterError(f"adapter {path}: " + refused("lora, other type", kind=kind))
    if fields.get("use_dora"):
        raise AdapterError(f"adapter {path}: " + refused("lora, dora"))
    if fields.get("bias", "none") != "none" or fields.get("lora_bias"):
        raise AdapterError(f"adapter {path}: " + refused("lora, bias"))
    if fields.get("target_parameters"):
        raise AdapterError(f"adapter {path}: " + refused("lora, experts", layer="target_parameters"))
    for name in ("modules_to_save", "trainable_token_indices"):
        if fields.get(name):
            raise AdapterError(f"adapter {path}: " + refused("lora, saved modules", field=name))
    for name in ("layer_replication", "arrow_config", "use_qalora", "use_bdlora"):
        if fields.get(name):
            raise AdapterError(f"adapter {path}: " + refused("lora, variant", field=name))


def _pairs(tensors: dict[str, torch.Tensor], fields: dict[str, Any], path: Path) -> dict[str, LowRankPair]:
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.match(name)
        if match is None:
            raise AdapterError(
                f"adapter {path}: the tensor {name} is neither lora_A nor lora_B of a linear layer: only plain LoRA "
                "of linear layers is supported"
            )
        found.setdefault(match["layer"], {})[match["which"]] = tensor
    if not found:
        raise AdapterError(f"adapter {path}: {WEIGHTS} has no weights")
    pairs = {}
    for layer, both in found.items():
        a, b = both.get("A"), both.get("B")
        if a is None or b is None or a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
            shapes = {which: tuple(tensor.shape) for which, tensor in both.items()}
            raise AdapterError(
                f"adapter {path}: layer {layer} needs lora_A [rank, inputs] and lora_B [outputs, rank], got {shapes}"
            )
        if not (a.is_floating_point() and b.is_floating_point()):
            raise AdapterError(
                f"adapter {path}: the weights of layer {layer} are {a.dtype}, not floating point"
            )
        pairs[layer] = LowRankPair(a, (b.float() * _scale(fields, layer, len(a), path)).to(b.dtype))
    return pairs


def _scale(fields: dict[str, Any], layer: str, rank: int, path: Path) -> float:
    """Return the factor of a layer's low-rank term."""
    alpha = fields.get("lora_alpha", 8)
    for pattern, value in (fields.get("alpha_pattern") or {}).items():
        if re.match(rf"(?:.*\.)?(?:{pattern.removeprefix('^')})$", layer):
            alpha = value
            break
    if not isinstance(alpha, int | float):
        raise AdapterError(f"adapter {path}: lora_alpha {alpha!r} is not a number")
    return alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)


def _invocation_tokens(fields: dict[str, Any], path: Path) -> tuple[int, ...]:
    tokens = fields.get("alora_invocation_tokens") or []
    if not isinstance(tokens, list) or not all(isinstance(one, int) and one >= 0 for one in tokens):
        raise AdapterError(f"adapter {path}: alora_invocation_tokens {tokens!r} is not a list of token ids")
    return tuple(tokens)
