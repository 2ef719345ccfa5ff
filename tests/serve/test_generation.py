"""OpenAI's client with a real server: texts, streams, chats, several answers, log-probabilities, JSON."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.serve.running import MODEL, Running

GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 12}
IDS = {"return_token_ids": True, "ignore_eos": True}
CHAT: list[Any] = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(server: Running) -> OpenAI:
    return server.client()


def expected(folder: Path, prompt: list[int], count: int) -> list[int]:
    """What transformers' own generate() writes."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = model.generate(
        torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return [int(token) for token in found[0, len(prompt) :]]


def test_a_completion_equals_hugging_face_generate(server: Running, folder: Path) -> None:
    prompt = list(range(40, 80))
    body = {**GREEDY, **IDS, "prompt": prompt, "logit_bias": {"2": -100}}
    choice = server.complete(**body)["choices"][0]
    assert choice["token_ids"] == expected(folder, prompt, 12)
    assert choice["text"] == AutoTokenizer.from_pretrained(folder).decode(choice["token_ids"])
    assert choice["finish_reason"] == "length"


def test_prompts_may_be_texts_or_token_ids(client: OpenAI, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = ["one fish", "two fish"]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    many = client.completions.create(prompt=texts, extra_body=IDS, **GREEDY)
    assert [choice.index for choice in many.choices] == [0, 1]
    assert many.usage is not None
    assert many.usage.prompt_tokens == sum(map(len, ids))
    assert many.usage.completion_tokens == 24
    told = [choice.text for choice in many.choices]
    assert [
        choice.text for choice in client.completions.create(prompt=ids, extra_body=IDS, **GREEDY).choices
    ] == told
    single = [
        client.completions.create(prompt=one, extra_body=IDS, **GREEDY).choices[0].text
        for one in (texts[0], ids[1])
    ]
    assert single == told


def test_stream_events_add_up_to_the_whole_answer(client: OpenAI) -> None:
    long = {
        **GREEDY,
        "max_tokens": 96,
        "extra_body": {"ignore_eos": True},
    }  # tokens that wait for a busy server go together
    whole = client.completions.create(prompt="a stream", **long)
    pieces = list(
        client.completions.create(
            prompt="a stream", stream=True, stream_options={"include_usage": True}, **long
        )
    )
    assert "".join(piece.choices[0].text for piece in pieces[:-1]) == whole.choices[0].text
    assert len(pieces) > 3
    assert [piece.choices[0].finish_reason for piece in pieces[:-1]][-1] == "length"
    assert pieces[-1].choices == []
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.completion_tokens == 96
    plain = list(client.completions.create(prompt="a stream", stream=True, **GREEDY))
    assert all(piece.usage is None for piece in plain)


def test_a_chat_uses_the_models_template(client: OpenAI, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    written = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert written == "[system]be kind[user]hello[assistant]"
    chat = client.chat.completions.create(messages=CHAT, **GREEDY)
    assert chat.usage is not None
    assert chat.usage.prompt_tokens == len(tokenizer(written, add_special_tokens=False)["input_ids"])
    assert chat.choices[0].message.role == "assistant"
    same = client.completions.create(prompt=written, **GREEDY)
    assert chat.choices[0].message.content == same.choices[0].text
    parts = [
        {"role": "system", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "kind"}]},
        CHAT[1],
    ]
    again = client.chat.completions.create(messages=parts, **GREEDY)  # type: ignore[arg-type]
    assert again.choices[0].message.content == chat.choices[0].message.content


def test_a_chat_streams_its_role_first(client: OpenAI) -> None:
    whole = client.chat.completions.create(
        messages=CHAT, max_completion_tokens=10, model=MODEL, temperature=0
    )
    pieces = list(
        client.chat.completions.create(
            messages=CHAT, max_completion_tokens=10, model=MODEL, temperature=0, stream=True
        )
    )
    assert pieces[0].choices[0].delta.role == "assistant"
    assert all(piece.choices[0].delta.role is None for piece in pieces[1:])
    assert (
        "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.choices[0].message.content
    )
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_a_seed_reproduces_several_answers(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL, "prompt": "draw", "max_tokens": 16, "temperature": 1.0, "n": 4, "seed": 7, "extra_body": IDS,
    }  # fmt: skip
    first = client.completions.create(**asked)
    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) == 4
    assert [choice.text for choice in client.completions.create(**asked).choices] == texts
    assert first.usage is not None
    assert first.usage.completion_tokens == 64
    streamed = ["", "", "", ""]
    for piece in client.completions.create(stream=True, **asked):
        streamed[piece.choices[0].index] += piece.choices[0].text
    assert streamed == texts
    best = client.completions.create(**{**asked, "n": 2, "best_of": 4})
    assert len(best.choices) == 2
    assert {choice.text for choice in best.choices} <= set(texts)


def test_log_probabilities_of_completions(client: OpenAI) -> None:
    choice = client.completions.create(prompt="odds", logprobs=3, extra_body=IDS, **GREEDY).choices[0]
    told = choice.logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.token_logprobs is not None
    assert told.top_logprobs is not None
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == 12
    for token, value, top in zip(told.tokens, told.token_logprobs, told.top_logprobs, strict=True):
        assert value is not None
        assert value == max(top.values())  # greedy took the likeliest
        assert top[token] == value
        assert value <= 0
    pieces = list(client.completions.create(prompt="odds", logprobs=3, stream=True, extra_body=IDS, **GREEDY))
    streamed = [v for p in pieces for v in (p.choices[0].logprobs.token_logprobs or [])]  # type: ignore[union-attr]
    assert streamed == pytest.approx(told.token_logprobs, abs=1e-4)


def test_log_probabilities_of_chats(client: OpenAI) -> None:
    chat = client.chat.completions.create(
        messages=CHAT, logprobs=True, top_logprobs=2, model=MODEL, max_tokens=8, temperature=1.5, seed=3
    )
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content
    assert content
    for place in content:
        assert len(place.top_logprobs) == 2
        assert place.top_logprobs[0].logprob >= place.top_logprobs[1].logprob
        assert place.logprob <= place.top_logprobs[0].logprob
        assert place.bytes is None or bytes(place.bytes).decode() == place.token
        assert sum(math.exp(top.logprob) for top in place.top_logprobs) <= 1 + 1e-6


def test_an_answer_of_a_json_schema(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["colour", "count"],
        "additionalProperties": False,
    }  # fmt: skip
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema, "strict": True}}
    chat = client.chat.completions.create(
        messages=CHAT, response_format=wanted, model=MODEL, max_tokens=200, temperature=1.0, seed=1
    )
    found = json.loads(chat.choices[0].message.content or "")
    assert set(found) == {"colour", "count"}
    assert found["colour"] in ("red", "green")
    assert 0 <= found["count"] <= 99


def test_stop_texts_and_echo(client: OpenAI) -> None:
    whole = client.completions.create(
        prompt="stop it", extra_body={"ignore_eos": True}, **{**GREEDY, "max_tokens": 24}
    )
    text = whole.choices[0].text
    stop = text[len(text) // 2 :][:2]
    cut = client.completions.create(
        prompt="stop it", stop=[stop], extra_body={"ignore_eos": True}, **{**GREEDY, "max_tokens": 24}
    )
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    echoed = client.completions.create(prompt="stop it", echo=True, extra_body={"ignore_eos": True}, **GREEDY)
    assert echoed.choices[0].text.startswith("stop it" + text[:3])


def test_usage_reports_cached_tokens(server: Running) -> None:
    prompt = [5 + i % 200 for i in range(100)]

    def cached(**more: Any) -> int:
        found = server.complete(prompt=prompt, max_tokens=4, temperature=0, **more)["usage"]
        assert found["total_tokens"] == 104
        return int(found["prompt_tokens_details"]["cached_tokens"])

    assert cached(tenant="usage", cache={"store": False}) == 0
    assert cached(tenant="usage") == 0  # nothing was stored
    assert cached(tenant="usage") == 99
    assert cached(tenant="usage", cache={"read": False}) == 0
    assert cached(tenant="usage", read=False) == 0  # its former name
    assert cached(tenant="usage", store=False) == 99  # OpenAI's field: not about the cache
    assert cached(tenant="another") == 0  # what one tenant stored is not there for others
    assert cached(tenant="usage", session_id="s", ttl=5.0, priority=3) == 99
    status, _, told = server.send("POST", "/v1/sessions/s?tenant=usage")
    assert (status, told["expected"]) == (202, True)
    assert server.send("DELETE", "/v1/sessions/s?tenant=usage")[2]["ended"] is True


def test_parallel_requests_get_the_same_answers_as_alone(server: Running) -> None:
    prompts = [[7 + i, *range(30, 60 + i)] for i in range(24)]

    def ask(prompt: list[int]) -> list[int]:
        return list(server.complete(**{**GREEDY, **IDS, "prompt": prompt})["choices"][0]["token_ids"])

    alone = [ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(24) as pool:
        assert list(pool.map(ask, prompts)) == alone


def test_the_model_is_listed(client: OpenAI, folder: Path) -> None:
    assert [model.id for model in client.models.list().data] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    found = client.completions.create(**{**GREEDY, "model": str(folder)}, prompt="by its path")
    assert found.model == MODEL
