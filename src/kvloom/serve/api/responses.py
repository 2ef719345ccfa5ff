"""Responses in OpenAI's formats for completions and chats, whole or as events of a stream."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvloom.serve.api.answers import AnswerParser, Piece
from kvloom.serve.errors import ApiError, bad_request, pool_full
from kvloom.serve.worker import Delta, TokenLogprob

from .prompts import PARTIAL_TOKEN, Prompt, PromptEncoder
from .request_fields import StreamOptions

__all__ = ["ChatResponse", "CompletionResponse", "ResponseBuilder", "Usage"]

_encode = msgspec.json.Encoder().encode

_FINISH_ERRORS: dict[str, ApiError] = {
    "no_room": pool_full(),
}


@dataclass(slots=True)
class Usage:
    """The token counts of a request. `cached` is the number of cached prompt tokens, by id of the prompt. `reused` is the
    number of prompt tokens whose K and V were copied from documents. With such tokens the answer is approximate."""

    prompt: int = 0
    completion: int = 0
    cached: dict[int, int] = field(default_factory=dict)
    reused: dict[int, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": self.prompt_details(),
            **self.approximate(),
        }

    def approximate(self) -> dict[str, bool]:
        """Return the field `approximate` if prompt tokens were copied from documents, otherwise nothing."""
        return {"approximate": True} if any(self.reused.values()) else {}

    def prompt_details(self) -> dict[str, int]:
        """Return the number of prompt tokens that were cached. If K and V of prompt tokens were copied from documents,
        also return the number of these tokens (`reused_tokens`)."""
        reused = sum(self.reused.values())
        return {"cached_tokens": sum(self.cached.values())} | ({"reused_tokens": reused} if reused else {})


class ResponseBuilder(ABC):
    """Builds the response of one HTTP request. Each delta updates `usage` and `finish_reasons`.

    - `ids` are the ids of the request's prompts in the engine, and each prompt has `n` answers.
    - With `echo`, an answer begins with the text of its prompt.
    - `new_parser` creates the parser of one answer, or returns None if the whole text is content.
    - `warning` is sent as a header.
    """

    prefix = ""
    content_type = b"application/json"
    """Content type of a complete response."""
    whole_object = ""
    event_object = ""

    def __init__(
        self,
        model: str,
        prompts: list[Prompt],
        ids: list[int],
        n: int,
        encoder: PromptEncoder,
        echo: bool = False,
        token_ids: bool = False,
        top_logprobs: int = 0,
        usage: StreamOptions | None = None,
        prompt_logprobs: bool = False,
        new_parser: Callable[[], AnswerParser | None] = lambda: None,
        warning: str | None = None,
    ) -> None:
        self.usage = Usage(sum(len(prompt.tokens) for prompt in prompts))
        self._prompts, self._echo, self._wants_prompt_logprobs = prompts, echo, prompt_logprobs
        self._prompt_logprobs: dict[int, list[list[TokenLogprob]]] = {}  # by prompt id
        self._prompt_index = {id_: place for place, id_ in enumerate(ids)}
        self._n, self._encoder, self._token_ids, self._top = n, encoder, token_ids, top_logprobs
        self._usage_last = bool(usage and usage.include_usage)
        self._usage_always = bool(self._usage_last and usage and usage.continuous_usage_stats)
        self.finish_reasons: list[str] = []
        self._new_parser, self._parsers = new_parser, dict[int, AnswerParser | None]()  # by choice
        self.warning = warning
        self._sent_characters: dict[int, int] = {}  # by choice
        self._token_offsets: dict[int, int] = {}  # characters of the tokens so far, by choice
        self.kv_transfer_params: dict[str, Any] | None = None
        """The fields with which a decode worker finds the pages of this request. None if there is no hand-over."""
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._head = {
            "id": self.id,
            "object": "",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, deltas: list[Delta]) -> bytes:
        """Return the complete response. Raises ApiError if an answer failed."""
        choices = []
        self._prompt_logprobs = {
            delta.id: delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None
        }
        for delta in sorted(deltas, key=self._index):
            self._count(delta)
            choices.append(self._whole_choice(self._choice(delta), delta))
        return _encode(
            {
                **self._head,
                **self._more(),
                **(
                    {} if self.kv_transfer_params is None else {"kv_transfer_params": self.kv_transfer_params}
                ),
                "object": self.whole_object,
                "choices": choices,
                "usage": self.usage.to_dict(),
            }
        )

    def _more(self) -> dict[str, Any]:
        """Return additional fields of a complete response."""
        return {}

    def _prompt_logprob_list(self, id_: int) -> list[dict[str, Any] | None]:
        """Return the log-probabilities of a prompt's tokens in vLLM's format."""
        return [
            None,
            *(
                {
                    str(token): {
                        "logprob": value,
                        "rank": rank,
                        "decoded_token": self._encoder.token_text(token),
                    }
                    for token, value, rank in place
                }
                for place in self._prompt_logprobs.get(id_, [])
            ),
        ]

    def event(self, delta: Delta) -> bytes:
        """Return one event of a stream. Raises ApiError if the answer failed."""
        self._count(delta)
        first = self._index(delta) not in self._sent_characters
        choice = self._event_choice(self._choice(delta), delta, first)
        entry = {**self._head, "object": self.event_object, "choices": [choice]}
        return _event({**entry, "usage": self.usage.to_dict()} if self._usage_always else entry)

    def last_event(self) -> bytes:
        """Return the last event of a stream. The event contains the usage if requested."""
        last = {**self._head, "object": self.event_object, "choices": [], "usage": self.usage.to_dict()}
        return (_event(last) if self._usage_last else b"") + b"data: [DONE]\n\n"

    def error_event(self, error: ApiError) -> bytes:
        """Return the last event of a stream that failed."""
        return b"data: " + error.body + b"\n\n"

    def _index(self, delta: Delta) -> int:
        return self._prompt_index[delta.id] * self._n + delta.index

    def _count(self, delta: Delta) -> None:
        if delta.finish_reason is not None:
            self.finish_reasons.append(delta.finish_reason)
        if delta.finish_reason in _FINISH_ERRORS:
            raise _FINISH_ERRORS[delta.finish_reason]
        if delta.finish_reason == "grammar":
            why = "the requested format allows no token of this model"
            raise bad_request(f"{why}: {delta.stop_reason}", "response_format", logged=why)
        self.usage.completion += len(delta.tokens)
        self.usage.cached[delta.id] = delta.cached_tokens
        self.usage.reused[delta.id] = delta.reused_tokens
        if delta.prompt_tokens is not None:  # a prompt with images, which is the only prompt of its request
            self.usage.prompt = delta.prompt_tokens

    def _choice(self, delta: Delta) -> dict[str, Any]:
        """Return a delta as an entry of `choices`, with the fields that completions and chats share. The text of the
        delta is in the field "text"."""
        index = self._index(delta)
        text = delta.text
        if self._echo and index not in self._sent_characters:
            text = (self._prompts[self._prompt_index[delta.id]].text or "") + text
        offset = self._sent_characters.get(index, 0)
        self._sent_characters[index] = offset + len(text)
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None if delta.logprobs is None else self._logprobs(delta, offset),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._token_ids:
            choice["token_ids"] = delta.tokens
        return choice

    def _whole_choice(self, choice: dict[str, Any], delta: Delta) -> dict[str, Any]:
        return choice

    def _event_choice(self, choice: dict[str, Any], delta: Delta, first: bool) -> dict[str, Any]:
        return choice

    @abstractmethod
    def _logprobs(self, delta: Delta, offset: int) -> dict[str, Any]: ...


class CompletionResponse(ResponseBuilder):
    prefix = "cmpl"
    whole_object = event_object = "text_completion"

    def _logprobs(self, delta: Delta, offset: int) -> dict[str, Any]:
        assert delta.logprobs is not None
        ids, places = self._tokens(delta), delta.logprobs
        if len(ids) > len(places):
            places = [[], *self._prompt_logprobs[delta.id], *places]  # the first token has no log-probability
        index = self._index(delta)
        offsets, self._token_offsets[index] = self._encoder.text_offsets(
            ids, self._token_offsets.get(index, 0)
        )
        return {
            "tokens": [self._encoder.token_text(token) for token in ids],
            "token_logprobs": [place[0][1] if place else None for place in places],
            "top_logprobs": [
                {self._encoder.token_text(token): value for token, value, _ in place} or None
                for place in places
            ],
            "text_offset": offsets,
        }

    def _tokens(self, delta: Delta) -> list[int]:
        """Return the tokens of a delta whose log-probabilities the response contains. With `echo`, the tokens of the
        prompt precede them.
        """
        if not self._echo or delta.id not in self._prompt_logprobs:
            return delta.tokens
        return [*self._prompts[self._prompt_index[delta.id]].tokens, *delta.tokens]

    def _whole_choice(self, choice: dict[str, Any], delta: Delta) -> dict[str, Any]:
        if choice["logprobs"] is not None:  # the complete text is known here
            offsets, _ = self._encoder.text_offsets(self._tokens(delta), 0, choice["text"])
            choice["logprobs"]["text_offset"] = offsets
        return (
            {**choice, "prompt_logprobs": self._prompt_logprob_list(delta.id)}
            if self._wants_prompt_logprobs
            else choice
        )


class ChatResponse(ResponseBuilder):
    prefix = "chatcmpl"
    whole_object = "chat.completion"
    event_object = "chat.completion.chunk"

    def _more(self) -> dict[str, Any]:
        return (
            {"prompt_logprobs": self._prompt_logprob_list(next(iter(self._prompt_index)))}
            if self._wants_prompt_logprobs
            else {}
        )

    def _whole_choice(self, choice: dict[str, Any], delta: Delta) -> dict[str, Any]:
        text = choice.pop("text")
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if (parser := self._new_parser()) is not None:
            message |= _whole_message(parser.feed(text, ended=True))
            choice["finish_reason"] = _finish_reason(delta, parser)
        return {**choice, "message": message}

    def event(self, delta: Delta) -> bytes:
        """Return the events of a delta, one for each piece of its answer."""
        index = self._index(delta)
        first = index not in self._parsers
        if first:
            self._parsers[index] = self._new_parser()
        parser = self._parsers[index]
        if parser is None:
            return super().event(delta)
        self._count(delta)
        choice = self._choice(delta)
        choice.pop("stop_reason", None)
        pieces = parser.feed(choice.pop("text"), ended=delta.finish_reason is not None)
        deltas: list[dict[str, Any]] = [_delta(piece) for piece in pieces]
        if delta.finish_reason is not None or not deltas:
            deltas.append({})
        if first:
            deltas[0] = {"role": "assistant", **deltas[0]}
        final = {"finish_reason": _finish_reason(delta, parser), "stop_reason": delta.stop_reason}
        usage = {"usage": self.usage.to_dict()} if self._usage_always else {}
        events = []
        for place, fields in enumerate(deltas):
            once = choice if not place else {"index": index, "logprobs": None}
            is_last = delta.finish_reason is not None and place == len(deltas) - 1
            ending = final if is_last else {"finish_reason": None}
            entry = {
                **self._head,
                "object": self.event_object,
                "choices": [{**once, **ending, "delta": fields}],
            }
            events.append(_event({**entry, **usage}))
        return b"".join(events)

    def _event_choice(self, choice: dict[str, Any], delta: Delta, first: bool) -> dict[str, Any]:
        entry = {"content": choice.pop("text")}
        return {**choice, "delta": {"role": "assistant", **entry} if first else entry}

    def _logprobs(self, delta: Delta, offset: int) -> dict[str, Any]:
        assert delta.logprobs is not None
        content = []
        for place in delta.logprobs:
            likely = sorted(place, key=lambda entry: entry[2])[: self._top]
            content.append(
                {
                    **self._token_logprob(place[0]),
                    "top_logprobs": [self._token_logprob(entry) for entry in likely],
                }
            )
        return {"content": content, "refusal": None}

    def _token_logprob(self, entry: TokenLogprob) -> dict[str, Any]:
        name = self._encoder.token_text(entry[0])
        return {
            "token": name,
            "logprob": entry[1],
            "bytes": None if name.startswith(PARTIAL_TOKEN) else list(name.encode()),
        }


def _whole_message(pieces: list[Piece]) -> dict[str, Any]:
    """Return the fields of a message, built from the pieces of its answer."""
    texts: dict[str, list[str]] = {"content": [], "reasoning": []}
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        if piece.kind != "call":
            texts[piece.kind].append(piece.text)
        elif piece.id is not None:
            function = {"name": piece.name, "arguments": piece.text}
            calls.append({"id": piece.id, "type": "function", "function": function})
        else:
            calls[-1]["function"]["arguments"] += piece.text
    content, reasoning = "".join(texts["content"]), "".join(texts["reasoning"])
    message: dict[str, Any] = {"content": content if content or not (calls or reasoning) else None}
    if reasoning:
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
    return {**message, "tool_calls": calls} if calls else message


def _delta(piece: Piece) -> dict[str, Any]:
    """Return a piece of an answer as the field `delta` of an event."""
    if piece.kind == "content":
        return {"content": piece.text}
    if piece.kind == "reasoning":
        return {"reasoning_content": piece.text, "reasoning": piece.text}
    function: dict[str, Any] = {"arguments": piece.text}
    if piece.id is None:
        return {"tool_calls": [{"index": piece.index, "function": function}]}
    function = {"name": piece.name, **function}
    return {"tool_calls": [{"index": piece.index, "id": piece.id, "type": "function", "function": function}]}


def _finish_reason(delta: Delta, parser: AnswerParser) -> str | None:
    return "tool_calls" if delta.finish_reason == "stop" and parser.has_calls else delta.finish_reason


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + _encode(data) + b"\n\n"
