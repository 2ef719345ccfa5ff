"""Answers in OpenAI's shapes: whole, or piece by piece. Two forms, completions and chats, behind one interface."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import msgspec

from .errors import ApiError, bad_request, no_room
from .fields import StreamOptions
from .messages import Delta, TokenTold
from .prompts import PIECE, Prompt, Prompts

__all__ = ["ChatForm", "CompletionForm", "Form", "Usage"]

_encode = msgspec.json.Encoder().encode

_ENDS: dict[str, ApiError] = {
    "no_room": no_room(),
}


@dataclass(slots=True)
class Usage:
    """Tokens of a request's prompts and answers so far; `cached` of the prompts' were found in the cache."""

    prompt: int = 0
    completion: int = 0
    cached: dict[int, int] = field(default_factory=dict)

    def shape(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


class Form(ABC):
    """One HTTP request's answers. `ids` are its prompts, which have `n` answers each; `echo` repeats each prompt's text
    before its answers; `usage` is counted here, and `finishes` says how answers ended, as they do."""

    prefix = ""
    whole_object = ""
    piece_object = ""

    def __init__(
        self,
        model: str,
        prompts: list[Prompt],
        ids: list[int],
        n: int,
        names: Prompts,
        echo: bool = False,
        token_ids: bool = False,
        top_logprobs: int = 0,
        usage: StreamOptions | None = None,
        prompt_logprobs: bool = False,
    ) -> None:
        self.usage = Usage(sum(len(prompt.tokens) for prompt in prompts))
        self._prompts, self._echo, self._of_prompts = prompts, echo, prompt_logprobs
        self._told_of: dict[
            int, list[list[TokenTold]]
        ] = {}  # what is known of prompts' own tokens, by their ids
        self._places = {id_: place for place, id_ in enumerate(ids)}
        self._n, self._names, self._token_ids, self._top = n, names, token_ids, top_logprobs
        self._usage_last = bool(usage and usage.include_usage)
        self._usage_always = bool(self._usage_last and usage and usage.continuous_usage_stats)
        self.finishes: list[str] = []
        self._lengths: dict[int, int] = {}  # characters of each choice that were told
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._head = {
            "id": self.id,
            "object": "",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, deltas: list[Delta]) -> bytes:
        """The complete answer. Raises ApiError where one of its texts could not be made."""
        choices = []
        self._told_of = {delta.id: delta.prompt for delta in deltas if delta.prompt is not None}
        for delta in sorted(deltas, key=self._index):
            self._count(delta)
            choices.append(self._whole_choice(self._choice(delta), delta))
        return _encode(
            {
                **self._head,
                **self._more(),
                "object": self.whole_object,
                "choices": choices,
                "usage": self.usage.shape(),
            }
        )

    def _more(self) -> dict[str, Any]:
        """What a whole answer has beside its choices."""
        return {}

    def _prompt_places(self, id_: int) -> list[dict[str, Any] | None]:
        """How likely a prompt's tokens were, as vLLM tells it."""
        return [
            None,
            *(
                {
                    str(token): {"logprob": value, "rank": rank, "decoded_token": self._names.name(token)}
                    for token, value, rank in place
                }
                for place in self._told_of.get(id_, [])
            ),
        ]

    def piece(self, delta: Delta) -> bytes:
        """One event of a stream. Raises ApiError where the text cannot be made."""
        self._count(delta)
        first = self._index(delta) not in self._lengths
        choice = self._piece_choice(self._choice(delta), delta, first)
        told = {**self._head, "object": self.piece_object, "choices": [choice]}
        return _event({**told, "usage": self.usage.shape()} if self._usage_always else told)

    def closing(self) -> bytes:
        """The end of a stream, with what it used if that is wanted."""
        last = {**self._head, "object": self.piece_object, "choices": [], "usage": self.usage.shape()}
        return (_event(last) if self._usage_last else b"") + b"data: [DONE]\n\n"

    def _index(self, delta: Delta) -> int:
        return self._places[delta.id] * self._n + delta.index

    def _count(self, delta: Delta) -> None:
        if delta.finish is not None:
            self.finishes.append(delta.finish)
        if delta.finish in _ENDS:
            raise _ENDS[delta.finish]
        if delta.finish == "grammar":
            why = f"the form that was asked for allows no token of this model: {delta.stop_reason}"
            raise bad_request(why, "response_format")
        self.usage.completion += len(delta.tokens)
        self.usage.cached[delta.id] = delta.cached

    def _choice(self, delta: Delta) -> dict[str, Any]:
        """What both kinds of choice have; its text still under "text"."""
        index = self._index(delta)
        text = delta.text
        if self._echo and index not in self._lengths:
            text = (self._prompts[self._places[delta.id]].text or "") + text
        offset = self._lengths.get(index, 0)
        self._lengths[index] = offset + len(text)
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None if delta.logprobs is None else self._logprobs(delta, offset),
            "finish_reason": delta.finish,
        }
        if delta.finish is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._token_ids:
            choice["token_ids"] = delta.tokens
        return choice

    def _whole_choice(self, choice: dict[str, Any], delta: Delta) -> dict[str, Any]:
        return choice

    def _piece_choice(self, choice: dict[str, Any], delta: Delta, first: bool) -> dict[str, Any]:
        return choice

    @abstractmethod
    def _logprobs(self, delta: Delta, offset: int) -> dict[str, Any]: ...


class CompletionForm(Form):
    prefix = "cmpl"
    whole_object = piece_object = "text_completion"

    def _logprobs(self, delta: Delta, offset: int) -> dict[str, Any]:
        assert delta.logprobs is not None
        ids, places = delta.tokens, delta.logprobs
        if self._echo and delta.id in self._told_of:
            prompt = self._prompts[self._places[delta.id]].tokens
            ids, places = (
                [*prompt, *ids],
                [[], *self._told_of[delta.id], *places],
            )  # the first token follows nothing
        tokens, offsets = [], []
        for token in ids:
            tokens.append(self._names.name(token))
            offsets.append(offset)
            offset += len(tokens[-1])
        return {
            "tokens": tokens,
            "token_logprobs": [place[0][1] if place else None for place in places],
            "top_logprobs": [
                {self._names.name(token): value for token, value, _ in place} or None for place in places
            ],
            "text_offset": offsets,
        }

    def _whole_choice(self, choice: dict[str, Any], delta: Delta) -> dict[str, Any]:
        return {**choice, "prompt_logprobs": self._prompt_places(delta.id)} if self._of_prompts else choice


class ChatForm(Form):
    prefix = "chatcmpl"
    whole_object = "chat.completion"
    piece_object = "chat.completion.chunk"

    def _more(self) -> dict[str, Any]:
        return {"prompt_logprobs": self._prompt_places(next(iter(self._places)))} if self._of_prompts else {}

    def _whole_choice(self, choice: dict[str, Any], delta: Delta) -> dict[str, Any]:
        text = choice.pop("text")
        return {**choice, "message": {"role": "assistant", "content": text, "refusal": None}}

    def _piece_choice(self, choice: dict[str, Any], delta: Delta, first: bool) -> dict[str, Any]:
        told = {"content": choice.pop("text")}
        return {**choice, "delta": {"role": "assistant", **told} if first else told}

    def _logprobs(self, delta: Delta, offset: int) -> dict[str, Any]:
        assert delta.logprobs is not None
        content = []
        for place in delta.logprobs:
            likely = sorted(place, key=lambda told: told[2])[: self._top]
            content.append({**self._told(place[0]), "top_logprobs": [self._told(told) for told in likely]})
        return {"content": content, "refusal": None}

    def _told(self, told: TokenTold) -> dict[str, Any]:
        name = self._names.name(told[0])
        return {
            "token": name,
            "logprob": told[1],
            "bytes": None if name.startswith(PIECE) else list(name.encode()),
        }


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + _encode(data) + b"\n\n"
