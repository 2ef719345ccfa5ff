"""/v1/responses, through OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.serve.running import MODEL, Running

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Ulm"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
QUIET: Any = {"ignore_eos": True}


@pytest.fixture
def client(server: Running) -> OpenAI:
    return server.client()


def prompt_of(server: Running, **fields: Any) -> int:
    """The prompt tokens of a request."""
    status, _, found = server.send("POST", "/v1/responses", {"max_output_tokens": 1, **fields})
    assert status == 200, found
    return int(found["usage"]["input_tokens"])


def test_a_text_gets_a_response(server: Running, client: OpenAI) -> None:
    found = client.responses.create(
        model=MODEL, input="hi", instructions="be brief", max_output_tokens=6, temperature=0, extra_body=QUIET
    )
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}], max_tokens=6, temperature=0,
        extra_body=QUIET,
    )  # fmt: skip
    assert found.output_text == chat.choices[0].message.content
    assert (found.status, found.incomplete_details and found.incomplete_details.reason) == (
        "incomplete",
        "max_output_tokens",
    )
    assert found.id.startswith("resp_")
    assert found.instructions == "be brief"
    assert found.usage is not None
    assert chat.usage is not None
    assert (found.usage.input_tokens, found.usage.output_tokens) == (chat.usage.prompt_tokens, 6)
    assert found.usage.input_tokens_details.cached_tokens >= 0


def test_items_are_messages_of_the_chat(server: Running) -> None:
    items = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call_output", "call_id": "1", "output": "rain"},
    ]
    wanted = "[system]be brief[user]hi[assistant]so(Oslo)[tool]rain[assistant]"
    assert prompt_of(server, input=items) == len(wanted)


def test_a_stream_has_the_events_of_the_client(client: OpenAI) -> None:
    more: Any = {**QUIET, "store": True}
    events = list(
        client.responses.create(
            model=MODEL, input="hi", max_output_tokens=5, temperature=0, stream=True, extra_body=more
        )
    )
    kinds = [event.type for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]  # fmt: skip
    assert kinds[-4:] == ["response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete"]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last: Any = events[-1]
    assert last.response.output_text == text
    assert last.response.usage.output_tokens == 5
    with client.responses.stream(model=MODEL, input="hi", max_output_tokens=5, temperature=0, extra_body=QUIET) as stream:  # fmt: skip
        for _ in stream:
            pass
        assert stream._state is not None  # the client's own accumulation read every event


def test_structured_text(client: OpenAI) -> None:
    form: Any = {
        "format": {"type": "json_schema", "name": "x", "schema": {"enum": ["a", "b"]}, "strict": True}
    }
    found = client.responses.create(model=MODEL, input="hi", max_output_tokens=40, text=form)
    assert json.loads(found.output_text) in ("a", "b")
    assert found.status == "completed"


def test_a_forced_call_is_an_item(client: OpenAI) -> None:
    choice: Any = {"type": "function", "name": "weather"}
    found = client.responses.create(
        model=MODEL, input="hi", tools=[WEATHER], tool_choice=choice, max_output_tokens=100
    )
    (call,) = found.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)["city"] in ("Oslo", "Ulm")) == ("weather", True)
    again = client.responses.create(
        model=MODEL, max_output_tokens=1, tools=[WEATHER],
        input=[{"role": "user", "content": "hi"}, call.to_dict(), {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}],  # type: ignore[list-item]
    )  # fmt: skip
    assert again.usage is not None
    events = list(
        client.responses.create(
            model=MODEL, input="hi", tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_output_tokens=100, stream=True
        )
    )  # fmt: skip
    pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    done = next(e for e in events if e.type == "response.function_call_arguments.done")
    assert "".join(pieces) == done.arguments
    assert len(pieces) > 1
    assert events[-1].type == "response.completed"
    assert events[-1].response.output[0].type == "function_call"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input"),
        ({"input": [{"type": "image"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"temperature": "hot"}, "temperature"),
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
    ],
)
def test_invalid_requests_get_an_error(server: Running, fields: dict[str, Any], param: str) -> None:
    status, _, found = server.send("POST", "/v1/responses", {"input": "hi", **fields})
    assert (status, found["error"]["param"]) == (400, param)


def test_the_client_raises_its_error(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="not stored"):
        client.responses.create(model=MODEL, input="hi", previous_response_id="resp_1")
