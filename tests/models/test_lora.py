"""LoRA adapters: their files, their digests, and the layers that they may target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvloom.models.fusion import fuse
from kvloom.models.loading import model_fingerprint
from kvloom.models.lora import AdapterError, AdapterSlots, read_adapter
from tests.models.lora_adapters import adapter_layers, write_adapter
from tests.models.zoo import tiny

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def change_config(folder: Path, **fields: object) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_weights_include_the_scale(tmp_path: Path) -> None:
    model = tiny("llama")
    folder = write_adapter(tmp_path / "a", model, ("q_proj", "v_proj"), rank=4, alpha=6.0)
    stored = load_file(folder / "adapter_model.safetensors")
    name = next(iter(adapter_layers(model, ("v_proj",))))
    b = stored[f"base_model.model.{name}.lora_B.weight"]
    assert torch.equal(read_adapter(folder).pairs[name].b, b * 1.5)
    change_config(folder, use_rslora=True)
    assert torch.equal(read_adapter(folder).pairs[name].b, b * 3)
    change_config(folder, use_rslora=False, alpha_pattern={"v_proj": 12})
    found = read_adapter(folder)
    assert torch.equal(found.pairs[name].b, b * 3)
    other = name.replace("v_proj", "q_proj")
    assert torch.equal(found.pairs[other].b, stored[f"base_model.model.{other}.lora_B.weight"] * 1.5)
    assert found.rank == 4


def test_the_digest_covers_weights_and_config_but_not_the_path(tmp_path: Path) -> None:
    model = tiny("llama")
    one = read_adapter(write_adapter(tmp_path / "a", model, ATTENTION, seed=1))
    same = read_adapter(write_adapter(tmp_path / "b", model, ATTENTION, seed=1))
    other = read_adapter(write_adapter(tmp_path / "c", model, ATTENTION, seed=2))
    scaled = read_adapter(write_adapter(tmp_path / "d", model, ATTENTION, seed=1, alpha=9.0))
    assert one.digest == same.digest
    assert len({one.digest, other.digest, scaled.digest}) == 3
    change_config(tmp_path / "b", base_model_name_or_path="elsewhere")
    assert read_adapter(tmp_path / "b").digest == one.digest


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"peft_type": "IA3"}, "its type is IA3"),
        ({"use_dora": True}, "DoRA scales the base weights"),
        ({"bias": "all"}, "trained biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save replaces whole modules"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters is a weight of experts"),
        ({"use_qalora": True}, "use_qalora changes how the adapter is computed"),
        ({"lora_alpha": "much"}, "lora_alpha 'much' is not a number"),
        ({"alora_invocation_tokens": "hi"}, "is not a list of token ids"),
    ],
)
def test_other_kinds_of_adapters_are_refused(tmp_path: Path, fields: dict[str, object], reason: str) -> None:
    folder = write_adapter(tmp_path / "a", tiny("llama"), ATTENTION)
    change_config(folder, **fields)
    with pytest.raises(AdapterError, match=reason):
        read_adapter(folder)


def test_missing_and_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"there is no adapter_config.json"):
        read_adapter(tmp_path)
    folder = write_adapter(tmp_path / "a", tiny("llama"), ATTENTION)
    file = folder / "adapter_model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(AdapterError, match="cannot be read"):
        read_adapter(folder)
    file.unlink()
    (folder / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(AdapterError, match="is a pickle, which is never read"):
        read_adapter(folder)
    save_file({"model.norm.weight": torch.ones(4)}, file)
    with pytest.raises(AdapterError, match="neither lora_A nor lora_B"):
        read_adapter(folder)
    save_file({"layers.0.q_proj.lora_A.weight": torch.ones(4, 4)}, file)
    with pytest.raises(AdapterError, match="needs lora_A"):
        read_adapter(folder)


def test_an_adapter_must_fit_the_model(tmp_path: Path) -> None:
    slots = AdapterSlots(tiny("llama"), 1, 8)
    wide = read_adapter(write_adapter(tmp_path / "a", tiny("llama", hidden_size=64), ATTENTION))
    with pytest.raises(AdapterError, match="it was trained on another model"):
        slots.check(wide)
    large = read_adapter(write_adapter(tmp_path / "b", tiny("llama"), ATTENTION, rank=20))
    with pytest.raises(AdapterError, match="has rank 20, and the slots have rank 16: raise max_lora_rank"):
        slots.check(large)
    output = read_adapter(write_adapter(tmp_path / "c", tiny("llama"), ("lm_head",)))
    with pytest.raises(AdapterError, match="not inside a decoder layer"):
        slots.check(output)
    deeper = read_adapter(write_adapter(tmp_path / "d", tiny("llama", num_hidden_layers=5), ATTENTION))
    with pytest.raises(AdapterError, match=r"the model has no linear layer model.layers.4.self_attn"):
        slots.check(deeper)


def test_latents_have_no_adapter(tmp_path: Path) -> None:
    model = tiny("deepseek_v3")
    adapter = read_adapter(write_adapter(tmp_path / "a", model, ("kv_b_proj",)))
    with pytest.raises(AdapterError, match="is applied to cached latents"):
        AdapterSlots(model, 1, 8).check(adapter)


def test_targets_limit_the_layers_and_the_memory(tmp_path: Path) -> None:
    model = tiny("llama")
    fuse(model)
    few = AdapterSlots(model, 2, 8, ("o_proj",))
    few.attach()
    every = AdapterSlots(tiny("llama"), 2, 8)
    every.attach()
    assert 0 < few.bytes < every.bytes / 4
    adapter = read_adapter(write_adapter(tmp_path / "a", model, ("q_proj",)))
    with pytest.raises(AdapterError, match=r"is not one of lora_targets \(o_proj\): add it there"):
        few.check(adapter)
    with pytest.raises(ValueError, match="lora_targets nothing: the model has no such layers: use down_proj"):
        AdapterSlots(model, 2, 8, ("nothing",))


def test_slots_do_not_change_the_fingerprint_of_the_base_model() -> None:
    one, other = tiny("llama"), tiny("llama")
    fuse(other)
    AdapterSlots(other, 2, 8).attach()
    assert model_fingerprint(one) == model_fingerprint(other)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3", "gpt_oss"])
def test_a_model_without_rows_computes_the_base(family: str) -> None:
    """Attached slots without adapters in the step change no bit."""
    model, fused = tiny(family), tiny(family)
    fuse(model)
    fuse(fused)
    AdapterSlots(fused, 2, 8).attach()
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, fused(ids).logits)
