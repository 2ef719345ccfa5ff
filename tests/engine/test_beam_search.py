"""Beam search on forks, compared with Hugging Face's token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvloom.engine import SamplingParams
from tests.engines import make_engine
from tests.models.zoo import tiny

from .test_samples import POOL, idle

PROMPTS = [list(range(3, 24)), [9, 8, 7], list(range(40, 3, -1))]


def wanted(
    model: Any,
    prompt: list[int],
    width: int,
    new: int,
    eos: int | None = None,
    penalty: float = 1.0,
    early: bool = False,
) -> Any:
    """Return the texts and scores of generate(), best first."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=eos,
            pad_token_id=0,
            length_penalty=penalty,
            early_stopping=early,
            return_dict_in_generate=True,
            output_scores=True,
        )
    rows = [row[len(prompt) :].tolist() for row in found.sequences]
    texts = [row[: row.index(eos) + 1] if eos in row else row for row in rows]
    return texts, found.sequences_scores.tolist()


def params(width: int, new: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=new, temperature=0, beam_width=width, n=width, **more)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next", "bamba"])
@pytest.mark.few(2)
def test_beams_match_generate(family: str) -> None:
    model = tiny(family)
    expected = [wanted(model, prompt, 3, 8) for prompt in PROMPTS]
    engine = make_engine(model, POOL, token_budget=16, ahead=True)
    requests = [engine.add(prompt, params(3, 8)) for prompt in PROMPTS]
    engine.run()
    for request, (texts, scores) in zip(requests, expected, strict=True):
        assert [one.output for one in request.returned_samples] == texts
        assert [one.cumulative_logprob / 8 for one in request.returned_samples] == pytest.approx(
            scores, abs=1e-4
        )
        assert {one.finish_reason for one in request.returned_samples} == {"length"}
    assert idle(engine)


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0, -1.0])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.few(2)
def test_beams_that_finish_early_match_generate(width: int, penalty: float) -> None:
    model = tiny("llama")
    reference = tiny("llama")
    ended = 0
    for prompt in PROMPTS:
        plain, _ = wanted(reference, prompt, width, 12)
        for eos in (plain[0][3], plain[-1][6]):  # tokens that beams do meet
            texts, scores = wanted(reference, prompt, width, 12, eos, penalty)
            engine = make_engine(model, POOL)
            more = {"stop_token_ids": (eos,), "length_penalty": penalty}
            request = engine.add(prompt, params(width, 12, **more))
            engine.run()
            assert [one.output for one in request.returned_samples] == texts
            found = [one.cumulative_logprob / len(one.output) ** penalty for one in request.returned_samples]
            assert found == pytest.approx(scores, abs=1e-4, rel=1e-6)
            ended += sum(one.finish_reason == "stop" for one in request.returned_samples)
            assert all(
                (one.finish_reason == "stop") == (one.output[-1] == eos) for one in request.returned_samples
            )
    assert ended or penalty == 2.0  # which likes long texts


def test_early_stopping_matches_generate() -> None:
    model, reference = tiny("llama"), tiny("llama")
    differs = 0
    for prompt in PROMPTS:
        plain, _ = wanted(reference, prompt, 2, 12)
        for eos in {token for text in plain for token in text[1:6]}:
            texts, _ = wanted(reference, prompt, 2, 12, eos, 2.0, early=True)
            engine = make_engine(model, POOL)
            more = {"stop_token_ids": (eos,), "length_penalty": 2.0}
            early, full = (
                engine.add(prompt, params(2, 12, **more, early_stopping=stops)) for stops in (True, False)
            )
            engine.run()
            assert [one.output for one in early.returned_samples] == texts
            differs += [one.output for one in full.returned_samples] != texts
    assert differs  # the search without it goes on


@pytest.mark.parametrize(
    ("family", "slabs", "new"),
    [("llama", 5, 8), ("gemma3_text", 4, 8), ("qwen3_next", 4, 20), ("bamba", 5, 8)],
)
@pytest.mark.few(1)
def test_preempted_beams_return_the_same_texts(family: str, slabs: int, new: int) -> None:
    model = tiny(family)
    expected = [wanted(model, prompt, 4, new)[0] for prompt in PROMPTS]
    layout = make_engine(model, POOL).layout
    engine = make_engine(model, slabs * layout.slab_bytes, token_budget=24, max_running=9)
    engine.scheduler.admission = None  # admit every request for which pages are free, so that pages run out
    requests = [engine.add(prompt, params(4, new)) for prompt in PROMPTS]
    steps = 0
    while engine.busy:
        engine.step()
        engine.cache.check()
        steps += 1
        assert steps < 2000
    assert [[one.output for one in request.returned_samples] for request in requests] == expected
    preempted = [one for request in requests for one in request.family if one.preemptions]
    assert len(preempted) > 1, family  # several beams lost their pages, and found their way back
    assert idle(engine)


def test_more_beams_than_max_running() -> None:
    model = tiny("llama")
    expected = [wanted(model, prompt, 6, 5)[0] for prompt in PROMPTS]
    engine = make_engine(model, POOL, max_running=2)
    requests = [engine.add(prompt, params(6, 5)) for prompt in PROMPTS]
    engine.run()
    assert [[one.output for one in request.returned_samples] for request in requests] == expected
    assert idle(engine)


def test_vocabulary_smaller_than_the_beam_width() -> None:
    engine = make_engine(tiny("llama"), POOL)
    request = engine.add([5, 6], params(70, 1))
    engine.run()
    assert len(request.returned_samples) == 64
    assert len({one.output[0] for one in request.returned_samples}) == 64
    assert {one.finish_reason for one in request.family} == {"length"}
    assert idle(engine)


def test_cancel_finishes_all_beams() -> None:
    for steps in range(6):
        engine = make_engine(tiny("llama"), POOL, token_budget=12, ahead=True)
        request = engine.add(PROMPTS[0], params(4, 10))
        other = engine.add(PROMPTS[1], SamplingParams(max_tokens=10, temperature=0))
        for _ in range(steps):
            engine.step()
        engine.cancel(request)
        assert {one.finish_reason for one in request.family} == {"cancelled"}
        engine.run()
        assert other.finish_reason == "length"
        assert idle(engine)


def test_min_tokens_and_logprobs_of_beams() -> None:
    model = tiny("llama")
    plain, _ = wanted(model, PROMPTS[0], 2, 8)
    engine = make_engine(model, POOL)
    more: dict[str, Any] = {"stop_token_ids": tuple(plain[0][:3]), "min_tokens": 5, "logprobs": 2}
    request = engine.add(PROMPTS[0], params(2, 8, **more))
    engine.run()
    for one in request.returned_samples:
        assert not set(one.output[:5]) & set(plain[0][:3])
        assert len(one.logprobs) == len(one.output)
        found = [told[token].logprob for token, told in zip(one.output, one.logprobs, strict=True)]
        assert sum(found) == pytest.approx(one.cumulative_logprob, abs=1e-4)
        assert all(len(told) in (2, 3) for told in one.logprobs)
