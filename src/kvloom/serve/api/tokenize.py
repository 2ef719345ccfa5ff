"""/tokenize and /detokenize: convert text to token ids and back without generating, compatible with vLLM."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvloom.serve.errors import bad_request

from .prompts import PromptEncoder, PromptLimits, characters_for, with_public_prefix
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
        account = context.authenticate(request) or ""
        context.require_accepting()
        with context.bodies.hold(account) as held:
            body = await context.read_body(request, held)
            fields = await context.parse(lambda: _read(body), account, len(body))
            facts, prompts = context.served(fields.model).require_ready()
            most = characters_for(facts.max_tokens)
            limits = PromptLimits(most, facts.vocab_size, characters=most)
            response = await prompts.run(
                lambda: _tokenized(fields, prompts, limits, facts.max_tokens), account, len(body)
            )
        await _send_json(response, scope, receive, send)


class DetokenizeEndpoint:
    """Returns the text of token ids. An ASGI application."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, request = self._context, Request(scope, receive)
        account = context.authenticate(request) or ""
        context.require_accepting()
        with context.bodies.hold(account) as held:
            body = await context.read_body(request, held)
            fields = await context.parse(lambda: read_fields(body, IdsFields), account, len(body))
            facts, prompts = context.served(fields.model).require_ready()
            most = characters_for(facts.max_tokens)
            tokens = fields.tokens
            if prompts.tokenizer is None:
                raise bad_request("this model has no tokenizer, so token ids have no text", "tokens")
            if len(tokens) > most:
                raise bad_request(
                    f"tokens: {len(tokens):,} exceed the limit of {most:,}: send them in parts", "tokens"
                )
            check_tokens(tokens, facts.vocab_size, "tokens")
            text = await prompts.run(lambda: prompts.text(tokens), account, len(body))
        await _send_json({"prompt": text}, scope, receive, send)


def _read(body: bytes) -> TextFields | MessagesFields:
    return read_fields(body, MessagesFields) if _has_messages(body) else read_fields(body, TextFields)


def _tokenized(
    fields: TextFields | MessagesFields, prompts: PromptEncoder, limits: PromptLimits, longest: int
) -> dict[str, Any]:
    """Return the response of /tokenize. May take seconds for a long text."""
    public = 0 if fields.cache is None else fields.cache.public_tokens or 0
    if isinstance(fields, MessagesFields):
        prompt = with_public_prefix(fields, prompts.encode_chat(fields, limits), prompts, limits)
        tokens, public = prompt.tokens, prompt.public or public
    else:
        given = fields.prompt
        if isinstance(given, list) and len(given) > 1 and not isinstance(given[0], int):
            raise bad_request(
                f"prompt has {len(given)} texts; /tokenize takes one: send them one by one", "prompt"
            )
        tokens = prompts.encode_completion(fields, limits)[0].tokens
    strings = prompts.token_strings(tokens) if fields.return_token_strs else None
    found = {"count": len(tokens), "max_model_len": longest, "tokens": tokens, "token_strs": strings}
    return found | ({"public_tokens": public} if public else {})


def _has_messages(body: bytes) -> bool:
    """Return whether a body is a chat: a JSON object with messages. Invalid JSON causes no error here, because it is
    refused later."""
    try:
        return "messages" in msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


async def _send_json(body: dict[str, Any], scope: Scope, receive: Receive, send: Send) -> None:
    await Response(msgspec.json.encode(body), media_type="application/json")(scope, receive, send)
