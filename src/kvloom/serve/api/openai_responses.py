"""POST /v1/responses: OpenAI's Responses API, translated to a chat and back. Responses are not stored.

input items ──▶ messages of a chat ──▶ ChatEndpoint ──▶ pieces of the answer ──▶ output items, or events
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from kvloom.engine import SamplingParams
from kvloom.serve.api.answers import Block, BlockChange, Blocks, Piece
from kvloom.serve.errors import ApiError, bad_request
from kvloom.serve.worker import Delta

from .generation import ChatEndpoint
from .request_fields import ChatFields, read_fields
from .responses import ChatResponse
from .translation import copied_fields, read_object, text_of_parts

__all__ = ["ResponsesEndpoint"]

REFUSED = {
    "previous_response_id": "responses are not stored: send the whole conversation as input",
    "conversation": "conversations are not stored: send the whole conversation as input",
    "background": "responses are not stored: omit it, or use stream",
    "prompt": "prompt templates are not stored: send input and instructions",
}
PARAMS = {"messages": "input", "response_format": "text", "max_completion_tokens": "max_output_tokens"}
"""Fields of a chat, and their names in the Responses API."""
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
LOGPROBS = "message.output_text.logprobs"
TEXT_FILE = re.compile(r"data:text/[\w.+-]+(;charset=utf-8)?;base64,", re.IGNORECASE)


class ResponsesFields(ChatFields, frozen=True, kw_only=True):
    """The fields of one request to `/v1/responses`, translated to a chat. `original` contains those fields of the
    request that the response must repeat.
    """

    original: dict[str, Any]


class ResponsesEndpoint(ChatEndpoint):
    @property
    def builder(self) -> type[ChatResponse]:
        return ResponsesBuilder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except ApiError as error:
            error.param = PARAMS.get(error.param or "", error.param)
            raise

    def read(self, body: bytes) -> ChatFields:
        chat = _chat(read_object(body))
        return read_fields(msgspec.json.encode(chat), ResponsesFields)

    def response_options(self, fields: ChatFields, params: SamplingParams) -> dict[str, Any]:
        assert isinstance(fields, ResponsesFields)
        return {"top_logprobs": params.logprobs or 0, "original": fields.original}


class ResponsesBuilder(ChatResponse):
    """Builds one response: items of reasoning, text and calls."""

    def __init__(self, *args: Any, original: dict[str, Any], **options: Any) -> None:
        super().__init__(*args, **options)
        self.id = self.id.replace(f"{self.prefix}-", "resp_")
        self._original = original
        self._blocks = Blocks()
        self._parser = self._new_parser()
        self._sequence = 0
        self._finish: str | None = None
        self._logprobs_of_text: list[dict[str, Any]] = []

    def whole(self, deltas: list[Delta]) -> bytes:
        for delta in deltas:
            self._changes(delta)
        return msgspec.json.encode(self._response(self._status))

    def event(self, delta: Delta) -> bytes:
        events = []
        if not self._sequence:
            begun = self._response("in_progress")
            events = [self._event("response.created", response=begun)]
            events.append(self._event("response.in_progress", response=begun))
        for change in self._changes(delta):
            events += self._change_events(change)
        return b"".join(events)

    def last_event(self) -> bytes:
        name = "response.completed" if self._status == "completed" else "response.incomplete"
        return self._event(name, response=self._response(self._status))

    def error_event(self, error: ApiError) -> bytes:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish == "length" else "completed"

    def _changes(self, delta: Delta) -> list[BlockChange]:
        """Return the changes of items that a delta (new tokens of the answer) causes."""
        self._count(delta)
        if delta.logprobs is not None:
            self._logprobs_of_text += self._logprobs(delta, 0)["content"]
        self._finish = delta.finish_reason
        ended = delta.finish_reason is not None
        pieces = [Piece("content", delta.text)] if delta.text else []
        if self._parser is not None:
            pieces = self._parser.feed(delta.text, ended)
        changes = self._blocks.add(pieces)
        if ended:
            if not self._blocks.blocks:
                changes += self._blocks.add([Piece("content", "")])
            changes += self._blocks.close()
        return changes

    def _response(self, status: str) -> dict[str, Any]:
        """Return the response object of the Responses API, with the given status."""
        given, done = self._original, status != "in_progress"
        blocks = self._blocks.blocks if done else []
        last = len(blocks) - 1
        items = [self._item(b, status if b.index == last else "completed") for b in blocks]
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._head["model"],
            "output": items,
            "parallel_tool_calls": given.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "store": False,
            "tool_choice": given.get("tool_choice") or "auto",
            "tools": given.get("tools") or [],
            "text": given.get("text") or {"format": {"type": "text"}},
            "truncation": "disabled",
            "metadata": given.get("metadata") or {},
            **{name: given.get(name) for name in REPEATED},
            "usage": self._usage() if done else None,
        }

    def _usage(self) -> dict[str, Any]:
        reasoning = "".join(block.text for block in self._blocks.blocks if block.kind == "reasoning")
        return {
            "input_tokens": self.usage.prompt,
            "input_tokens_details": self.usage.prompt_details(),
            "output_tokens": self.usage.completion,
            "output_tokens_details": {"reasoning_tokens": self._encoder.count_tokens(reasoning)},
            "total_tokens": self.usage.prompt + self.usage.completion,
            **self.usage.approximate(),
        }

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        """Return a block of the answer as an output item of the Responses API."""
        entry: dict[str, Any] = {"id": self._item_id(block), "status": status}
        if block.kind == "call":
            entry |= {"type": "function_call", "call_id": block.first.id, "name": block.first.name}
            return {**entry, "arguments": block.text}
        part = self._part(block)
        content = [part] if part["text"] or status != "in_progress" else []
        if block.kind == "reasoning":
            return {**entry, "type": "reasoning", "summary": [], "content": content}
        return {**entry, "type": "message", "role": "assistant", "content": content}

    def _part(self, block: Block) -> dict[str, Any]:
        text = block.text
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
        return {**part, "logprobs": self._logprobs_of_text} if self._logprobs_of_text and text else part

    def _item_id(self, block: Block) -> str:
        kind = {"call": "fc", "reasoning": "rs", "content": "msg"}[block.kind]
        return f"{kind}_{self.id.removeprefix('resp_')}_{block.index}"

    def _change_events(self, change: BlockChange) -> list[bytes]:
        """Return the events that report one change of an output item."""
        verb, block, text = change
        at: dict[str, Any] = {"output_index": block.index, "item_id": self._item_id(block)}
        is_call = block.kind == "call"
        name = {
            "call": "response.function_call_arguments",
            "reasoning": "response.reasoning_text",
            "content": "response.output_text",
        }[block.kind]
        if not is_call:
            at["content_index"] = 0
        more: dict[str, Any] = {"logprobs": []} if block.kind == "content" else {}
        if verb == "grow":
            return [self._event(f"{name}.delta", **at, delta=text, **more)]
        item = self._item(block, "in_progress" if verb == "open" else "completed")
        if verb == "open":
            events = [self._event("response.output_item.added", output_index=block.index, item=item)]
            if not is_call:
                events.append(self._event("response.content_part.added", **at, part=self._part(block)))
            return events
        more |= {"name": block.first.name, "arguments": block.text} if is_call else {"text": block.text}
        events = [self._event(f"{name}.done", **at, **more)]
        if not is_call:
            events.append(self._event("response.content_part.done", **at, part=self._part(block)))
        return [*events, self._event("response.output_item.done", output_index=block.index, item=item)]

    def _event(self, kind: str, **data: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._sequence, **data}
        self._sequence += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(body))


REPEATED = ("instructions", "max_output_tokens", "temperature", "top_p", "reasoning", "user")
"""Fields of the request that its response repeats as they are."""


def _chat(given: dict[str, Any]) -> dict[str, Any]:
    """Translate a request of the Responses API to a chat. Raises ApiError if a chat cannot express the request."""
    for name, instead in REFUSED.items():
        if given.get(name):
            raise bad_request(f"{name} is not supported: {instead}", name)
    chat = copied_fields(given)
    chat["messages"] = _messages(given)
    chat["original"] = {
        name: given.get(name)
        for name in (*REPEATED, "parallel_tool_calls", "tool_choice", "tools", "text", "metadata")
    }
    chat["max_completion_tokens"] = given.get("max_output_tokens")
    include = given.get("include") or []
    if not isinstance(include, list):
        raise bad_request(f"include {str(include)[:64]!r} must be a list of texts", "include")
    if given.get("top_logprobs") is not None or LOGPROBS in include:
        chat |= {"logprobs": True, "top_logprobs": given.get("top_logprobs")}
    chat["tools"] = _tools(given.get("tools"))
    choice = given.get("tool_choice")
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    chat["tool_choice"] = choice
    reasoning, text = given.get("reasoning"), given.get("text")
    if isinstance(reasoning, dict) and reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    form = text.get("format") if isinstance(text, dict) else None
    if isinstance(form, dict):
        chat["response_format"] = {"type": form.get("type"), "json_schema": form}
    return chat


def _tools(given: Any) -> Any:
    """Return the tools of a Responses request in the format of chat completions."""
    if not isinstance(given, list):
        return given
    tools = []
    for place, tool in enumerate(given):
        kind = tool.get("type") if isinstance(tool, dict) else tool
        if kind != "function":
            raise bad_request(
                f"tools[{place}]: type {str(kind)[:64]!r} is not supported: send functions", "tools"
            )
        function = {name: value for name, value in tool.items() if name != "type"}
        if not function.get("strict"):
            function.pop("strict", None)
        tools.append({"type": "function", "function": function})
    return tools


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    """Return the content of a message as a text. If the content has images, audio or documents, return a list of
    parts in the format of chats."""
    if not isinstance(content, list) or not any(_kind(part) in PARTS for part in content):
        return text_of_parts(content, TEXT_PARTS, where, "input")
    return [
        PARTS[_kind(part)](part, where)
        if _kind(part) in PARTS
        else {"type": "text", "text": text_of_parts([part], TEXT_PARTS, where, "input")}
        for part in content
    ]


def _kind(part: Any) -> str:
    return str(part.get("type")) if isinstance(part, dict) else ""


def _image(part: dict[str, Any], where: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": part.get("image_url")}


def _audio(part: dict[str, Any], where: str) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": part.get("input_audio")}


def _document(part: dict[str, Any], where: str) -> dict[str, Any]:
    return {"type": "document", "text": text_of_parts([part], ("document",), where, "input")}


def _file(part: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a text file as a document. Raises ApiError for a file that is not a text in the request."""
    data = part.get("file_data")
    if isinstance(data, str) and (found := TEXT_FILE.match(data)) is not None:
        with suppress(ValueError):  # not base64, or not UTF-8
            return {"type": "document", "text": b64decode(data[found.end() :], validate=True).decode()}
    raise bad_request(
        f"{where}: an input_file must be a text in UTF-8: send file_data "
        '"data:text/plain;base64,DATA", or a part of type document with the text',
        "input",
    )


PARTS: dict[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
    "input_image": _image,
    "input_audio": _audio,
    "input_file": _file,
    "document": _document,
}
"""Content parts that are not plain text. The functions return them in the format of chats."""


def _messages(given: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages for the instructions and input items."""
    items = given.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list):
        raise bad_request("input must be a text or a list of items", "input")
    messages: list[dict[str, Any]] = []
    if given.get("instructions"):
        messages.append({"role": "system", "content": given["instructions"]})
    reasoning = ""
    for place, item in enumerate(items):
        where = f"input[{place}]"
        if not isinstance(item, dict):
            raise bad_request(f"{where} must be an object", "input")
        kind = item.get("type", "message")
        if kind == "message":
            role = item.get("role")
            content = _content(item.get("content"), where)
            message: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
            if role == "assistant" and reasoning:
                message["reasoning_content"], reasoning = reasoning, ""
            messages.append(message)
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            reasoning = text_of_parts(parts, TEXT_PARTS, where, "input")
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments", "")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            if reasoning:
                messages[-1]["reasoning_content"], reasoning = reasoning, ""
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = text_of_parts(item.get("output"), TEXT_PARTS, where, "input")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        else:
            raise bad_request(
                f"{where}: items of type {str(kind)[:64]!r} are not supported: send messages, function calls and their outputs",
                "input",
            )
    return messages
