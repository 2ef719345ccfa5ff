"""Further request fields: tools, salts, structured outputs, truncation, usage; and /tokenize."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.serve.running import LONGEST, MODEL, Running

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture
def client(server: Running) -> OpenAI:
    return server.client()


def chat_text(server: Running, **fields: Any) -> str:
    """A chat as the template wrote it."""
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    status, _, found = server.send("POST", "/tokenize", body)
    assert status == 200, found
    _, _, told = server.send("POST", "/detokenize", {"tokens": found["tokens"]})
    return str(told["prompt"])


def test_tools_documents_and_effort_reach_the_template(server: Running) -> None:
    assert chat_text(server) == "[user]hi[assistant]"
    assert chat_text(server, tools=[TOOL]) == "<weather>[user]hi[assistant]"
    assert chat_text(server, tools=[TOOL], tool_choice="auto") == "<weather>[user]hi[assistant]"
    assert chat_text(server, tools=[TOOL], tool_choice="none") == "[user]hi[assistant]"
    assert chat_text(server, documents=[{"title": "a", "text": "b"}]) == "<a>[user]hi[assistant]"
    assert chat_text(server, reasoning_effort="low") == "<low>[user]hi[assistant]"
    assert chat_text(server, add_generation_prompt=False) == "[user]hi"


def test_tool_calls_and_results_are_messages(server: Running, client: OpenAI) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages: list[Any] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    assert chat_text(server, messages=messages) == "[user]hi[assistant](Oslo)[tool]rain[assistant]"
    tools: Any = [TOOL]
    found = client.chat.completions.create(model=MODEL, messages=messages, tools=tools, max_tokens=3)
    assert found.choices[0].message.tool_calls is None  # the template's format is unknown


def test_a_salt_separates_cached_pages(server: Running) -> None:
    def cached(**fields: Any) -> int:
        found = server.complete(prompt="salted " * 40, max_tokens=1, **fields)
        return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(cache_salt="one") == 0
    assert cached(cache_salt="one") > 200
    assert cached(cache_salt="two") == 0
    assert cached() < 16  # others' prompts may begin like it


def test_prompt_log_probabilities_equal_the_models(server: Running, folder: Path) -> None:
    import torch
    from transformers import LlamaForCausalLM

    ids = [5, 6, 7, 80, 90, 7]
    for _ in range(2):  # the second time it is in the cache
        found = server.complete(
            prompt=ids, max_tokens=2, temperature=0, echo=True, logprobs=2, prompt_logprobs=1
        )
    with torch.inference_mode():
        logits = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([ids])).logits[0]
    wanted = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    choice = found["choices"][0]
    told = choice["logprobs"]
    assert [len(told[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [
        8
    ] * 4
    assert (told["token_logprobs"][0], told["top_logprobs"][0]) == (None, None)
    assert told["token_logprobs"][1:6] == pytest.approx(wanted.tolist(), abs=1e-4)
    assert [choice["prompt_logprobs"][i][str(ids[i])]["logprob"] for i in range(1, 6)] == pytest.approx(
        wanted.tolist(), abs=1e-4
    )
    assert choice["prompt_logprobs"][0] is None
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 1,
        "prompt_logprobs": 0,
    }
    _, _, chat = server.send("POST", "/v1/chat/completions", body)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert all(len(place) == 1 for place in chat["prompt_logprobs"][1:])


@pytest.mark.parametrize("prompt", ["plain text", "€ and ü", "<|special|> <s> text", [1, 70, 1, 80]])
def test_text_offsets_are_positions_in_the_returned_text(server: Running, prompt: Any) -> None:
    for echo in (True, False):
        found = server.complete(
            prompt=prompt, max_tokens=5, temperature=0, echo=echo, logprobs=0, ignore_eos=True
        )
        text, told = found["choices"][0]["text"], found["choices"][0]["logprobs"]
        offsets = told["text_offset"]
        assert len(offsets) == len(told["tokens"])
        assert offsets[0] == 0
        assert offsets == sorted(offsets)
        assert offsets[-1] <= len(text)
        for token, start in zip(told["tokens"], offsets, strict=True):
            if not token.startswith("piece:"):  # a part of a character
                assert text.startswith(token, start) or token in ("<s>", "</s>", "<pad>"), (
                    token,
                    start,
                    text,
                )


def test_structured_outputs_follow_vllms_fields(server: Running) -> None:
    def text(**outputs: Any) -> str:
        found = server.complete(prompt="x", max_tokens=40, temperature=0, structured_outputs=outputs)
        return str(found["choices"][0]["text"])

    assert text(choice=["red fox", "blue+"]) in ("red fox", "blue+")
    assert text(regex="[ab]{3}").strip("ab") == ""
    assert text(json={"enum": ["x"]}) == '"x"'


def test_a_prompt_is_truncated_to_its_last_tokens(server: Running) -> None:
    cut = server.complete(prompt="abcdef", truncate_prompt_tokens=3, max_tokens=1, echo=True)
    assert cut["usage"]["prompt_tokens"] == 3
    assert cut["choices"][0]["text"].startswith("def")
    long = server.complete(prompt="x" * 3 * LONGEST, truncate_prompt_tokens=-1, max_tokens=2)
    assert long["usage"]["prompt_tokens"] == LONGEST - 2


def test_usage_can_be_sent_with_every_event(client: OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    pieces = list(
        client.completions.create(
            model=MODEL, prompt="hi", max_tokens=5, stream=True, stream_options=options, extra_body={"ignore_eos": True}
        )
    )  # fmt: skip
    counts = [piece.usage.completion_tokens for piece in pieces if piece.usage is not None]
    assert len(counts) == len(pieces)
    assert counts == sorted(counts)
    assert counts[-1] == 5


def test_min_tokens_biases_and_stop_tokens_apply(client: OpenAI) -> None:
    bias = {"65": 100.0}  # nothing but this one
    found = client.completions.create(
        model=MODEL, prompt="hi", max_tokens=6, temperature=0, logit_bias=bias, extra_body={"return_token_ids": True}
    )  # fmt: skip
    ids: Any = found.choices[0].model_dump()["token_ids"]
    assert ids == [65] * 6
    more: Any = {"stop_token_ids": [65], "min_tokens": 4}
    found = client.completions.create(
        model=MODEL, prompt="hi", max_tokens=6, temperature=0, logit_bias=bias, extra_body=more
    )
    assert found.usage is not None
    assert found.usage.completion_tokens > 4 or found.choices[0].finish_reason == "stop"
    assert found.usage.completion_tokens >= 4
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], max_completion_tokens=3, extra_body={"ignore_eos": True}
    )  # fmt: skip
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 3


def test_unknown_fields_are_ignored(client: OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    found = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=2, user="me", metadata={"a": "b"}, service_tier="auto",
        parallel_tool_calls=True, extra_body={"request_id": "7", "spaces_between_special_tokens": True, "suffix": ""},
    )  # fmt: skip
    assert found.choices[0].finish_reason in ("length", "stop")


def test_tokenize_and_detokenize_are_inverse(server: Running) -> None:
    status, _, found = server.send(
        "POST", "/tokenize", {"model": MODEL, "prompt": "hé", "return_token_strs": True}
    )
    assert (status, found["count"], found["max_model_len"]) == (200, 3, LONGEST)
    assert len(found["tokens"]) == len(found["token_strs"]) == 3
    assert server.send("POST", "/detokenize", {"tokens": found["tokens"]})[2] == {"prompt": "hé"}
    assert server.send("POST", "/tokenize", {"prompt": [5, 6]})[2]["tokens"] == [5, 6]


def test_version_and_ping(server: Running) -> None:
    assert server.send("GET", "/version")[2] == {"version": version("kvloom")}
    assert server.send("GET", "/ping")[:1] == server.send("POST", "/ping")[:1] == (200,)


def test_probes_of_gateways(server: Running) -> None:
    status, _, info = server.send("GET", "/server_info")
    assert (status, info["served_model_name"], info["context_length"]) == (200, MODEL, LONGEST)
    server.send("POST", "/v1/completions", {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 2})
    status, _, found = server.send("GET", "/v1/loads?include=core")
    (load,) = found["loads"]
    assert (status, load["num_running_reqs"], load["num_waiting_reqs"]) == (200, 0, 0)
    assert load["max_total_num_tokens"] == info["max_total_num_tokens"] > 0
    assert 0 <= load["token_usage"] <= 1
