"""Encoder-decoder models on our cache against generate(): the encoder's output is in media pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvloom.core import CacheControl
from kvloom.engine import Engine, Request, SamplingParams
from kvloom.models.loading import language_model_class, refusal, sharding_refusal
from kvloom.models.paged import runs_separately
from kvloom.models.specs import ENCODER_DECODERS, model_spec
from tests.engines import PATIENT, make_engine
from tests.models.tiny_encoder_decoders import FAMILIES, NEW, config_of, expected, input_of, reference, tiny
from tools import families_table

GREEDY = SamplingParams(max_tokens=NEW, temperature=0)
PREFIX = [9, 17, 30, 21, 5, 44, 12, 50, 8, 33, 7, 26, 19, 40, 11, 58, 14, 37, 22]


def engine_of(model: Any, room: int = 4 << 20, **options: Any) -> Engine:
    """An engine whose pool is full of NaN: nothing unwritten may be read."""
    engine = make_engine(model, room, **options)
    if options.get("kv_dtype") is None:
        engine.buffer.view(torch.float32).fill_(torch.nan)
    return engine


def prefix_of(model: Any) -> list[int]:
    """First tokens of a decoder: more than a block."""
    return [model.config.decoder_start_token_id, *PREFIX]


def add(engine: Engine, family: str, given: Any, decoder: list[int] | None = None, **options: Any) -> Request:
    params = options.pop("params", GREEDY)
    if family == "whisper":
        return engine.add(decoder or [], params, audio=[{"input_features": given}], **options)
    return engine.add(given, params, decoder_prompt=decoder or (), **options)


def runs_of(engine: Engine) -> int:
    assert engine.vision is not None
    return engine.vision.encoder_runs


def test_every_family_is_compared_and_in_the_docs() -> None:
    assert FAMILIES.keys() == ENCODER_DECODERS.keys()
    text = families_table.FILE.read_text(encoding="utf-8")
    assert families_table.encoder_decoder_table() in text, "run: .venv/bin/python tools/families_table.py"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(3)
def test_tokens_are_generates_whole_in_chunks_and_from_disk(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    assert refusal(model.config) is None
    given = [input_of(family, seed, tokens) for seed, tokens in enumerate((5, 40, 29))]
    asked = [(one, prefix) for one in given for prefix in (None, prefix_of(model))]
    wanted = [reference(family, model, one, prefix or ()) for one, prefix in asked]
    assert len({tuple(logprobs) for _, logprobs in wanted}) == len(wanted), (
        "these models must read their inputs"
    )

    def same(engine: Engine) -> tuple[int, int]:
        params = SamplingParams(max_tokens=NEW, temperature=0, logprobs=1)
        requests = [add(engine, family, one, prefix, params=params) for one, prefix in asked]
        engine.run()
        engine.cache.check()
        for request, (tokens, logprobs) in zip(requests, wanted, strict=True):
            assert request.tokens == tokens
            found = [
                step[token].logprob for token, step in zip(request.output, request.logprobs, strict=True)
            ]
            assert found == pytest.approx(logprobs, abs=1e-3)
        return runs_of(engine), sum(request.cached_tokens or 0 for request in requests)

    kept = {"tiers": [f"disk:{tmp_path}:64MiB"], "offload": PATIENT}
    whole = engine_of(model, **kept)
    runs, _ = same(whole)
    # An encoder input is found by its content, and a sequence by this content and the tokens of the decoder.
    again = same(whole)
    assert again == (runs, 3 * len(PREFIX))
    whole.close()

    restarted = engine_of(model, **kept)
    assert same(restarted)[0] == 0, "the output of the encoder is found on disk"
    restarted.close()
    same(engine_of(model, token_budget=7))


@pytest.mark.parametrize("family", ["bart", "t5", "whisper", "m2m_100"])
@pytest.mark.few(2)
def test_a_step_runs_the_decoder_once_for_all_sequences(family: str) -> None:
    model = tiny(family)
    given = [input_of(family, seed, 9 + 5 * seed) for seed in range(8)]
    wanted = [expected(family, model, one, prefix_of(model)[: 1 + seed]) for seed, one in enumerate(given)]
    engine = engine_of(model)
    assert not runs_separately(model)
    requests = [add(engine, family, one, prefix_of(model)[: 1 + seed]) for seed, one in enumerate(given)]
    engine.step()  # encodes all inputs, and runs the decoder for their K and V
    calls: list[int] = []
    model.get_decoder().register_forward_pre_hook(lambda *_: calls.append(1))
    engine.run()
    assert [request.tokens for request in requests] == wanted
    assert len(calls) == NEW - 1


@pytest.mark.parametrize("family", ["bart", "t5"])
@pytest.mark.slow
def test_quantised_pages_are_read_alike_in_a_batch_and_alone(family: str) -> None:
    model, params = tiny(family), SamplingParams(max_tokens=NEW, temperature=0, logprobs=1)
    given = [input_of(family, seed, 20 + seed) for seed in range(3)]
    both = engine_of(model, kv_dtype="int8"), engine_of(model, kv_dtype="int8")
    together = [add(both[0], family, one, params=params) for one in given]
    both[0].run()
    for one, other in zip(given, together, strict=True):
        alone = add(both[1], family, one, params=params)
        both[1].run()
        assert alone.tokens == other.tokens
        first = [step[token].logprob for token, step in zip(alone.output, alone.logprobs, strict=True)]
        second = [step[token].logprob for token, step in zip(other.output, other.logprobs, strict=True)]
        assert first == pytest.approx(second, abs=1e-4)
        exact = reference(family, model, one)[1]
        assert first[0] == pytest.approx(exact[0], abs=0.3)


def test_features_that_encoder_decoders_do_not_have_are_refused(tmp_path: Path) -> None:
    model = tiny("bart")
    for error, settings in (
        ("share the encoder outputs", {"max_loras": 1}),
        ("reads the whole prompt at once", {"reuse_documents": 0.1}),
    ):
        with pytest.raises(ValueError, match=error):
            make_engine(model, 4 << 20, **settings)
    assert "no rule for several ranks" in str(sharding_refusal(model.config, 2))


def test_an_input_is_encoded_once_for_each_content_and_tenant() -> None:
    model, given = tiny("bart"), [input_of("bart", seed) for seed in (1, 2)]
    engine = engine_of(model)
    for one, runs, tenant in ((0, 1, ""), (0, 1, ""), (1, 2, ""), (0, 3, "another"), (0, 3, "another")):
        request = add(engine, "bart", given[one], control=CacheControl(tenant=tenant))
        engine.run()
        assert request.tokens == expected("bart", model, given[one])
        assert runs_of(engine) == runs


def test_the_first_token_of_the_decoder_is_part_of_the_hash() -> None:
    model, given = tiny("whisper"), input_of("whisper", 1)
    engine = engine_of(model)
    for first in (2, 7, 2):
        decoder, alone = [first, *PREFIX], engine_of(model)
        both = [add(one, "whisper", given, decoder) for one in (engine, alone)]
        engine.run()
        alone.run()
        assert both[0].tokens == both[1].tokens
    assert (both[0].cached_tokens, both[1].cached_tokens) == (len(PREFIX), 0)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bart", "whisper"])
def test_requests_in_a_pool_far_too_small(family: str) -> None:
    model = tiny(family)
    given = [input_of(family, seed % 5, 10 + 7 * (seed % 5)) for seed in range(10)]
    wanted = [expected(family, model, one, new=30) for one in given]
    layout = make_engine(model, 4 << 20).layout
    room = 3 * layout.slab_bytes_for(31, [40])
    engine = engine_of(model, room, token_budget=11, max_running=6)
    engine.scheduler.admission = None  # admit every request for which pages are free, so that pages run out
    params = SamplingParams(max_tokens=30, temperature=0)
    requests = [add(engine, family, one, params=params) for one in given]
    while engine.busy:
        engine.step()
        engine.cache.check()
    assert [request.tokens for request in requests] == wanted
    assert sum(request.preemptions for request in requests)
    engine.cache.take_copies()
    assert engine.cache.stats()["in_use_pages"] == 0


def test_samples_and_drafts_share_the_encoder_input() -> None:
    model, given = tiny("t5"), input_of("t5", 2)
    engine = engine_of(model, speculate="ngram", draft_tokens=3, fixed=("drafts",))
    samples = engine.add(given, SamplingParams(max_tokens=NEW, temperature=0.8, seed=5, n=3))
    engine.run()
    for i, one in enumerate(samples.family):
        alone = engine_of(model)
        single = alone.add(given, SamplingParams(max_tokens=NEW, temperature=0.8, seed=5 + i))
        alone.run()
        assert one.tokens == single.tokens
    assert runs_of(engine) == 1
    params = SamplingParams(max_tokens=60, temperature=0)
    long = engine.add(given, params)
    engine.run()
    assert long.tokens == expected("t5", model, given, new=60)
    assert long.accepted_tokens


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "cross=fp8"])
@pytest.mark.few(1)
def test_quantised_pages_give_the_same_tokens_after_a_hit(kv_dtype: str) -> None:
    engine = engine_of(tiny("bart"), kv_dtype=kv_dtype)
    requests = []
    for _ in range(2):
        requests.append(add(engine, "bart", input_of("bart", 1), PREFIX))  # begins with the start token
        engine.run()
    assert requests[0].tokens == requests[1].tokens
    assert (requests[1].cached_tokens, runs_of(engine)) == (len(PREFIX), 1)


def test_the_first_tokens_of_the_decoder_come_from_the_generation_config() -> None:
    model, given = tiny("mbart"), input_of("mbart", 1)
    model.generation_config.forced_bos_token_id = 33
    engine = engine_of(model)
    request = engine.add(given, GREEDY)
    engine.run()
    assert list(request.prompt) == [2, 33]
    assert request.tokens == expected("mbart", model, given, new=NEW + 1)
    other = engine.add(given, GREEDY, decoder_prompt=[2, 34])
    engine.run()
    model.generation_config.forced_bos_token_id = 34
    assert other.tokens == expected("mbart", model, given, new=NEW + 1)


def test_prompts_that_an_encoder_cannot_take_are_refused() -> None:
    engine = engine_of(tiny("bart"))
    for prompt, error in (([], "prompt is empty"), ([3] * 129, "limit of 128"), ([64], "from 0 to 63")):
        with pytest.raises(ValueError, match=error):
            engine.add(prompt, GREEDY)
    with pytest.raises(ValueError, match="takes no images and no audio"):
        engine.add([3], GREEDY, images=[torch.zeros(3, 8, 8)])
    audio = engine_of(tiny("whisper"))
    with pytest.raises(ValueError, match="needs one audio clip, not 0"):
        audio.add([2], GREEDY)
    with pytest.raises(ValueError, match=r"are \[8, 40\], not \[8, 41\]"):
        audio.add([2], GREEDY, audio=[{"input_features": torch.zeros(8, 41)}])
    assert engine.add([3] * 128, GREEDY) is not None
    with pytest.raises(ValueError, match="remove encoders"):
        make_engine(tiny("bart"), 4 << 20, encoders=["peer://127.0.0.1:1?secret=none"])


def test_the_limit_of_whisper_is_that_of_its_decoder() -> None:
    config = tiny("whisper").config.to_dict() | {"max_position_embeddings": 4096}
    assert model_spec(config).max_context == config["max_target_positions"] == 64


def test_the_decoder_of_a_config_runs_alone_unless_the_checkpoint_has_both_parts() -> None:
    both, alone = config_of("bart"), config_of("bart")
    alone.architectures = ["BartForCausalLM"]
    cls, own = language_model_class(both)
    assert (cls.__name__, len(model_spec(own.to_dict()).layers)) == ("BartForConditionalGeneration", 4)
    cls, own = language_model_class(alone)
    assert (cls.__name__, len(model_spec(own.to_dict()).layers)) == ("BartForCausalLM", 2)
