"""Checks the settings of an engine before anything is loaded. Refuses an unknown model or device, an invalid dtype
or tier, and a pool that is too small.

The checks read at most the model's config. If a GPU is named, they query the driver. They import no torch and open
no tiers. Other errors occur only during loading.
"""

from __future__ import annotations

import math
import mmap
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from kvloom.core import QUANTISED, WHOLE, ContextPart, Field, PoolLayout, make_policy
from kvloom.kernels.memory import CudaError, load_cuda_driver
from kvloom.models.specs import (
    KVDtype,
    ModelError,
    ModelSpec,
    embedded_models,
    is_gguf,
    known_models,
    kv_dtypes,
    load_config,
    model_spec,
)
from kvloom.tiers import check_tiers, scheme_of, split_write_policy
from kvloom.tiers.host import HostURL

from .config import EngineConfig

__all__ = ["check_engine", "check_model", "host_slab_bytes"]

HUB_SECONDS = 5.0


def check_engine(
    model: str,
    config: EngineConfig,
    *,
    load_format: str = "auto",
    dtype: str = "auto",
    device: str | None = None,
) -> None:
    """Raise ValueError for settings that can never be loaded. Takes milliseconds, or seconds if a model hub cannot be
    reached.
    """
    kv_dtype, kv_scales, pool_bytes = config.kv_dtype, config.kv_scales, config.pool_bytes
    kv_dtypes(kv_dtype)
    tiers = [tier for tier in config.tiers if isinstance(tier, str)]
    check_tiers(tiers)
    make_policy(config.eviction_policy)
    for name, path in config.adapters.items():
        if not Path(path).is_dir():
            raise ValueError(
                f"lora {name}={path}: there is no such folder: give the folder of a PEFT adapter"
            )
        if not (Path(path) / "adapter_config.json").is_file():
            raise ValueError(
                f"lora {name}={path}: the folder has no adapter_config.json: give the folder of a PEFT adapter"
            )
    if device is not None and device.startswith("cuda"):
        _check_gpu(device)
    found = check_model(model, load_format)
    static = kv_scales != "dynamic"
    spec = None if found is None else _spec(found, dtype, kv_dtype, static)
    if static:
        _check_scales(kv_dtype, kv_scales, spec)
    if spec is not None and spec.media is None:
        slab_bytes = _slab_bytes(spec, config)
        if slab_bytes is None:
            return  # Loading decides how states are divided, and checks the sizes.
        for host in (text for text in tiers if scheme_of(text) == "host"):
            capacity = HostURL.parse(split_write_policy(host)[0]).capacity
            host_slab_bytes(slab_bytes * config.rank_count, capacity)
        if pool_bytes is not None and pool_bytes < 2 * slab_bytes:
            raise ValueError(
                f"a pool of {pool_bytes:,} bytes is too small: give at least two slabs of {slab_bytes:,} bytes"
            )


def _slab_bytes(spec: ModelSpec, config: EngineConfig) -> int | None:
    """Return the slab size of the pool of each rank, or None if it is not known before the model is loaded."""
    layers, count = spec.layers, config.tensor_parallel
    if count > 1:
        if any(layer.unit == "state" for layer in layers.values()):
            return None
        layers = {
            name: replace(layer, fields=tuple(_part(field, count) for field in layer.fields))
            for name, layer in layers.items()
        }
    part = ContextPart(0, config.context_parallel) if config.context_parallel > 1 else WHOLE
    return PoolLayout.build(layers, config.block_tokens, part=part).slab_bytes


def _part(field: Field, count: int) -> Field:
    """Return the part of a field that each of `count` ranks stores. If there are fewer heads than ranks, ranks share
    heads."""
    axis = field.shard_axis
    if axis is None:
        return field
    shape = (*field.shape[:axis], max(1, field.shape[axis] // count), *field.shape[axis + 1 :])
    return replace(field, shape=shape)


def host_slab_bytes(slab_bytes: int, capacity: int) -> int:
    """Return the smallest slab size of a host tier: the least common multiple of the slab size of all ranks
    (`slab_bytes`) and the memory page size. Raises ValueError if `capacity`, the bytes of the tier, is less than one slab.
    """
    unit = math.lcm(slab_bytes, mmap.PAGESIZE)
    if capacity < unit:
        raise ValueError(
            f"host tier of {capacity:,} bytes is too small: its slabs have {unit:,} bytes; give it at least one"
        )
    return unit


def check_model(model: str, load_format: str = "auto") -> dict[str, Any] | None:
    """Return the config of a local model, or None for a hub id or a GGUF file. Raises ValueError for a folder without a
    config, a config without weights, or a hub id if no hub can be reached.
    """
    path = Path(model)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(f"{model}: the folder has no config.json: give the folder of a model")
    if is_gguf(model):
        return None
    named = path.is_file() or (not path.exists() and model.lower() in known_models())
    if named and load_format != "random":
        raise ModelError(
            f"{model!r} is a config without weights: give the folder or hub id of a checkpoint, "
            "or use random weights (--load-format random)"
        )
    if path.exists() or named:
        return load_config(model)
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise ModelError(
            f"there is no model {model!r}: give the folder of a model, a hub id such as org/name, "
            f"or an embedded model: {', '.join(embedded_models())}"
        )
    _check_hub(model)
    return None


def _check_gpu(device: str) -> None:
    """Raise ValueError if the driver does not list this GPU. Whether torch can use it is checked during loading."""
    index = device.partition(":")[2] or "0"
    if not (index.isascii() and index.isdigit()) or len(index) > 9:
        return
    try:
        count = load_cuda_driver().devices()
    except OSError:
        reason = "no NVIDIA driver is installed"
    except CudaError as error:
        reason = f"the NVIDIA driver reports: {error}"
    else:
        if int(index) < count:
            return
        reason = f"the NVIDIA driver sees {count} GPU{'' if count == 1 else 's'}"
    raise ValueError(f"there is no device {device!r}: {reason}; use --device cpu, or omit --device")


def _spec(config: dict[str, Any], dtype: str, kv_dtype: KVDtype | None, static: bool) -> ModelSpec | None:
    """Return the layer specs of a model, or None for a config that only transformers can read."""
    if dtype != "auto":
        config = {**config, "dtype": dtype}
    try:
        model_spec(config)
    except ModelError:
        return None  # loading reports the error
    return model_spec(config, kv_dtype=kv_dtype, static_scales=static)


def _check_scales(kv_dtype: KVDtype | None, source: str | os.PathLike[str], spec: ModelSpec | None) -> None:
    """Raise ValueError if scales are configured but no layer is quantised, or if the file of scales is missing."""
    every, by_kind = kv_dtypes(kv_dtype)
    dtypes = {every, *by_kind.values()}
    if spec is not None:
        dtypes = {layer.fields[0].dtype for layer in spec.layers.values() if layer.unit == "token"}
    if not dtypes.intersection(QUANTISED):
        raise ModelError(
            f"scales ({source}) need a layer with K and V in int8 or fp8, and there is none: "
            "set kv_dtype (--kv-dtype), or omit the scales"
        )
    if source != "checkpoint" and not Path(source).exists():
        raise ModelError(f"there is no file {source} with scales: create one with `kvloom calibrate`")


def _check_hub(model: str) -> None:
    """Raise ValueError if the hub cannot be reached. The hub library itself would retry for minutes."""
    from huggingface_hub import constants, try_to_load_from_cache

    hub = urlsplit(constants.ENDPOINT)
    is_downloaded = isinstance(try_to_load_from_cache(model, "config.json"), str)
    if is_downloaded or constants.HF_HUB_OFFLINE or hub.scheme in getproxies():
        return
    port = hub.port or (443 if hub.scheme == "https" else 80)
    try:
        socket.create_connection((hub.hostname or "", port), timeout=HUB_SECONDS).close()
    except TimeoutError:
        return  # a slow hub may still answer
    except OSError as error:
        raise ModelError(
            f"{model!r} is not a folder, and the hub ({hub.netloc}) cannot be reached: {error.strerror or error}"
        ) from None
