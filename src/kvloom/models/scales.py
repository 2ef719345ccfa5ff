"""Static scales of quantised K and V: found in a checkpoint or in a file that calibration wrote, and checked.

    layers.3.attention   k_scale, v_scale  [kv heads] float32      a stored value times its scale is the value
                         latent_scale      [1]                     where one latent a token is kept (MLA)

A layer whose scales are static keeps none in its pages: these stand beside them, like weights, and are the same for every
token. Knows files and layer specs; what is done with scales is the kernels'.
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

from kvloom.core import QUANTISED, LayerSpec
from kvloom.kernels.reference import largest
from kvloom.kernels.views import TORCH_DTYPES

from .reading import ModelError

__all__ = [
    "Scales",
    "checkpoint_of",
    "fingerprint",
    "load_scales",
    "read_scales",
    "scale_sizes",
    "write_scales",
]

Scales = dict[str, dict[str, torch.Tensor]]
"""By layer and by field."""

_NAME = re.compile(
    r"(?:^|\.)(?:layers|h|blocks?)\.(?P<layer>\d+)\.(?:.+\.)?(?:(?P<part>k|v|kv|latent)_scale|(?P<proj>[kv])_proj\.output_scale)$"
)
_TOWERS = re.compile(r"vision|visual|audio|encoder")
_SOURCES = {"k_scale": ("k", "kv"), "v_scale": ("v", "kv"), "latent_scale": ("latent", "k", "kv")}
"""Which of the names in a checkpoint a field is read from, the first that is there."""


def scale_sizes(spec: LayerSpec) -> dict[str, int]:
    """The scales that a layer's pages need from outside, and how many values each has; none where pages are not quantised,
    or keep scales themselves."""
    fields = {field.name: field for field in spec.fields}
    if spec.unit == "state" or spec.fields[0].dtype not in QUANTISED:
        return {}
    wanted = {"latent_scale": 1} if "latent" in fields else dict.fromkeys(("k_scale", "v_scale"), 0)
    return {name: size or fields["k"].shape[0] for name, size in wanted.items() if name not in fields}


def load_scales(source: str | os.PathLike[str], model: Any, layers: Mapping[str, LayerSpec]) -> Scales:
    """The static scales of `layers`, on the model's device: from its own checkpoint (`source` "checkpoint"), or from a file
    or a folder. Raises ModelError, which names the layer, where one is missing or not positive."""
    if not any(map(scale_sizes, layers.values())):
        raise ModelError(
            f"static scales ({source}) are for K and V kept in int8 or fp8, and no layer keeps them so: "
            "set kv_dtype, or leave scales out"
        )
    path = checkpoint_of(model) if source == "checkpoint" else Path(source)
    found = read_scales(path, layers)
    device = next(model.parameters()).device
    return {layer: {name: x.to(device) for name, x in fields.items()} for layer, fields in found.items()}


def checkpoint_of(model: Any) -> Path:
    """The folder that a model's weights were read from. Raises ModelError where there is none."""
    name = str(getattr(model.config, "_name_or_path", "") or "")
    if name and Path(name).is_dir():
        return Path(name)
    if name.count("/") == 1:  # an id of the hub: what was loaded from there is kept
        from huggingface_hub import try_to_load_from_cache

        config = try_to_load_from_cache(name, "config.json")
        if isinstance(config, str):
            return Path(config).parent
    raise ModelError(
        f"scales were asked for from the checkpoint, but the model ({name or 'made in memory'}) was not loaded from one: "
        "give a file of `kvloom calibrate`"
    )


def read_scales(path: Path, layers: Mapping[str, LayerSpec]) -> Scales:
    """The scales that `layers` need, from a safetensors file or a folder of them. Those made for another dtype are converted,
    so that the largest value they have room for stays the same."""
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
            factor = _most(made_for) / _most(spec.fields[0].dtype)
            scales.setdefault(layer, {})[name] = _checked(*known, f"{name} of {layer}", size) * factor
    return scales


def write_scales(path: str | os.PathLike[str], scales: Scales, about: Mapping[str, str]) -> None:
    """Write a file that `read_scales` reads; `about` becomes its metadata, of which "dtype" says what they are for. The file
    is whole or not there."""
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
    """A few letters that other scales do not have: pages that were written with them cannot be read with others."""
    digest = hashlib.blake2b(digest_size=8)
    for layer in sorted(scales):
        for name in sorted(scales[layer]):
            digest.update(f"{layer}.{name}".encode())
            digest.update(scales[layer][name].cpu().numpy().tobytes())
    return digest.hexdigest()


def _tensors(path: Path) -> tuple[dict[tuple[int, str], tuple[str, torch.Tensor]], str]:
    """Every scale of a file or folder by layer and part, with its name there, and the dtype they were made for."""
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
                            f"{path}: {found[key][0]} and {name} say different things of one layer"
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
    """What a checkpoint's scales were made for: fp8, unless its config says int."""
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
        raise ModelError(
            f"{what} ({name}) has {len(flat)} values; needed is one, or one for each of {size} heads"
        )
    bad = next((x for x in flat.tolist() if not (x > 0 and math.isfinite(x))), None)
    if bad is not None:
        raise ModelError(f"{what} ({name}) is {bad}; a scale is positive and finite: calibrate anew")
    return flat.expand(size).clone()


def _most(dtype: str) -> float:
    most = largest(TORCH_DTYPES[dtype])
    assert most is not None
    return most
