"""The endpoints that generate: from a request's JSON to the engine, and its answers back, whole or as a stream of events.

check, tokenise ──▶ Add to the engine ──▶ Mailbox ──▶ events, as fast as the client reads
                               ▲── withdrawn when the client goes away, reads too slowly, or something fails
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from kvloom.engine import SamplingParams
from kvloom.serve.metrics.request_records import Record
from kvloom.serve.worker.mailbox import Mailbox
from kvloom.serve.worker.messages import Add, Delta, Ready

from .errors import ApiError, bad_request, slow_reader, too_long
from .prompts import Prompt, Prompts, Room
from .request_fields import ChatFields, CompletionFields, check_tokens, read_fields, sampling
from .responses import ChatForm, CompletionForm, Form
from .service import Service

__all__ = ["Chats", "Completions", "Generation"]

DEFAULT_TOKENS = 16
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Generation(ABC):
    """An ASGI application for one endpoint."""

    def __init__(self, service: Service) -> None:
        self.service = service

    @abstractmethod
    def read(self, body: bytes) -> CompletionFields | ChatFields: ...

    @abstractmethod
    async def prompts(
        self, fields: CompletionFields | ChatFields, prompts: Prompts, room: Room
    ) -> list[Prompt]: ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        service, request = self.service, Request(scope, receive)
        if service.keys:
            service.tenant_of(request)  # before anything of the body is read
        facts, prompts = service.ready()
        fields = self.read(await service.body(request))
        service.check_model(fields.model)
        tenant = service.tenant(request, fields)
        answers, caps = _answers(fields), service.keys.caps(tenant)
        caps.check(answers, fields.ttl, fields.priority)
        with service.gate.entered(answers, tenant, caps.open):
            most = self._most(tenant, facts)
            room = Room(most, facts.vocabulary, _kept(fields, most))
            given = await self.prompts(fields, prompts, room)
            messages = self._messages(fields, given, tenant, facts)
            ids, n = [message.id for message in messages], messages[0].params.n
            stream = bool(fields.stream)
            mailbox = Mailbox(ids, n, service.limits.unread_characters if stream else None)
            form = (ChatForm if isinstance(fields, ChatFields) else CompletionForm)(
                service.model,
                given,
                ids,
                n,
                prompts,
                echo=bool(isinstance(fields, CompletionFields) and fields.echo),
                token_ids=bool(fields.return_token_ids),
                top_logprobs=messages[0].params.logprobs or 0,
                usage=fields.stream_options,
                prompt_logprobs=fields.prompt_logprobs is not None,
            )
            service.link.check()
            record = service.observer.begin(form.id, scope["path"], messages, began, request.headers)
            service.link.submit(messages, mailbox)
            watcher = asyncio.create_task(_watch(receive, mailbox))
            try:
                if stream:
                    events = _Events(service, mailbox, form, send, record)
                    if not await events.run() and "kvloom.abort" in scope:
                        scope["kvloom.abort"]()
                        await watcher
                else:
                    await _whole(mailbox, form, send)
            except ApiError as error:
                record.failure = error.code or str(error.status)
                raise
            finally:
                watcher.cancel()
                service.link.withdraw(mailbox)
                record.output_tokens, record.finishes = form.usage.completion, form.finishes
                record.gone = mailbox.gone
                service.observer.end(record)

    def _messages(
        self, fields: CompletionFields | ChatFields, prompts: list[Prompt], tenant: str, facts: Ready
    ) -> list[Add]:
        """One message for each prompt. Raises ApiError where one makes no sense, and then none is sent."""
        return [
            Add(
                id_,
                prompt.tokens,
                self._params(fields, prompt.tokens, tenant, facts),
                bool(fields.stream),
                tenant,
                fields.session_id,
                fields.priority or 0,
                fields.ttl,
                fields.store is not False,
                fields.read is not False,
                fields.cache_salt or "",
                bool(fields.end_session),
                bool(fields.lossy),
            )
            for id_, prompt in zip(self.service.link.numbers(len(prompts)), prompts, strict=True)
        ]

    def _params(
        self, fields: CompletionFields | ChatFields, tokens: list[int], tenant: str, facts: Ready
    ) -> SamplingParams:
        """How a prompt's answers are made. Raises ApiError where the prompt or a field makes no sense."""
        chat, count = isinstance(fields, ChatFields), len(tokens)
        param = "messages" if chat else "prompt"
        longest, most = facts.tenants_longest.get(tenant, facts.longest), self._most(tenant, facts)
        wanted = fields.max_tokens
        if isinstance(fields, ChatFields) and wanted is None:
            wanted = fields.max_completion_tokens
        new = min(longest if chat else DEFAULT_TOKENS, max(1, longest - count)) if wanted is None else wanted
        params = sampling(fields, new, facts.vocabulary)
        if not count:
            raise bad_request("a prompt needs at least one token", param)
        if count > most:
            raise too_long(count, 0, most, param)
        if count + new > longest:
            raise too_long(count, new, longest, param)
        check_tokens(tokens, facts.vocabulary, param)
        return params

    def _most(self, tenant: str, facts: Ready) -> int:
        """The most tokens that a tenant's prompt can have: an answer needs one more."""
        longest = facts.tenants_longest.get(tenant, facts.longest)
        return min(longest - 1, self.service.limits.prompt_tokens or longest)


class Completions(Generation):
    def read(self, body: bytes) -> CompletionFields:
        return read_fields(body, CompletionFields)

    async def prompts(
        self, fields: CompletionFields | ChatFields, prompts: Prompts, room: Room
    ) -> list[Prompt]:
        assert isinstance(fields, CompletionFields)
        return await prompts.of_completion(fields, room)


class Chats(Generation):
    def read(self, body: bytes) -> ChatFields:
        return read_fields(body, ChatFields)

    async def prompts(
        self, fields: CompletionFields | ChatFields, prompts: Prompts, room: Room
    ) -> list[Prompt]:
        assert isinstance(fields, ChatFields)
        return [await prompts.of_chat(fields, room)]


class _Events:
    """A stream of events to one client."""

    def __init__(self, service: Service, mailbox: Mailbox, form: Form, send: Send, record: Record) -> None:
        self._service, self._mailbox, self._form, self._send = service, mailbox, form, send
        self._seconds = service.limits.read_seconds
        self._record = record
        self._last = 0.0

    async def run(self) -> bool:
        """Send everything; False where the client reads too slowly, and what waits for it is of no use any more."""
        pieces = await self._mailbox.take()  # what is refused is told with a status of its own
        if not pieces:
            return True
        body = self._body(pieces)
        await self._send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        try:
            while pieces:
                await self._write(body)
                pieces = await self._mailbox.take()
                body = self._body(pieces)
            if not self._mailbox.gone:
                await self._write(self._form.closing(), more=False)
        except ApiError as error:
            self._record.failure = error.code or str(error.status)
            if error.code == "slow_reader":
                return False
            await self._write(b"data: " + error.body + b"\n\n", more=False)
        return True

    def _body(self, pieces: list[Delta]) -> bytes:
        now, metrics = time.monotonic(), self._service.metrics
        if not self._last:
            self._record.first = now
        elif metrics.observe:
            for piece in pieces:
                count = len(piece.tokens)
                if count:
                    metrics.between_tokens.add((now - self._last) / count, count)
        self._last = now
        return b"".join([self._form.piece(piece) for piece in pieces])

    async def _write(self, body: bytes, more: bool = True) -> None:
        try:
            async with asyncio.timeout(self._seconds):
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError:
            raise slow_reader(f"nothing was read for {self._seconds:g} seconds") from None


async def _whole(mailbox: Mailbox, form: Form, send: Send) -> None:
    found: list[Delta] = []
    while pieces := await mailbox.take():
        found += pieces
    if mailbox.gone:
        return
    body = form.whole(found)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _watch(receive: Receive, mailbox: Mailbox) -> None:
    """Notice when the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass
    mailbox.hang_up()


def _kept(fields: CompletionFields | ChatFields, most: int) -> int | None:
    """How many of a prompt's last tokens are enough, where it says so: -1 means as many as leave room for the answer."""
    if fields.truncate_prompt_tokens != -1:
        return fields.truncate_prompt_tokens
    new = fields.max_tokens or (fields.max_completion_tokens if isinstance(fields, ChatFields) else None)
    return max(1, most + 1 - (new or 1))


def _answers(fields: CompletionFields | ChatFields) -> int:
    """How many answers a request asks for."""
    each = max(1, fields.n or 1)
    if isinstance(fields, ChatFields):
        return each
    prompt = fields.prompt
    many = 1 if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int) else len(prompt)
    return many * max(each, fields.best_of or 1)
