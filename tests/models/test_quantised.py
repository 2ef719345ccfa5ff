"""Quantised weights: the tokens of transformers with the same weights, layers that are not mistaken for dense ones, and
refusals that name the missing package. Tests of a format need its package, and are skipped without it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from kvloom.engine import LLM, SamplingParams
from kvloom.models.fusion import fuse
from kvloom.models.loading import load, model_fingerprint
from kvloom.models.lora import AdapterError, AdapterSlots
from kvloom.models.paged import is_dense, replace_up_projections
from kvloom.models.specs import ModelError

from .quantised import FORMATS, bitsandbytes_4bit, compressed_int4, dense_model, fp8, gguf_file, integers
from .tiny import MLA

PROMPT = list(range(3, 40))


def need(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


def expected(path: str, tokens: int = 12, **source: Any) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto", **source).eval()
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return out[0, len(PROMPT) :].tolist()  # type: ignore[no-any-return]


def generated(path: str, **settings: Any) -> list[int]:
    llm = LLM(path, device="cpu", pool_bytes=8 << 20, **settings)
    try:
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        return llm.generate([PROMPT], params)[0].outputs[0].token_ids
    finally:
        llm.close()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.few(2)
def test_a_quantised_checkpoint_gives_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    make, packages = FORMATS[name]
    need(*packages)
    path = make(tmp_path)
    wanted = expected(path)
    assert generated(path) == wanted
    assert generated(path, token_budget=16) == wanted  # a prompt in chunks


@pytest.mark.slow
def test_mla_reads_the_weights_of_a_quantised_up_projection(tmp_path: Path) -> None:
    need("bitsandbytes", "accelerate")
    # The kernels of bitsandbytes for CPUs with AVX-512 need multiples of 32 outputs and of 64 inputs.
    sizes = {**MLA, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "v_head_dim": 16}
    sizes |= {"intermediate_size": 64, "moe_intermediate_size": 64}
    path = bitsandbytes_4bit(tmp_path, "deepseek_v3", first_k_dense_replace=1, **sizes)
    # Later tokens may differ by the rounding of bfloat16: attention in latent space has another order of sums.
    assert generated(path)[:8] == expected(path, 8)


@pytest.mark.slow
def test_mla_reads_the_weights_of_a_compressed_up_projection(tmp_path: Path) -> None:
    need("compressed_tensors")
    sizes = {**MLA, "q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16}
    path = compressed_int4(tmp_path, "deepseek_v3", first_k_dense_replace=2, **sizes)
    assert generated(path) == expected(path)


def test_a_missing_package_is_named_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fp8(tmp_path)
    monkeypatch.setattr("kvloom.models.loading.quantisation.find_spec", lambda _: None)
    with pytest.raises(ModelError, match=r"quantised \(fp8\).*pip install accelerate") as caught:
        load(path, device="cpu")
    assert path in str(caught.value)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("form", ["gptq", "gptq 8 bits", "gptq_v2", "gptq in another order", "awq"])
def test_packed_integers_are_dequantised_without_their_package(
    form: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvloom.models.loading.quantisation.find_spec", lambda _: None)
    path, dense = integers(tmp_path, form, family)
    loaded = dict(load(path, "float32", "cpu")[0].named_parameters())
    for name, weight in dense.named_parameters():
        torch.testing.assert_close(loaded[name], weight, rtol=0, atol=0, msg=name)
    out = dense.generate(
        torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert generated(path, dtype="float32") == out[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize(
    ("form", "changes", "reason"),
    [
        ("gptq", {"bits": 3}, r"\(gptq\) with bits 3; without the package gptqmodel, bits can be 4 or 8"),
        ("gptq", {"checkpoint_format": "marlin"}, "with layout 'marlin'.*layout can be gptq or gptq_v2"),
        ("awq", {"bits": 8}, r"\(awq\) with bits 8.*bits can be 4:"),
        ("awq", {"version": "gemv"}, "with layout 'gemv'.*layout can be gemm"),
    ],
)
def test_packed_integers_of_unknown_layouts_are_refused(
    form: str, changes: dict[str, Any], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvloom.models.loading.quantisation.find_spec", lambda _: None)
    path, _ = integers(tmp_path, form)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=reason):
        load(path, device="cpu")


def test_a_gguf_file_gives_the_tokens_of_transformers(tmp_path: Path) -> None:
    need("gguf", "accelerate")
    path = gguf_file(tmp_path)
    assert generated(path, dtype="float32") == expected(str(tmp_path), gguf_file="tiny.gguf")
    assert load(path, "float32", "cpu")[1].decode([127, 125]) == "aba"


def test_a_gguf_file_without_its_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGUF")
    with monkeypatch.context() as patch:
        patch.setattr("kvloom.models.loading.quantisation.find_spec", lambda _: None)
        with pytest.raises(ModelError, match=r"\(gguf\).*pip install gguf accelerate"):
            LLM(str(path), device="cpu")
    need("gguf", "accelerate")
    with pytest.raises(ModelError, match="transformers cannot read this GGUF file"):
        load(str(path), device="cpu")


class _Halves(torch.Tensor):
    """A stand-in for quantised tensors, which are subclasses of torch.Tensor."""


def quantised_in_place(layer: Any, kind: str) -> None:
    """Make a dense layer a quantised one, which computes something else than its weight."""
    if kind == "forward":
        layer.forward = lambda x: nn.functional.linear(x.round(decimals=1), layer.weight)
    elif kind == "hook":
        layer.register_forward_pre_hook(lambda _, given: (given[0].round(decimals=1),))
    elif kind == "subclass":
        layer.weight = nn.Parameter(layer.weight.data.as_subclass(_Halves), requires_grad=False)
    elif kind == "dtype":
        layer.weight = nn.Parameter(layer.weight.data.to(torch.float8_e4m3fn), requires_grad=False)


@pytest.mark.parametrize("kind", ["forward", "hook", "subclass", "dtype"])
def test_layers_that_are_not_dense_are_not_fused(kind: str) -> None:
    model = dense_model(torch.float32)
    names = ("self_attn.q_proj", "mlp.up_proj", "self_attn.o_proj")
    layers = [model.get_submodule(f"model.layers.0.{name}") for name in names]
    assert all(is_dense(layer) for layer in layers)
    for layer in layers:
        quantised_in_place(layer, kind)
    assert not any(is_dense(layer) for layer in layers)
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        wanted = model(ids).logits if kind in ("forward", "hook") else None
    done = fuse(model)
    assert (done["gated MLPs"], done["projections"], done["layers"]) == (1, 1, 1)  # those of layer 1
    if wanted is not None:
        with torch.inference_mode():
            torch.testing.assert_close(model(ids).logits, wanted, rtol=1e-4, atol=1e-4)


def test_fused_layers_are_still_dense() -> None:
    model = dense_model(torch.float32)
    fuse(model)
    assert all(is_dense(layer) for layer in model.model.layers[0].self_attn.children())


def test_an_up_projection_is_replaced_by_the_weights_that_it_computes_with() -> None:
    model = dense_model(torch.float32, "deepseek_v3", first_k_dense_replace=1, **MLA)
    attention = model.model.layers[0].self_attn
    weight = attention.kv_b_proj.weight.data
    halved = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    halved.weight = nn.Parameter(weight.clone())
    halved.register_forward_hook(lambda _, given, out: out / 2)
    attention.kv_b_proj = halved
    replace_up_projections(model, torch.float32)
    torch.testing.assert_close(attention.kv_b_proj.weight.data, weight / 2)
    assert is_dense(attention.kv_b_proj)
    before = model.model.layers[1].self_attn.kv_b_proj
    replace_up_projections(model, torch.float32)
    assert model.model.layers[1].self_attn.kv_b_proj is before


def test_adapters_of_quantised_layers_are_refused() -> None:
    model = dense_model(torch.float32)
    for layer in model.model.layers.modules():
        if isinstance(layer, nn.Linear):
            quantised_in_place(layer, "forward")
    with pytest.raises(AdapterError, match="is not a dense linear layer"):
        AdapterSlots(model, 1, 8)


def test_the_parts_of_quantised_tensors_are_in_the_fingerprint() -> None:
    class Quantised(torch.Tensor):
        values: torch.Tensor

        @staticmethod
        def __new__(cls: Any, values: torch.Tensor) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

        def __init__(self, values: torch.Tensor) -> None:
            self.values = values

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["values"], None

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.detach.default:
                return Quantised(args[0].values)
            raise NotImplementedError(func)

    found = []
    for value in (1, 2, 1):
        model = dense_model(torch.float32)
        weight = Quantised(torch.full((64, 64), value, dtype=torch.int8))
        model.model.layers[0].self_attn.q_proj.weight = nn.Parameter(weight, requires_grad=False)
        found.append(model_fingerprint(model))
    assert found[0] == found[2] != found[1]
