"""`kvloom.Cache` in `model.generate()`: the same tokens as without it, from fewer computed tokens."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from functools import cache as memoised
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import cache_utils

import kvloom
from kvloom.adapters.transformers import Cache
from kvloom.adapters.transformers.model_layers import forward_arguments
from kvloom.engine import Engine, EngineConfig, SamplingParams
from tests.models.tiny import TINY
from tests.models.zoo import config_of, prompts_of, tiny

NEW = 10
KINDS = [
    "llama",
    "gemma3_text",
    "llama4_text",
    "deepseek_v3",
    "mamba",
    "jamba",
    "bamba",
    "qwen3_next",
    "falcon_h1",
]
"""One family for each way of storing tokens and states."""
NO_CAUSAL_MODEL = ("mllama_text_model", "qwen2_5_vl_text")
OWN_CACHE = ("minimax",)
SUPPORTED = [family for family in TINY if family not in NO_CAUSAL_MODEL + OWN_CACHE]


@memoised
def model_of(family: str) -> Any:
    return tiny(family)


def generate(model: Any, prompts: list[list[int]], cache: Cache | None = None, **options: Any) -> Any:
    """Greedy answers, prompts included, with logits."""
    tokens = torch.tensor(prompts)
    given = {
        "attention_mask": torch.ones_like(tokens),
        "max_new_tokens": NEW,
        "min_new_tokens": NEW,
        **options,
    }
    if cache is not None:
        given["past_key_values"] = cache
    return model.generate(
        tokens, do_sample=False, pad_token_id=0, return_dict_in_generate=True, output_logits=True, **given
    )


def assert_same(found: Any, expected: Any) -> None:
    assert found.sequences.tolist() == expected.sequences.tolist()
    for one, other in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-3)


def check_answers(model: Any, cache: Cache, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    """Compare a call with the cache and one without. Return the tokens."""
    found = generate(model, prompts, cache, **options)
    assert_same(found, generate(model, prompts, **options))
    cache._store.kv.check()
    return found.sequences.tolist()  # type: ignore[no-any-return]


@pytest.fixture(params=KINDS)
def opened(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Cache]]:
    model = model_of(request.param)
    with Cache(model, "2MiB") as cache:
        yield model, cache


TESTED = "5.22"
METHODS = {
    "activate_past_recording": [],
    "batch_repeat_interleave": ["repeats"],
    "batch_select_indices": ["indices"],
    "crop": ["tokens_to_remove"],
    "early_initialization": None,
    "get_conv_state": None,
    "get_mask_sizes": ["query_length", "layer_idx"],
    "get_max_length": None,
    "get_query_offset": None,
    "get_recurrent_state": None,
    "get_seq_length": ["layer_idx"],
    "has_previous_state": None,
    "is_recording_past": None,
    "offload": None,
    "prefetch": None,
    "reorder_cache": ["beam_idx"],
    "reset": [],
    "update": ["key_states", "value_states", "layer_idx"],
    "update_conv_state": None,
    "update_indexer": None,
    "update_recurrent_state": None,
}
"""The methods of transformers' cache, and the parameters of those that kvloom.Cache replaces."""


def test_the_interface_of_transformers_is_the_tested_one() -> None:
    """If this test fails, transformers changed its caches: adapt kvloom.Cache, then these values."""
    found = Version(transformers.__version__)
    if found < Version(TESTED):
        pytest.skip(f"transformers {found} is older than {TESTED}")
    base: Any = cache_utils.Cache
    for name, method in vars(base).items():
        if name.startswith("_") or not inspect.isfunction(method):
            continue
        assert name in METHODS, (
            f"{name} is new in transformers {found}: does kvloom.Cache have to replace it?"
        )
        parameters = [one for one in inspect.signature(method).parameters if one != "self"]
        expected = METHODS[name]
        if expected is not None:
            assert name in vars(Cache)
            assert parameters[: len(expected)] == expected, f"{name} has other parameters in {found}"
    assert set(METHODS) <= set(vars(base)), f"methods are gone from the cache of transformers {found}"
    for name in ("is_compileable", "is_croppable", "is_initialized"):
        assert isinstance(getattr(base, name), property)
    states = cache_utils.LinearAttentionCacheLayerMixin
    layer: Any = cache_utils.LinearAttentionLayer(number_of_states=2)
    assert list(inspect.signature(states.__init__).parameters)[1:] == ["number_of_states", "kwargs"]
    for name in ("conv_states", "recurrent_states", "has_previous_state", "conv_kernel_size"):
        assert len(getattr(layer, name)) == 2, f"{name} is not per state in transformers {found}"
    for kind in ("conv", "recurrent"):
        assert len(getattr(layer, f"is_{kind}_states_initialized")) == 2
    for name in ("_supports_default_dynamic_cache", "_is_stateful", "generate"):
        assert hasattr(model_of("llama"), name), f"models of transformers {found} have no {name}"
    assert f"{found.major}.{found.minor}" == TESTED, (
        f"transformers {found} has the tested interface: run all tests of this file, then raise TESTED, the limit in "
        "pyproject.toml and the version in docs/transformers.md"
    )


def test_it_is_a_public_name() -> None:
    assert kvloom.Cache is Cache


def check_turns(family: str) -> None:
    model = model_of(family)
    with Cache(model, "2MiB") as cache:
        (prompt,) = prompts_of(1, (50,))
        (answer,) = check_answers(model, cache, [prompt])
        assert cache.cached_tokens == 0
        check_answers(model, cache, [prompt])
        assert (cache.cached_tokens, cache.computed_tokens) == (49, NEW)
        check_answers(model, cache, [[*answer, 7, 8, 9]])
        assert cache.cached_tokens == len(answer) - 1
        assert cache.computed_tokens == 4 + NEW - 1


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.few(2)
def test_a_second_call_computes_new_tokens_only(family: str) -> None:
    check_turns(family)


@pytest.mark.parametrize("family", [family for family in SUPPORTED if family not in KINDS])
@pytest.mark.few(2)
def test_every_family_gives_the_tokens_of_generate(family: str) -> None:
    check_turns(family)


@pytest.mark.few(2)
def test_a_common_start_is_computed_once(opened: tuple[Any, Cache]) -> None:
    """With states, the second prompt marks the branch, and the third resumes there."""
    model, cache = opened
    start, *ends = prompts_of(2, (48, 9, 9, 9))
    for end in ends:
        check_answers(model, cache, [start + end])
    assert cache.cached_tokens >= 32


@pytest.mark.few(2)
def test_a_chat_of_many_turns(opened: tuple[Any, Cache]) -> None:
    model, cache = opened
    history = prompts_of(3, (20,))[0]
    for turn in range(4):
        before = len(history)
        (history,) = check_answers(model, cache, [history])
        assert cache.cached_tokens >= (before - 4 if turn else 0)
        history += [turn + 3, 5, 8]


@pytest.mark.few(2)
def test_batches(opened: tuple[Any, Cache]) -> None:
    model, cache = opened
    prompts = prompts_of(4, (40, 40, 40))
    check_answers(model, cache, prompts)
    check_answers(model, cache, prompts[::-1])
    assert cache.cached_tokens == 39
    check_answers(model, cache, [prompts[0], prompts_of(9, (40,))[0]])
    assert cache.cached_tokens == 0, "rows of one batch resume at the same position"
    check_answers(model, cache, [prompts[0], prompts[0][:20] + prompts[1][:20]])
    check_answers(model, cache, [prompts[0], prompts[0]])
    assert cache.cached_tokens == 39


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3", "gpt2"])
@pytest.mark.few(2)
def test_padded_batches(family: str) -> None:
    model = model_of(family)
    short, long = prompts_of(5, (13, 40))
    rows = [[0] * 27 + short, long]
    mask = torch.tensor([[0] * 27 + [1] * 13, [1] * 40])
    with Cache(model, "2MiB") as cache:
        check_answers(model, cache, rows, attention_mask=mask)
        check_answers(model, cache, rows, attention_mask=mask)
        assert cache.cached_tokens == 39
        check_answers(model, cache, [[0] * 27 + short])  # here 0 is a token, not padding
        assert cache.cached_tokens == 0


@pytest.mark.few(2)
def test_beams(opened: tuple[Any, Cache]) -> None:
    model, cache = opened
    prompts = prompts_of(6, (40, 40))
    for _ in range(2):
        found = generate(model, prompts, cache, num_beams=3)
        assert found.sequences.tolist() == generate(model, prompts, num_beams=3).sequences.tolist()
        cache._store.kv.check()
    assert cache.cached_tokens == 39
    assert cache.stats["in_use_pages"] == 0


def test_many_samples_of_one_prompt() -> None:
    model = model_of("bamba")
    with Cache(model, "2MiB") as cache:
        prompt = torch.tensor(prompts_of(7, (40,)))
        options: dict[str, Any] = {
            "do_sample": True,
            "num_return_sequences": 4,
            "max_new_tokens": NEW,
            "pad_token_id": 0,
        }
        for _ in range(2):
            found = []
            for given in ({"past_key_values": cache}, {}):
                torch.manual_seed(3)
                mask = torch.ones_like(prompt)
                found.append(model.generate(prompt, attention_mask=mask, **options, **given).tolist())
            assert found[0] == found[1]


# -- crop ---------------------------------------------------------------------------------------------


def run(model: Any, cache: Cache, tokens: list[int]) -> torch.Tensor:
    """The logits after `tokens`, which follow the tokens in the cache."""
    given = forward_arguments(model, torch.tensor([tokens]), cache, cache.get_seq_length())
    return model(**given).logits[0, -1]  # type: ignore[no-any-return]


@pytest.mark.parametrize("remove", [1, 3, 8, 25])
@pytest.mark.few(5)
def test_crop_in_a_loop_of_ones_own(opened: tuple[Any, Cache], remove: int) -> None:
    """After a crop the model gives the logits of the remaining tokens, also beyond the last forward."""
    model, cache = opened
    tokens = torch.tensor(prompts_of(8, (60,)))
    with torch.no_grad(), cache.open(tokens) as cached:
        run(model, cache, tokens[0, cached:].tolist())
        single = [8, 9, 7]
        for token in single:
            run(model, cache, [token])
        cache.crop(-remove)
        whole = [*tokens[0].tolist(), *single][:-remove]
        assert cache.get_seq_length() == len(whole)
        found = run(model, cache, [11])
        expected = model(input_ids=torch.tensor([[*whole, 11]])).logits[0, -1]
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)
    cache._store.kv.check()


def test_crop_twice(opened: tuple[Any, Cache]) -> None:
    model, cache = opened
    tokens = torch.tensor(prompts_of(12, (40,)))
    with torch.no_grad(), cache.open(tokens) as cached:
        run(model, cache, tokens[0, cached:].tolist())
        for remove in (3, 2, 10):
            cache.crop(-remove)
        assert cache.get_seq_length() == 25
        found = run(model, cache, [11])
        expected = model(input_ids=torch.tensor([[*tokens[0, :25].tolist(), 11]])).logits[0, -1]
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)
        assert cache.cached_tokens == 0
        assert cache.computed_tokens <= 40 + 26


def repetitive(seed: int) -> list[int]:
    part = prompts_of(seed, (9,))[0]
    return part * 4 + part[:4]


@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", "llama4_text", "deepseek_v3", "bamba", "qwen3_next", "lfm2"]
)
@pytest.mark.few(1)
def test_assisted_generation_gives_the_greedy_tokens(family: str) -> None:
    """transformers refuses assisted generation for models with recurrent layers."""
    model = model_of(family)
    with Cache(model, "2MiB") as cache:
        for seed in (1, 2):
            prompt = repetitive(seed)
            expected = generate(model, [prompt], max_new_tokens=24, min_new_tokens=24).sequences.tolist()
            for options in ({"prompt_lookup_num_tokens": 4}, {"assistant_model": model_of("llama")}):
                for _ in range(2):
                    found = generate(model, [prompt], cache, max_new_tokens=24, min_new_tokens=24, **options)
                    assert found.sequences.tolist() == expected
                    cache._store.kv.check()
                assert cache.cached_tokens == len(prompt) - 1


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "llama4_text", "deepseek_v3", "bamba"])
@pytest.mark.few(2)
def test_prefill_in_chunks(family: str) -> None:
    model = model_of(family)
    cache = Cache(model, "2MiB")
    (prompt,) = prompts_of(10, (60,))
    check_answers(model, cache, [prompt], prefill_chunk_size=16)
    check_answers(model, cache, [[*prompt[:40], *prompt[:20]]], prefill_chunk_size=16)
    cache.close()


# -- small pools and tiers ----------------------------------------------------------------------------


def small_pool(model: Any) -> int:
    """Bytes of a pool for about two prompts of 70 tokens."""
    with Cache(model, "1MiB") as cache:
        return 12 * cache._store.layout.slab_bytes


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.few(1)
def test_random_calls_with_a_small_pool_and_a_host_tier(family: str) -> None:
    model = model_of(family)
    chooser = random.Random(family)
    texts = [prompts_of(20 + i, (48,))[0] for i in range(4)]
    with Cache(model, small_pool(model), ["host:8MiB"]) as cache:
        cached = 0
        for _ in range(14):
            base = chooser.choice(texts)
            prompt = base[: chooser.choice([20, 33, 48])] + prompts_of(chooser.randrange(99), (5,))[0]
            check_answers(model, cache, [prompt], max_new_tokens=4, min_new_tokens=4)
            cached += cache.cached_tokens
        assert cached > 0


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.few(2)
def test_evicted_pages_come_back_from_host_memory(family: str) -> None:
    model = model_of(family)
    (first,) = prompts_of(30, (60,))
    with Cache(model, small_pool(model), ["host:8MiB"]) as cache:
        (answer,) = check_answers(model, cache, [first])
        question = [*answer, 7, 8, 9]
        for seed in range(31, 60):
            if not cache._store.kv.match(question).resume:
                break
            generate(model, prompts_of(seed, (60,)), cache)
        assert not cache._store.kv.match(question).resume
        check_answers(model, cache, [question])
        assert cache.cached_tokens >= 64


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.few(2)
def test_a_new_cache_loads_pages_from_disk(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    (prompt,) = prompts_of(31, (60,))
    tiers = [f"disk:{tmp_path}:64MiB"]
    with Cache(model, "2MiB", tiers) as cache:
        check_answers(model, cache, [prompt])
    with Cache(tiny(family), "2MiB", tiers) as cache:
        check_answers(cache._model, cache, [prompt])
        assert cache.cached_tokens >= 48
    with Cache(tiny(family, initializer_range=0.3), "2MiB", tiers) as cache:
        check_answers(cache._model, cache, [prompt])
        assert cache.cached_tokens == 0, "other weights have other pages"
    with Cache(model, "2MiB", tiers, salt="mine") as cache:
        check_answers(model, cache, [prompt])
        assert cache.cached_tokens == 0


def test_damaged_pages_are_computed_again(tmp_path: Path) -> None:
    model = model_of("llama")
    (prompt,) = prompts_of(34, (60,))
    tiers = [f"disk:{tmp_path}:64MiB"]
    with Cache(model, "2MiB", tiers) as cache:
        check_answers(model, cache, [prompt])
    largest = max(
        (path for path in tmp_path.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    data = bytearray(largest.read_bytes())
    for place in range(0, len(data), 64):
        data[place] ^= 255
    largest.write_bytes(data)
    with Cache(model, "2MiB", tiers) as cache:
        check_answers(model, cache, [prompt])
        assert cache.cached_tokens < 48


@pytest.mark.parametrize(("family", "cached"), [("llama", 48), ("gemma3_text", 48), ("qwen3_next", 0)])
def test_attention_pages_are_shared_with_the_engine(family: str, cached: int, tmp_path: Path) -> None:
    """A notebook and a server with the same weights can use one disk tier. Pages with states have another form."""
    (prompt,) = prompts_of(33, (60,))
    tiers = [f"disk:{tmp_path}:64MiB"]
    engine = Engine(tiny(family), EngineConfig(pool_bytes=2 << 20, tiers=tiers))
    request = engine.add(prompt, SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True))
    engine.run()
    engine.close()
    with Cache(model_of(family), "2MiB", tiers) as cache:
        assert check_answers(model_of(family), cache, [prompt]) == [request.tokens]
        assert cache.cached_tokens == cached


def test_a_pool_that_is_too_small() -> None:
    model = model_of("llama")
    with Cache(model, "64KiB") as cache:
        with pytest.raises(MemoryError, match="more memory"):
            generate(model, prompts_of(32, (60,)) * 8, cache)
        cache._store.kv.check()
        check_answers(model, cache, prompts_of(32, (20,)))
    with pytest.raises(ValueError, match="too small"):
        Cache(model, 100)


# -- wrong use ----------------------------------------------------------------------------------------


def test_after_close_the_model_is_unchanged() -> None:
    model = model_of("llama")
    hooks = len(model._forward_pre_hooks), len(model._forward_hooks)
    first, second = Cache(model, "1MiB"), Cache(model, "1MiB")
    check_answers(model, first, prompts_of(1, (20,)))
    check_answers(model, second, prompts_of(1, (20,)))
    second.close()
    first.close()
    first.close()
    assert "generate" not in vars(model)
    assert (len(model._forward_pre_hooks), len(model._forward_hooks)) == hooks
    with pytest.raises(RuntimeError, match="close"):
        generate(model, prompts_of(1, (20,)), first)


def test_wrong_use_is_refused() -> None:
    model, other = model_of("llama"), model_of("qwen2")
    (prompt,) = prompts_of(1, (20,))
    tokens = torch.tensor([prompt])
    with Cache(model, "1MiB") as cache:
        with pytest.raises(RuntimeError, match="belongs to a LlamaForCausalLM"):
            generate(other, [prompt], cache)
        with pytest.raises(ValueError, match="input_ids, not inputs_embeds"):
            model.generate(inputs_embeds=torch.zeros(1, 3, 32), past_key_values=cache)
        with pytest.raises(RuntimeError, match="no prompt is open"):
            model(input_ids=tokens, past_key_values=cache)
        with cache.open(tokens), pytest.raises(RuntimeError, match="another call"):
            generate(model, [prompt], cache)
        with cache.open(tokens), pytest.raises(ValueError, match="inputs_embeds cannot be used"):
            model(inputs_embeds=torch.zeros(1, 3, 32), past_key_values=cache)
        with cache.open(tokens), pytest.raises(ValueError, match=r"crop\(4\)"):
            cache.crop(4)
        with pytest.raises(ValueError, match="pad on the left"):
            generate(model, [prompt], cache, attention_mask=torch.tensor([[1] * 19 + [0]]))
        with pytest.raises(ValueError, match="attention_mask"):
            generate(model, [[0, *prompt]], cache, attention_mask=None)
        check_answers(model, cache, [prompt])


def test_unsupported_models_are_refused() -> None:
    with pytest.raises(ValueError, match="cache class of its own"):
        Cache(tiny("minimax"))
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    with pytest.raises(ValueError, match="decoder-only"):
        Cache(transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)))
    padded = torch.tensor([[0] * 7 + [1] * 13])
    for family in ("bamba", "llama4_text"):
        with (
            Cache(model_of(family), "2MiB") as cache,
            pytest.raises(ValueError, match="once for each prompt"),
        ):
            generate(cache._model, prompts_of(1, (20,)), cache, attention_mask=padded)
    with Cache(model_of("jamba"), "2MiB") as cache:
        with pytest.raises(ValueError, match="assisted generation is not supported"):
            generate(cache._model, [repetitive(1)], cache, prompt_lookup_num_tokens=4)
        tokens = torch.tensor([repetitive(1)])
        with cache.open(tokens), pytest.raises(ValueError, match="ignores its states"):
            run(cache._model, cache, [1, 2])


def test_attention_implementations() -> None:
    for name in ("eager", "sdpa"):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            config_of("gemma3_text"), attn_implementation=name
        ).eval()
        with Cache(model, "2MiB") as cache:
            (prompt,) = prompts_of(1, (50,))
            check_answers(model, cache, [prompt])
            check_answers(model, cache, [prompt])
            assert cache.cached_tokens == 49
