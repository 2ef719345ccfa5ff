"""Text to token ids and back, without generating: /tokenize and /detokenize, as other servers of the field have them."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .errors import bad_request
from .fields import ChatFields, CompletionFields, check_tokens, read_fields
from .prompts import Room, fitting_characters
from .service import Service

__all__ = ["Detokenize", "Tokenize"]


class TextFields(CompletionFields, frozen=True, kw_only=True):
    return_token_strs: bool | None = None


class MessagesFields(ChatFields, frozen=True, kw_only=True):
    return_token_strs: bool | None = None


class IdsFields(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int]
    model: str | None = None


class Tokenize:
    """A prompt or a chat as the ids that the model would get. An ASGI application."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, request = self._service, Request(scope, receive)
        service.tenant_of(request)
        facts, prompts = service.ready()
        body = await service.body(request)
        fields: TextFields | MessagesFields
        most = fitting_characters(facts.longest)
        room = Room(most, facts.vocabulary, characters=most)
        if _has_messages(body):
            fields = read_fields(body, MessagesFields)
            service.check_model(fields.model)
            found = [await prompts.of_chat(fields, room)]
        else:
            fields = read_fields(body, TextFields)
            service.check_model(fields.model)
            given = fields.prompt
            if isinstance(given, list) and len(given) > 1 and not isinstance(given[0], int):
                raise bad_request(f"prompt has {len(given)} texts; /tokenize takes one", "prompt")
            found = await prompts.of_completion(fields, room)
        tokens = found[0].tokens
        told: dict[str, Any] = {"count": len(tokens), "max_model_len": facts.longest, "tokens": tokens}
        told["token_strs"] = await prompts.spelled(tokens) if fields.return_token_strs else None
        await _answer(told, scope, receive, send)


class Detokenize:
    """The text of token ids. An ASGI application."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, request = self._service, Request(scope, receive)
        service.tenant_of(request)
        facts, prompts = service.ready()
        fields = read_fields(await service.body(request), IdsFields)
        service.check_model(fields.model)
        if prompts.tokenizer is None:
            raise bad_request("this model has no tokenizer: its tokens have no text", "tokens")
        check_tokens(fields.tokens, facts.vocabulary, "tokens")
        most = fitting_characters(facts.longest)
        if len(fields.tokens) > most:
            raise bad_request(
                f"tokens: {len(fields.tokens):,} were given, and /detokenize takes {most:,}: send them in parts",
                "tokens",
            )
        await _answer({"prompt": await prompts.text(fields.tokens)}, scope, receive, send)


def _has_messages(body: bytes) -> bool:
    """Whether a body is a chat; what is no JSON at all is told by whoever reads it next."""
    try:
        return "messages" in msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


async def _answer(told: dict[str, Any], scope: Scope, receive: Receive, send: Send) -> None:
    await Response(msgspec.json.encode(told), media_type="application/json")(scope, receive, send)
