"""Dequantises the weights of GPTQ and AWQ checkpoints while they are loaded, without the package gptqmodel.

A weight [outputs, inputs] is `scale * (number - zero)`, with one scale and one zero for each output and group of inputs.
Numbers of 4 or 8 bits are packed into int32, from the lowest bits to the highest.

| tensor            | GPTQ, packed in pairs of …             | AWQ, with 8 numbers of 4 bits                  |
|-------------------|----------------------------------------|------------------------------------------------|
| qweight           | [inputs / n, outputs], along inputs    | [inputs, outputs / 8], outputs in `AWQ_ORDER`  |
| qzeros            | [groups, outputs / n], one less than   | [groups, outputs / 8], outputs in `AWQ_ORDER`  |
|                   | the zero; the zero in gptq_v2          |                                                |
| scales            | [groups, outputs]                      | [groups, outputs]                              |
| g_idx             | group of each input                    | not stored: groups are consecutive inputs      |
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from kvloom.models.specs import ModelError

__all__ = ["dequantise", "packed_config"]

METHOD = "kvloom_packed_integers"
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place, within its int32, of each of eight consecutive outputs."""
NAMES = ("qweight", "qzeros", "scales", "g_idx")


def packed_config(fields: dict[str, Any], model: str) -> dict[str, Any]:
    """Return the quantisation config with which transformers dequantises a GPTQ or AWQ checkpoint. `fields` is the
    checkpoint's own. Raises ModelError for a layout that is not known."""
    method, bits = fields["quant_method"], fields.get("bits", fields.get("w_bit", 4))
    form = fields.get("checkpoint_format", "gptq") if method == "gptq" else fields.get("version", "gemm")
    known = {"gptq": ((4, 8), ("gptq", "gptq_v2")), "awq": ((4,), ("gemm",))}[method]
    for what, found, possible in (("bits", bits, known[0]), ("layout", str(form).lower(), known[1])):
        if found not in possible:
            raise ModelError(
                f"{model}: its weights are quantised ({method}) with {what} {found!r}; without the package gptqmodel, "
                f"{what} can be {' or '.join(map(str, possible))}: use another checkpoint, or install gptqmodel, "
                "optimum and accelerate"
            )
    _register()
    offset = int(method == "gptq" and form == "gptq")
    return {"quant_method": METHOD, "bits": bits, "is_awq": method == "awq", "zero_offset": offset}


def dequantise(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None,
    bits: int,
    is_awq: bool,
    zero_offset: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the weight [outputs, inputs] of packed tensors. `zero_offset` is added to the stored zeros."""
    numbers = _unpack(qweight, bits) if is_awq else _unpack(qweight.T, bits).T
    zeros = _unpack(qzeros, bits)
    if is_awq:
        numbers, zeros = (one.view(len(one), -1, 8)[..., AWQ_ORDER].flatten(1) for one in (numbers, zeros))
    zeros = (zeros + zero_offset) & (2**bits - 1)
    inputs = len(numbers)
    group = torch.arange(inputs, device=numbers.device) // (inputs // len(scales)) if g_idx is None else g_idx
    group = group.long()
    weight: torch.Tensor = (numbers - zeros[group]) * scales.float()[group]
    return weight.T.to(dtype).contiguous()


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the numbers of [n, m] int32 as [n, m * 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    numbers: torch.Tensor = (packed[..., None] >> shifts) & (2**bits - 1)
    return numbers.flatten(1)


@cache
def _register() -> None:
    """Register the method with transformers."""
    from transformers.core_model_loading import ConversionOps, WeightConverter
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    class Config(QuantizationConfigMixin):  # type: ignore[misc]
        def __init__(self, bits: int, is_awq: bool, zero_offset: int, **_: Any) -> None:
            self.quant_method, self.dequantize = METHOD, True
            self.bits, self.is_awq, self.zero_offset = bits, is_awq, zero_offset

    class Dequantise(ConversionOps):  # type: ignore[misc]
        def __init__(self, hf_quantizer: Any) -> None:
            self.hf_quantizer = hf_quantizer

        def convert(
            self, input_dict: dict[str, Any], model: Any = None, full_layer_name: str = "", **_: Any
        ) -> dict[str, Any]:
            dtype = model.get_parameter(full_layer_name).dtype
            given = {name: each if isinstance(each, list) else [each] for name, each in input_dict.items()}
            found: dict[str, Any] = {name: each for name, each in given.items() if name.endswith(".weight")}
            for name in [name for name in given if name.endswith("qweight")]:
                stem = name.removesuffix("qweight")
                parts = [given.get(stem + part, [None] * len(given[name])) for part in NAMES]
                weights = [self.hf_quantizer.weight(*each, dtype) for each in zip(*parts, strict=True)]
                found[name if stem else full_layer_name] = weights
            return found

    class Quantiser(HfQuantizer):  # type: ignore[misc]
        is_trainable = False
        serialized_names = {"weight": list(NAMES)}  # noqa: RUF012

        def get_load_operations(self) -> dict[str, Any]:
            return {"dequantize": Dequantise}

        def get_weight_conversions(self) -> list[Any]:
            return [WeightConverter(list(NAMES), "weight", [Dequantise(self)])]

        def weight(self, *given: Any) -> torch.Tensor:
            config, (*packed, dtype) = self.quantization_config, given
            qweight, qzeros, scales, g_idx = packed
            return dequantise(
                qweight, qzeros, scales, g_idx, config.bits, config.is_awq, config.zero_offset, dtype
            )

        def is_serializable(self) -> bool:
            return False

    register_quantization_config(METHOD)(Config)
    register_quantizer(METHOD)(Quantiser)
