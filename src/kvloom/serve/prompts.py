"""Text and chats to token ids, by the model's tokenizer. Knows no engine; runs in the server's process.

Threads of its own do the work, so that it stops nobody's answers: one for short requests and one for long ones, as a text of
megabytes takes seconds. One that is plainly too long is not read to its end.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvloom.models.specs import known_models

from .errors import bad_request, too_long
from .fields import ChatFields, CompletionFields

__all__ = ["PIECE", "Prompt", "Prompts", "load_tokenizer"]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
BROKEN = "\ufffd"
PIECE = "piece:"
MOST_NAMES = 1 << 18
PER_MESSAGE = 16
"""Characters that a message counts for beside its own."""
LONG_CHARACTERS = 1 << 16
"""Texts of more than that wait for each other, and for no short one."""
SAMPLE_CHARACTERS = 16
"""Of a text with more than that for each token that may be, a first part is tokenised alone; if it has twice too many
tokens already, the rest cannot help."""

Some = TypeVar("Some")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the text they were made of where that is known."""

    tokens: list[int]
    text: str | None = None


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

    def __init__(self, tokenizer: Any | None) -> None:
        self.tokenizer = tokenizer
        self._short = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="long-tokenizer")
        self._names: dict[int, str] = {}

    async def of_completion(self, fields: CompletionFields, most: int) -> list[Prompt]:
        """The prompts of a completion: one or several, each text or ids. Texts that have far more than `most` tokens are
        refused without counting them all."""
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
        if not texts:
            return [Prompt(ids, self._text(ids) if fields.echo else None) for ids in many]
        if fields.truncate_prompt_tokens is not None:
            most = sys.maxsize  # the rest is cut off

        how = {"add_special_tokens": fields.add_special_tokens is not False}

        def encode() -> list[Prompt]:
            return [
                Prompt(self._encoded(item, most, "prompt", **how), item)
                if isinstance(item, str)
                else Prompt(item, self._text(item) if fields.echo else None)
                for item in many
            ]

        return await self._run(encode, sum(map(len, texts)))

    async def of_chat(self, fields: ChatFields, most: int) -> Prompt:
        """A chat as its template writes it; refused where it plainly has more than `most` tokens."""
        messages = [_plain(i, message) for i, message in enumerate(fields.messages)]
        if not messages:
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
        given = {
            "tools": None if fields.tool_choice == "none" else fields.tools,
            "documents": fields.documents,
            "reasoning_effort": fields.reasoning_effort,
            **(fields.chat_template_kwargs or {}),
        }
        more = {
            name: value
            for name, value in given.items()
            if value is not None and name not in ("chat_template", "tokenize", "conversation")
        }
        how = {"add_special_tokens": bool(fields.add_special_tokens)}
        if fields.truncate_prompt_tokens is not None:
            most = sys.maxsize

        def write() -> Prompt:
            from jinja2.exceptions import TemplateError

            assert self.tokenizer is not None
            try:
                text = self.tokenizer.apply_chat_template(
                    messages,
                    **{
                        **more,
                        "tokenize": False,
                        "add_generation_prompt": generate,
                        "continue_final_message": on,
                    },
                )
            except (TemplateError, ValueError, TypeError, KeyError, IndexError) as error:
                raise bad_request(f"the chat template refuses these messages: {error}", "messages") from None
            return Prompt(self._encoded(text, most, "messages", **how), text)

        return await self._run(write, sum(len(message["content"]) + PER_MESSAGE for message in messages))

    def cut(self, prompt: Prompt, keep: int | None) -> Prompt:
        """A prompt's last `keep` tokens; None keeps all."""
        if keep is None or len(prompt.tokens) <= keep:
            return prompt
        ids = prompt.tokens[len(prompt.tokens) - keep :]
        return Prompt(ids, None if prompt.text is None else self._text(ids))

    async def text(self, ids: list[int]) -> str:
        """The text of token ids."""
        return await self._run(lambda: self._text(ids), len(ids))

    def spelled(self, ids: list[int]) -> list[str]:
        """Tokens as the tokenizer spells them."""
        return [] if self.tokenizer is None else list(self.tokenizer.convert_ids_to_tokens(ids))

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

    def _encoded(self, text: str, most: int, param: str, **how: bool) -> list[int]:
        """A text's tokens. Raises ApiError where its beginning alone is too long by far."""
        assert self.tokenizer is not None
        first = SAMPLE_CHARACTERS * most
        if len(text) > first:
            count = len(self.tokenizer(text[:first], **how)["input_ids"])
            if count > 2 * most:
                raise too_long(count, 0, most, param, at_least=True)
        return list(self.tokenizer(text, **how)["input_ids"])

    async def _run(self, work: Callable[[], Some], characters: int) -> Some:
        thread = self._short if characters <= LONG_CHARACTERS else self._long
        return await asyncio.get_running_loop().run_in_executor(thread, work)


def _plain(place: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is text: parts of text are put together, others are refused."""
    where = f"messages[{place}]"
    if not isinstance(message.get("role"), str):
        raise bad_request(f"{where}: role must be a text", "messages")
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
                read = msgspec.json.decode(function["arguments"] or "{}")
            except (msgspec.DecodeError, RecursionError):
                raise bad_request(f"{where}: the arguments of a tool call must be JSON", "messages") from None
            call = {**call, "function": {**function, "arguments": read}}
        found.append(call)
    return found
