"""Static scales of quantised K and V. They are read from a checkpoint or a calibration file, and checked.

    layers.3.attention   k_scale, v_scale  [kv heads] float32      value = stored value * scale
                         latent_scale      [1]                     for one latent per token (MLA)

A layer with static scales stores no scales in its pages, because the scales are the same for every token. The kernels
apply them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from kvloom.core import QUANTISED, LayerSpec, TensorPart
from kvloom.kernels.dtypes import TORCH_DTYPES, quantised_max
from kvloom.models.specs import ModelError

__all__ = [
    "Scales",
    "checkpoint_of",
    "divide_scales",
    "fingerprint",
    "load_scales",
    "read_scales",
    "scale_sizes",
    "write_scales",
]

Scales = dict[str, dict[str, torch.Tensor]]
"""Scales by layer and by field."""

_NAME = re.compile(
    r"(?:^|\.)(?:layers|h|blocks?)\.(?P<layer>\d+)\.(?:.+\.)?(?:(?P<part>k|v|kv|latent)_scale|(?P<proj>[kv])_proj\.output_scale)$"
)
_TOWERS = re.compile(r"vision|visual|audio|encoder")
_SOURCES = {"k_scale": ("k", "kv"), "v_scale": ("v", "kv"), "latent_scale": ("latent", "k", "kv")}
"""Names of tensors in a checkpoint for each field. The first name that exists is used."""


def scale_sizes(spec: LayerSpec) -> dict[str, int]:
    """Return the names and sizes of the static scales that a layer needs. Return an empty dictionary if its pages
    are not quantised or contain scales.
    """
    fields = {field.name: field for field in spec.fields}
    if spec.unit == "state" or spec.fields[0].dtype not in QUANTISED:
        return {}
    wanted = {"latent_scale": 1} if "latent" in fields else dict.fromkeys(("k_scale", "v_scale"), 0)
    return {name: size or fields["k"].shape[0] for name, size in wanted.items() if name not in fields}


def load_scales(source: str | os.PathLike[str], model: Any, layers: Mapping[str, LayerSpec]) -> Scales:
    """Return the static scales of `layers` on the model's device. `source` is "checkpoint", a file or a folder. If
    a scale is missing or not positive, raises ModelError with the name of the layer.
    """
    if not any(map(scale_sizes, layers.values())):
        raise ModelError(
            f"static scales ({source}) are for K and V in int8 or fp8, but no layer stores K and V so: "
            "set kv_dtype, or leave scales out"
        )
    path = checkpoint_of(model) if source == "checkpoint" else Path(source)
    found = read_scales(path, layers)
    device = next(model.parameters()).device
    return {layer: {name: x.to(device) for name, x in fields.items()} for layer, fields in found.items()}


def divide_scales(scales: Scales, layers: Mapping[str, LayerSpec], part: TensorPart) -> Scales:
    """Return the scales of the heads that one rank stores. `scales` are those of the whole model, and `layers` are the
    layers of the rank."""
    found: Scales = {}
    for layer, fields in scales.items():
        sizes = scale_sizes(layers[layer])
        found[layer] = {
            name: x[part.own_values(sizes[name], len(x))].contiguous() for name, x in fields.items()
        }
    return found


def checkpoint_of(model: Any) -> Path:
    """Return the folder from which a model's weights were read. Raises ModelError if there is none."""
    name = str(getattr(model.config, "_name_or_path", "") or "")
    if name and Path(name).is_dir():
        return Path(name)
    if name.count("/") == 1:  # a hub id, whose files are in the local cache
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(name, "config.json")
        if isinstance(config, str):
            return Path(config).parent
    raise ModelError(
        f"scales of the checkpoint were requested, but the model ({name or 'made in memory'}) was not loaded from one: "
        "give a file of `kvloom calibrate`"
    )


def read_scales(path: Path, layers: Mapping[str, LayerSpec]) -> Scales:
    """Return the scales of `layers` from a safetensors file or folder. Scales that were made for another dtype are
    converted: the largest value that can be stored stays the same."""
    tensors, made_for = _tensors(path)
    scales: Scales = {}
    for layer, spec in layers.items():
        index = int(re.findall(r"\d+", layer)[0])
        for name, size in scale_sizes(spec).items():
            known = next((tensors[index, part] for part in _SOURCES[name] if (index, part) in tensors), None)
            if known is None:
                have = sorted({one for one, _ in tensors})
                raise ModelError(
                    f"{path} has no {name} for {layer}; it has scales of {f'layers {have}' if have else 'no layer'}. "
                    "Make them with `kvloom calibrate`, or keep them dynamic"
                )
            factor = _quantised_max(made_for) / _quantised_max(spec.fields[0].dtype)
            scales.setdefault(layer, {})[name] = _checked(*known, f"{name} of {layer}", size) * factor
    return scales


def write_scales(path: str | os.PathLike[str], scales: Scales, about: Mapping[str, str]) -> None:
    """Write `scales` atomically to a file that `read_scales` can read. `about` becomes the metadata of the file. Its
    entry "dtype" is the dtype of the quantised values."""
    from safetensors.torch import save_file

    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    named = {f"{layer}.{name}": x.cpu() for layer, fields in scales.items() for name, x in fields.items()}
    try:
        save_file(named, beside, metadata=dict(about))
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def fingerprint(scales: Scales) -> str:
    """Return a short digest of the scales. Pages are valid only with the scales with which they were written. The
    digest therefore becomes part of the model name in block hashes."""
    digest = hashlib.blake2b(digest_size=8)
    for layer in sorted(scales):
        for name in sorted(scales[layer]):
            digest.update(f"{layer}.{name}".encode())
            digest.update(scales[layer][name].cpu().numpy().tobytes())
    return digest.hexdigest()


def _tensors(path: Path) -> tuple[dict[tuple[int, str], tuple[str, torch.Tensor]], str]:
    """Return two values. The first maps (layer number, part of the layer) to (name in the file, scales), for all
    scales in a file or folder. The second is the dtype of the quantised values."""
    from safetensors import SafetensorError, safe_open

    found: dict[tuple[int, str], tuple[str, torch.Tensor]] = {}
    made_for = _dtype_of(path)
    for file in _files(path):
        try:
            with safe_open(file, framework="pt") as opened:
                made_for = (opened.metadata() or {}).get("dtype", made_for) if file == path else made_for
                for key, name in _scale_names(opened.keys()):
                    tensor = opened.get_tensor(name)
                    if key in found and not torch.equal(found[key][1], tensor):
                        raise ModelError(
                            f"{path}: {found[key][0]} and {name} are different scales of one layer"
                        )
                    found[key] = name, tensor
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from error
    if made_for not in QUANTISED:
        raise ModelError(f"{path}: scales for {made_for!r} are not known; known: {', '.join(QUANTISED)}")
    return found, made_for


def _scale_names(names: Any) -> Iterator[tuple[tuple[int, str], str]]:
    for name in names:
        match = _NAME.search(name)
        if match is not None and not _TOWERS.search(name):
            yield (int(match["layer"]), match["part"] or match["proj"]), name


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ModelError(f"there is no file {path} with scales; `kvloom calibrate` makes one")
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return sorted(path.glob("*.safetensors"))
    try:
        placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return sorted({path / placed[name] for _, name in _scale_names(placed)})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} is not an index of shards: {error!r}") from error


def _dtype_of(path: Path) -> str:
    """Return the dtype for which a checkpoint's scales were made: int8 if its config has an int scheme, else fp8."""
    config = path / "config.json"
    if not config.is_file():
        return "fp8"
    try:
        given = json.loads(config.read_text(encoding="utf-8"))
        scheme = given["quantization_config"]["kv_cache_scheme"]
        return "int8" if str(scheme["type"]).startswith("int") else "fp8"
    except (ValueError, KeyError, TypeError):
        return "fp8"


def _checked(name: str, tensor: torch.Tensor, what: str, size: int) -> torch.Tensor:
    flat = tensor.float().flatten()
    if len(flat) not in (1, size):
        raise ModelError(f"{what} ({name}) has {len(flat)} values; give one, or one for each of {size} heads")
    bad = next((x for x in flat.tolist() if not (x > 0 and math.isfinite(x))), None)
    if bad is not None:
        raise ModelError(f"{what} ({name}) is {bad}; a scale must be positive and finite: calibrate again")
    return flat.expand(size).clone()


def _quantised_max(dtype: str) -> float:
    most = quantised_max(TORCH_DTYPES[dtype])
    assert most is not None
    return most
