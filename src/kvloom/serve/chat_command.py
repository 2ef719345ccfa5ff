"""`kvloom chat`: a conversation in the terminal, with a model in this process or with a server.

Each line of standard input is one message. If standard input is a pipe, only the answers are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request

from kvloom.arguments import MODEL, SERVER, elapsed, number, server, whole
from kvloom.engine import add_engine_arguments, engine_settings

from .http_client import KEY, fetch, open_url

__all__ = ["arguments", "run"]

HELP = "/reset starts a new conversation, /quit ends it"
READ_SECONDS = 600.0
Messages = list[dict[str, str]]
Answer = Callable[[Messages], Iterator[str]]
"""A function that yields the answer to a conversation in pieces."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to a parser."""
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help=f"{MODEL} (default: kvloom-llama, or the server's)")
    add(
        "--server",
        type=server,
        metavar="URL",
        help=f"chat with a server instead: {SERVER.partition(' (')[0]}",
    )
    add("--api-key", metavar="KEY", help=f"API key of the server (default: ${KEY})")
    add("--system", metavar="TEXT", help="system message")
    add(
        "--max-tokens",
        type=whole(1),
        default=512,
        metavar="N",
        help="most tokens of an answer (default: 512)",
    )
    temperature = "sampling temperature; 0 selects the most likely token (default: 0)"
    add("--temperature", type=number(0), default=0.0, metavar="T", help=temperature)
    add_engine_arguments(parser)
    parser.epilog = f"Commands during the chat: {HELP}."


def run(args: argparse.Namespace) -> int:
    """Chat until /quit or the end of standard input. Return the exit status."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if args.server is not None:
        return _chat(args, _server_answer(args), interactive)
    from kvloom.engine import SamplingParams, check_engine, engine_config
    from kvloom.models.specs import folder_of

    model = args.model or "kvloom-llama"
    settings = engine_settings(args)
    weights = {"load_format": args.load_format, "dtype": args.dtype, "device": args.device}
    check_engine(folder_of(model), engine_config(**settings), **weights)
    with elapsed(f"loading {model}", sys.stderr.isatty()):
        from kvloom.engine import LLM

    llm = LLM(model, threads=args.threads, progress=sys.stderr.isatty(), **weights, **settings)
    try:
        llm.chat_prompt([{"role": "user", "content": ""}])  # reports a missing template at once
        params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature)

        def answer(messages: Messages) -> Iterator[str]:
            for delta in llm.stream(llm.chat_prompt(messages), params):
                yield delta.text

        return _chat(args, answer, interactive)
    finally:
        llm.close()


def _chat(args: argparse.Namespace, answer: Answer, interactive: bool) -> int:
    first: Messages = [] if args.system is None else [{"role": "system", "content": args.system}]
    messages = list(first)
    if interactive:
        print(HELP)
    while (line := _read(interactive)) is not None:
        if line == "/quit":
            break
        if line == "/reset":
            messages = list(first)
        elif line.startswith("/"):
            print(f"unknown command {line.split()[0]!r}; {HELP}", file=sys.stderr)
        elif line:
            messages.append({"role": "user", "content": line})
            text = _print_answer(answer, messages, interactive)
            messages.append({"role": "assistant", "content": text})
    return 0


def _read(interactive: bool) -> str | None:
    """Return the next line without surrounding spaces, or None at the end of standard input. If `interactive`, show a
    prompt."""
    if interactive:
        try:
            return input("> ").strip()
        except EOFError:
            print()
            return None
    line = sys.stdin.readline()
    return line.strip() if line else None


def _print_answer(answer: Answer, messages: Messages, interactive: bool) -> str:
    """Print an answer as it arrives, and return its text. On a terminal, Ctrl-C stops only the answer."""
    text = ""
    pieces = answer(messages)
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
            text += piece
    except KeyboardInterrupt:
        if not interactive:
            raise
    finally:
        getattr(pieces, "close", lambda: None)()
    print(flush=True)
    return text


def _server_answer(args: argparse.Namespace) -> Answer:
    """Return a function that sends messages to a server and yields its answer. If the command line names no model, the
    server's first model is used. The function raises ValueError if the server refuses a request, and OSError if there
    is no server.
    """
    key = args.api_key or os.environ.get(KEY)
    model = args.model or str(fetch(args.server, "/v1/models", key)["data"][0]["id"])

    def answer(messages: Messages) -> Iterator[str]:
        body = {"model": model, "messages": messages, "stream": True}
        body |= {"max_tokens": args.max_tokens, "temperature": args.temperature}
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        request = Request(f"{args.server}/v1/chat/completions", json.dumps(body).encode(), headers)
        try:
            with open_url(request, READ_SECONDS) as stream:
                yield from _events(stream)
        except HTTPError as error:
            raise ValueError(_message(error)) from None
        except URLError as error:
            raise OSError(f"no server at {args.server} ({error.reason})") from None

    return answer


def _events(stream: Any) -> Iterator[str]:
    """Yield the texts of a stream of server-sent events. Raises ValueError for an error event."""
    for line in stream:
        data = line.decode().strip().removeprefix("data: ")
        if not data or data == "[DONE]":
            continue
        event = json.loads(data)
        if "error" in event:
            raise ValueError(event["error"]["message"])
        for choice in event["choices"]:
            yield choice["delta"].get("content") or ""


def _message(error: HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (KeyError, TypeError, ValueError):
        return f"the server returned status {error.code}"
