"""Reused documents: tokens equal those of Hugging Face's modeling code with the same K and V replaced, copies are never
published, and what cannot be copied is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvloom.bench.documents import blended_logits
from kvloom.core import CacheControl
from kvloom.engine import LLM, Engine, Request, SamplingParams
from tests.engines import evict_all, make_engine
from tests.models.lora_adapters import write_adapter
from tests.models.zoo import expected, tiny

from .test_offload import PATIENT, closed, drawn, greedy, offload_of, stored
from .thread_ranks import grid_engine

POOL, NEW = 1 << 22, 6
TEXT, FIRST, BETWEEN, SECOND, QUESTION = drawn("documents", 20, 100, 5, 70, 10)
PROMPT = TEXT + FIRST + BETWEEN + SECOND + QUESTION
SPANS = ((20, 120), (125, 195))
ROTARY = ["llama", "gemma3_text", "deepseek_v3", "cohere", "gpt_oss", "glm", "mistral"]
REFUSED = {
    "gpt2": "V of layer 0 depends on the position",
    "qwen3_next": "recurrent layers",
    "llama4_text": "position of a token in its chunk",
}


def model_of(family: str) -> Any:
    model = tiny(family, max_position_embeddings=512)
    model.generation_config.eos_token_id = None
    return model


def reusing(model: Any, share: float = 0.1, **settings: Any) -> Engine:
    return make_engine(model, settings.pop("pool", POOL), reuse_documents=share, **settings)


def ask(engine: Engine, prompt: list[int] = PROMPT, spans: Any = SPANS, **more: Any) -> Request:
    request = engine.add(prompt, greedy(NEW), CacheControl(documents=spans, **more))
    engine.run()
    return request


def blended(model: Any, prompt: list[int], spans: Any, share: float, new: int = NEW) -> list[int]:
    """Greedy tokens of Hugging Face's modeling code, with K and V of documents that were computed alone."""
    tokens = list(prompt)
    for _ in range(new):
        computed = torch.ones(len(tokens), dtype=torch.bool)
        for start, end in spans:
            computed[start + -int(-share * (end - start) // 1) : end] = False
        tokens.append(int(blended_logits(model, torch.tensor(tokens), spans, computed)[-1].argmax()))
    return tokens


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("family", ROTARY)
@pytest.mark.few(4)
def test_tokens_equal_those_with_replaced_keys_and_values(family: str, share: float) -> None:
    wanted = blended(model_of(family), PROMPT, SPANS, share)
    engine = reusing(model_of(family), share, token_budget=33)
    found = ask(engine)
    assert found.tokens == wanted
    assert found.reused_tokens == sum(end - start - -int(-share * (end - start) // 1) for start, end in SPANS)
    closed(engine)


@pytest.mark.parametrize("parts", [(2, 1), (1, 2), (2, 2)], ids=["tensor", "context", "both"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3", "gpt_oss"])
@pytest.mark.few(4)
def test_ranks_copy_documents(family: str, parts: tuple[int, int]) -> None:
    """The second prompt has the documents at other places, and hits the documents of the first."""
    other = drawn("other", 33)[0] + SECOND + BETWEEN + FIRST + QUESTION
    spans = ((33, 103), (108, 208))
    engine = grid_engine(model_of(family), *parts, pool_bytes=POOL, reuse_documents=0.1, token_budget=64)
    for prompt, places in ((PROMPT, SPANS), (other, spans)):
        found = ask(engine, prompt, places)
        assert found.tokens == blended(model_of(family), prompt, places, 0.1)
        assert found.reused_tokens == 153
    closed(engine)


@pytest.mark.parametrize("parts", [(2, 1), (1, 2)], ids=["tensor", "context"])
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_ranks_copy_quantised_pages(kv_dtype: Any, parts: tuple[int, int]) -> None:
    settings = {"pool_bytes": POOL, "kv_dtype": kv_dtype, "reuse_documents": 0.1}
    one, many = make_engine(model_of("llama"), **settings), grid_engine(model_of("llama"), *parts, **settings)
    assert ask(one).tokens == ask(many).tokens
    closed(one)
    closed(many)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3"])
@pytest.mark.few(1)
def test_all_tokens_computed_is_exact(family: str) -> None:
    engine = reusing(model_of(family), 1.0)
    found = ask(engine)
    assert found.tokens == expected(model_of(family), [PROMPT], NEW)[0]
    assert found.reused_tokens == 0
    closed(engine)


def test_documents_are_computed_once_and_copied_to_any_place() -> None:
    engine = reusing(model_of("llama"))
    ask(engine)
    other = drawn("other", 33)[0] + SECOND + BETWEEN + FIRST + QUESTION
    spans = ((33, 103), (108, 208))
    moved = engine.add(other, greedy(NEW), CacheControl(documents=spans))
    assert not moved.awaited  # both documents are cached
    engine.run()
    assert moved.reused_tokens == 153
    assert moved.tokens == blended(model_of("llama"), other, spans, 0.1)
    closed(engine)


def test_lookups_count_prompts_of_clients_only() -> None:
    """The requests that compute documents, and the sequences from which documents are copied, are not lookups."""
    engine = reusing(model_of("llama"))
    for _ in range(2):
        assert ask(engine).reused_tokens
    counts = engine.cache.inspect
    assert counts.looked_up_tokens == 2 * len(PROMPT)
    (account,) = counts.accounts.values()
    assert account.looked_up_tokens == 2 * len(PROMPT)
    assert counts.hit_tokens == account.hit_tokens < len(PROMPT)
    assert sum(counts.misses.values()) == 2
    closed(engine)


def test_copies_are_never_published() -> None:
    engine = reusing(model_of("llama"))
    ask(engine)
    plain = engine.add([*PROMPT, 5], greedy(NEW))
    engine.run()
    assert plain.cached_tokens == 16  # only the text before the first copy, in whole blocks
    assert plain.tokens == expected(model_of("llama"), [[*PROMPT, 5]], NEW)[0]
    assert plain.reused_tokens == 0
    closed(engine)


def test_an_exact_hit_is_preferred() -> None:
    engine = reusing(model_of("llama"))
    plain = engine.add(PROMPT, greedy(NEW))
    engine.run()
    found = ask(engine)
    assert found.tokens == plain.tokens
    assert found.cached_tokens == len(PROMPT) - 1
    assert found.reused_tokens == 0
    closed(engine)


def test_a_document_of_another_tenant_or_salt_is_not_reused() -> None:
    engine = reusing(model_of("llama"))
    ask(engine, tenant="red")
    for more in ({"tenant": "blue"}, {"tenant": "red", "salt": "x"}):
        request = engine.add(PROMPT, greedy(NEW), CacheControl(documents=SPANS, **more))
        assert len(request.awaited) == 2
        engine.run()
        assert request.cached_tokens == 0
    assert not engine.add(PROMPT, greedy(NEW), CacheControl(documents=SPANS, tenant="red")).awaited
    engine.run()
    closed(engine)


def test_requests_with_the_same_document_wait_for_one_computation() -> None:
    engine = reusing(model_of("llama"))
    many = [
        engine.add([*drawn(i, 20)[0], *PROMPT[20:]], greedy(NEW), CacheControl(documents=SPANS))
        for i in range(3)
    ]
    assert {id(one) for request in many for one in request.awaited} == {id(one) for one in many[0].awaited}
    updated: list[Request] = []
    while engine.busy:
        updated += engine.step()
    assert {id(one) for one in updated} == {id(one) for one in many}  # requests of documents are not returned
    for request in many:
        assert request.tokens == blended(model_of("llama"), list(request.prompt), SPANS, 0.1)
    closed(engine)


def test_samples_share_the_copies() -> None:
    engine = reusing(model_of("llama"))
    request = engine.add(
        PROMPT, SamplingParams(max_tokens=4, temperature=1.0, n=3, seed=1), CacheControl(documents=SPANS)
    )
    engine.run()
    assert [one.reused_tokens for one in request.family] == [153] * 3
    beams = engine.add(
        PROMPT, SamplingParams(max_tokens=4, temperature=0, beam_width=3), CacheControl(documents=SPANS)
    )
    engine.run()
    assert beams.reused_tokens == 153
    closed(engine)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.few(1)
def test_a_preempted_request_copies_again(family: str) -> None:
    wanted = blended(model_of(family), PROMPT, SPANS, 0.1, 10)
    engine = reusing(model_of(family))
    request = engine.add(PROMPT, greedy(10), CacheControl(documents=SPANS))
    while request.output_count < 4:
        engine.step()
    engine.scheduler._preempt(request)
    engine.run()
    assert request.preemptions == 1
    assert request.tokens == wanted
    assert request.reused_tokens == 153
    closed(engine)


def test_a_crowded_pool_finishes_every_request() -> None:
    engine = reusing(model_of("llama"), pool=1 << 18)
    many = [
        engine.add([*drawn(i, 20)[0], *PROMPT[20:]], greedy(NEW), CacheControl(documents=SPANS))
        for i in range(6)
    ]
    engine.run()
    assert all(one.output_count == NEW for one in many)
    closed(engine)


@pytest.mark.slow
@pytest.mark.parametrize("speculate", ["ngram", "suffix"])
def test_drafts_without_weights_are_verified_on_copies(speculate: str) -> None:
    prompt = TEXT + FIRST + FIRST[:20]  # a repetition, so that drafts are proposed
    wanted = blended(model_of("llama"), prompt, SPANS[:1], 0.1, 16)
    engine = reusing(model_of("llama"), speculate=speculate)
    request = engine.add(prompt, greedy(16), CacheControl(documents=SPANS[:1]))
    engine.run()
    assert request.tokens == wanted
    assert request.reused_tokens == 90
    closed(engine)


def test_log_probabilities_of_the_prompt_are_exact() -> None:
    engine = reusing(model_of("llama"))
    request = engine.add(
        PROMPT, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0), CacheControl(documents=SPANS)
    )
    engine.run()
    assert request.reused_tokens == 0
    assert len(request.prompt_logprobs) == len(PROMPT)
    closed(engine)


@pytest.mark.parametrize(("kv_dtype", "limit"), [("bf16", 0.02), ("int8", 0.06), ("fp8", 0.25)])
@pytest.mark.few(1)
def test_quantised_pages_are_copied(kv_dtype: Any, limit: float) -> None:
    """The log-probabilities of the next token are near those with copies in float32. They differ by 0.4 from those of a
    request that computes all tokens."""
    engine = reusing(model_of("llama"), kv_dtype=kv_dtype)
    exact = reusing(model_of("llama"), kv_dtype="fp32")
    logprobs = []
    for one in (engine, exact):
        request = one.add(
            PROMPT, SamplingParams(max_tokens=1, temperature=0, logprobs=5), CacheControl(documents=SPANS)
        )
        one.run()
        assert request.reused_tokens == 153
        logprobs.append({token: found.logprob for token, found in request.logprobs[0].items()})
        closed(one)
    common = logprobs[0].keys() & logprobs[1].keys()
    assert len(common) >= 3
    assert all(abs(logprobs[0][token] - logprobs[1][token]) < limit for token in common)


@pytest.mark.slow
def test_documents_are_loaded_from_tiers(tmp_path: Path) -> None:
    tiers = (f"disk:{tmp_path}:64MiB",)
    wanted = blended(model_of("llama"), PROMPT, SPANS, 0.1)
    first = reusing(model_of("llama"), tiers=tiers, offload=PATIENT)
    assert ask(first).tokens == wanted
    stored(first)
    first.close()
    second = reusing(model_of("llama"), tiers=tiers, offload=PATIENT)
    found = ask(second)
    assert found.tokens == wanted
    assert found.reused_tokens == 153
    assert offload_of(second).stats.loaded_tokens
    closed(second)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_text_before_the_first_copy_is_loaded_from_host_memory(family: str) -> None:
    """With windows, a prompt can resume only at a checkpoint, and pages after the first copy are not published."""
    engine = reusing(model_of(family), tiers=["host:8MiB"], offload=PATIENT)
    tokens = ask(engine).tokens
    evict_all(engine)
    stored(engine)
    again = ask(engine)
    assert again.tokens == tokens
    assert again.hits == {"host": 16}
    closed(engine)


def test_documents_of_an_adapter_are_its_own(tmp_path: Path) -> None:
    model = model_of("llama")
    folder = write_adapter(tmp_path / "one", model, ("q_proj", "k_proj", "v_proj"))
    engine = reusing(model, lora={"one": str(folder)})
    ask(engine)
    request = engine.add(PROMPT, greedy(NEW), CacheControl(documents=SPANS), lora="one")
    assert len(request.awaited) == 2
    engine.run()
    assert request.reused_tokens == 153
    closed(engine)


def test_results_report_that_they_are_approximate() -> None:
    llm = LLM(model_of("llama"), pool_bytes=POOL, reuse_documents=0.1)
    marked, plain = (
        llm.generate([PROMPT], greedy(NEW), control=CacheControl(documents=spans))[0] for spans in (SPANS, ())
    )
    llm.close()
    assert (marked.num_reused_tokens, marked.is_approximate) == (153, True)
    assert (plain.num_reused_tokens, plain.is_approximate) == (0, False)


def test_without_the_setting_marks_have_no_effect() -> None:
    engine = make_engine(model_of("llama"), POOL)
    found = ask(engine)
    assert found.tokens == expected(model_of("llama"), [PROMPT], NEW)[0]
    assert found.reused_tokens == 0
    closed(engine)


@pytest.mark.parametrize("budget", [16, 400])
def test_rotations_are_found_although_rounding_changes_experts(budget: int) -> None:
    engine = reusing(model_of("deepseek_v3"), kv_dtype="fp8", token_budget=budget)
    assert ask(engine).reused_tokens == 153
    closed(engine)


def test_quantised_keys_that_cannot_move_are_refused() -> None:
    for kv_dtype in ("int8", "fp8"):
        with pytest.raises(ValueError, match=REFUSED["gpt2"]):
            reusing(tiny("gpt2"), kv_dtype=kv_dtype)


@pytest.mark.parametrize("family", REFUSED)
def test_models_whose_keys_cannot_move_are_refused(family: str) -> None:
    with pytest.raises(ValueError, match=REFUSED[family]):
        reusing(tiny(family))


def test_wrong_settings_and_ranges_are_refused() -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        reusing(None, 1.5)
    with pytest.raises(ValueError, match="use ngram or suffix"):
        reusing(None, speculate="draft=kvloom-draft")
    for spans in (((5, 5),), ((5, 9), (8, 12)), ((-1, 4),)):
        with pytest.raises(ValueError, match="without overlap"):
            CacheControl(documents=spans)
    engine = reusing(model_of("llama"))
    with pytest.raises(ValueError, match="ends after the 205 tokens"):
        ask(engine, spans=((20, 206),))
    closed(engine)
