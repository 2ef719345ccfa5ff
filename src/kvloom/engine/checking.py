"""What can be said against an engine before it is loaded: no such model or device, a dtype or a tier that makes no sense, a
pool too small.

Reads the model's config at most, and asks the driver where a GPU is named: no torch, no weights, nothing opened. What needs
more is said while loading.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from kvloom.core.layers import QUANTISED
from kvloom.core.layout import PoolLayout
from kvloom.kernels.cuda_driver import CudaError, cuda_driver
from kvloom.models.catalog import embedded_models, known_models, load_config
from kvloom.models.reading import ModelError
from kvloom.models.specs import KVDtype, ModelSpec, kv_dtypes, model_spec
from kvloom.tiers.opening import check_tiers

__all__ = ["check_engine", "check_model"]

HUB_SECONDS = 5.0


def check_engine(
    model: str,
    *,
    load_format: str = "auto",
    dtype: str = "auto",
    kv_dtype: KVDtype | None = None,
    kv_scales: str | os.PathLike[str] = "dynamic",
    pool_bytes: int | None = None,
    tiers: Iterable[str] = (),
    device: str | None = None,
) -> None:
    """Raise ValueError for what could never be loaded, or not so. Takes milliseconds, and seconds where a hub must be found to
    be out of reach. The arguments are those of `Engine` and `load`."""
    kv_dtypes(kv_dtype)
    check_tiers(tiers)
    if device is not None and device.startswith("cuda"):
        _check_gpu(device)
    config = check_model(model, load_format)
    static = kv_scales != "dynamic"
    spec = None if config is None else _spec(config, dtype, kv_dtype, static)
    if static:
        _check_scales(kv_dtype, kv_scales, spec)
    if spec is not None and spec.media is None and pool_bytes is not None:
        unit = PoolLayout.build(spec.layers).slab_bytes
        if pool_bytes < 2 * unit:
            raise ValueError(
                f"a pool of {pool_bytes:,} bytes is too small: its unit is {unit:,} and it needs two"
            )


def check_model(model: str, load_format: str = "auto") -> dict[str, Any] | None:
    """The config of a model that is here, or None where it has to come from a hub. Raises ValueError for what is plainly no
    model: a folder without a config, a config without weights, a hub id while no hub can be reached."""
    path = Path(model)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelError(f"{model}: the folder has no config.json, so there is no model in it")
    named = path.is_file() or (not path.exists() and model.lower() in known_models())
    if named and load_format != "random":
        raise ModelError(
            f"{model!r} is a config without weights: give the folder or hub id of a checkpoint, "
            "or let the weights be random (--load-format random)"
        )
    if path.exists() or named:
        return load_config(model)
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise ModelError(
            f"there is no model {model!r} here: give a folder with one, a hub id such as org/name, "
            f"or one that comes along: {', '.join(embedded_models())}"
        )
    _check_hub(model)
    return None


def _check_gpu(device: str) -> None:
    """Whether torch can use a GPU that the driver sees, loading tells, and what is no device at all."""
    index = device.partition(":")[2] or "0"
    if not (index.isascii() and index.isdigit()) or len(index) > 9:
        return
    try:
        count = cuda_driver().devices()
    except OSError:
        why = "no NVIDIA driver is installed"
    except CudaError as error:
        why = f"the NVIDIA driver says: {error}"
    else:
        if int(index) < count:
            return
        why = f"the NVIDIA driver sees {count} GPU{'' if count == 1 else 's'}"
    raise ValueError(f"there is no device {device!r} here: {why}; give cpu (--device cpu), or leave it out")


def _spec(config: dict[str, Any], dtype: str, kv_dtype: KVDtype | None, static: bool) -> ModelSpec | None:
    """What the layers keep; None for a config that is read with transformers alone."""
    if dtype != "auto":
        config = {**config, "dtype": dtype}
    try:
        model_spec(config)
    except ModelError:
        return None  # loading tells what is wrong with it, if anything
    return model_spec(config, kv_dtype=kv_dtype, static_scales=static)


def _check_scales(kv_dtype: KVDtype | None, source: str | os.PathLike[str], spec: ModelSpec | None) -> None:
    every, by_kind = kv_dtypes(kv_dtype)
    kept = {every, *by_kind.values()}
    if spec is not None:
        kept = {layer.fields[0].dtype for layer in spec.layers.values() if layer.unit == "token"}
    if not kept.intersection(QUANTISED):
        raise ModelError(
            f"scales ({source}) are for K and V kept in int8 or fp8, and no layer keeps them so: "
            "say so with kv_dtype (--kv-dtype), or leave scales out"
        )
    if source != "checkpoint" and not Path(source).exists():
        raise ModelError(f"there is no file {source} with scales; `kvloom calibrate` makes one")


def _check_hub(model: str) -> None:
    """Say at once that a hub is out of reach, rather than after its library's many tries."""
    from huggingface_hub import constants, try_to_load_from_cache

    hub = urlsplit(constants.ENDPOINT)
    kept = isinstance(try_to_load_from_cache(model, "config.json"), str)
    if kept or constants.HF_HUB_OFFLINE or hub.scheme in getproxies():
        return
    port = hub.port or (443 if hub.scheme == "https" else 80)
    try:
        socket.create_connection((hub.hostname or "", port), timeout=HUB_SECONDS).close()
    except TimeoutError:
        return  # slow is not away
    except OSError as error:
        raise ModelError(
            f"{model!r} is no folder here, and the hub ({hub.netloc}) cannot be reached: {error.strerror or error}"
        ) from None
