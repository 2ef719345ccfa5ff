"""A client process of `kvloom bench online`: sends requests at planned times, and reads their streams.

`python -m kvloom.bench.online_client` reads a ClientWork as a line of JSON from standard input, and writes the line
`ready`. Then it reads the time to start, on the monotonic clock. At the end it writes its answers as JSON. The HTTP code is minimal, because at a high rate a complete HTTP client would need more time than the
server.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np

__all__ = ["FIRST_ID", "Answer", "ClientWork", "Plan", "prompt_ids"]

FIRST_ID = 3
"""Smallest token id in prompts: lower ids are special tokens in most tokenizers."""
END = b"0\r\n\r\n"
USAGE = re.compile(rb'"completion_tokens": ?(\d+)')


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """One request: when it is sent (seconds after the start), its conversation, its number of prompt tokens, and the
    number of tokens to generate. Prompts of one conversation begin with the same tokens."""

    at: float
    conversation: int
    prompt: int
    tokens: int


class ClientWork(msgspec.Struct):
    """The work of one client process. If `tokenizer` is the path of a tokenizer.json, prompts are text. Otherwise they
    are token ids below `vocabulary`. An answer that is missing after `limit` seconds is an error."""

    url: str
    model: str
    limit: float
    plans: list[Plan]
    tokenizer: str
    vocabulary: int
    seed: int
    key: str = ""


class Answer(msgspec.Struct, array_like=True):
    """The answer to one request. Times are in seconds: `asked` counts from the start, `first` is the time to the first
    token, and `gaps` are the times between later messages. `tokens` is the number of output tokens. `error` is empty
    for a complete answer."""

    asked: float
    first: float = 0.0
    gaps: list[float] = []
    tokens: int = 0
    error: str = ""


def prompt_ids(seed: int, conversation: int, tokens: int, vocabulary: int) -> list[int]:
    """Return the first `tokens` token ids of a conversation."""
    rng = np.random.default_rng((seed, conversation))
    return [int(one) for one in rng.integers(FIRST_ID, vocabulary, tokens)]


class _Connection(asyncio.Protocol):
    """One HTTP connection. At the end of an answer, calls `done(connection)`. If the connection can be used again,
    `is_open` is then True."""

    _transport: asyncio.Transport

    def __init__(self, done: Any) -> None:
        self._done = done
        self.is_open = True
        self.answer: Answer | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def send(self, request: bytes, answer: Answer) -> None:
        self.answer, self._tail, self._head = answer, b"", b""
        self._began = self._last = time.monotonic()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        answer, now = self.answer, time.monotonic()
        if answer is None:
            return
        if self._head is not None:
            data = self._read_head(data, answer)
            if not data:
                return
        if b'"choices":[{' in data or b'"choices": [{' in data:
            if not answer.first:
                answer.first = now - self._began
            else:
                answer.gaps.append(now - self._last)
            self._last = now
        if b'data: {"error"' in data:
            self._end(data[-200:].decode(errors="replace"))
            return
        self._tail = (self._tail + data)[-1024:]
        if self._tail.endswith(END):
            found = USAGE.findall(self._tail)
            answer.tokens = int(found[-1]) if found else 0
            self._end("" if found else "the answer has no usage")

    def _read_head(self, data: bytes, answer: Answer) -> bytes:
        """Read the head of a response. Return the bytes after it, or b"" if more data is needed or the server returned
        an error."""
        self._head += data
        head, blank, rest = self._head.partition(b"\r\n\r\n")
        if not blank:
            return b""
        if b" 200 " not in head.split(b"\r\n", 1)[0]:
            self._end(head.split(b"\r\n", 1)[0].decode(errors="replace"))
            return b""
        self._head = None  # type: ignore[assignment]
        return rest

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self.answer is not None:
            self._end("the server closed the connection")

    def close(self) -> None:
        self.is_open = False
        self._transport.close()

    def _end(self, error: str) -> None:
        assert self.answer is not None
        self.answer.error, self.answer = error, None
        if error:
            self.close()
        self._done(self)


def _requests(work: ClientWork) -> list[bytes]:
    """Return the HTTP requests of all plans."""
    tokenizer: Any = None
    if work.tokenizer:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(work.tokenizer)
    host = urlsplit(work.url).netloc
    auth = f"authorization: Bearer {work.key}\r\n" if work.key else ""
    made = []
    for plan in work.plans:
        ids = prompt_ids(work.seed, plan.conversation, plan.prompt, work.vocabulary)
        fields = {
            "model": work.model, "prompt": tokenizer.decode(ids) if tokenizer else ids, "max_tokens": plan.tokens,
            "temperature": 0.0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        body = msgspec.json.encode(fields)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\n{auth}content-type: application/json\r\n"
        made.append(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    return made


async def _run(work: ClientWork, requests: list[bytes], start: float) -> list[Answer]:
    place = urlsplit(work.url)
    host, port = place.hostname or "127.0.0.1", place.port or 80
    loop, idle, answers = asyncio.get_running_loop(), list[_Connection](), list[Answer]()
    open_answers, all_ended = 0, asyncio.Event()

    def done(connection: _Connection) -> None:
        nonlocal open_answers
        open_answers -= 1
        if connection.is_open:
            idle.append(connection)
        if not open_answers:
            all_ended.set()

    async def send(request: bytes, answer: Answer) -> None:
        nonlocal open_answers
        while idle:
            connection = idle.pop()
            if connection.is_open:
                break
        else:
            try:
                _, connection = await loop.create_connection(lambda: _Connection(done), host, port)
            except OSError as error:
                answer.error = str(error)
                return
        open_answers += 1
        all_ended.clear()
        connection.send(request, answer)

    for plan, request in zip(work.plans, requests, strict=True):
        wait = start + plan.at - time.monotonic()
        if wait > 0:
            await asyncio.sleep(wait)
        answers.append(Answer(time.monotonic() - start))
        await send(request, answers[-1])
    try:
        async with asyncio.timeout(max(0.0, start + work.limit - time.monotonic())):
            if open_answers:
                await all_ended.wait()
    except TimeoutError:
        pass
    for answer in answers:
        if not answer.tokens and not answer.error:
            answer.error = "no complete answer in time"
    return answers


def main() -> None:
    work = msgspec.json.decode(sys.stdin.buffer.readline(), type=ClientWork)
    requests = _requests(work)
    print("ready", flush=True)
    start = float(sys.stdin.buffer.readline())
    answers = asyncio.run(_run(work, requests, start))
    sys.stdout.buffer.write(msgspec.json.encode(answers))


if __name__ == "__main__":
    main()
