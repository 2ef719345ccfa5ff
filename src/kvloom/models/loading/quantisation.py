"""Checkpoints with quantised weights. Transformers loads them. kvloom checks that the required packages are installed.

Keys and values do not depend on the format of weights: `kv_dtype` alone selects their dtype.

| method             | weights in memory                                     | packages                |
|--------------------|-------------------------------------------------------|-------------------------|
| compressed-tensors | dequantised at loading (inputs are still quantised if | compressed-tensors      |
|                    | the checkpoint's config asks for it)                  |                         |
| fp8, mxfp8         | quantised on a GPU, dequantised on a CPU              | accelerate              |
| mxfp4              | quantised on a GPU with `kernels`, else dequantised   | accelerate              |
| bitsandbytes       | quantised                                             | bitsandbytes accelerate |
| torchao            | quantised                                             | torchao accelerate      |
| gptq, awq          | quantised with packages, else dequantised at loading  | gptqmodel optimum       |
|                    | (`packed_integers`)                                   | accelerate              |
| gguf (a file)      | dequantised at loading                                | gguf accelerate         |

Other methods of transformers are tried, too.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from kvloom.models.specs import ModelError

from .packed_integers import packed_config

__all__ = ["check_packages", "prepare_quantisation", "quantisation_method"]

PACKAGES: dict[str, tuple[str, ...]] = {
    "compressed-tensors": ("compressed-tensors",),
    "fp8": ("accelerate",),
    "mxfp8": ("accelerate",),
    "mxfp4": ("accelerate",),
    "bitsandbytes": ("bitsandbytes", "accelerate"),
    "torchao": ("torchao", "accelerate"),
    "gptq": ("gptqmodel", "optimum", "accelerate"),
    "awq": ("gptqmodel", "accelerate"),
    "gguf": ("gguf", "accelerate"),
}


def quantisation_method(config: Any) -> str | None:
    """Return the `quant_method` of a transformers config, or None if its weights are not quantised."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return None
    fields = found if isinstance(found, dict) else found.to_dict()
    method = fields.get("quant_method")
    return str(getattr(method, "value", method))


def check_packages(method: str, model: str) -> None:
    """Raise ModelError if weights of this quantisation method need a package that is not installed."""
    missing = _missing(method)
    if missing:
        raise ModelError(
            f"{model}: its weights are quantised ({method}), and loading them needs packages that are not installed: "
            f"pip install {' '.join(missing)}"
        )


def _missing(method: str) -> list[str]:
    return [name for name in PACKAGES.get(method, ()) if find_spec(name.replace("-", "_")) is None]


def prepare_quantisation(config: Any, model: str) -> None:
    """Raise ModelError if the quantised weights of a checkpoint need a package that is not installed. Modifies
    `config`, so that compressed-tensors weights are dequantised at loading. Otherwise they would be dequantised in
    the first step, after modules were fused. GPTQ and AWQ weights whose package is not installed are dequantised at
    loading, too."""
    method = quantisation_method(config)
    if method is None:
        return
    found = config.quantization_config
    if method in ("gptq", "awq") and _missing(method):
        fields = found if isinstance(found, dict) else found.to_dict()
        config.quantization_config = packed_config({**fields, "quant_method": method}, model)
        return
    check_packages(method, model)
    if method == "compressed-tensors" and isinstance(found, dict):
        config.quantization_config = {"dequantize": True, **found}
