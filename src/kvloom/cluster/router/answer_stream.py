"""One streamed answer. If its worker dies, another worker continues it.

    worker A: event, event, event, dies     worker B: the same request, with the tokens so far
                 │ forwarded                          │ the part that the client has is dropped
                 ▼                                    ▼
    client:   event, event, event ─────────────────── event, event, [DONE]

A continued answer must repeat the text that the client has, character by character. If the texts differ, the stream
ends with an error instead of a wrong text. The texts can differ if a worker samples without a seed, or if its results
depend on the other requests in the batch.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["AnswerStream", "DivergedError", "WorkerFailedError"]

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode
TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "refusal")
FATAL_TYPES = ("invalid_request_error", "authentication_error", "permission_error", "not_found_error")


class WorkerFailedError(Exception):
    """Raised if a worker cannot finish the request. Another worker may be able to finish it."""


class DivergedError(Exception):
    """Raised if a continued answer differs from the text that the client has."""


class AnswerStream:
    """Forwards the events of one streamed answer from a worker to the client.

    It records the text and tokens that the client has, so that another worker can continue the stream. With
    `hides_tokens`, token ids are removed from the events, because the client did not ask for them.
    """

    def __init__(self, hides_tokens: bool) -> None:
        self._tokens: list[int] = []
        self._known: list[int] = []
        self.has_begun = self.is_done = False
        self._hides_tokens = hides_tokens
        self._sent: dict[tuple[int, str], str] = {}
        self._again: dict[tuple[int, str], int] = {}
        """Number of characters that the present worker has sent, by index of the choice and name of the text. After a
        failover, the new worker first repeats text that the client has.
        """
        self._is_continued = False
        self._finished: set[int] = set()
        self._head: dict[str, Any] = {}
        self._buffer = b""
        self._failure: WorkerFailedError | DivergedError | None = None

    def restart(self) -> None:
        """Prepare for another worker, whose stream repeats the answer from its beginning."""
        self._buffer, self._is_continued, self._again = b"", True, {}
        self._known, self._tokens, self._failure = self.tokens, [], None

    @property
    def tokens(self) -> list[int]:
        """Token ids of the first answer (choice 0) so far. After a failover, the present worker repeats the answer.
        Until it has sent more tokens than the earlier workers, the tokens of the earlier workers are returned.
        """
        return max(self._tokens, self._known, key=len)

    def feed(self, data: bytes) -> tuple[bytes, int]:
        """Process `data` from a worker. Return the bytes to send to the client, and the number of new tokens.

        An error event that the client caused (FATAL_TYPES) is sent to the client. Raises WorkerFailedError for other
        error events, and DivergedError if the answer differs from the text that the client has. If there are bytes to
        send before the error, `feed` returns them, and `check` raises the error.
        """
        *events, self._buffer = (self._buffer + data).split(b"\n\n")
        out, count = b"", 0
        for event in events:
            try:
                passed, tokens = self._event(event)
            except (WorkerFailedError, DivergedError) as error:
                if not out:
                    raise
                self._failure = error
                break
            out += passed
            count += tokens
        return out, count

    def check(self) -> None:
        """Raise the error that the last `feed` postponed. Does nothing if there was no error. Call this after the bytes
        of `feed` are sent."""
        if self._failure is not None:
            raise self._failure

    def _event(self, event: bytes) -> tuple[bytes, int]:
        if not event.startswith(b"data:"):
            return event + b"\n\n", 0  # a comment
        data = event[5:].strip()
        if data == b"[DONE]":
            self.is_done = True
            return event + b"\n\n", 0
        try:
            body = _decode(data)
        except msgspec.DecodeError:
            raise WorkerFailedError("the worker sent an event that is not JSON") from None
        error = body.get("error")
        if error is not None:
            if isinstance(error, dict) and error.get("type") in FATAL_TYPES:
                self.is_done = True
                return event + b"\n\n", 0
            raise WorkerFailedError(str(error.get("message") if isinstance(error, dict) else error))
        new = 0
        choices = body.get("choices") or []
        for choice in choices:
            found = choice.get("token_ids")
            if found is not None:
                new += len(found)
                if choice.get("index") == 0:
                    self._tokens += found
                if self._hides_tokens:
                    del choice["token_ids"]
            else:
                new += 1
        if self._is_continued:
            body["choices"] = choices = [choice for choice in choices if self._trim(choice)]
            if not choices and body.get("usage") is None:
                return b"", new
        else:
            for choice in choices:
                self._record(choice)
        self._finished.update(
            choice["index"] for choice in choices if choice.get("finish_reason") is not None
        )
        if not self._head:
            self._head = {name: body[name] for name in ("id", "created") if name in body}
        else:
            body.update(self._head)
        self.has_begun = True
        return b"data: " + _encode(body) + b"\n\n", new

    @staticmethod
    def _texts(choice: dict[str, Any]) -> list[tuple[dict[str, Any], str, str]]:
        """Return all texts of a choice that grow from event to event. Each is a tuple: the dictionary that contains the
        text, the key of the text in this dictionary, and a name for the text."""
        if isinstance(choice.get("text"), str):
            return [(choice, "text", "text")]
        delta = choice.get("delta") or {}
        found = [(delta, name, name) for name in TEXT_FIELDS if isinstance(delta.get(name), str)]
        for call in delta.get("tool_calls") or []:
            function = call.get("function") or {}
            for name in ("name", "arguments"):
                if isinstance(function.get(name), str):
                    found.append((function, name, f"call {call.get('index', 0)} {name}"))
        return found

    def _record(self, choice: dict[str, Any]) -> None:
        for owner, key, name in self._texts(choice):
            place = choice.get("index", 0), name
            self._sent[place] = self._sent.get(place, "") + owner[key]

    def _trim(self, choice: dict[str, Any]) -> bool:
        """Remove from a choice the text that the client already has. Return whether anything is left to send."""
        index = choice.get("index", 0)
        if index in self._finished:
            return False
        is_new = choice.get("finish_reason") is not None
        for owner, key, name in self._texts(choice):
            place, text = (index, name), owner[key]
            sent, again = self._sent.get(place, ""), self._again.get(place, 0)
            known = sent[again : again + len(text)]
            if not text.startswith(known):
                raise DivergedError(f"answer {index} differs at character {again} of its {name}")
            self._again[place] = again + len(known)
            owner[key] = rest = text[len(known) :]
            if rest:
                self._sent[place] = sent + rest
                self._again[place] += len(rest)
                is_new = True
        calls = (choice.get("delta") or {}).get("tool_calls")
        if calls and not is_new:
            return False
        (choice.get("delta") or {}).pop("role", None)
        return is_new
