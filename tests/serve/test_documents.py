"""Reused documents over HTTP: document parts of chats and of the other APIs, token ranges of completions, and what is
reported."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvloom.serve.api.anthropic_messages import MessagesEndpoint
from kvloom.serve.api.openai_responses import ResponsesEndpoint
from kvloom.serve.api.prompts import PromptEncoder, PromptLimits, load_tokenizer
from kvloom.serve.api.request_fields import ChatFields
from kvloom.serve.errors import ApiError
from kvloom.serve.explain_command import describe
from tests.serve.running import MODEL, Running, running

TEXT = "The harbour of Bergen has seven piers. Pier four is closed in winter, and ships use pier five."
OTHER = "Trains to Voss leave every hour. The first train leaves at six, and the last one before midnight."
PROMPT = [5 + i % 200 for i in range(30)] + [7 + i % 90 for i in range(80)] + [9, 10, 11]


def parts(*texts: str) -> list[dict[str, Any]]:
    """A chat of one message. Texts that begin with a capital letter are documents."""
    kinds = ("document" if text[0].isupper() else "text" for text in texts)
    content = [{"type": kind, "text": text} for kind, text in zip(kinds, texts, strict=True)]
    return [{"role": "user", "content": content}]


def test_document_parts_become_token_ranges(folder: Path) -> None:
    encoder = PromptEncoder(load_tokenizer(str(folder)))
    limits = PromptLimits(4096, 1 << 20)
    marked = encoder.encode_chat(
        ChatFields(messages=parts("read: ", TEXT, "\nand: ", OTHER, "\nwhy?")), limits
    )
    plain = [{"role": "user", "content": f"read: {TEXT}\nand: {OTHER}\nwhy?"}]
    assert marked.tokens == encoder.encode_chat(ChatFields(messages=plain), limits).tokens
    assert [encoder.text(marked.tokens[a:b]) for a, b in marked.documents] == [TEXT, OTHER]
    assert encoder.encode_chat(ChatFields(messages=plain), limits).documents == ()


def messages_block(text: str, **more: Any) -> dict[str, Any]:
    source = {"type": "text", "media_type": "text/plain", "data": text}
    return {"type": "document", "source": source, **more}


def test_document_blocks_of_the_messages_api_become_token_ranges(folder: Path) -> None:
    encoder = PromptEncoder(load_tokenizer(str(folder)))
    cached = {"cache_control": {"type": "ephemeral"}}
    chunks = {
        "type": "content",
        "content": [{"type": "text", "text": OTHER[:30]}, {"type": "text", "text": OTHER[30:]}],
    }
    content = [
        {"type": "text", "text": "read:"},
        messages_block(TEXT, title="Harbour", **cached),
        {"type": "document", "source": chunks, "context": "of 1990"},
        {"type": "text", "text": "why?", **cached},
    ]
    endpoint = MessagesEndpoint(None)  # type: ignore[arg-type]
    fields = endpoint.read(_json({"max_tokens": 1, "messages": [{"role": "user", "content": content}]}))
    (prompt,) = endpoint.prompts(fields, encoder, PromptLimits(4096, 1 << 20))
    assert encoder.text(prompt.tokens) == f"[user]read:\nHarbour\n{TEXT}\nof 1990\n{OTHER}\nwhy?[assistant]"
    assert [encoder.text(prompt.tokens[a:b]) for a, b in prompt.documents] == [TEXT, OTHER]
    ends = [encoder.text(prompt.tokens[:stop]) for stop, _ in prompt.retain]
    assert [end[-8:] for end in ends] == [f"{TEXT}\n"[-8:], f"{OTHER}\nwhy?"[-8:]]


def test_documents_and_text_files_of_the_responses_api_become_token_ranges(folder: Path) -> None:
    encoder = PromptEncoder(load_tokenizer(str(folder)))
    data = b64encode(OTHER.encode()).decode()
    content = [
        {"type": "input_text", "text": "read:\n"},
        {"type": "document", "text": TEXT},
        {"type": "input_text", "text": "\n"},
        {"type": "input_file", "filename": "trains.txt", "file_data": f"data:text/plain;base64,{data}"},
        {"type": "input_text", "text": "\nwhy?"},
    ]
    endpoint = ResponsesEndpoint(None)  # type: ignore[arg-type]
    fields = endpoint.read(_json({"input": [{"role": "user", "content": content}]}))
    (prompt,) = endpoint.prompts(fields, encoder, PromptLimits(4096, 1 << 20))
    assert encoder.text(prompt.tokens) == f"[user]read:\n{TEXT}\n{OTHER}\nwhy?[assistant]"
    assert [encoder.text(prompt.tokens[a:b]) for a, b in prompt.documents] == [TEXT, OTHER]


@pytest.mark.parametrize(
    ("block", "reason"),
    [
        (messages_block("x", citations={"enabled": True}), "omit citations"),
        (messages_block("x", title=5), "title must be a text"),
        (
            {"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}},
            "'base64' are not",
        ),
        ({"type": "document"}, "documents of source 'None' are not supported"),
    ],
)
def test_other_blocks_of_the_messages_api_are_refused(block: dict[str, Any], reason: str) -> None:
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": [block]}]}
    with pytest.raises(ApiError, match=reason):
        MessagesEndpoint(None).read(_json(body))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "data", ["data:application/pdf;base64,eA==", "data:text/plain;base64,/w==", "eA==", None, 5]
)
def test_other_files_of_the_responses_api_are_refused(data: Any) -> None:
    body = {"input": [{"role": "user", "content": [{"type": "input_file", "file_data": data}]}]}
    with pytest.raises(ApiError, match="an input_file must be a text in UTF-8"):
        ResponsesEndpoint(None).read(_json(body))  # type: ignore[arg-type]


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps({"model": MODEL, **body}).encode()


def test_bad_documents_are_refused(server: Running) -> None:
    def refused(path: str = "/v1/completions", **fields: Any) -> str:
        status, _, found = server.send("POST", path, {"model": MODEL, "max_tokens": 1, **fields})
        assert status == 400, found
        return str(found["error"]["message"])

    assert "without overlap" in refused(prompt=PROMPT, cache={"documents": [[30, 60], [50, 70]]})
    assert "exceed the limit of 256" in refused(
        prompt=PROMPT, cache={"documents": [[i, i + 1] for i in range(257)]}
    )
    chat = {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": "hello"}]}
    assert "send document parts" in refused(**chat, cache={"documents": [[1, 2]]})  # type: ignore[arg-type]
    chat["messages"] = [{"role": "user", "content": [{"type": "document", "data": "x"}]}]
    assert "needs the field text" in refused(**chat)  # type: ignore[arg-type]


def test_a_server_without_reuse_ignores_the_mark(server: Running) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    _, _, plain = server.send("POST", "/v1/completions", body)
    _, _, marked = server.send("POST", "/v1/completions", {**body, "cache": {"documents": [[30, 110]]}})
    assert marked["choices"][0]["text"] == plain["choices"][0]["text"]
    assert "approximate" not in marked["usage"]


@pytest.fixture(scope="module")
def reusing(folder: Path) -> Iterator[Running]:
    with running(folder, "--pool", "8MiB", "--reuse-documents", "0.25") as found:
        yield found


@pytest.mark.slow
def test_reused_tokens_are_reported(reusing: Running) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "cache": {"documents": [[30, 110]]}}
    status, _, found = reusing.send("POST", "/v1/completions", body)
    assert status == 200, found
    assert found["usage"]["approximate"] is True
    assert found["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "reused_tokens": 60}
    _, _, exact = reusing.send("POST", "/v1/completions", {**body, "cache": {}})
    assert "approximate" not in exact["usage"]
    status, _, found = reusing.send("POST", "/v1/completions", {**body, "cache": {"documents": [[30, 200]]}})
    assert status == 400
    assert "ends after the 113 tokens" in found["error"]["message"]
    _, _, chat = reusing.send(
        "POST",
        "/v1/chat/completions",
        {"model": MODEL, "messages": parts("read: ", TEXT, "\nwhy?"), "max_tokens": 1},
    )
    assert chat["usage"]["prompt_tokens_details"]["reused_tokens"] >= len(TEXT) * 3 // 4 - 1
    copied = chat["usage"]["prompt_tokens_details"]["reused_tokens"]
    content: list[dict[str, Any]] = [{"type": "text", "text": "read this "}, messages_block(TEXT)]
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    _, _, message = reusing.send("POST", "/v1/messages", body)
    assert message["usage"]["approximate"] is True
    assert message["usage"]["reused_input_tokens"] == copied
    body = {"model": MODEL, "input": parts("read all: ", TEXT), "max_output_tokens": 1}
    body["input"][0]["content"][0]["type"] = "input_text"
    _, _, response = reusing.send("POST", "/v1/responses", body)
    assert response["usage"]["approximate"] is True
    assert response["usage"]["input_tokens_details"]["reused_tokens"] == copied
    reusing.wait_for(lambda: reusing.metrics()["kvloom_reused_prompt_tokens_total"] >= 60)
    _, _, record = reusing.send("GET", f"/kvloom/requests/{exact['id']}")
    assert record["reused_tokens"] == 0
    assert record["approximate"] is False
    _, _, listed = reusing.send("GET", "/kvloom/requests")
    copied = next(one for one in listed["requests"] if one["reused_tokens"] == 60)
    assert copied["computed_tokens"] == len(PROMPT) - 60
    assert "60 were copied from documents" in describe(copied)[1]
