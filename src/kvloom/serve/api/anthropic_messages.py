"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API, translated to a chat and back.

content blocks ──▶ messages of a chat ──▶ ChatEndpoint ──▶ pieces of the answer ──▶ content blocks, or events
cache_control  ──▶ breakpoints ──▶ token positions ──▶ pages up to there are retained for the ttl
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvloom.engine import SamplingParams
from kvloom.serve.api.answers import Block, BlockChange, Blocks, Piece
from kvloom.serve.errors import ApiError, bad_request
from kvloom.serve.worker import Delta

from .generation import ChatEndpoint
from .prompts import Prompt, PromptEncoder, PromptLimits, characters_for, chat_position, with_public_prefix
from .request_fields import ChatFields, CompletionFields, read_fields
from .responses import ChatResponse
from .server_context import ServerContext
from .translation import copied_fields, read_object, text_of_parts

__all__ = ["CountTokensEndpoint", "MessagesEndpoint"]

TTL_SECONDS = {"5m": 300.0, "1h": 3600.0}
MAX_BREAKPOINTS = 4
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Breakpoint(msgspec.Struct, frozen=True):
    """A position in a chat. Pages before the position are retained for `ttl` seconds. If `characters` is None, the
    position is the end of the first `messages` messages. Otherwise it is inside the last of these messages, after
    `characters` characters.
    """

    messages: int
    characters: int | None
    ttl: float


class MessagesFields(ChatFields, frozen=True, kw_only=True):
    """The fields of one request to `/v1/messages`: the fields of a chat, and the cache breakpoints of the request."""

    breakpoints: list[Breakpoint] = msgspec.field(default_factory=list)


class MessagesEndpoint(ChatEndpoint):
    @property
    def builder(self) -> type[ChatResponse]:
        return MessagesBuilder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except ApiError as error:
            await _error_response(error)(scope, receive, send)

    def read(self, body: bytes) -> ChatFields:
        given = read_object(body)
        if not isinstance(given.get("max_tokens"), int):
            raise bad_request("max_tokens is required: the most tokens of the answer", "max_tokens")
        return _fields(given)

    def longest_ttl(self, fields: CompletionFields | ChatFields) -> float | None:
        assert isinstance(fields, MessagesFields)
        every = [super().longest_ttl(fields), *(point.ttl for point in fields.breakpoints)]
        return max((ttl for ttl in every if ttl is not None), default=None)

    def prompts(
        self, fields: CompletionFields | ChatFields, prompts: PromptEncoder, limits: PromptLimits
    ) -> list[Prompt]:
        assert isinstance(fields, MessagesFields)
        prompt = with_public_prefix(fields, prompts.encode_chat(fields, limits), prompts, limits)
        if (
            prompt.has_media
        ):  # positions are known only after the engine process has expanded the placeholders
            return [prompt]
        retain = [
            (chat_position(fields, point.messages, prompt, prompts, limits, point.characters), point.ttl)
            for point in fields.breakpoints
        ]
        return [replace(prompt, retain=tuple((stop, ttl) for stop, ttl in retain if stop))]

    def response_options(self, fields: ChatFields, params: SamplingParams) -> dict[str, Any]:
        return {}


class CountTokensEndpoint:
    """Returns the number of prompt tokens of a request. An ASGI application."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._count(Request(scope, receive))
        except ApiError as error:
            response = _error_response(error)
        await response(scope, receive, send)

    async def _count(self, request: Request) -> Response:
        context = self._context
        account = context.authenticate(request) or ""
        context.require_accepting()
        with context.bodies.hold(account) as held:
            body = await context.read_body(request, held)
            fields = await context.parse(lambda: _fields(read_object(body)), account, len(body))
            facts, prompts = context.served(fields.model).require_ready()
            most = characters_for(facts.max_tokens)
            limits = PromptLimits(most, facts.vocab_size, characters=most)
            prompt = await prompts.run(lambda: prompts.encode_chat(fields, limits), account, len(body))
        return Response(
            msgspec.json.encode({"input_tokens": len(prompt.tokens)}), media_type="application/json"
        )


class MessagesBuilder(ChatResponse):
    """Builds one message: blocks of thinking, text and tool use."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.id = self.id.replace(f"{self.prefix}-", "msg_")
        self._blocks = Blocks()
        self._parser = self._new_parser()
        self._has_begun = False
        self._last: Delta | None = None

    def whole(self, deltas: list[Delta]) -> bytes:
        for delta in deltas:
            self._changes(delta)
        content = [_whole_block(block) for block in self._blocks.blocks]
        return msgspec.json.encode(
            {**self._message(content), **self._stop(), "usage": self._usage(self.usage.completion)}
        )

    def event(self, delta: Delta) -> bytes:
        changes = self._changes(delta)
        events = []
        if not self._has_begun:
            self._has_begun = True
            begun = {**self._message([]), "stop_reason": None, "stop_sequence": None, "usage": self._usage(0)}
            events.append(_event("message_start", message=begun))
        events += [_change_event(change) for change in changes]
        return b"".join(events)

    def last_event(self) -> bytes:
        usage = self._usage(self.usage.completion)
        return _event("message_delta", delta=self._stop(), usage=usage) + _event("message_stop")

    def error_event(self, error: ApiError) -> bytes:
        return b"event: error\ndata: %s\n\n" % _error_body(error)

    def _changes(self, delta: Delta) -> list[BlockChange]:
        """Return the changes of blocks that a delta (new tokens of the answer) causes."""
        self._count(delta)
        self._last = delta
        ended = delta.finish_reason is not None
        pieces = [Piece("content", delta.text)] if delta.text else []
        if self._parser is not None:
            pieces = self._parser.feed(delta.text, ended)
        changes = self._blocks.add(pieces)
        return [*changes, *self._blocks.close()] if ended else changes

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "type": "message", "role": "assistant", "model": self._head["model"]}
        return {**head, "content": content}

    def _stop(self) -> dict[str, Any]:
        last = self._last
        if last is None or last.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self._parser is not None and self._parser.has_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(last.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self, output: int) -> dict[str, Any]:
        """Return the token counts of a message in Anthropic's format.

        Prompt tokens are divided into three counts: tokens read from the cache, other tokens before the last
        breakpoint ("creation"), and other tokens after it. If K and V of tokens were copied from documents, the
        result also contains the number of these tokens, and the field `approximate`: true.
        """
        read = sum(self.usage.cached.values())
        last = max((stop for stop, _ in self._prompts[0].retain), default=0)
        created, reused = max(0, last - read), sum(self.usage.reused.values())
        return {
            "input_tokens": self.usage.prompt - read - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": read,
            "output_tokens": output,
            **({"reused_input_tokens": reused} if reused else {}),
            **self.usage.approximate(),
        }


def _whole_block(block: Block) -> dict[str, Any]:
    if block.kind == "content":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    try:
        read = msgspec.json.decode(block.text or "{}")
    except (msgspec.DecodeError, RecursionError):
        read = None
    given = (
        read if isinstance(read, dict) else {"arguments": block.text}
    )  # the model wrote arguments that are not an object
    return {"type": "tool_use", "id": block.first.id, "name": block.first.name, "input": given}


def _change_event(change: BlockChange) -> bytes:
    verb, block, text = change
    if verb == "close":
        return _event("content_block_stop", index=block.index)
    if verb == "open":
        begun: dict[str, Any] = {"type": "text", "text": ""}
        if block.kind == "reasoning":
            begun = {"type": "thinking", "thinking": "", "signature": ""}
        elif block.kind == "call":
            begun = {"type": "tool_use", "id": block.first.id, "name": block.first.name, "input": {}}
        return _event("content_block_start", index=block.index, content_block=begun)
    kind, name = {
        "content": ("text_delta", "text"),
        "reasoning": ("thinking_delta", "thinking"),
        "call": ("input_json_delta", "partial_json"),
    }[block.kind]
    return _event("content_block_delta", index=block.index, delta={"type": kind, name: text})


def _event(kind: str, **data: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **data}))


def _error_body(error: ApiError) -> bytes:
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": error.message}})


def _error_response(error: ApiError) -> Response:
    headers = {name.decode(): value.decode() for name, value in error.headers}
    return Response(_error_body(error), error.status, headers)


def _fields(given: dict[str, Any]) -> MessagesFields:
    """Translate a request of the Messages API to the fields of a chat. Raises ApiError if a chat cannot express the
    request.
    """
    chat = copied_fields(given)
    reader = _Reader()
    reader.read(given)
    chat["messages"], chat["breakpoints"] = reader.messages, msgspec.to_builtins(reader.breakpoints)
    chat["max_tokens"], chat["stop"] = given.get("max_tokens"), given.get("stop_sequences")
    chat["tools"] = _tools(given.get("tools"))
    last = reader.messages[-1] if reader.messages else {}
    if last.get("role") == "assistant" and last.get("content") and not last.get("tool_calls"):
        chat["continue_final_message"] = True
    choice = given.get("tool_choice")
    if isinstance(choice, dict):
        kind = choice.get("type")
        named = {"type": "function", "function": {"name": choice.get("name")}}
        chat["tool_choice"] = named if kind == "tool" else CHOICES.get(str(kind), kind)
        if choice.get("disable_parallel_tool_use"):
            chat["parallel_tool_calls"] = False
    thinking, output = given.get("thinking"), given.get("output_config")
    if isinstance(thinking, dict):
        variables = given.get("chat_template_kwargs") or {}
        if not isinstance(variables, dict):
            raise bad_request("chat_template_kwargs must be an object", "chat_template_kwargs")
        chat["chat_template_kwargs"] = {"enable_thinking": thinking.get("type") != "disabled", **variables}
    if isinstance(output, dict):
        chat["reasoning_effort"] = output.get("effort")
        if isinstance(form := output.get("format"), dict):
            chat["response_format"] = {"type": form.get("type"), "json_schema": form}
    return read_fields(msgspec.json.encode(chat), MessagesFields)


def _tools(given: Any) -> Any:
    """Return Anthropic's tools in the format of OpenAI's chat completions."""
    if not isinstance(given, list):
        return given
    tools = []
    for place, tool in enumerate(given):
        if not isinstance(tool, dict) or tool.get("type", "custom") != "custom":
            raise bad_request(f"tools[{place}]: only tools with an input_schema are supported", "tools")
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        if "description" in tool:
            function["description"] = tool["description"]
        if tool.get("strict"):
            function["strict"] = tool["strict"]
        tools.append({"type": "function", "function": function})
    return tools


class _Reader:
    """Translates system text, messages and tools to a chat, and collects the cache breakpoints."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.breakpoints: list[Breakpoint] = []

    def read(self, given: dict[str, Any]) -> None:
        tools = given.get("tools") or []
        if not isinstance(tools, list):
            raise bad_request("tools must be a list", "tools")
        for place, tool in enumerate(tools):
            self._mark(tool, f"tools[{place}]")
        if system := given.get("system"):
            self.messages.append({"role": "system", "content": ""})
            self._texts(system, "system", "system")
        messages = given.get("messages")
        if not isinstance(messages, list):
            raise bad_request("messages must be a list", "messages")
        for place, message in enumerate(messages):
            self._message(message, f"messages[{place}]")
        self._mark(given, "cache_control")
        seconds = 0.0
        for place in range(
            len(self.breakpoints) - 1, -1, -1
        ):  # a prefix is retained at least as long as the tokens after it
            point = self.breakpoints[place]
            seconds = max(seconds, point.ttl)
            self.breakpoints[place] = msgspec.structs.replace(point, ttl=seconds)

    def _message(self, message: Any, where: str) -> None:
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant"):
            raise bad_request(f"{where}: role must be user or assistant", "messages")
        content = message.get("content")
        if isinstance(content, str):
            self.messages.append({"role": role, "content": content})
            return
        if not isinstance(content, list):
            raise bad_request(f"{where}: content must be a text or a list of blocks", "messages")
        if role == "assistant" or not content:
            self.messages.append({"role": role, "content": ""})
        for place, block in enumerate(content):
            at = f"{where}.content[{place}]"
            kind = block.get("type") if isinstance(block, dict) else None
            if kind == "text":
                if (
                    self.messages[-1:] == []
                    or self.messages[-1]["role"] != role
                    or (role == "user" and not place)
                ):
                    self.messages.append({"role": role, "content": ""})
                self._texts([block], at, "messages")
            elif kind == "document" and role == "user":
                if not place or not self.messages or self.messages[-1]["role"] != role:
                    self.messages.append({"role": role, "content": ""})
                self._document(block, at)
            elif kind == "image" and role == "user":
                if not place or not self.messages or self.messages[-1]["role"] != role:
                    self.messages.append({"role": role, "content": ""})
                self._parts().append({"type": "image_url", "image_url": {"url": _image_url(block, at)}})
                self._mark(block, at)
            elif kind == "tool_result" and role == "user":
                result = text_of_parts(block.get("content") or "", ("text",), at, "messages")
                self.messages.append(
                    {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": result}
                )
                self._mark(block, at)
            elif kind == "tool_use" and role == "assistant":
                function = {"name": block.get("name"), "arguments": block.get("input") or {}}
                call = {"id": block.get("id"), "type": "function", "function": function}
                self.messages[-1].setdefault("tool_calls", []).append(call)
                self._mark(block, at)
            elif kind == "thinking" and role == "assistant":
                self.messages[-1]["reasoning_content"] = block.get("thinking")
            elif kind == "redacted_thinking" and role == "assistant":
                continue
            else:
                raise bad_request(
                    f"{at}: blocks of type {str(kind)[:64]!r} of role {role} are not supported: send text",
                    "messages",
                )

    def _texts(self, content: Any, where: str, param: str) -> None:
        """Append a text or blocks of text to the last message."""
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        text_of_parts(content, ("text",), where, param)  # raises for other parts
        for block in content:
            if isinstance(self.messages[-1]["content"], list):
                self._parts().append({"type": "text", "text": block["text"]})
            else:
                self.messages[-1]["content"] += block["text"]
            self._mark(block, where, self._characters())

    def _document(self, block: dict[str, Any], where: str) -> None:
        """Append a document to the last message, on lines of its own. Its title and context precede it."""
        text, before = _document_text(block, where), self._text()
        head = "" if not before or before.endswith("\n") else "\n"
        for name in ("title", "context"):
            if value := block.get(name):
                head += f"{value}\n"
        parts = self._parts()
        if head:
            parts.append({"type": "text", "text": head})
        parts += [{"type": "document", "text": text}, {"type": "text", "text": "\n"}]
        self._mark(block, where, self._characters())

    def _text(self) -> str:
        """Return the text of the last message so far."""
        content = self.messages[-1]["content"]
        return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)

    def _characters(self) -> int | None:
        """Return the number of characters of the last message so far, or None if it contains images."""
        content = self.messages[-1]["content"]
        has_images = isinstance(content, list) and any(part["type"] == "image_url" for part in content)
        return None if has_images else len(self._text())

    def _parts(self) -> list[dict[str, Any]]:
        """Return the content of the last message as a list of parts, to which images and documents can be added. If the content is a
        text, the text becomes the first part of a new list."""
        content = self.messages[-1]["content"]
        if isinstance(content, str):
            content = [{"type": "text", "text": content}] if content else []
            self.messages[-1]["content"] = content
        parts: list[dict[str, Any]] = content
        return parts

    def _mark(self, block: Any, where: str, characters: int | None = None) -> None:
        """If the content block `block` has the field `cache_control`, add a breakpoint after the block. `characters` is
        the position of its end in the text of the last message, or None for the end of this message. Raises ApiError
        for an invalid `cache_control`, or for too many breakpoints.
        """
        control = block.get("cache_control") if isinstance(block, dict) else None
        if control is None:
            return
        ttl = control.get("ttl") or "5m" if isinstance(control, dict) else None
        if (
            not isinstance(control, dict)
            or control.get("type") != "ephemeral"
            or not isinstance(ttl, str)
            or ttl not in TTL_SECONDS
        ):
            raise bad_request(
                f'{where}: cache_control must be {{"type": "ephemeral"}}, with a ttl of 5m or 1h',
                "cache_control",
            )
        if len(self.breakpoints) >= MAX_BREAKPOINTS:
            raise bad_request(
                f"more than {MAX_BREAKPOINTS} blocks have cache_control: keep the last ones", "cache_control"
            )
        self.breakpoints.append(Breakpoint(len(self.messages), characters, TTL_SECONDS[ttl]))


def _document_text(block: dict[str, Any], where: str) -> str:
    """Return the text of a document block. Raises ApiError for a document without text, and for citations."""
    source, citations = block.get("source"), block.get("citations")
    if isinstance(citations, dict) and citations.get("enabled"):
        raise bad_request(f"{where}: answers have no citations: omit citations", "messages")
    for name in ("title", "context"):
        if not isinstance(block.get(name) or "", str):
            raise bad_request(f"{where}: {name} must be a text", "messages")
    kind = source.get("type") if isinstance(source, dict) else None
    if isinstance(source, dict) and kind == "text" and isinstance(source.get("data"), str):
        return str(source["data"])
    if isinstance(source, dict) and kind == "content":
        return text_of_parts(source.get("content"), ("text",), where, "messages")
    raise bad_request(
        f"{where}: documents of source {str(kind)[:64]!r} are not supported: send the source "
        '{"type": "text", "media_type": "text/plain", "data": TEXT}',
        "messages",
    )


def _image_url(block: dict[str, Any], where: str) -> str:
    """Return the source of an image block as a URL. Raises ApiError for another source."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if isinstance(source, dict) and kind == "base64" and isinstance(source.get("data"), str):
        return f"data:{source.get('media_type')};base64,{source['data']}"
    if isinstance(source, dict) and kind == "url" and isinstance(source.get("url"), str):
        return str(source["url"])
    raise bad_request(
        f"{where}: source must have the type base64 and data, or the type url and url", "messages"
    )
