"""Loading: weights from folders, random ones from configs, and what is refused at the door, with its reason."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvloom.engine import SamplingParams
from kvloom.models.loading import choose_device, load, refusal, transformers_config
from kvloom.models.paged.family_exceptions import fix_rope_frequencies
from kvloom.models.sharding import WholeModel
from kvloom.models.specs import ModelError
from tests.engines import make_engine

from .quantised import fp8
from .tiny import SIZES, TINY
from .zoo import Runner, config_of, expected, prompts_of, tiny

LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": 32,
    "long_factor": [4.0, 3.0, 2.0, 1.0],
    "short_factor": [1.0] * 4,
}


def saved(model: Any, folder: Path, **options: Any) -> str:
    model.save_pretrained(folder, **options)
    return str(folder)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "bamba", "gpt2"])
@pytest.mark.few(2)
def test_a_sharded_folder_gives_the_tokens_it_was_saved_with(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    name = saved(model, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    loaded, tokenizer = load(name, "float32", "cpu", progress=True)
    assert tokenizer is None
    assert not loaded.training
    assert not any(weight.requires_grad for weight in loaded.parameters())
    prompts = prompts_of(1)
    model.set_attn_implementation("eager")
    assert Runner(loaded).generate(prompts) == expected(model, prompts)


def test_files_of_weights_are_not_mapped_into_memory(tmp_path: Path) -> None:
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        pytest.skip("no /proc: the mapped files of a process are not known")
    name = saved(tiny("llama"), tmp_path, max_shard_size="20KB")
    during = []

    def watch(*_: Any, **__: Any) -> None:
        during.append(name in maps.read_text())

    inner = transformers.LlamaForCausalLM.tie_weights
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            transformers.LlamaForCausalLM, "tie_weights", lambda *a, **k: (watch(), inner(*a, **k))[1]
        )
        model, _ = load(name, "float32", "cpu")
    assert during
    assert not any(during)
    assert name not in maps.read_text()
    assert model.model.embed_tokens.weight.isfinite().all()


MEASURE = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from kvloom.models.loading import load
from kvloom.models.sharding import RankGroups, Shard

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))

small, large, dtype, device, count = sys.argv[1:]
rank = SimpleNamespace(shard=Shard(0, int(count)))
groups = RankGroups(rank, rank, None) if int(count) > 1 else None
load(small, dtype, device, ranks=groups)  # imports, caches
Path("/proc/self/clear_refs").write_text("5")
before = peak()
model, _ = load(large, dtype, device, ranks=groups)
weights = [one.nbytes for one in model.parameters() if one.device.type == "cpu"]
print(json.dumps([peak() - before, sum(weights)]))
"""
"""Prints the largest growth of memory during a load, and the size of the model on the CPU, in bytes."""
WIDE = {"hidden_size": 512, "vocab_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}
DENSE = {"model_type": "llama", **WIDE, "intermediate_size": 1400, "num_hidden_layers": 8}
ROUTED = {
    "model_type": "qwen3_moe", **WIDE, "num_hidden_layers": 4, "num_experts": 32, "num_experts_per_tok": 2,
    "moe_intermediate_size": 352, "head_dim": 64,
}  # fmt: skip
ENCODER = {
    "model_type": "t5",
    "d_model": 512,
    "d_ff": 1408,
    "num_layers": 6,
    "num_heads": 8,
    "vocab_size": 4096,
}
LOADS: dict[str, tuple[dict[str, Any], str, str, int]] = {
    "same dtype": (DENSE, "bfloat16", "cpu", 1),
    "another dtype": (DENSE, "float32", "cpu", 1),
    "tied weights": ({**DENSE, "vocab_size": 8192, "tie_word_embeddings": True}, "float32", "cpu", 1),
    "tensors as large as a shard": ({**DENSE, "intermediate_size": 12000}, "float32", "cpu", 1),
    "experts": (ROUTED, "bfloat16", "cpu", 1),
    "experts, another dtype": (ROUTED, "float32", "cpu", 1),
    "an encoder and a decoder": (ENCODER, "float32", "cpu", 1),
    "a rank": (DENSE, "bfloat16", "cpu", 2),
    "a rank with experts": (ROUTED, "bfloat16", "cpu", 2),
    "another device": (DENSE, "float32", "meta", 1),  # it takes weights like a GPU, and keeps none
    "experts on another device": (ROUTED, "float32", "meta", 1),
}
"""Config, dtype, device and number of ranks of a load."""


def loaded_bytes(small: str, large: str, dtype: str, device: str, ranks: int) -> tuple[int, int]:
    """The growth of memory, and the size of the model. A process of its own measures, because memory that earlier tests
    freed would change the result."""
    if not Path("/proc/self/clear_refs").is_file():
        pytest.skip("no /proc: the peak of memory is not known")
    command = [sys.executable, "-c", MEASURE, small, large, dtype, device, str(ranks)]
    grown, model = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return grown, model


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADS)
def test_loading_needs_little_memory_beside_the_model(name: str, tmp_path: Path) -> None:
    fields, dtype, device, ranks = LOADS[name]
    config = transformers.AutoConfig.for_model(**fields)
    is_encoder = config.is_encoder_decoder
    auto = transformers.AutoModelForSeq2SeqLM if is_encoder else transformers.AutoModelForCausalLM
    made = auto.from_config(config, dtype=torch.bfloat16)
    large = saved(made, tmp_path / "large", max_shard_size="12MB")
    thin = {"d_model": 64, "d_ff": 64} if is_encoder else {"hidden_size": 64, "head_dim": 8}
    short = {**fields, **thin, ("num_layers" if is_encoder else "num_hidden_layers"): 1}
    small = saved(
        auto.from_config(transformers.AutoConfig.for_model(**short), dtype=torch.bfloat16), tmp_path / "small"
    )
    grown, model = loaded_bytes(small, large, dtype, device, ranks)
    largest = max(file.stat().st_size for file in (tmp_path / "large").glob("*.safetensors"))
    assert grown - model < 1.2 * largest
    if device == "cpu" and ranks == 1:
        wanted = getattr(torch, dtype)
        loaded, _ = load(large, dtype, "cpu")
        weights = dict(loaded.named_parameters())
        assert all(torch.equal(weights[key], one.to(wanted)) for key, one in made.named_parameters())


@pytest.mark.slow
def test_dequantising_needs_little_memory_beside_the_model(tmp_path: Path) -> None:
    for name, fields in (
        ("small", {}),
        ("large", {**WIDE, "intermediate_size": 1408, "num_hidden_layers": 8}),
    ):
        (tmp_path / name).mkdir()
        fp8(tmp_path / name, **fields)
    grown, model = loaded_bytes(str(tmp_path / "small"), str(tmp_path / "large"), "bfloat16", "cpu", 1)
    assert grown - model < 1.2 * (tmp_path / "large" / "model.safetensors").stat().st_size


def test_a_rank_that_reads_experts_one_by_one_knows_the_whole_weight() -> None:
    for count, size in ((3, 5), (8, 64), (128, 6)):
        weight = torch.randn(count, size, 2)
        at_once, in_parts = WholeModel(None), WholeModel(None)
        at_once.record("w", weight)
        for index in range(count):
            in_parts.record_part("w", weight[index : index + 1], index, count)
        assert in_parts.weights["w"][0] == at_once.weights["w"][0]
        assert torch.equal(in_parts.weights["w"][1], at_once.weights["w"][1])


def test_a_file_that_becomes_shorter_while_it_is_read_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = saved(tiny("llama"), tmp_path)
    monkeypatch.setattr("kvloom.models.loading.weight_reader.os.preadv", lambda *_: 0)
    with pytest.raises(ModelError, match="ends before its last weight"):
        load(name, "float32", "cpu")


def test_weights_have_the_requested_dtype(tmp_path: Path) -> None:
    name = saved(tiny("llama").to(torch.bfloat16), tmp_path)
    assert {weight.dtype for weight in load(name, device="cpu")[0].parameters()} == {torch.bfloat16}
    assert {weight.dtype for weight in load(name, "float32", "cpu")[0].parameters()} == {torch.float32}
    with pytest.raises(ModelError, match="dtype 'int4' is not known"):
        load(name, "int4", "cpu")


@pytest.mark.parametrize(
    "family", ["llama", "qwen3_moe", "gpt_oss", "deepseek_v3", "mamba2", "jamba", "qwen3_next"]
)
@pytest.mark.few(3)
def test_random_weights_are_sane_and_the_same_for_a_seed(family: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SIZES, **TINY[family]}))
    model, tokenizer = load(str(path), device="cpu", load_format="random", seed=3)
    assert tokenizer is None
    for name, weight in model.named_parameters():
        assert weight.dtype == torch.bfloat16
        assert weight.isfinite().all(), name
        if name.endswith("norm.weight"):
            assert torch.equal(weight, torch.ones_like(weight)) or torch.equal(
                weight, torch.zeros_like(weight)
            ), name
    assert 0.018 < model.get_input_embeddings().weight.float().std() < 0.022
    with torch.inference_mode():
        assert model(torch.arange(3, 60)[None]).logits.isfinite().all()
    before = torch.get_rng_state()
    same, other = (load(str(path), device="cpu", load_format="random", seed=seed)[0] for seed in (3, 4))
    for one, two in zip(model.parameters(), same.parameters(), strict=True):
        assert torch.equal(one, two)
    assert not torch.equal(model.get_input_embeddings().weight, other.get_input_embeddings().weight)
    assert torch.equal(torch.get_rng_state(), before)


def test_random_weights_that_are_tied_are_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **TINY["llama"], "tie_word_embeddings": True}))
    model, _ = load(str(tmp_path), "float32", "cpu", load_format="random")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_random_weights_take_a_folder_or_a_name_that_is_shipped(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **TINY["llama"]}))
    model, _ = load(str(tmp_path), "float32", "cpu", load_format="random")
    assert len(model.model.layers) == SIZES["num_hidden_layers"]
    assert transformers_config("qwen3-0.6b", "random").num_hidden_layers == 28
    with pytest.raises(ModelError, match="describes layers, not weights"):
        transformers_config("qwen2.5-vl-7b", "random")


PARAMETERS = {
    "llama-3.1-8b": 8.03, "llama-3.2-1b": 1.236, "llama-3-70b": 70.55, "llama-3.1-405b": 405.85, "llama-4-scout": 107.77,
    "qwen3-0.6b": 0.596, "qwen3-30b-a3b": 30.53, "qwen3-next-80b": 79.67, "qwen2.5-7b": 7.616, "mistral-7b": 7.242,
    "gemma-2-27b": 27.23, "gemma-3-12b": 11.77, "gpt-oss-20b": 20.91, "gpt-oss-120b": 116.83, "deepseek-v3": 671.03,
    "mamba2-2.7b": 2.703, "jamba-1.5-mini": 51.57, "bamba-9b": 9.78, "nemotron-h-8b": 8.10, "falcon-h1-7b": 7.586,
}  # fmt: skip
"""Billions, as published (of the text alone, where there are images)."""


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.few(2)
def test_a_shipped_config_is_as_large_as_the_model_and_runs(name: str) -> None:
    config = transformers_config(name, "random")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(weight.numel() for weight in model.parameters()) / 1e9 == pytest.approx(
        PARAMETERS[name], rel=1e-3
    )
    assert refusal(config) is None


def changed(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_what_is_missing_is_named_before_weights_are_read(tmp_path: Path) -> None:
    name = saved(tiny("llama"), tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    whole = shards[0].read_bytes()
    shards[0].write_bytes(whole[:-10])
    with pytest.raises(ModelError, match=f"{shards[0].name} cannot be read"):
        load(name, device="cpu")
    shards[0].unlink()
    with pytest.raises(ModelError, match=rf"1 of {len(shards)} shards are missing: {shards[0].name}"):
        load(name, device="cpu")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("[]")
    with pytest.raises(ModelError, match="not an index of shards"):
        load(name, device="cpu")
    index.unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        load(name, device="cpu")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="is a pickle, which is never read"):
        load(name, device="cpu")
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        load(name, device="cpu")


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    name = saved(tiny("llama"), tmp_path)
    changed(tmp_path, num_hidden_layers=5)
    with pytest.raises(ModelError, match=r"lacks \d+ weights of LlamaForCausalLM, first model\.layers\.4\."):
        load(name, device="cpu")


def test_what_cannot_be_a_model_is_refused(tmp_path: Path) -> None:
    name = saved(tiny("llama"), tmp_path)
    for fields, said in (
        (
            {"architectures": ["LlamaForSequenceClassification"]},
            "is a LlamaForSequenceClassification, not a causal",
        ),
        (
            {"model_type": "newest", "auto_map": {"AutoConfig": "code.py"}},
            "has its own code, which is never run",
        ),
        ({"model_type": "newest", "auto_map": {}}, "'newest' is not known to transformers"),
        ({"model_type": "vit", "architectures": []}, "'vit' is not a causal language model"),
        ({"model_type": "llama", "hidden_size": "many"}, "transformers cannot read this config"),
    ):
        changed(tmp_path, **fields)
        with pytest.raises(ModelError, match=said):
            load(name, device="cpu")
    with pytest.raises(ModelError, match="config without weights"):
        load("llama-3.1-8b")
    with pytest.raises(ModelError, match="did you mean llama"):
        load("llama-3.1-9b")
    with pytest.raises(ModelError, match="there is no file"):
        load(str(tmp_path / "nothing"))
    with pytest.raises(ModelError, match="load format 'gguf'"):
        load(name, load_format="gguf")  # type: ignore[arg-type]


@pytest.mark.few(1)
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_a_checkpoint_is_never_run(file: str, tmp_path: Path) -> None:
    """The model type is known, so the checkpoint loads, with the code of transformers."""
    name = saved(tiny("llama"), tmp_path)
    names = {
        "AutoConfig": "code.Own",
        "AutoModelForCausalLM": "code.Own",
        "AutoTokenizer": ["code.Own", None],
    }
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    if file == "config.json":
        changed(tmp_path, auto_map=names)
        model, _ = load(name, "float32", "cpu")
        assert type(model) is transformers.LlamaForCausalLM
    else:
        (tmp_path / file).write_text(json.dumps({"auto_map": names, "tokenizer_class": "Own"}))
        with pytest.raises(ModelError, match="tokenizer cannot be read"):
            load(name, "float32", "cpu")
    assert not (tmp_path / "ran").exists()


def test_progress_counts_all_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = saved(tiny("qwen3_moe"), tmp_path, max_shard_size="20KB")
    steps: list[list[int]] = []

    class Bars:
        def __init__(self, console: Any, transient: bool) -> None:
            assert console.stderr
            assert transient

        def __enter__(self) -> Bars:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def add_task(self, _: str, total: int) -> int:
            steps.append([total, 0])
            return len(steps) - 1

        def advance(self, task: int, count: int) -> None:
            steps[task][1] += count

    monkeypatch.setattr("rich.progress.Progress", Bars)
    model, _ = load(name, "float32", "cpu", progress=True)
    assert steps
    assert all(done == total for total, done in steps)
    assert max(total for total, _ in steps) == len(model.state_dict())
    count = len(steps)
    load(name, "float32", "cpu")
    assert len(steps) == count


def test_a_tokenizer_that_is_there_must_be_readable(tmp_path: Path) -> None:
    name = saved(tiny("llama"), tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="tokenizer cannot be read"):
        load(name, device="cpu")


def test_encoders_are_refused_and_decoders_run() -> None:
    assert "BertSelfAttention is not causal" in str(refusal(config_of("bert", is_decoder=False)))
    assert refusal(config_of("bert")) is None
    assert refusal(config_of("bart")) is None
    assert refusal(config_of("bart", architectures=["BartForConditionalGeneration"])) is None
    assert "save its decoder as ProphetNetForCausalLM" in str(
        refusal(config_of("prophetnet", architectures=["ProphetNetForConditionalGeneration"]))
    )


def test_windows_that_depend_on_how_a_prompt_is_split_are_refused() -> None:
    assert "keep_window_size is 8" in str(refusal(config_of("doge", keep_window_size=8)))
    assert "sliding_window is 8" in str(refusal(config_of("moshi", sliding_window=8)))


@pytest.mark.slow
def test_a_large_model_whose_code_depends_on_values_is_examined_without_memory() -> None:
    assert refusal(transformers.AutoConfig.for_model("jetmoe")) is None


def test_a_module_that_calls_attention_with_something_new_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    inner = modeling_llama.LlamaAttention.forward
    monkeypatch.setattr(
        modeling_llama.LlamaAttention,
        "forward",
        lambda self, *args, **kwargs: inner(self, *args, **{**kwargs, "position_bias": 1}),
    )
    assert "LlamaAttention calls attention with position_bias" in str(refusal(config_of("llama")))


def test_a_config_that_means_something_else_than_was_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.qwen2 import modeling_qwen2

    config = config_of("qwen2 with windows")
    inner = modeling_qwen2.Qwen2Attention.__init__

    def wider(self: Any, config: Any, layer_idx: int) -> None:
        inner(self, config, layer_idx)
        self.sliding_window = 9

    monkeypatch.setattr(modeling_qwen2.Qwen2Attention, "__init__", wider)
    assert "layer 0 attends with a window of 9, its config has None" in str(refusal(config))


def test_rotary_frequencies_do_not_follow_the_batch() -> None:
    options = {"rope_parameters": LONG, "sliding_window": None, "original_max_position_embeddings": 32}
    model = tiny("phi3", **options)
    assert refusal(model.config) is None
    short = model.model.rotary_emb.inv_freq.clone()
    fix_rope_frequencies(model, context=32)
    assert torch.equal(model.model.rotary_emb.inv_freq, short)
    model = tiny("phi3", **options)
    fix_rope_frequencies(model)
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, short / torch.tensor(LONG["long_factor"]))
    model.set_attn_implementation("eager")
    prompts = prompts_of(1, (5, 20, 40))
    wanted = expected(model, prompts)
    assert Runner(model).generate(prompts) == wanted


def test_dynamic_rope_scaling_keeps_its_frequencies_within_the_limit_of_the_model() -> None:
    model = tiny("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    model.set_attn_implementation("eager")
    prompts = prompts_of(1, (5, 20, 110))  # the limit is 128
    wanted = expected(model, prompts)
    assert refusal(model.config) is None
    assert Runner(model).generate(prompts) == wanted


@pytest.mark.parametrize("wrong", ["cudda", "gpu", "cpu:x", "cuda:99", torch.device("cuda", 99)])
def test_a_device_that_is_not_there_is_named(wrong: torch.device | str) -> None:
    with pytest.raises(ValueError, match=r"give cpu") as caught:
        choose_device(wrong)
    assert str(wrong) in str(caught.value)
    assert choose_device("cpu") == torch.device("cpu")


def test_an_engine_of_short_contexts_uses_short_frequencies() -> None:
    model = tiny("phi3", rope_parameters=LONG, sliding_window=None, original_max_position_embeddings=32)
    prompt = prompts_of(1, (10,))[0]
    wanted = expected(model, [prompt], 8)[0][len(prompt) :]
    params = SamplingParams(max_tokens=8, temperature=0)
    found = {}
    for context in (32, None, 32):
        engine = make_engine(model, 1 << 22, max_context=context)
        request = engine.add(prompt, params)
        engine.run()
        found[context] = request.output
        if context:
            assert request.output == wanted
            with pytest.raises(
                ValueError, match="30 prompt tokens and max_tokens 8 exceed the engine's limit of 32"
            ):
                engine.add([5] * 30, params)
    assert found[None] != wanted  # by the long ones
    with pytest.raises(ValueError, match="max_context 500 must be from 1 to 128"):
        make_engine(model, 1 << 22, max_context=500)
