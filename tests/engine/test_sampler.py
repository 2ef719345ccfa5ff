"""The sampler: distributions, seeds, penalties and log-probabilities compared with plain references; it never waits."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from kvloom.engine import Request, SamplingParams
from kvloom.engine.sampling import Sampler, TokenCounts, apply_grammar_mask
from kvloom.engine.sampling.noise import gumbel, index_words, row_words

CPU = torch.device("cpu")
LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0])


def request(tokens: tuple[int, ...] = (1,), output: tuple[int, ...] = (), **params: Any) -> Request:
    made = Request(0, tokens, SamplingParams(**{"max_tokens": 1000, **params}))
    made.tokens += output
    return made


def draws(logits: torch.Tensor, count: int = 4000, **params: Any) -> torch.Tensor:
    """Return how often each token was sampled, over `count` draws in one batch."""
    requests = [request(seed=seed, **params) for seed in range(count)]
    tokens = Sampler().choose(logits.expand(count, -1), requests).tokens
    return torch.bincount(tokens, minlength=logits.shape[-1]) / count


def kept(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return the probabilities of one row, by a plain reference."""
    weights = torch.softmax(logits / params.temperature, -1)
    if params.top_k:
        weights = torch.where(
            weights >= weights.topk(min(params.top_k, len(weights))).values[-1], weights, 0.0
        )
    if params.top_p < 1:
        ordered, index = weights.sort(descending=True)
        before = ordered.cumsum(-1) - ordered
        ordered = torch.where(before < params.top_p * weights.sum(), ordered, 0.0)
        weights = torch.zeros_like(weights).scatter(0, index, ordered)
    if params.min_p:
        weights = torch.where(weights >= params.min_p * weights.max(), weights, 0.0)
    return weights / weights.sum()


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 3},
        {"top_p": 0.5},
        {"top_p": 0.7},
        {"top_k": 3, "top_p": 0.9},
        {"min_p": 0.3},
        {"top_k": 2, "top_p": 0.95, "min_p": 0.1, "temperature": 1.3},
    ],
)
def test_samples_follow_the_distribution(params: dict[str, Any]) -> None:
    wanted = kept(LOGITS, SamplingParams(**params))
    found = draws(LOGITS, **params)
    assert (found[wanted == 0] == 0).all()
    torch.testing.assert_close(found, wanted, atol=0.035, rtol=0)


def test_top_k_and_top_p_match_a_reference_on_a_large_vocabulary() -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 5000) * 3
    for params in (
        {"top_k": 40},
        {"top_k": 200, "top_p": 0.8},
        {"top_k": 3000},
        {"top_p": 0.6},
        {"min_p": 0.05},
    ):
        sampler, count = Sampler(), 300
        allowed = kept(logits[0], SamplingParams(**params)) > 0
        found = sampler.choose(
            logits.expand(count, -1), [request(seed=s, **params) for s in range(count)]
        ).tokens
        assert allowed[found].all(), params
        assert len(found.unique()) > 4


def test_samples_of_one_seed_are_independent() -> None:
    count, size = 20000, 30
    torch.manual_seed(1)
    logits = torch.randn(size)
    words = torch.from_numpy(row_words([5] * count, range(count)))
    tokens = (logits + gumbel(words, index_words(size, CPU))).argmax(-1)
    share = logits.softmax(0)
    misfit = (torch.bincount(tokens, minlength=size) - count * share).square() / (count * share)
    assert misfit.sum() < 60  # chi squared of 29 degrees: 0.1 % lie above 58
    top = share.argmax()
    both = ((tokens[:-1] == top) & (tokens[1:] == top)).double().mean()
    assert abs(both - share[top] ** 2) < 4 * math.sqrt(share[top] ** 2 / count)


def test_the_noise_is_pinned() -> None:
    """The same seed must give the same tokens on every machine and in every release."""
    found = row_words([0, 1, -1, 2**64 - 1, 12345], [0, 0, 7, 7, 3])
    assert found[2].tolist() == found[3].tolist()
    noise = gumbel(torch.from_numpy(found), index_words(1000, CPU))
    assert noise.isfinite().all()
    torch.testing.assert_close(noise[[0, 1, 4], [0, 500, 999]], torch.tensor(PINNED), atol=1e-5, rtol=0)


PINNED = [2.535926103591919, 1.117285132408142, 1.3182603120803833]


def test_seed_samples_the_same_in_any_batch_and_place() -> None:
    torch.manual_seed(2)
    logits = torch.randn(40, 3000)
    kinds: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9},
        {"top_k": 50},
        {"top_k": 700, "top_p": 0.5},
        {"top_p": 0.3, "min_p": 0.01, "temperature": 1.7},
        {"temperature": 0},
        {"frequency_penalty": 1.0, "logit_bias": {5: 3.0}},
    ]
    requests = [request(output=(3, 4, 3), seed=i, **kinds[i % len(kinds)]) for i in range(40)]
    together = Sampler().choose(logits, requests).tokens
    alone = [int(Sampler().choose(logits[i : i + 1], [r]).tokens) for i, r in enumerate(requests)]
    assert together.tolist() == alone
    order = torch.randperm(40)
    mixed = Sampler().choose(logits[order], [requests[i] for i in order]).tokens
    assert mixed.tolist() == together[order].tolist()


def test_sample_depends_on_seed_and_count() -> None:
    logits = torch.zeros(1, 100000)

    def drawn(one: Request, count: int | None = None) -> int:
        return int(Sampler().choose(logits, [one], None if count is None else [count]).tokens)

    assert drawn(request(seed=1)) == drawn(request(tokens=(7, 8, 9), seed=1))
    assert drawn(request(seed=1)) != drawn(request(seed=2))
    assert drawn(request(seed=1)) != drawn(request(seed=1, output=(4,)))
    assert drawn(request(seed=1), 1) == drawn(request(seed=1, output=(4,)))
    assert len({request().seed for _ in range(10)}) == 10


def test_greedy_and_sampled_rows_in_one_batch() -> None:
    torch.manual_seed(3)
    logits = torch.randn(6, 200)
    greedy = [request(temperature=0) for _ in range(6)]
    assert Sampler().choose(logits, greedy).tokens.tolist() == logits.argmax(-1).tolist()
    mixed = [request(temperature=i % 2, seed=i) for i in range(6)]
    found = Sampler().choose(logits, mixed).tokens
    assert found[::2].tolist() == logits[::2].argmax(-1).tolist()
    only = Sampler().choose(logits[1::2], mixed[1::2]).tokens
    assert found[1::2].tolist() == only.tolist()


def test_penalties_match_a_reference() -> None:
    torch.manual_seed(4)
    vocabulary = 50
    logits = torch.randn(3, vocabulary)
    kinds = [
        {"repetition_penalty": 1.7},
        {"presence_penalty": 0.8, "frequency_penalty": 0.4},
        {"repetition_penalty": 0.6, "presence_penalty": -1.5, "frequency_penalty": 2.0},
    ]
    requests = [request(tokens=(1, 2, 2, 9), output=(9, 3, 3, 3), temperature=0, **kind) for kind in kinds]
    sampler = Sampler()
    for step in range(30):
        wanted = []
        for row, one in zip(logits, requests, strict=True):
            row, params = row.clone(), one.params
            for token in set(one.tokens):
                value = row[token]
                row[token] = (
                    (value / params.repetition_penalty) if value > 0 else value * params.repetition_penalty
                )
            for token, times in Counter(one.output).items():
                row[token] -= params.presence_penalty + params.frequency_penalty * times
            wanted.append(int(row.argmax()))
        before = logits.clone()
        found = sampler.choose(logits, requests).tokens.tolist()
        assert found == wanted, step
        assert torch.equal(logits, before)  # what the model said stays as it was
        for one, token in zip(requests, found, strict=True):
            one.tokens.append(token)


def test_token_counts_add_new_tokens() -> None:
    tally = TokenCounts()
    tokens = [token % 100 for token in range(250)]
    for upto in (3, 3, 120, 250):
        tally.update(tokens[:upto], 50)
    assert dict(zip(tally.ids.tolist(), tally.counts.tolist(), strict=True)) == {
        token: Counter(tokens[50:])[token] for token in tokens
    }


def test_biases_and_masked_end_tokens() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0]])
    sampler = Sampler(eos=[0])

    def chosen(**params: Any) -> int:
        return int(sampler.choose(logits, [request(temperature=0, **params)]).tokens)

    assert chosen(logit_bias={2: 10.0, 999: 1.0}) == 2
    assert chosen(logit_bias={0: -100}) == 1
    assert chosen(min_tokens=1) == 1
    assert chosen(min_tokens=1, stop_token_ids=(1, 500)) == 2
    assert chosen(allowed_token_ids=(2, 3, 999)) == 2
    assert chosen(allowed_token_ids=[3], logit_bias={0: 100}) == 3
    assert chosen(bad_token_ids=[(0,), (1,)]) == 2
    assert chosen(bad_token_ids=[(3, 0)]) == 0  # nothing comes before it
    assert chosen(bad_token_ids=[(2, 3, 0), (3, 1)], output=(2, 3)) == 2
    assert chosen(bad_token_ids=[(2, 3, 0)], output=(3, 3)) == 0
    both = [request(temperature=0, allowed_token_ids=(3,)), request(temperature=0)]
    assert sampler.choose(logits.repeat(2, 1), both).tokens.tolist() == [3, 0]
    long = request(temperature=0, min_tokens=1, output=(3,))
    assert int(sampler.choose(logits, [long]).tokens) == 0


def test_logprobs_ignore_changes_of_logits() -> None:
    torch.manual_seed(5)
    logits = torch.randn(4, 300).to(torch.bfloat16)
    requests = [
        request(temperature=0, logprobs=0),
        request(temperature=0),
        request(temperature=0.3, top_k=5, seed=1, logprobs=3),
        request(temperature=0, logit_bias={17: 100}, logprobs=2),
    ]
    chosen = Sampler().choose(logits, requests)
    assert chosen.logprobs is not None
    assert chosen.logprobs.rows == (0, 2, 3)
    found = chosen.logprobs.to_host().read()
    tokens = chosen.tokens.tolist()
    assert tokens[3] == 17
    for row, count, one in zip((0, 2, 3), (0, 3, 2), found, strict=True):
        every = logits[row].float().log_softmax(-1)
        token = tokens[row]
        assert next(iter(one)) == token
        assert one[token].logprob == pytest.approx(float(every[token]), abs=1e-5)
        assert one[token].rank == int((every > every[token]).sum()) + 1
        likeliest = every.topk(count) if count else None
        if likeliest is not None:
            assert [one[t].rank for t in likeliest.indices.tolist()] == list(range(1, count + 1))
            assert [one[t].logprob for t in likeliest.indices.tolist()] == pytest.approx(
                likeliest.values.tolist()
            )
        assert len(one) == len({token, *([] if likeliest is None else likeliest.indices.tolist())})
    assert Sampler().choose(logits[:1], requests[1:2]).logprobs is None


@pytest.mark.parametrize("vocabulary", [64, 70, 31])
def test_grammar_mask_keeps_set_bits(vocabulary: int) -> None:
    logits = torch.zeros(3, vocabulary)
    bits = np.array([[0b1011, -(2**31)], [0, 1]], dtype=np.int32)
    apply_grammar_mask(logits, [0, 2], bits)
    left = [[i for i in range(vocabulary) if row[i] == 0] for row in logits]
    assert left[0] == [i for i in (0, 1, 3, 63) if i < vocabulary]
    assert left[1] == list(range(vocabulary))
    assert left[2] == [i for i in (32,) if i < vocabulary]


def test_sampler_does_not_wait_for_the_device() -> None:
    """Tensors on the meta device have no values: reading one would fail."""
    requests = [
        request(temperature=0),
        request(seed=3, top_p=0.9),
        request(seed=3, top_k=20, min_p=0.1, logprobs=4),
        request(
            output=(4, 5), repetition_penalty=1.2, presence_penalty=0.1, min_tokens=10, logit_bias={3: 1.0}
        ),
    ]
    logits = torch.empty(4, 5000, device="meta", dtype=torch.bfloat16)
    chosen = Sampler(eos=[1]).choose(logits, requests)
    assert chosen.tokens.device.type == "meta"
    assert chosen.tokens.shape == (4,)
    assert chosen.logprobs is not None
    assert chosen.logprobs.top_ids.shape == (1, 4)
    with pytest.raises((RuntimeError, NotImplementedError)):
        chosen.tokens.tolist()  # so the test would see it


def test_rows_and_requests_must_match() -> None:
    with pytest.raises(ValueError, match="2 rows of logits do not match 1 requests"):
        Sampler().choose(torch.zeros(2, 5), [request()])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"temperature": math.nan}, "temperature nan"),
        ({"temperature": math.inf}, "temperature inf"),
        ({"min_tokens": 17}, "min_tokens 17 must be from 0 to max_tokens 16"),
        ({"presence_penalty": 3}, "presence_penalty 3"),
        ({"frequency_penalty": -2.5}, "frequency_penalty -2.5"),
        ({"repetition_penalty": 0}, "repetition_penalty 0"),
        ({"logit_bias": {4: 101}}, "logit_bias 4: 101"),
        ({"logit_bias": {-4: 1}}, "logit_bias -4"),
        ({"allowed_token_ids": []}, "allowed_token_ids must have at least one"),
        ({"allowed_token_ids": [-1, 2]}, "allowed_token_ids"),
        ({"bad_token_ids": [[]]}, "bad_token_ids"),
        ({"stop": ["a", ""]}, "has an empty text"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids"),
        ({"logprobs": -1}, "logprobs -1"),
        ({"logprobs": 2000}, "logprobs 2000"),
        ({"n": 0}, "n 0"),
        ({"n": 3, "best_of": 2}, "best_of 2 must be from n 3"),
        ({"n": 2, "temperature": 0}, "are all the same"),
        ({"beam_width": 4}, "needs temperature 0"),
        ({"beam_width": 4, "temperature": 0, "n": 5}, "n 5 must not exceed beam_width 4"),
        ({"beam_width": 4, "temperature": 0, "stop": "x"}, "beam_width excludes"),
        ({"beam_width": 4, "temperature": 0, "allowed_token_ids": [1]}, "beam_width excludes"),
        ({"regex": "a", "grammar": "b"}, "regex and grammar"),
        ({"json_schema": "{"}, "not JSON"),
        ({"json_schema": {"a": {1, 2}}}, "cannot be encoded as JSON"),
    ],
)
def test_invalid_parameters_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SamplingParams(**wrong)


def test_parameters_that_need_the_last_token() -> None:
    for kind in (
        {"top_p": 0.5, "seed": 1},
        {"min_tokens": 4, "logit_bias": {1: 1}},
        {"stop": "x"},
        {"n": 3},
        {"logprobs": 5},
        {"allowed_token_ids": [1], "bad_token_ids": [[2], [3]]},
    ):
        assert not SamplingParams(**kind).needs_last_token
    for kind in (
        {"presence_penalty": 1},
        {"repetition_penalty": 1.1},
        {"regex": "a"},
        {"json_schema": {}},
        {"bad_token_ids": [[2, 3]]},
    ):
        assert SamplingParams(**kind).needs_last_token


def test_time_stamps_follow_the_rule_of_transformers() -> None:
    from transformers import GenerationConfig
    from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

    from kvloom.engine.sampling import TimestampRule

    settings = GenerationConfig(eos_token_id=40, bos_token_id=40)
    settings.no_timestamps_token_id, settings.max_initial_timestamp_index = 49, 3
    rule, prompt = TimestampRule.of(settings), [41, 42]
    assert rule == TimestampRule(50, 40, 3)
    assert TimestampRule.of(GenerationConfig(eos_token_id=40)) is None
    generator, seen = torch.Generator().manual_seed(1), set()
    outputs = [
        [],
        [50],
        [51, 3],
        [51, 3, 55],
        [51, 3, 55, 55],
        [51, 3, 55, 55, 4],
        [51, 3, 55, 57],
        [3],
        [3, 50],
    ]
    for output in outputs:
        for scale in (0.1, 1.0, 4.0):
            logits = torch.randn(1, 64, generator=generator) * scale
            theirs = WhisperTimeStampLogitsProcessor(settings, begin_index=len(prompt))
            wanted = theirs(torch.tensor([prompt + output]), logits)
            rule.apply(logits, [(0, output)])
            assert torch.equal(logits, wanted), output
            seen.add(tuple(torch.isinf(wanted[0]).tolist()))
    assert len(seen) >= len(outputs), "the outputs lead to different masks"
