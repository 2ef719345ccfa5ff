"""Text and chats to token ids, by the model's tokenizer. Knows no engine; runs in the server's process.

Threads of its own do the work, so that it stops nobody's answers: one for short requests and one for long ones, as a text of
megabytes takes seconds. One that is plainly too long is not read to its end.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from jinja2.exceptions import TemplateError

from kvloom.models.catalog import known_models

from .control_tokens import MARK_ROOM, ControlTokens, Encode
from .errors import ApiError, bad_request, too_long
from .fields import ChatFields, CompletionFields, check_levels, check_tokens, paused_gc
from .templates import RenderError, limit_templates, rendering, reserved_names, weigh

__all__ = ["PIECE", "Prompt", "Prompts", "Room", "fitting_characters", "load_tokenizer"]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
BROKEN = "\ufffd"
PIECE = "piece:"
MOST_NAMES = 1 << 18
PER_MESSAGE = 16
"""Characters that a message counts for beside its own."""
LONG_CHARACTERS = 1 << 16
"""Texts of more than that wait for each other, and for no short one."""
SAMPLE_CHARACTERS = 8
"""A text with more than that for each token that fits is counted piece by piece, and refused at twice the tokens that fit."""
SHORTEST_PIECE = 1 << 12
MOST_CHARACTERS = 16
"""Characters that a text may have for each token that fits; more are refused before they are tokenised."""
LEAST_CHARACTERS = 1 << 16
RENDERED_CHARACTERS = 1 << 24
"""Characters that a chat may have where only its end is kept."""
TAIL_TOKENS = 256
"""Tokens before the kept ones that are tokenised with them: a cut changes the tokens after it, for a few of them."""
LONGEST_REASON = 500
ROLE = re.compile(r"[\w .-]{1,64}")

_REFUSALS = (
    TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError
)  # fmt: skip
"""What templates raise for messages that they were not written for."""

Some = TypeVar("Some")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the text they were made of where that is known."""

    tokens: list[int]
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Room:
    """What prompts may be: `tokens` at most, of which the last `keep` are kept (None: all), ids below `vocabulary`. Texts may
    have `characters`, if that is given, else what could fit."""

    tokens: int
    vocabulary: int
    keep: int | None = None
    characters: int | None = None

    @property
    def cuts(self) -> bool:
        """Whether a prompt that is too long is cut to one that fits."""
        return self.keep is not None and self.keep <= self.tokens

    @property
    def most_characters(self) -> int:
        return self.characters or fitting_characters(self.tokens)


def fitting_characters(tokens: int) -> int:
    """The most characters of a text that is tokenised for so many tokens."""
    return max(LEAST_CHARACTERS, MOST_CHARACTERS * tokens)


def load_tokenizer(model: str, template: str | None = None) -> Any | None:
    """The tokenizer of a folder or hub id, None where there is none; `template` replaces its chat template. Where a folder
    says that its tokenizer.json is all there is to it, torch is not imported."""
    folder = Path(model)
    if folder.is_dir():
        if not any((folder / name).exists() for name in TOKENIZER_FILES):
            return None
    elif folder.is_file() or model.lower() in known_models():  # a config alone
        return None
    if _plain_file(folder):
        from transformers import PreTrainedTokenizerFast as Reader
    else:
        from transformers import AutoTokenizer as Reader
    try:
        found = Reader.from_pretrained(model)
    except (OSError, ValueError, ImportError) as error:
        if folder.is_dir():
            raise ValueError(f"{model}: its tokenizer cannot be read: {error}") from None
        return None
    if template is not None:
        found.chat_template = template
    found("")  # settles padding and truncation, before threads share it
    return found


def _plain_file(folder: Path) -> bool:
    try:
        config = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return False
    return (folder / "tokenizer.json").is_file() and config.get("tokenizer_class") in PLAIN_CLASSES


class Prompts:
    """One tokenizer (or none: then prompts are ids, and answers have no text)."""

    def __init__(self, tokenizer: Any | None, template_seconds: float = 2.0) -> None:
        self.tokenizer = tokenizer
        self.template_seconds = template_seconds
        self._short = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-tokenizer")
        self._names: dict[int, str] = {}
        self._reserved: frozenset[str] = frozenset()
        self._control: ControlTokens | None = None
        if tokenizer is not None and tokenizer.chat_template:
            limit_templates(tokenizer)
            self._reserved = reserved_names(tokenizer)
            self._control = ControlTokens(tokenizer)

    async def of_completion(self, fields: CompletionFields, room: Room) -> list[Prompt]:
        """The prompts of a completion: one or several, each text or ids. Texts that have far more tokens than fit are
        refused without counting them all. Special tokens in a text are recognised: the caller writes the whole prompt."""
        given = fields.prompt
        if isinstance(given, str):
            many: list[Any] = [given]
        elif given and all(isinstance(item, int) for item in given):
            many = [given]
        else:
            many = given
        if not many:
            raise bad_request("prompt is empty: give a text, token ids, or a list of those", "prompt")
        if any(isinstance(item, int) for item in many):
            raise bad_request("prompt mixes token ids with texts or lists: give one kind", "prompt")
        texts = [item for item in many if isinstance(item, str)]
        if texts and self.tokenizer is None:
            raise bad_request("this model has no tokenizer: give prompts as token ids", "prompt")
        for item in many:
            if not isinstance(item, str):
                check_tokens(item, room.vocabulary, "prompt")
                if len(item) > room.tokens and not room.cuts:
                    raise too_long(len(item), 0, room.tokens, "prompt")
        if not texts and not fields.echo:
            return [self.cut(Prompt(ids), room.keep) for ids in many]
        how = {"add_special_tokens": fields.add_special_tokens is not False}

        def encode(text: str) -> list[int]:
            assert self.tokenizer is not None
            return list(self.tokenizer(text, **how)["input_ids"])

        def make(item: Any) -> Prompt:
            if isinstance(item, str):
                return self.cut(Prompt(_encoded(item, room, "prompt", encode), item), room.keep)
            found = self.cut(Prompt(item), room.keep)
            return Prompt(found.tokens, self._text(found.tokens)) if fields.echo else found

        return await self._run(lambda: [make(item) for item in many], sum(map(len, many)))

    async def of_chat(self, fields: ChatFields, room: Room) -> Prompt:
        """A chat as its template writes it; refused where it plainly has more tokens than fit. Control tokens in what the
        request gives are text; those that the template writes are tokens."""
        if not fields.messages:
            raise bad_request("messages is empty: a chat needs at least one", "messages")
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise bad_request(
                "this model has no chat template: use /v1/completions, or start the server with --chat-template FILE",
                "messages",
            )
        on = bool(fields.continue_final_message)
        generate = not on if fields.add_generation_prompt is None else fields.add_generation_prompt
        if on and generate:
            raise bad_request(
                "continue_final_message goes on with the last message, add_generation_prompt begins another: give one",
                "continue_final_message",
            )
        more = self._variables(fields)
        characters = weigh([*fields.messages, *more.values()], "messages")

        def write() -> Prompt:
            messages = [_plain(i, message) for i, message in enumerate(fields.messages)]
            weigh(messages, "messages")  # tool calls were read from texts
            return self._written(messages, more, generate, on, bool(fields.add_special_tokens), room)

        return await self._run(write, characters + PER_MESSAGE * len(fields.messages))

    def _variables(self, fields: ChatFields) -> dict[str, Any]:
        """What the template is given beside the messages. Raises ApiError for a name that a request may not set."""
        given = fields.chat_template_kwargs or {}
        for name in given:
            if name in self._reserved or name.startswith("_"):
                raise bad_request(
                    f"chat_template_kwargs: {name[:64]!r} is set by the server or the model: give another name, or leave it out",
                    "chat_template_kwargs",
                )
        known = {
            "tools": None if fields.tool_choice == "none" else fields.tools,
            "documents": fields.documents,
            "reasoning_effort": fields.reasoning_effort,
        }
        return {name: value for name, value in {**known, **given}.items() if value is not None}

    def _written(
        self,
        messages: list[dict[str, Any]],
        more: dict[str, Any],
        generate: bool,
        on: bool,
        special: bool,
        room: Room,
    ) -> Prompt:
        """The prompt that the chat template writes. Raises ApiError where it refuses, or passes a limit."""
        assert self.tokenizer is not None and self._control is not None
        tokenizer = self.tokenizer
        most = RENDERED_CHARACTERS if room.cuts else room.most_characters
        marked, variables, mark = self._control.mark(messages, more)
        most += MARK_ROOM if mark else 0
        try:
            with rendering(most, self.template_seconds):
                text = tokenizer.apply_chat_template(
                    marked,
                    **variables,
                    tokenize=False,
                    add_generation_prompt=generate,
                    continue_final_message=on,
                )
        except RenderError as error:
            raise bad_request(f"messages: {error}", "messages", "context_length_exceeded") from None
        except _REFUSALS as error:
            why = str(error) or type(error).__name__
            why = (why.replace(mark, "") if mark else why)[:LONGEST_REASON]
            raise bad_request(f"the chat template refuses these messages: {why}", "messages") from None

        def encode(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=special)["input_ids"])

        if not mark:
            return self.cut(Prompt(_encoded(text, room, "messages", encode), text), room.keep)
        text, wanted, encoder = self._control.unmark(text, mark, encode, special)
        return self.cut(Prompt(_encoded(wanted, room, "messages", encoder), text), room.keep)

    def cut(self, prompt: Prompt, keep: int | None) -> Prompt:
        """A prompt's last `keep` tokens; None keeps all."""
        if keep is None or len(prompt.tokens) <= keep:
            return prompt
        ids = prompt.tokens[len(prompt.tokens) - keep :]
        return Prompt(ids, None if prompt.text is None else self._text(ids))

    async def text(self, ids: list[int]) -> str:
        """The text of token ids."""
        return await self._run(lambda: self._text(ids), len(ids))

    async def spelled(self, ids: list[int]) -> list[str]:
        """Tokens as the tokenizer spells them."""
        tokenizer = self.tokenizer
        return (
            []
            if tokenizer is None
            else await self._run(lambda: list(tokenizer.convert_ids_to_tokens(ids)), len(ids))
        )

    def name(self, token: int) -> str:
        """A token as text, for log-probabilities; part of a character is told as the tokenizer spells it."""
        if self.tokenizer is None:
            return f"{PIECE}{token}"
        found = self._names.get(token)
        if found is None:
            if len(self._names) >= MOST_NAMES:
                self._names.clear()
            found = str(self.tokenizer.decode([token]))
            if BROKEN in found:
                found = f"{PIECE}{self.tokenizer.convert_ids_to_tokens(token)}"
            self._names[token] = found
        return found

    def _text(self, ids: list[int]) -> str:
        return "" if self.tokenizer is None else str(self.tokenizer.decode(ids))

    async def _run(self, work: Callable[[], Some], characters: int) -> Some:
        thread = self._short if characters <= LONG_CHARACTERS else self._long
        return await asyncio.get_running_loop().run_in_executor(thread, work)


def _encoded(text: str, room: Room, param: str, encode: Encode) -> list[int]:
    """A text's tokens; of one that is cut, the kept ones and some before them. Raises ApiError where the text has too many
    characters, or its beginning too many tokens by far."""
    if room.cuts and room.keep is not None:
        return _tail(text, room.keep, param, encode)
    if len(text) > room.most_characters:
        raise _too_many_characters(len(text), room.most_characters, param)
    if len(text) > SAMPLE_CHARACTERS * room.tokens:
        size = max(SHORTEST_PIECE, 2 * room.tokens)
        count = 0
        for start in range(0, len(text), size):
            count += len(encode(text[start : start + size]))
            if count > 2 * room.tokens:
                raise too_long(count, 0, room.tokens, param, at_least=True)
    return encode(text)


def _tail(text: str, keep: int, param: str, encode: Encode) -> list[int]:
    """At least the last `keep` tokens of a text, or all. The work is in proportion to `keep`, whatever comes before."""
    size, most = SAMPLE_CHARACTERS * keep + SHORTEST_PIECE, fitting_characters(keep)
    while size < len(text):
        found = encode(text[len(text) - size :])
        if len(found) >= keep + TAIL_TOKENS:
            return found
        if size >= most:
            raise _too_many_characters(len(text), size, param)
        size = min(4 * size, max(most, size + 1))
    return encode(text)


def _too_many_characters(count: int, most: int, param: str) -> ApiError:
    return bad_request(
        f"{param}: a text of {count:,} characters exceeds the {most:,} that are tokenised here: shorten it",
        param,
        "context_length_exceeded",
    )


def _plain(place: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is text: parts of text are put together, others are refused."""
    where = f"messages[{place}]"
    role = message.get("role")
    if not isinstance(role, str):
        raise bad_request(f"{where}: role must be a text", "messages")
    if ROLE.fullmatch(role) is None:  # templates write control tokens around it
        raise bad_request(
            f"{where}: role {role[:64]!r} must be 1 to 64 letters, digits, spaces or _.-: rename it",
            "messages",
        )
    content = message.get("content")
    if message.get("tool_calls"):
        message = {**message, "tool_calls": _calls(where, message["tool_calls"])}
    if content is None and message["role"] == "assistant":
        return {**message, "content": ""}
    if isinstance(content, str):
        return message
    if not isinstance(content, list):
        raise bad_request(f"{where}: content must be a text or a list of parts", "messages")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise bad_request(f"{where}: a part of type {kind!r} cannot be had here; text can", "messages")
        texts.append(part["text"])
    return {**message, "content": "".join(texts)}


def _calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Tool calls as templates want them: arguments are an object, not the text of one."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise bad_request(f"{where}: tool_calls must be a list of objects", "messages")
    found = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                with paused_gc():
                    read = msgspec.json.decode(function["arguments"] or "{}")
            except (msgspec.DecodeError, RecursionError):
                raise bad_request(f"{where}: the arguments of a tool call must be JSON", "messages") from None
            check_levels(f"{where}: the arguments of a tool call", read, "messages")
            call = {**call, "function": {**function, "arguments": read}}
        found.append(call)
    return found
