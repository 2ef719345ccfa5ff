"""The generation config of a model: end tokens, suppressed tokens, lengths and penalties are those of generate()."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvloom.engine import LLM, GenerationDefaults, SamplingParams
from tests.models import tiny_encoder_decoders
from tests.models.zoo import prompts_of, tiny

SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "several ends": {"eos_token_id": [7, 11, 40, 51, 33, 21]},
    "shortest output": {"eos_token_id": list(range(3, 50)), "min_new_tokens": 6},
    "shortest text": {"eos_token_id": list(range(3, 50)), "min_length": 20},
    "longest output": {"max_new_tokens": 5},
    "longest text": {"max_length": 25},
    "suppressed tokens": {"suppress_tokens": list(range(3, 40)), "begin_suppress_tokens": list(range(3, 62))},
    "bad words": {"bad_words_ids": [[token] for token in range(3, 40)]},
    "penalty": {"repetition_penalty": 1.7},
}


def expected(model: Any, prompt: list[int], **options: Any) -> list[int]:
    """Return the new greedy tokens of `generate()`."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **options
    )
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize("name", SETTINGS)
def test_greedy_tokens_are_those_of_generate(name: str) -> None:
    model = tiny("llama")
    model.set_attn_implementation("eager")
    model.generation_config.eos_token_id = None
    model.generation_config.update(**SETTINGS[name])
    prompts = prompts_of(3, (5, 17))
    longest = {} if "max" in str(SETTINGS[name]) else {"max_new_tokens": 12}
    wanted = [expected(model, prompt, **longest) for prompt in prompts]
    if name not in ("nothing", "longest text", "longest output"):
        model.generation_config.update(**dict.fromkeys(SETTINGS[name]))
        assert wanted != [expected(model, prompt, **longest) for prompt in prompts], "it must matter"
        model.generation_config.update(**SETTINGS[name])
    llm = LLM(model, pool_bytes=1 << 22)
    limit = {"max_tokens": 12} if longest else {}
    for prompt, tokens in zip(prompts, wanted, strict=True):
        params = llm.engine.defaults.params(len(prompt), temperature=0, **limit)
        assert llm.generate([prompt], params)[0].outputs[0].token_ids == tokens
        if name != "penalty":  # a value of requests, not a rule
            params = SamplingParams(temperature=0, max_tokens=12 if longest else len(tokens))
            assert llm.generate([prompt], params)[0].outputs[0].token_ids == tokens


def test_a_request_without_parameters_has_those_of_the_model() -> None:
    model = tiny("llama")
    model.generation_config.update(temperature=0.5, top_k=7, top_p=0.8, max_new_tokens=9, eos_token_id=None)
    llm = LLM(model, pool_bytes=1 << 22)
    assert llm.default_params(seed=3) == SamplingParams(9, 0.5, 7, 0.8, seed=3)
    request = llm.engine.add([5, 6, 7])
    assert request.params == SamplingParams(9, 0.5, 7, 0.8)
    llm.engine.cancel(request)
    plain = LLM(model, pool_bytes=1 << 22, sampling_defaults="openai")
    assert plain.default_params() == SamplingParams()


def test_own_parameters_replace_those_of_the_model() -> None:
    defaults = GenerationDefaults({"temperature": 0.5}, min_new_tokens=4)
    assert defaults.params(3, temperature=1.0).temperature == 1.0
    asked = SamplingParams(max_tokens=9, min_tokens=2)
    assert defaults.with_minimum(asked, 3) is asked
    assert defaults.with_minimum(SamplingParams(max_tokens=3), 3).min_tokens == 3


def test_an_invalid_generation_config_is_refused() -> None:
    model = tiny("llama")
    model.generation_config.temperature = -1.0
    with pytest.raises(ValueError, match=r"generation config of the model: temperature -1\.0"):
        LLM(model, pool_bytes=1 << 22)


def test_the_decoder_of_an_encoder_decoder_model_has_the_lengths_of_generate(tmp_path: Path) -> None:
    model = tiny_encoder_decoders.tiny("bart")
    model.generation_config.update(
        eos_token_id=[2, *range(10, 50)],
        min_length=9,
        max_length=15,
        bad_words_ids=[[token] for token in range(50, 60)],
    )
    given = tiny_encoder_decoders.input_of("bart", 1)
    ids = torch.tensor([given])
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False)[0].tolist()
    model.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), device="cpu", pool_bytes=4 << 20)
    params = llm.engine.defaults.params(1, temperature=0)
    result = llm.generate([given], params)[0]
    assert [*result.prompt_token_ids, *result.outputs[0].token_ids] == wanted
    assert len(wanted) >= 9
