"""Quantised K and V in the engine: hits, forks and preemptions give the same tokens as a miss, and logits close to
float32.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvloom.cli import main
from kvloom.core import CacheControl
from kvloom.engine import LLM, Engine, SamplingParams, calibrate
from kvloom.engine.calibration import texts_of
from kvloom.models.paged import Scales, Work, read_scales
from kvloom.models.specs import ModelError
from tests.engines import make_engine
from tests.models.zoo import expected, tiny

FAMILIES = ("llama", "gemma3_text", "qwen3_next")
GREEDY = SamplingParams(max_tokens=8, temperature=0)
MOST = {"int8": 127.0, "fp8": 448.0}
NEAR = 0.02
"""A changed last bit of float32 can change the rounding to 8 bits, and so decide a near tie (in nats) differently."""


def drawn(seed: str, many: int, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 64) for _ in range(rng.randrange(1, longest))] for _ in range(many)]
    for i in range(1, many, 4):  # some share what comes first
        prompts[i] = prompts[i - 1][:20] + prompts[i]
    return prompts


def rounded(x: torch.Tensor, dtype: str, scale: torch.Tensor | None) -> torch.Tensor:
    """Return the values that a page returns for [batch, heads, tokens, dim]; a static `scale` has one value per head."""
    size = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / MOST[dtype]  # padding is zero
    if scale is not None:
        size = scale[:, None, None]
    y = (x / size).clamp(-MOST[dtype], MOST[dtype])
    return (y.round() if dtype == "int8" else y.to(torch.float8_e4m3fn).float()) * size


def oracle(family: str, dtype_of: Callable[[int], str | None], scales: Scales | None = None) -> Any:
    """Return the model on transformers' own cache, attending to quantised keys and values."""

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **named: Any) -> Any:
        layer = int(module.layer_idx)
        dtype = dtype_of(layer)
        if dtype is not None:
            static = None if scales is None else scales[f"layers.{layer}.attention"]
            key = rounded(key, dtype, None if static is None else static["k_scale"])
            value = rounded(value, dtype, None if static is None else static["v_scale"])
        return sdpa_attention_forward(module, query, key, value, mask, **named)

    ALL_ATTENTION_FUNCTIONS.register("quantised", attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("quantised", sdpa_mask)
    model = tiny(family)  # one of its own: mixers that run on our pages do not run on others
    model.set_attn_implementation("quantised")
    return model


def told(model: Any, prompts: list[list[int]]) -> Callable[[list[list[int]]], int]:
    """Return a function that counts answers equal to those of `model`; the others must first differ at a near tie."""
    wanted = expected(model, prompts, 2 * GREEDY.max_tokens)
    logits = {}
    for tokens in wanted:
        with torch.inference_mode():
            logits[tuple(tokens)] = model(torch.tensor([tokens])).logits[0].log_softmax(-1)

    def same(found: list[list[int]]) -> int:
        exact = 0
        for mine, tokens in zip(found, wanted, strict=True):
            other = [i for i, (a, b) in enumerate(zip(mine, tokens, strict=False)) if a != b]
            exact += not other
            if other:
                at = other[0]
                odds = logits[tuple(tokens)][at - 1]
                assert odds[tokens[at]] - odds[mine[at]] < NEAR, (at, mine, tokens)
        return exact

    return same


def calibrated(model: Any, folder: Path, prompts: list[list[int]]) -> str:
    path = folder / "scales.safetensors"
    calibrate(model, prompts).save(path)
    return str(path)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(1)
def test_quantised_tokens_do_not_depend_on_cache_preemption_or_batch(
    family: str, dtype: str, static: bool, tmp_path: Path
) -> None:
    model = tiny(family)
    prompts = drawn(family, 12)
    kv_scales = calibrated(model, tmp_path, prompts) if static else "dynamic"
    layout = make_engine(model, 1 << 24, dtype, kv_scales=kv_scales).layout
    scales = None
    if static:
        specs = {name: group.spec for group in layout.of("token") for name in group.layers}
        scales = read_scales(Path(kv_scales), specs)
    same = told(oracle(family, lambda _: dtype, scales), prompts)

    def run(engine: Engine, given: list[list[int]]) -> list[list[int]]:
        requests = [engine.add(prompt, GREEDY) for prompt in given]
        for step in count():
            if not engine.busy:
                break
            engine.step()
            if engine is tight and step % 6 == 5 and engine.scheduler.running:
                engine.scheduler._preempt(engine.scheduler.running[-1])
        engine.cache.check()
        assert all(request.finish_reason == "length" for request in requests)
        counts["cached"] = sum(request.cached_tokens or 0 for request in requests)
        counts["preempted"] = sum(request.preemptions for request in requests)
        found = [request.tokens for request in requests]
        assert same(found) >= len(prompts) - 1
        return found

    counts: dict[str, int] = {}
    # About as much as the longest needs and half again: pages of others do not last.
    room = int(1.5 * layout.slab_bytes_for(max(map(len, prompts)) + 16)) + 3 * layout.slab_bytes
    tight = make_engine(model, room, dtype, token_budget=13, max_running=5, ahead=True, kv_scales=kv_scales)
    roomy = make_engine(model, 1 << 24, dtype, kv_scales=kv_scales)
    roomy.buffer.fill_(0xFF)  # NaN, as fp8 and as a scale: nothing that was not written is read
    first = run(roomy, prompts)
    warm = run(roomy, first)  # each goes on from what it said, which is cached
    assert counts["cached"] == sum(len(tokens) - 1 for tokens in first)
    cold = run(make_engine(model, 1 << 24, dtype, kv_scales=kv_scales), first)
    assert counts["cached"] < sum(map(len, first)) / 3  # what two share
    assert warm == cold
    run(tight, first)
    assert counts["preempted"] > 0


def test_layer_kinds_have_their_own_dtypes() -> None:
    model = tiny("gemma3_text")
    prompts = drawn("kinds", 6)
    engine = make_engine(model, 1 << 24, "int8,sliding=fp32")
    kinds = {name: group.spec for group in engine.layout.groups for name in group.layers}
    assert {(spec.kind, spec.fields[0].dtype) for spec in kinds.values()} == {
        ("full", "int8"),
        ("sliding", "fp32"),
    }
    full = {int(name.split(".")[1]) for name, spec in kinds.items() if spec.kind == "full"}
    same = told(oracle("gemma3_text", lambda layer: "int8" if layer in full else None), prompts)
    mixed = make_engine(model, 1 << 24, {"full": "int8", "sliding": "fp32"})
    for one in (engine, mixed):
        requests = [one.add(prompt, GREEDY) for prompt in prompts]
        one.run()
        assert same([request.tokens for request in requests]) >= len(prompts) - 1


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_forks_match_separate_requests(family: str, dtype: str) -> None:
    model = tiny(family)
    prompt = drawn(family, 1, 60)[0] * 2
    engine = make_engine(model, 1 << 24, dtype)
    forked = engine.add(prompt, SamplingParams(max_tokens=8, temperature=0.9, seed=5, n=3))
    engine.run()
    alone = make_engine(model, 1 << 24, dtype)
    own = [alone.add(prompt, SamplingParams(max_tokens=8, temperature=0.9, seed=5 + i)) for i in range(3)]
    alone.run()
    assert [one.output for one in forked.returned_samples] == [one.output for one in own]


def logits_of(engine: Engine, prompt: list[int], chunk: int) -> torch.Tensor:
    sequence = engine.cache.open(engine.cache.match(prompt, CacheControl(store=False, read=False)))
    parts = []
    for at in range(0, len(prompt), chunk):
        work = Work(sequence, torch.tensor(prompt[at : at + chunk]).numpy())
        assert not sequence.extend(len(work.tokens))
        parts.append(engine.runner.score([work]))
        sequence.commit(work.tokens.astype("int32"))
    sequence.close()
    return torch.cat(parts)


BOUNDS = {"bf16": 0.01, "fp16": 0.0015, "int8": 0.06, "fp8": 0.25}
"""How far logits may be from those of float32 K and V: the distance over their own spread, over all places. Random weights
of heads this small average nothing out: a trained model is far nearer."""
CHUNKS = 5e-4
"""Largest difference of logits between different chunks; the scans of recurrent layers cause most of it."""


@pytest.mark.parametrize("family", [*FAMILIES, "deepseek_v3"])
@pytest.mark.slow
def test_quantised_logits_are_close_to_float32_for_any_chunks(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    prompts = drawn(family, 4, 90)
    scales = calibrated(model, tmp_path, prompts)
    exact = [logits_of(make_engine(model, 1 << 24), prompt, 100) for prompt in prompts]

    def distance(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
        x, y = torch.cat(a), torch.cat(b)
        return float((x - y).norm() / (y - y.mean(-1, keepdim=True)).norm())

    for dtype, bound in BOUNDS.items():
        for kept in ["dynamic", scales] if dtype in MOST else ["dynamic"]:
            engine = make_engine(model, 1 << 24, dtype, kv_scales=kept)
            whole, pieces = ([logits_of(engine, prompt, chunk) for prompt in prompts] for chunk in (100, 7))
            assert 0 < distance(whole, exact) < bound, (dtype, kept)
            # Were new keys read as they came, and only cached ones as pages give them back, chunks would show.
            assert distance(pieces, whole) < CHUNKS, (dtype, kept)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_calibration_matches_the_models_own_cache(family: str) -> None:
    model = tiny(family, sliding_window=64)
    prompts = drawn("sizes", 5)
    with torch.inference_mode():
        caches = [model(torch.tensor([prompt]), use_cache=True).past_key_values.layers for prompt in prompts]
    seen: list[tuple[int, int]] = []
    found = calibrate(model, prompts, "int8", progress=lambda done, total: seen.append((done, total)))
    assert (found.prompts, seen[-1]) == (5, (5, 5))
    assert found.tokens <= sum(map(len, prompts))  # what two share is computed once
    for i in range(model.config.num_hidden_layers):
        layer = f"layers.{i}.attention"
        for name, part in (("k_scale", "keys"), ("v_scale", "values")):
            sizes = torch.stack([getattr(cache[i], part)[0].abs().amax((1, 2)) for cache in caches]).amax(0)
            torch.testing.assert_close(found.sizes[layer][name], sizes)
            torch.testing.assert_close(found.scales[layer][name], sizes / 127)


def test_percentile_excludes_the_largest_values() -> None:
    model, prompts = tiny("llama"), drawn("sizes", 5)
    every, most = (calibrate(model, prompts, percentile=p).sizes for p in (100, 90))
    nearly = calibrate(model, prompts, percentile=99.9999).sizes
    for layer, fields in every.items():
        for name, sizes in fields.items():
            assert (most[layer][name] < sizes).all()
            torch.testing.assert_close(nearly[layer][name], sizes, rtol=1e-3, atol=0)


def test_long_prompts_are_calibrated_in_pieces() -> None:
    found = calibrate(tiny("llama"), [list(range(3, 60)) * 10], context=64)
    assert (found.prompts, found.tokens) == (1, 570)
    assert calibrate(tiny("llama"), [[5] * 300], context=10**6).prompts == 1  # no longer than the model takes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "bf16"}, "not 'bf16'"),
        ({"percentile": 0}, "percentile 0 must be above 0"),
        ({"context": 0}, "context 0 must be at least 1"),
        ({"prompts": []}, "no prompts to calibrate on"),
        ({"prompts": [[5, 99]]}, "token 99"),
        ({"family": "mamba2"}, "no keys and values to scale"),
    ],
)
def test_invalid_calibration_is_refused(options: dict[str, Any], words: str) -> None:
    options = {"prompts": [[5, 6, 7]], **options}
    with pytest.raises(ValueError, match=words):
        calibrate(tiny(options.pop("family", "llama")), options.pop("prompts"), **options)


def test_scales_without_quantised_pages_are_refused(tmp_path: Path) -> None:
    model = tiny("llama")
    scales = calibrated(model, tmp_path, [[5, 6, 7]])
    for dtype in (None, "bf16"):
        with pytest.raises(ModelError, match="for K and V in int8 or fp8"):
            make_engine(model, 1 << 24, dtype, kv_scales=scales)
    with pytest.raises(ModelError, match="was not loaded from one"):
        make_engine(model, 1 << 24, "fp8", kv_scales="checkpoint")


def test_other_scales_give_other_hashes(tmp_path: Path) -> None:
    model = tiny("llama")
    calibrate(model, [[5, 6, 7]]).save(tmp_path / "a")
    calibrate(model, [[8, 9]]).save(tmp_path / "b")
    names = [
        make_engine(model, 1 << 24, "fp8", kv_scales=s).cache.model
        for s in ("dynamic", tmp_path / "a", tmp_path / "b")
    ]
    assert len(set(names)) == 3


def test_scales_from_a_checkpoint_or_a_file(tmp_path: Path) -> None:
    model, prompts = tiny("llama"), drawn("checkpoint", 4)
    folder, scales = tmp_path / "model", tmp_path / "scales.safetensors"
    model.save_pretrained(folder)
    calibrate(model, prompts).save(scales)
    weights = load_file(folder / "model.safetensors")
    for name, x in load_file(scales).items():
        index, part = name.split(".")[1], name[-7]
        weights[f"model.layers.{index}.self_attn.{part}_proj.{part}_scale"] = x
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    by_name = LLM(str(folder), pool_bytes=1 << 24, kv_dtype="fp8", kv_scales="checkpoint")
    by_file = LLM(str(folder), pool_bytes=1 << 24, kv_dtype="fp8", kv_scales=scales)
    assert by_name.engine.cache.model == by_file.engine.cache.model
    first, second = (llm.generate(prompts, GREEDY) for llm in (by_name, by_file))
    assert [r.outputs[0].token_ids for r in first] == [r.outputs[0].token_ids for r in second]


@pytest.mark.slow
def test_calibrate_and_generate_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, scales = str(tmp_path / "model"), str(tmp_path / "scales.safetensors")
    tiny("llama").save_pretrained(folder)
    (tmp_path / "prompts.jsonl").write_text('[5, 6, 7]\n\n{"prompt": [8, 9]}\n')
    calibration = [
        "calibrate",
        folder,
        "--prompts",
        str(tmp_path / "prompts.jsonl"),
        "--tokens",
        "3 4",
        "--out",
        scales,
    ]
    assert main([*calibration, "--kv-dtype", "int8", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["prompts"], told["tokens"], told["dtype"], len(told["largest"])) == (3, 7, "int8", 4)
    assert main(calibration) == 0
    assert "scales for fp8 of 4 layers, from 7 tokens of 3 prompts; largest |k|" in capsys.readouterr().out
    generation = [
        "generate",
        folder,
        "--tokens",
        "5 6 7",
        "--max-tokens",
        "4",
        "--kv-dtype",
        "fp8",
        "--pool",
        "16MiB",
    ]
    assert main([*generation, "--kv-scales", scales]) == 0
    assert len(capsys.readouterr().out.split()) == 4
    for arguments, words in (
        ([*generation, "--kv-scales", "checkpoint"], "no k_scale for layers.0.attention"),
        ([*generation, "--kv-scales", str(tmp_path / "no")], "there is no file"),
        (["calibrate", folder, "--out", scales], "no prompts to calibrate on"),
        (["calibrate", folder, "--prompts", "no.jsonl", "--out", scales], "no prompt file 'no.jsonl'"),
        (["calibrate", folder, "--prompts", "some words", "--out", scales], "has no tokenizer"),
        (
            ["calibrate", folder, "--tokens", "5", "--out", str(tmp_path / "no" / "s")],
            "folder does not exist",
        ),
        (
            ["calibrate", folder, "--tokens", "5", "--out", scales, "--percentile", "101"],
            "--percentile: 101 is out of range",
        ),
    ):
        assert main(arguments) == 2
        assert words in capsys.readouterr().err


def test_prompts_from_files_and_arguments(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one text\nof two lines\n")
    (tmp_path / "b.jsonl").write_text('"a text"\n{"text": "another"}\n[1, 2]\n')
    given = [str(tmp_path / "a.txt"), "words of my own", str(tmp_path / "b.jsonl")]
    assert list(texts_of(given)) == [
        "one text\nof two lines\n",
        "words of my own",
        "a text",
        "another",
        [1, 2],
    ]
    for line in ("{", "3", "[]", '{"other": "x"}', '[1, "a"]', "[true]"):
        (tmp_path / "bad.jsonl").write_text(line)
        with pytest.raises(ValueError, match=r"bad\.jsonl, line 1"):
            list(texts_of([str(tmp_path / "bad.jsonl")]))
