"""Tiny checkpoints with quantised weights, one function per format. Most are written without the package that loads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUP = 32
"""Weights that share a scale."""
Tensors = dict[str, torch.Tensor]


def dense_model(dtype: torch.dtype, family: str = "llama", **fields: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **fields})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.2)
    return model


def write(model: Any, folder: Path, tensors: Mapping[str, torch.Tensor], quantisation: dict[str, Any]) -> str:
    fields = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(
        json.dumps({**fields, "quantization_config": quantisation}, default=str)
    )
    whole = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def with_layers(model: Any, quantise: Callable[[torch.Tensor], Tensors]) -> Tensors:
    """The tensors of a model, with those that `quantise` makes of each linear layer of the decoder."""
    tensors = dict(model.state_dict())
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            made = quantise(tensors.pop(f"{name}.weight").float())
            tensors.update({f"{name}.{part}": tensor for part, tensor in made.items()})
    return tensors


def fp8(folder: Path, **fields: Any) -> str:
    def quantise(weight: torch.Tensor) -> Tensors:
        blocks = weight.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))
        scale = blocks.abs().amax((1, 3)) / 448
        scaled = (blocks / scale[:, None, :, None]).reshape(weight.shape)
        return {"weight": scaled.to(torch.float8_e4m3fn), "weight_scale_inv": scale}

    model = dense_model(torch.bfloat16, **fields)
    method = {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP], "activation_scheme": "dynamic"}
    return write(model, folder, with_layers(model, quantise), method)


def mxfp4(folder: Path) -> str:
    kinds = ["sliding_attention", "full_attention"]
    model = dense_model(
        torch.bfloat16, "gpt_oss", head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
        layer_types=kinds,
    )  # fmt: skip
    tensors, draw = dict(model.state_dict()), torch.Generator().manual_seed(1)
    for name in list(tensors):
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inner, outer = tensors.pop(name).shape
            shape = experts, outer, inner // 32
            bytes_ = torch.randint(0, 256, (*shape, 16), generator=draw, dtype=torch.uint8)
            tensors[f"{name}_blocks"] = bytes_
            tensors[f"{name}_scales"] = torch.randint(122, 126, shape, generator=draw, dtype=torch.uint8)
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return write(model, folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": kept})


def packed(values: torch.Tensor) -> torch.Tensor:
    """Eight values from 0 to 15 of the last axis as one int32."""
    eights = values.to(torch.int64).unflatten(-1, (-1, 8))
    joined = (eights << (4 * torch.arange(8))).sum(-1)
    return torch.where(joined >= 1 << 31, joined - (1 << 32), joined).to(torch.int32)


def int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values from 0 to 15, where 8 is zero, and one scale per group."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(-1, keepdim=True) / 7
    return (groups / scale).round().clamp(-8, 7).reshape(weight.shape) + 8, scale[..., 0]


def compressed_method(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    scheme = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme},
    }  # fmt: skip


def compressed_int4(folder: Path, family: str = "llama", **fields: Any) -> str:
    def quantise(weight: torch.Tensor) -> Tensors:
        values, scale = int4(weight)
        return {
            "weight_packed": packed(values),
            "weight_scale": scale,
            "weight_shape": torch.tensor(weight.shape),
        }

    model = dense_model(torch.float32, family, **fields)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    method = compressed_method("pack-quantized", weights, None)
    return write(model, folder, with_layers(model, quantise), method)


def compressed_int8_inputs(folder: Path) -> str:
    """Weights and inputs of layers are int8."""

    def quantise(weight: torch.Tensor) -> Tensors:
        scale = weight.abs().amax(-1, keepdim=True) / 127
        return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}

    model = dense_model(torch.float32)
    both = {"num_bits": 8, "type": "int", "symmetric": True}
    inputs = {**both, "strategy": "token", "dynamic": True}
    method = compressed_method("int-quantized", {**both, "strategy": "channel"}, inputs)
    return write(model, folder, with_layers(model, quantise), method)


def compressed_fp8_inputs(folder: Path) -> str:
    """Weights and inputs of layers are fp8."""

    def quantise(weight: torch.Tensor) -> Tensors:
        scale = weight.abs().amax(-1, keepdim=True) / 448
        return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}

    model = dense_model(torch.float32)
    both = {"num_bits": 8, "type": "float", "symmetric": True}
    inputs = {**both, "strategy": "token", "dynamic": True}
    method = compressed_method("float-quantized", {**both, "strategy": "channel"}, inputs)
    return write(model, folder, with_layers(model, quantise), method)


def gptq(folder: Path) -> str:
    def quantise(weight: torch.Tensor) -> Tensors:
        values, scale = int4(weight)
        outer, inner = weight.shape
        zeros = packed(torch.full((inner // GROUP, outer), 7))
        group = (torch.arange(inner) // GROUP).to(torch.int32)
        return {"qweight": packed(values).T, "qzeros": zeros, "scales": scale.T.half(), "g_idx": group}

    model = dense_model(torch.float16)
    method = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}
    return write(model, folder, with_layers(model, quantise), method)


def awq(folder: Path) -> str:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def mixed(values: torch.Tensor) -> torch.Tensor:
        return packed(values.unflatten(-1, (-1, 8))[..., order].flatten(-2))

    def quantise(weight: torch.Tensor) -> Tensors:
        values, scale = int4(weight)
        outer, inner = weight.shape
        zeros = torch.full((inner // GROUP, outer), 8)
        return {"qweight": mixed(values.T.contiguous()), "qzeros": mixed(zeros), "scales": scale.T.half()}

    model = dense_model(torch.float16)
    method = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    return write(model, folder, with_layers(model, quantise), method)


def integers(folder: Path, form: str, family: str = "llama") -> tuple[str, Any]:
    """A GPTQ or AWQ checkpoint of random numbers, zeros and scales, and the model of their products."""
    bits, is_awq = (8 if form.endswith("8 bits") else 4), form == "awq"
    per_int, draw = 32 // bits, torch.Generator().manual_seed(1)
    sizes = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    model = dense_model(torch.float32, family, **(sizes if family == "qwen3_moe" else {}))

    def pack(numbers: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(numbers), numbers.shape[1] // per_int, dtype=torch.int64)
        for place in range(per_int):
            source = [0, 2, 4, 6, 1, 3, 5, 7][place] if is_awq else place
            total |= numbers[:, source::per_int] << (bits * place)
        return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)

    def quantise(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        outputs, inputs = weight.shape
        group = torch.arange(inputs) // GROUP
        if form == "gptq in another order":
            group = group[torch.randperm(inputs, generator=draw)]
        numbers = torch.randint(2**bits, (inputs, outputs), generator=draw)
        zeros = torch.randint(1, 2**bits, (inputs // GROUP, outputs), generator=draw)
        scales = (torch.rand(zeros.shape, generator=draw) * (0.5 / 2**bits)).half()
        qweight = pack(numbers) if is_awq else pack(numbers.T.contiguous()).T
        qzeros = pack(zeros if is_awq or form == "gptq_v2" else zeros - 1)
        made = {"qweight": qweight, "qzeros": qzeros, "scales": scales}
        if not is_awq:
            made["g_idx"] = group.to(torch.int32)
        return made, ((numbers - zeros[group]) * scales.float()[group]).T

    tensors: Tensors = {}
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            stem = name.removesuffix(".weight")
            if weight.dim() == 3:  # experts: the gate and the up-projection are stored apart
                for expert, each in enumerate(weight):
                    parts = {"gate_proj": each[: len(each) // 2], "up_proj": each[len(each) // 2 :]}
                    for part, matrix in parts.items() if "gate_up" in name else [("down_proj", each)]:
                        made, product = quantise(matrix)
                        matrix.copy_(product)
                        path = f"{stem.rpartition('.')[0]}.{expert}.{part}"
                        tensors.update({f"{path}.{key}": one for key, one in made.items()})
            elif weight.dim() == 2 and stem.endswith("_proj"):
                made, product = quantise(weight)
                weight.copy_(product)
                tensors.update({f"{stem}.{key}": one for key, one in made.items()})
            else:
                tensors[name] = weight
    method = {"quant_method": "awq" if is_awq else "gptq", "bits": bits, "group_size": GROUP}
    method |= {"version": "gemm"} if is_awq else {"checkpoint_format": "gptq_v2" if "v2" in form else "gptq"}
    return write(model, folder, tensors, method), model


def saved_by_transformers(folder: Path, quantisation: Any, family: str = "llama", **fields: Any) -> str:
    dense_model(torch.float32, family, **fields).save_pretrained(folder / "dense")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "dense", quantization_config=quantisation, dtype=torch.float32, device_map="cpu"
    )
    model.save_pretrained(folder / "quantised")
    return str(folder / "quantised")


def bitsandbytes_4bit(folder: Path, family: str = "llama", **fields: Any) -> str:
    method = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    return saved_by_transformers(folder, method, family, **fields)


def bitsandbytes_8bit(folder: Path) -> str:
    return saved_by_transformers(folder, transformers.BitsAndBytesConfig(load_in_8bit=True))


def torchao_int8(folder: Path) -> str:
    from torchao.quantization import Int8WeightOnlyConfig

    return saved_by_transformers(folder, transformers.TorchAoConfig(Int8WeightOnlyConfig()))


GGUF_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
GGUF_OUTER = {"model.embed_tokens": "token_embd", "lm_head": "output", "model.norm": "output_norm"}


def gguf_file(folder: Path) -> str:
    """A Llama whose matrices are Q8_0, with a tokenizer whose tokens are single characters."""
    import gguf

    model = dense_model(torch.float32)
    config, path = model.config, folder / "tiny.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*(chr(0x100 + i) for i in range(config.vocab_size - 3)), "a", "b", "ab"])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in model.state_dict().items():
        short = name.removesuffix(".weight")
        if short in GGUF_OUTER:
            named = GGUF_OUTER[short]
        else:
            _, _, layer, part = short.split(".", 3)
            named = f"blk.{layer}.{GGUF_NAMES[part]}"
            if part in ("self_attn.q_proj", "self_attn.k_proj"):  # llama.cpp rotates neighbours, not halves
                halves = tensor.unflatten(0, (-1, 2, config.head_dim // 2))
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
        array = tensor.contiguous().numpy()
        if array.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{named}.weight", gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{named}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


FORMATS: dict[str, tuple[Callable[[Path], str], tuple[str, ...]]] = {
    "fp8": (fp8, ("accelerate",)),
    "mxfp4": (mxfp4, ("accelerate",)),
    "compressed-tensors int4": (compressed_int4, ("compressed_tensors",)),
    "compressed-tensors int8 inputs": (compressed_int8_inputs, ("compressed_tensors",)),
    "compressed-tensors fp8 inputs": (compressed_fp8_inputs, ("compressed_tensors",)),
    "gptq": (gptq, ("gptqmodel", "optimum", "accelerate")),
    "awq": (awq, ("gptqmodel", "accelerate")),
    "bitsandbytes 4 bits": (bitsandbytes_4bit, ("bitsandbytes", "accelerate")),
    "bitsandbytes 8 bits": (bitsandbytes_8bit, ("bitsandbytes", "accelerate")),
    "torchao": (torchao_int8, ("torchao", "accelerate")),
}
"""Each format: the function that makes a checkpoint, and the packages that load it."""
