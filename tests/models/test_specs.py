"""Specs against what transformers allocates: tiny random models of every family are run, and the
shapes and dtypes in their caches are what the spec says."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, strategies as st

from kvloom.core import LayerSpec, PoolLayout, Visibility
from kvloom.models.specs import (
    FAMILIES,
    KV_DTYPES,
    ModelError,
    known_models,
    load_config,
    load_spec,
    model_spec,
    with_draft,
)

from .tiny import SIZES, TINY
from .tiny_encoder_decoders import FAMILIES as ENCODER_DECODERS
from .tiny_families import EVERY

transformers.logging.set_verbosity_error()

LENGTH = 20
IMAGE_TOKENS = 9

DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


def tiny_config(name: str) -> dict[str, Any]:
    return {**SIZES, **TINY[name]}


def transformers_config(raw: dict[str, Any]) -> Any:
    fields = dict(raw)
    return transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)


def run(config: Any) -> list[Any]:
    """The cache layers of a random model after LENGTH tokens."""
    torch.manual_seed(0)
    inputs: dict[str, Any] = {"input_ids": torch.randint(3, 60, (1, LENGTH))}
    if config.model_type == "mllama_text_model":
        model = transformers.MllamaForCausalLM(config).to(torch.bfloat16)
        inputs["cross_attention_states"] = torch.randn(1, IMAGE_TOKENS, config.hidden_size).bfloat16()
    elif config.model_type == "qwen2_5_vl_text":
        model = transformers.Qwen2_5_VLTextModel(config).to(torch.bfloat16)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        output = model.eval()(use_cache=True, **inputs)
    cache = output.cache_params if "cache_params" in output else output.past_key_values
    if hasattr(cache, "linear_cache"):  # MiniMax keeps its states beside the layers
        layers = dict(enumerate(cache.layers))
        for i, state in enumerate(cache.linear_cache):
            if torch.is_tensor(state):
                layers[i] = SimpleNamespace(recurrent_states={0: state})
        return [layers[i] for i in range(len(layers))]
    return list(cache.layers)


def held(layer: Any) -> dict[str, list[tuple[Any, ...]]]:
    """What one cache layer of transformers holds: part → shapes and dtypes without the batch."""
    parts: dict[str, list[tuple[Any, ...]]] = {}
    if getattr(layer, "keys", None) is not None:
        parts["token"] = [(tuple(t.shape[1:]), DTYPES[t.dtype]) for t in (layer.keys, layer.values)]
    for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
        for tensor in states.values():
            if tensor is not None:
                parts.setdefault("state", []).append((tuple(tensor.shape[1:]), DTYPES[tensor.dtype]))
    return parts


def tokens_held(spec: LayerSpec) -> int:
    """transformers drops what the *next* query will not see; a chunk it treats as a window."""
    if spec.axis == "media":
        return IMAGE_TOKENS
    span = (
        Visibility("sliding", spec.visibility.size) if spec.visibility.kind == "chunked" else spec.visibility
    )
    return span.visible_tokens(LENGTH + 1) - 1


def expected(spec: LayerSpec) -> list[tuple[Any, ...]]:
    if spec.unit == "state":
        return [(field.shape, field.dtype) for field in spec.fields]
    tokens = tokens_held(spec)
    if spec.fields[0].name == "latent":
        (width,) = spec.fields[0].shape
        rope = TINY["deepseek_v3"]["qk_rope_head_dim"]
        return [((1, tokens, width - rope), spec.fields[0].dtype), ((1, tokens, rope), spec.fields[0].dtype)]
    return [((field.shape[0], tokens, field.shape[1]), field.dtype) for field in spec.fields]


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_model_allocates_as_its_spec(name: str) -> None:
    config = transformers_config(tiny_config(name))
    spec = model_spec(tiny_config(name))
    cache = run(config)
    for index, layer in enumerate(cache):
        parts = {
            part.unit: expected(part)
            for key, part in spec.layers.items()
            if key.startswith(f"layers.{index}.")
        }
        assert held(layer) == parts, f"layer {index}"
    assert max(int(key.split(".")[1]) for key in spec.layers) < len(cache)


@pytest.mark.parametrize("name", TINY)
def test_the_saved_config_reads_like_the_published_one(name: str) -> None:
    saved = transformers_config(tiny_config(name)).to_dict()
    assert model_spec(saved).layers == model_spec(tiny_config(name)).layers


def test_every_family_is_tried() -> None:
    tried = {raw["model_type"] for raw in EVERY.values()} | set(ENCODER_DECODERS)
    assert tried >= set(FAMILIES)


@pytest.mark.parametrize(
    "model_type", [name for name in FAMILIES if name not in ("nemotron_h", "qwen4_exp_text")]
)
def test_fields_left_out_take_the_values_of_transformers(model_type: str) -> None:
    ours = model_spec({"model_type": model_type})
    theirs = model_spec(transformers_config({"model_type": model_type}).to_dict())
    assert ours.layers == theirs.layers
    assert ours.max_context == theirs.max_context


@pytest.mark.parametrize("name", known_models())
def test_shipped_configs_mean_the_same_to_transformers(name: str) -> None:
    ours = load_spec(name)
    theirs = model_spec(transformers_config(load_config(name)).to_dict())
    assert ours.layers == theirs.layers
    assert ours.max_context == theirs.max_context
    assert ours.media == theirs.media


def kinds(name: str) -> dict[str, int]:
    counts: dict[str, int] = {}
    for spec in load_spec(name).layers.values():
        word = spec.kind if not spec.visibility.windowed else f"{spec.kind} {spec.visibility.size}"
        counts[word] = counts.get(word, 0) + 1
    return counts


@pytest.mark.parametrize(
    ("name", "counts", "bytes_per_token"),
    [
        ("llama-3-70b", {"full": 80}, 327_680),
        ("llama-3-8b", {"full": 32}, 131_072),
        ("qwen3-8b", {"full": 36}, 147_456),
        ("mistral-7b", {"sliding 4096": 32}, 131_072),
        ("ministral-8b", {"full": 9, "sliding 32768": 27}, 147_456),
        ("gemma-2-9b", {"full": 21, "sliding 4096": 21}, 344_064),
        ("gemma-3-12b", {"full": 8, "sliding 1024": 40}, 393_216),
        ("gpt-oss-120b", {"full": 18, "sliding 128": 18}, 73_728),
        ("llama-4-scout", {"full": 12, "chunked 8192": 36}, 196_608),
        ("deepseek-v3", {"full": 61}, 70_272),
        ("mamba2-2.7b", {"state": 64}, 0),
        ("jamba-1.5-mini", {"full": 4, "state": 28}, 16_384),
        ("bamba-9b", {"full": 3, "state": 29}, 12_288),
        ("qwen3-next-80b", {"full": 12, "state": 36}, 24_576),
        ("falcon-h1-7b", {"full": 44, "state": 44}, 45_056),
        ("nemotron-h-8b", {"full": 4, "state": 24}, 16_384),
        ("llama-3.2-11b-vision", {"full": 32, "cross": 8}, 131_072),
        ("qwen2.5-vl-7b", {"full": 28}, 57_344),
    ],
)
def test_published_facts(name: str, counts: dict[str, int], bytes_per_token: int) -> None:
    assert kinds(name) == counts
    assert PoolLayout.build(load_spec(name).layers).bytes_per_token() == bytes_per_token


def test_names_of_layers() -> None:
    assert list(load_spec("nemotron-h-8b").layers)[:5] == [
        "layers.0.mamba",
        "layers.2.mamba",
        "layers.4.mamba",
        "layers.6.mamba",
        "layers.7.attention",
    ]
    assert {"layers.0.attention", "layers.0.mamba"} <= set(load_spec("falcon-h1-7b").layers)
    assert "layers.3.cross" in load_spec("llama-3.2-11b-vision").layers
    assert "layers.0.linear" in load_spec("qwen3-next-80b").layers


def test_images_go_where_the_model_puts_them() -> None:
    places = {
        name: load_spec(name).media for name in ("llama-3.2-11b-vision", "qwen2.5-vl-7b", "gemma-3-12b")
    }
    assert {name: media.place for name, media in places.items() if media} == {
        "llama-3.2-11b-vision": "cross",
        "qwen2.5-vl-7b": "stream",
        "gemma-3-12b": "stream",
    }
    assert places["qwen2.5-vl-7b"].token_id == 151655  # type: ignore[union-attr]
    assert load_spec("gemma-3-1b").media is None


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v3", "llama-3.2-11b-vision", "falcon-h1-7b"])
def test_the_kv_dtype_changes_tokens_and_leaves_states(name: str, dtype: str) -> None:
    own, other = load_spec(name), load_spec(name, dtype)
    for key, spec in other.layers.items():
        if spec.unit == "state":
            assert spec == own.layers[key]
        else:
            assert spec.fields[0].dtype == dtype
            scales = [field for field in spec.fields if field.name.endswith("_scale")]
            assert bool(scales) == (dtype in ("int8", "fp8"))


def test_the_latent_is_one_replicated_field() -> None:
    (field,) = load_spec("deepseek-v3").layers["layers.0.attention"].fields
    assert (field.name, field.shape, field.shard_axis) == ("latent", (576,), None)


def test_the_recurrence_keeps_the_dtype_its_config_states() -> None:
    raw = tiny_config("nemotron_h")
    assert model_spec(raw).layers["layers.0.mamba"].fields[1].dtype == "fp32"
    raw["mamba_ssm_cache_dtype"] = "bfloat16"
    assert model_spec(raw).layers["layers.0.mamba"].fields[1].dtype == "bf16"


def test_nemotron_lists_its_layers_in_either_spelling() -> None:
    raw = tiny_config("nemotron_h")
    del raw["hybrid_override_pattern"], raw["num_hidden_layers"]
    old = model_spec({**raw, "layers_block_type": ["mamba", "mlp", "mamba", "attention"]})
    new = model_spec(
        {**raw, "layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention"]}
    )
    assert old.layers == new.layers == model_spec(tiny_config("nemotron_h")).layers


def test_a_draft_stands_beside_its_target() -> None:
    target, draft = load_spec("llama-3-70b"), load_spec("llama-3.2-1b")
    both = with_draft(target, draft)
    assert len(both.layers) == 96
    assert both.layers["draft.layers.0.attention"].lifetime == "draft"
    assert both.layers["layers.0.attention"] == target.layers["layers.0.attention"]
    assert both.max_context == 8192
    assert len(PoolLayout.build(both.layers).groups) == 2


def test_a_draft_of_the_same_shape_gets_groups_of_its_own() -> None:
    same = load_spec("llama-3-8b")
    assert len(PoolLayout.build(with_draft(same, same).layers).groups) == 2


def test_the_canonical_form_is_stable_and_distinguishes_specs() -> None:
    form = load_spec("gemma-3-12b").canonical()
    assert form == load_spec("gemma-3-12b").canonical()
    assert json.loads(form)["layers"]["layers.5.attention"]["span"] == {"kind": "full", "size": 0}
    assert form != load_spec("gemma-3-12b", "int8").canonical()
    assert form != load_spec("gemma-3-27b").canonical()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": None}, "model_type"),
        ({"model_type": "rwkv9", "num_attention_heads": None}, "'rwkv9'.*num_attention_heads"),
        ({"model_type": "newmamba", "mamba_d_state": 16}, "'newmamba'.*mamba_d_state"),
        ({"num_hidden_layers": -3}, "num_hidden_layers is -3"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers is 2.5"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers 1000000"),
        ({"head_dim": "big"}, "head_dim is 'big'"),
        ({"hidden_size": 30}, "hidden_size 30.*num_attention_heads 4"),
        ({"layer_types": ["full_attention"]}, "1 kinds of layers for 4"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention'"),
        ({"layer_types": ["full_attention", "wavy"] * 2}, "'wavy' is not known"),
        ({"layer_types": ["linear_attention"] * 4}, "linear_attention layer"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window"),
        ({"layer_types": ["mlp"] * 4}, "no layer keeps anything"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX*-"}, "'MX.-'"),
        ({"model_type": "bamba", "attn_layer_indices": "all"}, "attn_layer_indices is 'all'"),
        ({"torch_dtype": "int3"}, "dtype 'int3'"),
    ],
)
def test_an_unreadable_config_raises_with_the_reason(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        model_spec({**SIZES, "model_type": "llama", **change})


def test_an_unknown_kv_dtype_lists_the_known_ones() -> None:
    with pytest.raises(ModelError, match=r"'int4'.*bf16, fp16, fp32, int8, fp8"):
        load_spec("llama-3-8b", "int4")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**41) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELD_NAMES = sorted(
    {key for family in FAMILIES.values() for key in family.defaults} | {"layer_types", "text_config"}
)


@given(
    st.sampled_from([*FAMILIES, "unheard_of"]),
    st.dictionaries(st.sampled_from(FIELD_NAMES), JSON, max_size=3),
)
def test_odd_values_raise_the_one_error_or_none(model_type: str, fields: dict[str, Any]) -> None:
    try:
        spec = model_spec({"model_type": model_type, **fields})
    except ModelError:
        return
    assert spec.layers
