"""Static scales: found under the field's names, checked, converted; and which layers are kept in which dtype."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvloom.core import PoolLayout
from kvloom.kernels.memory import allocate
from kvloom.models.paged import Pages, checkpoint_of, fingerprint, read_scales, scale_sizes, write_scales
from kvloom.models.specs import ModelError, model_spec

from .tiny import SIZES, TINY
from .zoo import tiny

LAYERS, HEADS = 4, 2


def specs(family: str = "llama", kv_dtype: Any = "fp8", static: bool = True) -> dict[str, Any]:
    return dict(model_spec({**SIZES, **TINY[family]}, kv_dtype=kv_dtype, static_scales=static).layers)


def test_kinds_may_be_kept_in_different_dtypes() -> None:
    def dtypes(kv_dtype: Any) -> dict[str, str]:
        layers = specs("gemma3_text", kv_dtype, static=False)
        return {spec.kind: spec.fields[0].dtype for spec in layers.values()}

    assert dtypes("fp8,sliding=bf16") == {"full": "fp8", "sliding": "bf16"}
    assert dtypes({"full": "int8", "sliding": "fp16"}) == {"full": "int8", "sliding": "fp16"}
    assert dtypes("sliding=int8") == {"full": "bf16", "sliding": "int8"}  # the model's own for the others
    assert dtypes(" int8 , full = fp32 ") == {"full": "fp32", "sliding": "int8"}


@pytest.mark.parametrize(
    ("kv_dtype", "words"),
    [
        ("int4", r"'int4' is not known; known: bf16, fp16, fp32, int8, fp8"),
        ("fp8,sliding=int4", r"'int4' is not known"),
        ("", r"'' is not known"),
        ("fp8,state=bf16", r"'state' layers keep no K and V; kinds that do: full, sliding, chunked, cross"),
        ({"windowed": "fp8"}, r"'windowed' layers keep no K and V"),
        ("fp8,int8", r"sets all layers twice"),
        ("full=fp8,full=int8", r"sets full layers twice"),
        ("fp8,sliding=bf16", r"llama has no sliding layers to which a KV dtype could apply; it has full"),
    ],
)
def test_invalid_kv_dtypes_raise_with_the_reason(kv_dtype: Any, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        specs("llama", kv_dtype)


def test_pages_are_smaller_where_scales_are_static() -> None:
    for family in ("llama", "gemma3_text", "qwen3_next", "deepseek_v3"):
        dynamic, static = (PoolLayout.build(specs(family, "int8", static)) for static in (False, True))
        assert static.bytes_per_token() < dynamic.bytes_per_token()
        names = {field.name for group in static.of("token") for field in group.spec.fields}
        assert not any(name.endswith("scale") for name in names)
        assert static.of("state") == () or static.of("state")[0].spec == dynamic.of("state")[0].spec


def test_only_quantised_layers_need_scales() -> None:
    layers = specs("gemma3_text", "fp8,sliding=bf16")
    needed = {spec.kind: scale_sizes(spec) for spec in layers.values()}
    assert needed == {"full": {"k_scale": 2, "v_scale": 2}, "sliding": {}}
    assert scale_sizes(specs("deepseek_v3")["layers.0.attention"]) == {"latent_scale": 1}
    assert scale_sizes(specs("llama", "fp8", static=False)["layers.0.attention"]) == {}


NAMES = [
    ("model.layers.{}.self_attn.k_scale", "model.layers.{}.self_attn.v_scale"),
    ("model.layers.{}.self_attn.attn.k_scale", "model.layers.{}.self_attn.attn.v_scale"),
    ("model.layers.{}.self_attn.k_proj.k_scale", "model.layers.{}.self_attn.v_proj.v_scale"),
    ("model.layers.{}.self_attn.k_proj.output_scale", "model.layers.{}.self_attn.v_proj.output_scale"),
    ("model.language_model.layers.{}.self_attn.k_scale", "model.language_model.layers.{}.self_attn.v_scale"),
    ("layers.{}.attention.k_scale", "layers.{}.attention.v_scale"),
]


def checkpoint(
    folder: Path, names: tuple[str, str] = NAMES[0], k: Any = 0.5, v: Any = 0.25, **changed: Any
) -> Path:
    tensors = {}
    for i in range(LAYERS):
        tensors[names[0].format(i)] = torch.as_tensor(k)
        tensors[names[1].format(i)] = torch.as_tensor(v)
        tensors[f"model.layers.{i}.self_attn.k_proj.weight_scale"] = torch.tensor(9.0)
        tensors[f"vision_tower.layers.{i}.self_attn.k_scale"] = torch.tensor(9.0)
    tensors.update(changed)
    save_file({name: x for name, x in tensors.items() if x is not None}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("names", NAMES)
def test_scales_are_found_under_the_usual_names(tmp_path: Path, names: tuple[str, str]) -> None:
    found = read_scales(checkpoint(tmp_path, names, k=0.5, v=[0.25, 0.125]), specs())
    assert found.keys() == {f"layers.{i}.attention" for i in range(LAYERS)}
    for fields in found.values():
        assert fields["k_scale"].tolist() == [0.5, 0.5]
        assert fields["v_scale"].tolist() == [0.25, 0.125]


def test_one_scale_may_serve_keys_and_values_and_shapes_do_not_matter(tmp_path: Path) -> None:
    tensors = {
        f"model.layers.{i}.self_attn.kv_scale": torch.tensor([[0.5]], dtype=torch.bfloat16) for i in range(4)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    found = read_scales(tmp_path, specs())["layers.3.attention"]
    assert found["k_scale"].tolist() == found["v_scale"].tolist() == [0.5, 0.5]
    assert found["k_scale"].dtype == torch.float32
    latent = read_scales(tmp_path, specs("deepseek_v3"))["layers.3.attention"]
    assert {name: x.tolist() for name, x in latent.items()} == {"latent_scale": [0.5]}


def test_shards_are_found_through_their_index(tmp_path: Path) -> None:
    placed = {}
    for i in range(LAYERS):
        names = [name.format(i) for name in NAMES[0]]
        save_file({name: torch.tensor(0.5 + i) for name in names}, tmp_path / f"part-{i}.safetensors")
        placed.update(dict.fromkeys(names, f"part-{i}.safetensors"))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    found = read_scales(tmp_path, specs())
    assert [found[f"layers.{i}.attention"]["k_scale"][0].item() for i in range(LAYERS)] == [
        0.5,
        1.5,
        2.5,
        3.5,
    ]


def test_scales_for_another_dtype_keep_their_range(tmp_path: Path) -> None:
    checkpoint(tmp_path)
    for spec, factor in ((specs("llama", "fp8"), 1.0), (specs("llama", "int8"), 448 / 127)):
        found = read_scales(tmp_path, spec)["layers.0.attention"]["k_scale"]
        torch.testing.assert_close(found, torch.full((HEADS,), 0.5 * factor))
    config = {"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_scales(tmp_path, specs("llama", "int8"))["layers.0.attention"]["k_scale"].tolist() == [
        0.5,
        0.5,
    ]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model.layers.2.self_attn.v_scale": None}, r"no v_scale for layers\.2\.attention"),
        (
            {"model.layers.1.self_attn.k_scale": torch.tensor(-1.0)},
            r"k_scale of layers\.1\.attention .* is -1\.0",
        ),
        ({"model.layers.1.self_attn.k_scale": torch.tensor([1.0, 0.0])}, r"layers\.1\.attention .* is 0\.0"),
        ({"model.layers.3.self_attn.v_scale": torch.tensor(torch.inf)}, r"layers\.3\.attention .* is inf"),
        ({"model.layers.3.self_attn.v_scale": torch.tensor(torch.nan)}, r"layers\.3\.attention .* is nan"),
        (
            {"model.layers.0.self_attn.k_scale": torch.ones(3)},
            r"layers\.0\.attention .* has 3 values.* 2 heads",
        ),
        ({"model.layers.0.self_attn.attn.k_scale": torch.tensor(7.0)}, r"are different scales of one layer"),
    ],
)
def test_bad_scales_name_their_layer(tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        read_scales(checkpoint(tmp_path, **changed), specs())


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no file .*nothing.*kvloom calibrate"):
        read_scales(tmp_path / "nothing", specs())
    with pytest.raises(ModelError, match=r"no k_scale for layers\.0\.attention; it has scales of no layer"):
        read_scales(tmp_path, specs())
    (tmp_path / "bad.safetensors").write_bytes(b"\x80\x04pickle")
    with pytest.raises(ModelError, match=r"bad\.safetensors cannot be read"):
        read_scales(tmp_path / "bad.safetensors", specs())
    write_scales(tmp_path / "other", {"layers.0.attention": {"k_scale": torch.ones(2)}}, {"dtype": "int4"})
    with pytest.raises(ModelError, match="scales for 'int4' are not known; known: int8, fp8"):
        read_scales(tmp_path / "other", specs())


def test_a_model_made_in_memory_has_no_checkpoint() -> None:
    with pytest.raises(ModelError, match="was not loaded from one"):
        checkpoint_of(tiny("llama"))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    layers = specs("gemma3_text", "int8,full=fp8")
    made = {name: {field: torch.rand(2) + 0.1 for field in ("k_scale", "v_scale")} for name in layers}
    write_scales(tmp_path / "scales.safetensors", made, {"dtype": "int8"})
    found = read_scales(tmp_path / "scales.safetensors", layers)
    for name, spec in layers.items():
        factor = 127 / 448 if spec.kind == "full" else 1.0
        for field, x in made[name].items():
            torch.testing.assert_close(found[name][field], x * factor)
    assert fingerprint(found) == fingerprint(read_scales(tmp_path / "scales.safetensors", layers))
    assert fingerprint(found) != fingerprint(made)
    assert [path.name for path in tmp_path.iterdir()] == ["scales.safetensors"]


def test_pages_refuse_to_do_without_scales_or_with_too_many() -> None:
    scale = {"k_scale": torch.ones(HEADS), "v_scale": torch.ones(HEADS)}
    everywhere = {f"layers.{i}.attention": scale for i in range(LAYERS)}
    static, dynamic = (PoolLayout.build(specs("llama", "int8", static)) for static in (True, False))
    Pages(static, allocate(static, 4), everywhere)
    with pytest.raises(
        ModelError, match=r"layers\.0\.attention needs static scales: k_scale, v_scale; .* given none"
    ):
        Pages(static, allocate(static, 4))
    with pytest.raises(
        ModelError, match=r"layers\.0\.attention needs static scales: none; it was given k_scale"
    ):
        Pages(dynamic, allocate(dynamic, 4), everywhere)
