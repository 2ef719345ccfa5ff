"""The endpoints that generate. They parse a request, send its prompts to the engine, and return the answers, whole
or as a stream of events.

    check, encode ──▶ Add to the engine ──▶ ResponseStream ──▶ events, at the client's speed
                             ▲── cancelled if the client disconnects or reads too slowly, or on an error
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from kvloom.combinations import refused
from kvloom.engine import SamplingParams
from kvloom.serve.access_log import RequestLog, request_log
from kvloom.serve.api.answers import ANSWER, AnswerParser, forced_functions, forced_grammar, last_marker
from kvloom.serve.errors import ApiError, bad_request, context_too_long, slow_reader
from kvloom.serve.metrics import RequestRecord
from kvloom.serve.worker import Add, Delta, ImagePrompt, Ready, ResponseStream, TokenRange

from .audio import RequestAudio
from .images import RequestImages
from .prompts import Prompt, PromptEncoder, PromptLimits, with_public_prefix
from .request_fields import (
    MAX_GRAMMAR_CHARACTERS,
    ChatFields,
    CompletionFields,
    TransferFields,
    beam_width,
    check_tokens,
    read_fields,
    sampling_params,
)
from .responses import ChatResponse, CompletionResponse, ResponseBuilder
from .served_model import ServedModel
from .server_context import ServerContext

__all__ = ["ChatEndpoint", "CheckedRequest", "CompletionEndpoint", "GenerationEndpoint"]

DEFAULT_TOKENS = 16
STRUCTURES = ("response_format", "structured_outputs", "regex", "grammar")
"""Request fields that require a structure of the whole answer."""
SMALL_LOGPROBS = 64
"""A response with log-probabilities of at most this many tokens is built in the event loop. A response with more tokens
is built in a thread.
"""
LOGPROBS_BYTES = 1 << 10
"""Approximate number of bytes that the log-probabilities of one token add to a response."""
EMBEDDING_BYTES = 1 << 8
"""Bytes of an embedding that take about as long to format as the log-probabilities of one token."""
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request whose fields are valid, with its prompts and its model. `ids` are the ids of the prompts in the engine.
    `adapter` is the name of its LoRA adapter, or None.
    """

    fields: CompletionFields | ChatFields
    prompts: list[Prompt]
    ids: list[int]
    params: SamplingParams
    served: ServedModel
    adapter: str | None = None

    @property
    def builder_arguments(self) -> tuple[str, list[Prompt], list[int], int, PromptEncoder]:
        """The arguments that all response builders share."""
        served = self.served
        name = self.adapter or served.name
        return name, self.prompts, self.ids, self.params.n, served.require_encoder()


class GenerationEndpoint(ABC):
    """An ASGI application for one endpoint. `content_type` is that of request bodies."""

    content_type = "application/json"

    def __init__(self, context: ServerContext) -> None:
        self.context = context

    @abstractmethod
    def read(self, body: bytes) -> CompletionFields | ChatFields: ...

    def adapt(
        self, fields: CompletionFields | ChatFields, served: ServedModel
    ) -> CompletionFields | ChatFields:
        """Hook for endpoints that adapt the fields of a request to the model, for example by a grammar for tool calls.
        By default, returns `fields` unchanged. The chat endpoint overrides this method.
        """
        return fields

    @abstractmethod
    def prompts(
        self, fields: CompletionFields | ChatFields, prompts: PromptEncoder, limits: PromptLimits
    ) -> list[Prompt]: ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()
        context, request = self.context, Request(scope, receive)
        with ExitStack() as admitted:
            served, messages, response, is_stream, forced = await self._prepare(request, admitted, started)
            ids, n = [message.id for message in messages], messages[0].params.n
            stream = ResponseStream(ids, n, context.limits.unread_characters if is_stream else None)
            served.require_ready()
            record = served.observer.start(response.id, scope["path"], messages, started, request.headers)
            log = request_log(scope)
            log.record, record.request_id = record, log.id
            served.engine.submit(messages, stream)
            watcher = asyncio.create_task(_watch_disconnect(receive, stream))
            try:
                if is_stream:
                    events = _EventStream(
                        served, context.limits.read_seconds, stream, response, send, record, log,
                        scope.get("kvloom.must_wait", lambda: True),
                    )  # fmt: skip
                    if not await events.run() and "kvloom.abort" in scope:
                        scope["kvloom.abort"]()
                        await watcher
                else:
                    await self._send_whole(served, stream, response, messages[0].tenant, send)
            except ApiError as error:
                record.error_code, record.refused_slo = error.code or str(error.status), error.slo
                if error.param == "grammar" and forced:
                    error.param = "tools"  # the grammar is built from the schemas of the tools
                raise
            finally:
                watcher.cancel()
                served.engine.cancel(stream)
                record.output_tokens, record.finish_reasons = (
                    response.usage.completion,
                    response.finish_reasons,
                )
                record.is_disconnected = stream.is_disconnected
                served.observer.finish(record)

    async def _send_whole(
        self,
        served: ServedModel,
        stream: ResponseStream,
        response: ResponseBuilder,
        tenant: str,
        send: Send,
    ) -> None:
        found: list[Delta] = []
        while pieces := await stream.take():
            found += pieces
        if stream.is_disconnected:
            return
        tokens = sum(len(piece.logprobs or ()) + len(piece.prompt_logprobs or ()) for piece in found)
        tokens += sum(len(piece.embedding or b"") for piece in found) // EMBEDDING_BYTES
        if tokens > SMALL_LOGPROBS:
            prompts = served.require_encoder()
            body = await prompts.run(lambda: response.whole(found), tenant, tokens * LOGPROBS_BYTES)
        else:
            body = response.whole(found)
        headers = [(b"content-type", response.content_type), (b"content-length", b"%d" % len(body))]
        headers += _warning(response)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _prepare(
        self, request: Request, admitted: ExitStack, started: float
    ) -> tuple[ServedModel, list[Add], ResponseBuilder, bool, bool]:
        """Read and check a request. Raises ApiError for a refused request.

        Return the model, the messages to its engine, the response builder, whether to stream, and whether a tool call
        is forced. The request counts as admitted until the caller closes `admitted`. Body and fields may be large. This
        method keeps no reference to them, so they are freed when it returns.
        """
        context = self.context
        account = context.authenticate(request) or ""  # before reading the body
        context.require_accepting()
        with context.bodies.hold(account) as held:
            body = await context.read_body(request, held, self.content_type)
            read = await context.parse(lambda: self.read(body), account, len(body))
            served, adapter = context.served(read.model), context.adapter(read.model)
            facts, prompts = served.require_ready()
            fields = await context.parse(lambda: self.adapt(read, served), account, len(body))
            tenant = context.request_tenant(request, fields)
            answers, caps = _answer_count(fields), context.keys.caps(tenant)
            public = fields.cache is not None and fields.cache.is_public
            caps.check(answers, self.longest_ttl(fields), fields.priority, public)
            admitted.enter_context(context.limiter.admit(answers, tenant, caps.open))
            most = self._max_prompt_tokens(tenant, facts)
            images = RequestImages(context.limits, served.name, facts.image_refusal)
            audio = RequestAudio(context.limits, served.name, facts.audio_refusal)
            keep = _tokens_to_keep(fields, most)
            limits = PromptLimits(most, facts.vocab_size, keep, images=images, audio=audio)
            has_template = isinstance(fields, ChatFields) and bool(fields.chat_template)
            given = await prompts.run(
                lambda: self.prompts(fields, prompts, limits), account, len(body), has_template
            )
        messages = self._messages(fields, given, tenant, served, facts, started, adapter)
        ids = [message.id for message in messages]
        response = self.response(CheckedRequest(fields, given, ids, messages[0].params, served, adapter))
        response.kv_transfer_params = _offered_pages(
            fields, facts, served.name, response, len(given[0].tokens)
        )
        forced = isinstance(fields, ChatFields) and _forces_call(fields)
        return served, messages, response, bool(fields.stream), forced

    @abstractmethod
    def response(self, request: CheckedRequest) -> ResponseBuilder:
        """Return the object that builds the response to a request."""

    def longest_ttl(self, fields: CompletionFields | ChatFields) -> float | None:
        """Return the longest time, in seconds, for which a request asks to retain or pin pages. The result is infinity
        if a token range has a positive priority and no ttl, and None if the request sets no such time.
        """
        ranges = () if fields.cache is None else fields.cache.retain or ()
        every = [
            fields.ttl,
            None if fields.cache is None else fields.cache.pin,
            *(math.inf if one.ttl is None else one.ttl for one in ranges if one.priority > 0),
        ]
        return max((ttl for ttl in every if ttl is not None), default=None)

    def _messages(
        self,
        fields: CompletionFields | ChatFields,
        prompts: list[Prompt],
        tenant: str,
        served: ServedModel,
        facts: Ready,
        started: float,
        adapter: str | None,
    ) -> list[Add]:
        """Return the messages to the engine: one `Add` message per prompt. Raises ApiError for the first invalid
        prompt."""
        transfer = fields.kv_transfer_params or TransferFields()
        made: dict[int, SamplingParams] = {}  # by max_tokens; a schema is encoded once
        return [
            Add(
                id_,
                prompt.tokens,
                self._params(fields, prompt, tenant, served, facts, made),
                bool(fields.stream),
                tenant,
                fields.session_id,
                fields.priority or 0,
                fields.ttl,
                fields.cache is None or fields.cache.store is not False,
                fields.read is not False and (fields.cache is None or fields.cache.read is not False),
                fields.cache_salt or "",
                bool(fields.end_session),
                bool(fields.lossy),
                _token_ranges(fields, prompt),
                self._image_prompt(fields, prompt, tenant, facts),
                fields.resume_token_ids or [],
                None if fields.cache is None else fields.cache.pin,
                transfer.do_remote_decode,
                transfer.awaited_peer,
                None if fields.slo is None else fields.slo.objective(),
                started,
                transfer.encoder,
                adapter,
                prompt.public or (0 if fields.cache is None else fields.cache.public_tokens or 0),
                list(prompt.documents) or ([] if fields.cache is None else fields.cache.documents or []),
            )
            for id_, prompt in zip(served.engine.new_ids(len(prompts)), prompts, strict=True)
        ]

    def _image_prompt(
        self, fields: CompletionFields | ChatFields, prompt: Prompt, tenant: str, facts: Ready
    ) -> ImagePrompt | None:
        """Return the text, images and audio clips of a prompt, which the engine process encodes. Return None if the
        prompt has neither images nor clips."""
        if not prompt.has_media:
            return None
        longest = facts.tenant_max_tokens.get(tenant, facts.max_tokens)
        is_open = fields.max_tokens is None
        if isinstance(fields, ChatFields):
            is_open = is_open and fields.max_completion_tokens is None
        return ImagePrompt(
            prompt.text or "",
            list(prompt.images),
            bool(fields.add_special_tokens),
            self._max_prompt_tokens(tenant, facts),
            longest if is_open else None,
            list(prompt.audio),
        )

    def _params(
        self,
        fields: CompletionFields | ChatFields,
        prompt: Prompt,
        tenant: str,
        served: ServedModel,
        facts: Ready,
        made: dict[int, SamplingParams],
    ) -> SamplingParams:
        """Return the sampling parameters of a prompt. `made` is a cache for all prompts of the request: it maps
        `max_tokens` to parameters that were created before. Raises ApiError for an invalid prompt or field.
        """
        tokens = prompt.tokens
        chat, count = isinstance(fields, ChatFields), len(tokens)
        param = "messages" if chat else "prompt"
        longest, most = (
            facts.tenant_max_tokens.get(tenant, facts.max_tokens),
            self._max_prompt_tokens(tenant, facts),
        )
        wanted = fields.max_tokens
        if isinstance(fields, ChatFields) and wanted is None:
            wanted = fields.max_completion_tokens
        # An encoder reads the prompt, so that its tokens are not part of the sequence.
        used = facts.decoder_tokens if facts.encoder_tokens else count
        default = facts.defaults.max_tokens(used)
        if default is None:
            default = longest if chat or prompt.has_media else DEFAULT_TOKENS
        new = min(default, max(1, longest - used)) if wanted is None else wanted
        if new not in made:
            made[new] = self._new_params(fields, prompt, new, served, facts)
        if not count:
            raise bad_request("the prompt is empty: it must have at least one token", param)
        if count > most:
            raise context_too_long(count, 0, most, param)
        if used + new > longest:
            raise context_too_long(used, new, longest, param)
        check_tokens(tokens, facts.vocab_size, param)
        check_tokens(fields.resume_token_ids or [], facts.vocab_size, "resume_token_ids")
        return made[new]

    def _new_params(
        self,
        fields: CompletionFields | ChatFields,
        prompt: Prompt,
        new: int,
        served: ServedModel,
        facts: Ready,
    ) -> SamplingParams:
        encoder = served.encoder
        bad = encoder.bad_words(fields.bad_words) if fields.bad_words and encoder is not None else []
        params = sampling_params(fields, new, facts.vocab_size, bad, facts.defaults.values)
        grammar = None
        if isinstance(fields, ChatFields):
            grammar = served.answers.reasoning_grammar(_end_of_prompt(fields, prompt), params.structure)
        if grammar is not None:
            params = replace(params, json_schema=None, regex=None, grammar=grammar)
        return params

    def _max_prompt_tokens(self, tenant: str, facts: Ready) -> int:
        """Return the largest allowed number of prompt tokens for a tenant. One token is left for the output."""
        if facts.encoder_tokens:
            return min(facts.encoder_tokens, self.context.limits.prompt_tokens or facts.encoder_tokens)
        longest = facts.tenant_max_tokens.get(tenant, facts.max_tokens)
        return min(longest - 1, self.context.limits.prompt_tokens or longest)


class CompletionEndpoint(GenerationEndpoint):
    def read(self, body: bytes) -> CompletionFields:
        return read_fields(body, CompletionFields)

    def prompts(
        self, fields: CompletionFields | ChatFields, prompts: PromptEncoder, limits: PromptLimits
    ) -> list[Prompt]:
        assert isinstance(fields, CompletionFields)
        return prompts.encode_completion(fields, limits)

    def response(self, request: CheckedRequest) -> ResponseBuilder:
        fields, params = request.fields, request.params
        assert isinstance(fields, CompletionFields)
        return CompletionResponse(
            *request.builder_arguments, echo=bool(fields.echo), **_response_options(fields, params)
        )


class ChatEndpoint(GenerationEndpoint):
    @property
    def builder(self) -> type[ChatResponse]:
        """The class that builds the endpoint's responses."""
        return ChatResponse

    def read(self, body: bytes) -> ChatFields:
        return read_fields(body, ChatFields)

    def adapt(
        self, fields: CompletionFields | ChatFields, served: ServedModel
    ) -> CompletionFields | ChatFields:
        """Return the fields of a chat. If the request forces a tool call or has strict tools, a grammar is added. If
        special tokens mark reasoning or tool calls in an answer, the text of the answer keeps special tokens.
        """
        assert isinstance(fields, ChatFields)
        changes: dict[str, Any] = {}
        formats, grammar = served.answers, ""
        functions = forced_functions(fields.tools, fields.tool_choice)
        if functions is not None:
            for name in STRUCTURES:
                if getattr(fields, name) is not None:
                    raise bad_request(refused("forced call, structure", name=name), name)
            many = fields.tool_choice == "required" and fields.parallel_tool_calls is not False
            grammar = forced_grammar(functions, many)
        elif _has_tools(fields) and not any(getattr(fields, name) is not None for name in STRUCTURES):
            grammar = formats.strict_grammar(_functions(fields)) or ""
        if grammar:
            if len(grammar) > MAX_GRAMMAR_CHARACTERS:
                raise bad_request(
                    f"tools: their schemas have more than {MAX_GRAMMAR_CHARACTERS:,} characters: send fewer",
                    "tools",
                )
            changes["grammar"] = ANSWER + grammar
        if formats.special and fields.skip_special_tokens is None and (fields.tools or formats.reasoning):
            changes["skip_special_tokens"] = False
        return msgspec.structs.replace(fields, **changes) if changes else fields

    def prompts(
        self, fields: CompletionFields | ChatFields, prompts: PromptEncoder, limits: PromptLimits
    ) -> list[Prompt]:
        assert isinstance(fields, ChatFields)
        return [with_public_prefix(fields, prompts.encode_chat(fields, limits), prompts, limits)]

    def response(self, request: CheckedRequest) -> ResponseBuilder:
        fields, params, served = request.fields, request.params, request.served
        assert isinstance(fields, ChatFields)
        return self.builder(
            *request.builder_arguments,
            new_parser=self.new_parser(fields, request.prompts[0], params, served),
            warning=self.tools_warning(fields, served),
            **self.response_options(fields, params),
        )

    def response_options(self, fields: ChatFields, params: SamplingParams) -> dict[str, Any]:
        """Return the additional arguments of `builder`."""
        return _response_options(fields, params)

    def tools_warning(self, fields: ChatFields, served: ServedModel) -> str | None:
        """Return a warning if the model does not support the tools of a request, else None."""
        if not _has_tools(fields):
            return None
        return served.answers.tools_warning(_forces_call(fields), _functions(fields))

    def new_parser(
        self, fields: ChatFields, prompt: Prompt, params: SamplingParams, served: ServedModel
    ) -> Callable[[], AnswerParser | None]:
        """Return a function that creates the parser of one answer. The function is called once for each answer."""
        formats, parallel = served.answers, fields.parallel_tool_calls is not False
        functions = _functions(fields) if _has_tools(fields) else None
        forced, end = _forces_call(fields), _end_of_prompt(fields, prompt)
        return lambda: formats.parser(end, params.structure, functions, forced, parallel)


class _EventStream:
    """A stream of server-sent events to one client."""

    def __init__(
        self,
        served: ServedModel,
        read_seconds: float,
        stream: ResponseStream,
        response: ResponseBuilder,
        send: Send,
        record: RequestRecord,
        log: RequestLog,
        must_wait: Callable[[], bool],
    ) -> None:
        self._must_wait = must_wait
        self._metrics, self._stream, self._response, self._send = served.metrics, stream, response, send
        self._seconds = read_seconds
        self._record, self._log = record, log
        self._last = 0.0

    async def run(self) -> bool:
        """Send all events. Return False if the client reads too slowly. The caller should then abort the
        connection."""
        # Wait for the first delta: if the engine rejects the request, the client gets an error response.
        pieces = await self._stream.take()
        if not pieces:
            return True
        body = self._body(pieces)
        headers = [*EVENTS, *_warning(self._response)]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            while pieces:
                await self._write(body)
                pieces = await self._stream.take()
                body = self._body(pieces)
            if not self._stream.is_disconnected:
                await self._write(self._response.last_event(), more=False)
        except ApiError as error:
            self._record.error_code = error.code or str(error.status)
            self._log.error = error
            if error.code == "slow_reader":
                return False
            await self._write(self._response.error_event(error), more=False)
        return True

    def _body(self, pieces: list[Delta]) -> bytes:
        now, metrics = time.monotonic(), self._metrics
        if not self._last:
            self._record.first_token = now
        elif metrics.is_enabled:
            for piece in pieces:
                count = len(piece.tokens)
                if count:
                    metrics.inter_token.add((now - self._last) / count, count)
        self._last = now
        return b"".join([self._response.event(piece) for piece in pieces])

    async def _write(self, body: bytes, more: bool = True) -> None:
        message = {"type": "http.response.body", "body": body, "more_body": more}
        if not self._must_wait():  # without a timer, which would take as long as everything else here
            await self._send(message)
            return
        try:
            async with asyncio.timeout(self._seconds):
                await self._send(message)
        except TimeoutError:
            raise slow_reader(f"no data was read for {self._seconds:g} seconds") from None


def _end_of_prompt(fields: ChatFields, prompt: Prompt) -> str:
    """Return the argument of `ReasoningParser.opens`, which decides whether the answer begins with reasoning. This is
    the text of the prompt. If the answer continues the final message, it is the result of `last_marker` for this
    message.
    """
    if not fields.continue_final_message:
        return prompt.text or ""
    content = fields.messages[-1].get("content")
    return last_marker(content if isinstance(content, str) else "")


def _has_tools(fields: ChatFields) -> bool:
    return bool(fields.tools) and fields.tool_choice != "none"


def _forces_call(fields: ChatFields) -> bool:
    return fields.tool_choice not in (None, "auto", "none")


def _warning(response: ResponseBuilder) -> list[tuple[bytes, bytes]]:
    return [] if response.warning is None else [(b"x-kvloom-warning", response.warning.encode())]


def _functions(fields: ChatFields) -> list[dict[str, Any]]:
    return [tool["function"] for tool in fields.tools or ()]


def _response_options(fields: CompletionFields | ChatFields, params: SamplingParams) -> dict[str, Any]:
    """Return the options that all responses share."""
    return {
        "token_ids": bool(fields.return_token_ids),
        "top_logprobs": params.logprobs or 0,
        "usage": fields.stream_options,
        "prompt_logprobs": fields.prompt_logprobs is not None,
    }


async def _watch_disconnect(receive: Receive, stream: ResponseStream) -> None:
    """Wait until the client disconnects, and then report this to `stream`."""
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.disconnect()


def _tokens_to_keep(fields: CompletionFields | ChatFields, most: int) -> int | None:
    """Return how many tokens at the end of the prompt to keep, or None to keep all. This is the request field
    `truncate_prompt_tokens`. If the field is -1, return the largest number that leaves enough tokens for the output.
    `most` is the largest allowed number of prompt tokens.
    """
    if fields.truncate_prompt_tokens != -1:
        return fields.truncate_prompt_tokens
    new = fields.max_tokens or (fields.max_completion_tokens if isinstance(fields, ChatFields) else None)
    return max(1, most + 1 - (new or 1))


def _token_ranges(fields: CompletionFields | ChatFields, prompt: Prompt) -> list[TokenRange]:
    """Return the token ranges whose priority a request sets: those in its field `cache.retain`, and for each of its
    cache breakpoints the tokens before the breakpoint.
    """
    own = () if fields.cache is None else fields.cache.retain or ()
    ranges = [TokenRange(one.start, one.stop, one.priority, one.ttl) for one in own]
    for stop, ttl in sorted(prompt.retain):
        ranges.append(TokenRange(stop=stop, ttl=ttl))
    return ranges


def _offered_pages(
    fields: CompletionFields | ChatFields, facts: Ready, model: str, response: ResponseBuilder, tokens: int
) -> dict[str, Any] | None:
    """Return the fields `kv_transfer_params` of the response, with which a decode worker finds the pages of this
    request. Return None if the request asks for no hand-over to a decode worker, or if this worker shares no host
    memory.
    """
    if fields.kv_transfer_params is None or not fields.kv_transfer_params.do_remote_decode:
        return None
    if facts.peer_address is None:
        return None
    host, port = facts.peer_address
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [],  # pages are found by hash
        "remote_engine_id": f"{model}@{host}:{port}",
        "remote_request_id": response.id,
        "remote_host": host,
        "remote_port": port,
        "remote_num_tokens": tokens,
    }


def _answer_count(fields: CompletionFields | ChatFields) -> int:
    """Return the number of answers that the engine generates for a request: n, best_of or the number of beams, times
    the number of prompts."""
    each = max(1, fields.n or 1, fields.best_of or 1, beam_width(fields))
    if isinstance(fields, ChatFields):
        return each
    prompt = fields.prompt
    many = 1 if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int) else len(prompt)
    return many * each
