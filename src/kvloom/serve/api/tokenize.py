"""Text to token ids and back, without generating: /tokenize and /detokenize, compatible with vLLM."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvloom.serve.errors import bad_request

from .prompts import PromptLimits, characters_for
from .request_fields import ChatFields, CompletionFields, check_tokens, read_fields
from .server_context import ServerContext

__all__ = ["DetokenizeEndpoint", "TokenizeEndpoint"]


class TextFields(CompletionFields, frozen=True, kw_only=True):
    return_token_strs: bool | None = None


class MessagesFields(ChatFields, frozen=True, kw_only=True):
    return_token_strs: bool | None = None


class IdsFields(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int]
    model: str | None = None


class TokenizeEndpoint:
    """Returns the token ids of a prompt or a chat. An ASGI application."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, request = self._context, Request(scope, receive)
        context.authenticate(request)
        facts, prompts = context.require_ready()
        body = await context.read_body(request)
        fields: TextFields | MessagesFields
        most = characters_for(facts.max_tokens)
        limits = PromptLimits(most, facts.vocab_size, characters=most)
        if _has_messages(body):
            fields = read_fields(body, MessagesFields)
            context.check_model(fields.model)
            found = [await prompts.encode_chat(fields, limits)]
        else:
            fields = read_fields(body, TextFields)
            context.check_model(fields.model)
            given = fields.prompt
            if isinstance(given, list) and len(given) > 1 and not isinstance(given[0], int):
                raise bad_request(
                    f"prompt has {len(given)} texts; /tokenize takes one: send them one by one", "prompt"
                )
            found = await prompts.encode_completion(fields, limits)
        tokens = found[0].tokens
        response: dict[str, Any] = {"count": len(tokens), "max_model_len": facts.max_tokens, "tokens": tokens}
        response["token_strs"] = await prompts.token_strings(tokens) if fields.return_token_strs else None
        await _send_json(response, scope, receive, send)


class DetokenizeEndpoint:
    """Returns the text of token ids. An ASGI application."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, request = self._context, Request(scope, receive)
        context.authenticate(request)
        facts, prompts = context.require_ready()
        fields = read_fields(await context.read_body(request), IdsFields)
        context.check_model(fields.model)
        if prompts.tokenizer is None:
            raise bad_request("this model has no tokenizer, so token ids have no text", "tokens")
        check_tokens(fields.tokens, facts.vocab_size, "tokens")
        most = characters_for(facts.max_tokens)
        if len(fields.tokens) > most:
            raise bad_request(
                f"tokens: {len(fields.tokens):,} exceed the limit of {most:,}: send them in parts",
                "tokens",
            )
        await _send_json({"prompt": await prompts.text(fields.tokens)}, scope, receive, send)


def _has_messages(body: bytes) -> bool:
    """Whether a body is a chat. Invalid JSON is reported by the next reader."""
    try:
        return "messages" in msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


async def _send_json(body: dict[str, Any], scope: Scope, receive: Receive, send: Send) -> None:
    await Response(msgspec.json.encode(body), media_type="application/json")(scope, receive, send)
