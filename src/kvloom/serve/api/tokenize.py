"""/tokenize and /detokenize: convert text to token ids and back without generating, compatible with vLLM."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvloom.serve.errors import bad_request
from kvloom.serve.worker import Ready

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


F = TypeVar("F", bound=CompletionFields | ChatFields | IdsFields)


class _TokenizerEndpoint(ABC, Generic[F]):
    """Reads the fields of a request, and answers with the tokenizer of its model. An ASGI application."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context, request = self._context, Request(scope, receive)
        account = context.authenticate(request) or ""
        context.require_accepting()
        with context.bodies.hold(account) as held:
            body = await context.read_body(request, held)
            fields = await context.parse(lambda: self._read(body), account, len(body))
            facts, prompts = context.served(fields.model).require_ready()
            found = await prompts.run(self._answer(fields, facts, prompts), account, len(body))
        response = Response(msgspec.json.encode(found), media_type="application/json")
        await response(scope, receive, send)

    @staticmethod
    @abstractmethod
    def _read(body: bytes) -> F:
        """Return the fields of a request body. Raises an error for invalid fields."""

    @staticmethod
    @abstractmethod
    def _answer(fields: F, facts: Ready, prompts: PromptEncoder) -> Callable[[], dict[str, Any]]:
        """Check the fields against the model. Return a function that computes the response, which may take seconds."""


class TokenizeEndpoint(_TokenizerEndpoint[TextFields | MessagesFields]):
    """Returns the token ids of a prompt or a chat."""

    @staticmethod
    def _read(body: bytes) -> TextFields | MessagesFields:
        return read_fields(body, MessagesFields) if _has_messages(body) else read_fields(body, TextFields)

    @staticmethod
    def _answer(
        fields: TextFields | MessagesFields, facts: Ready, prompts: PromptEncoder
    ) -> Callable[[], dict[str, Any]]:
        most = characters_for(facts.max_tokens)
        limits = PromptLimits(most, facts.vocab_size, characters=most)
        return lambda: _tokenized(fields, prompts, limits, facts.max_tokens)


class DetokenizeEndpoint(_TokenizerEndpoint[IdsFields]):
    """Returns the text of token ids."""

    @staticmethod
    def _read(body: bytes) -> IdsFields:
        return read_fields(body, IdsFields)

    @staticmethod
    def _answer(fields: IdsFields, facts: Ready, prompts: PromptEncoder) -> Callable[[], dict[str, Any]]:
        tokens, most = fields.tokens, characters_for(facts.max_tokens)
        if prompts.tokenizer is None:
            raise bad_request("this model has no tokenizer, so token ids have no text", "tokens")
        if len(tokens) > most:
            raise bad_request(
                f"tokens: {len(tokens):,} exceed the limit of {most:,}: send them in parts", "tokens"
            )
        check_tokens(tokens, facts.vocab_size, "tokens")
        return lambda: {"prompt": prompts.text(tokens)}


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
