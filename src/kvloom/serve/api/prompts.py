"""Encodes texts and chats as token ids with the model's tokenizer. Runs in the API process, without the engine.

One thread encodes short requests and another encodes long requests, so that long texts do not delay short requests.
Each thread serves tenants in turn. If a text is clearly too long, it is refused before it is encoded completely.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from jinja2.exceptions import TemplateError

from kvloom.combinations import refused
from kvloom.models.specs import known_models
from kvloom.serve.api.control_tokens import MARK_CHARACTERS, ControlTokens, Encode
from kvloom.serve.api.json_limits import check_structure, check_values, paused_gc
from kvloom.serve.api.template_process import TemplateProcess
from kvloom.serve.api.templates import (
    RenderError,
    limit_templates,
    render_limits,
    reserved_names,
)
from kvloom.serve.errors import ApiError, bad_request, context_too_long

from .audio import AUDIO_PARTS, RequestAudio
from .fair_thread import FairThread
from .images import RequestImages
from .request_fields import ChatFields, CompletionFields, check_tokens

__all__ = ["PARTIAL_TOKEN", "Prompt", "PromptEncoder", "PromptLimits", "characters_for", "load_tokenizer"]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
BROKEN = "\ufffd"
PARTIAL_TOKEN = "piece:"
MAX_TOKEN_TEXTS = 1 << 18
LONG_BYTES = 1 << 16
"""Requests with more bytes use the thread for long requests."""
SAMPLE_CHARACTERS = 8
"""A text with at most this many characters per allowed token is encoded at once. A longer text is first encoded in
parts, to count its tokens. The text is refused as soon as it has twice the allowed tokens.
"""
MIN_PIECE_CHARACTERS = 1 << 12
CHARACTERS_PER_TOKEN = 16
"""Largest number of characters per allowed token. Longer texts are refused before encoding."""
MIN_CHARACTERS = 1 << 16
RENDERED_CHARACTERS = 1 << 24
"""Largest number of characters of a rendered chat, if the chat is truncated to its last tokens."""
TAIL_TOKENS = 256
"""When only the end of a text is encoded, at least this many tokens before the kept tokens are encoded too. They are
dropped, because tokens directly after the cut may differ from the tokens of the whole text.
"""
MAX_REASON_CHARACTERS = 500
INFILLING = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - these letters are meant
)
"""The special tokens for infilling: before the text, between text and suffix, and after the suffix."""
ROLE = re.compile(r"[\w .-]{1,64}")
PROBE = "kvloom-probe"
TYPE_KEY = re.compile(r"['\"]type['\"]")

_REFUSALS = (
    TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError
)  # fmt: skip
"""Exceptions that templates raise for messages they do not support."""

Some = TypeVar("Some")


@dataclass(frozen=True, slots=True)
class Prompt:
    """The token ids of a prompt, and its text if known. Each entry of `retain` is a position and a number of seconds:
    pages before the position are retained for this time. The first `public` tokens are the public messages of a chat,
    which all tenants share. `documents` are the token ranges of a chat's document parts.

    With `images` or `audio`, the tokens contain one placeholder per image or clip, which the engine process expands.
    """

    tokens: list[int]
    text: str | None = None
    retain: tuple[tuple[int, float], ...] = ()
    images: tuple[bytes, ...] = ()
    public: int = 0
    documents: tuple[tuple[int, int], ...] = ()
    audio: tuple[bytes, ...] = ()

    @property
    def has_media(self) -> bool:
        """Whether the prompt has images or audio clips."""
        return bool(self.images or self.audio)


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """Limits of a prompt.

    | field        | meaning                                                                  |
    |--------------|--------------------------------------------------------------------------|
    | `tokens`     | largest number of tokens                                                 |
    | `vocab_size` | size of the vocabulary; token ids must be smaller                        |
    | `keep`       | number of tokens at the end of the prompt to keep; None keeps all tokens |
    | `characters` | largest number of characters; None derives it from `tokens`              |
    | `images`     | collects the images of the prompt; None refuses images                   |
    | `audio`      | collects the audio clips of the prompt; None refuses audio               |
    """

    tokens: int
    vocab_size: int
    keep: int | None = None
    characters: int | None = None
    images: RequestImages | None = None
    audio: RequestAudio | None = None

    @property
    def has_media(self) -> bool:
        """Whether images or audio clips were collected."""
        return any(one is not None and one.found for one in (self.images, self.audio))

    @property
    def truncates(self) -> bool:
        """Whether a prompt that is too long is truncated instead of refused."""
        return self.keep is not None and self.keep <= self.tokens

    @property
    def max_characters(self) -> int:
        return self.characters or characters_for(self.tokens)


def characters_for(tokens: int) -> int:
    """Return how many characters a text may have if it may have `tokens` tokens."""
    return max(MIN_CHARACTERS, CHARACTERS_PER_TOKEN * tokens)


def load_tokenizer(model: str, template: str | None = None) -> Any | None:
    """Load the tokenizer of a folder or hub id. Return None if there is no tokenizer. `template` replaces its chat
    template.

    A plain tokenizer.json is loaded without importing torch.
    """
    folder = Path(model)
    if folder.is_dir():
        if not any((folder / name).exists() for name in TOKENIZER_FILES):
            return None
    elif folder.is_file() or model.lower() in known_models():  # only a config
        return None
    if _plain_file(folder):
        from transformers import PreTrainedTokenizerFast as Reader
    else:
        from transformers import AutoTokenizer as Reader
    try:
        found = Reader.from_pretrained(model)
    except (OSError, ValueError, ImportError) as error:
        if folder.is_dir():
            raise ValueError(f"{model}: cannot read its tokenizer: {error}") from None
        return None
    if template is not None:
        found.chat_template = template
    found("")  # initialises padding and truncation before threads share it
    return found


def _plain_file(folder: Path) -> bool:
    try:
        config = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return False
    return (folder / "tokenizer.json").is_file() and config.get("tokenizer_class") in PLAIN_CLASSES


class PromptEncoder:
    """Encodes with one tokenizer. Without a tokenizer, prompts are token ids and answers have no text. Encoding may
    take seconds, so use `run`.
    """

    def __init__(
        self, tokenizer: Any | None, template_seconds: float = 2.0, allow_templates: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.template_seconds = template_seconds
        self._short = FairThread("tokenizer")
        self._long = FairThread("long-tokenizer")
        self._own = FairThread("request-templates")
        self._token_texts: dict[int, str] = {}
        self._reserved: frozenset[str] = frozenset()
        self._control: ControlTokens | None = None
        self._templates: TemplateProcess | None = None
        self._any_control: ControlTokens | None = None
        self._forms = _ContentForms()
        if tokenizer is not None and tokenizer.chat_template:
            limit_templates(tokenizer)
            self._reserved = reserved_names(tokenizer)
            self._control = ControlTokens(tokenizer)
            self._forms = _ContentForms.of(tokenizer)
        if tokenizer is not None and allow_templates:
            self._reserved = reserved_names(tokenizer)
            self._any_control = ControlTokens(tokenizer, any_template=True)
            self._templates = TemplateProcess()

    async def run(self, work: Callable[[], Some], tenant: str, size: int, has_template: bool = False) -> Some:
        """Run `work` for a request of `size` bytes in a thread, and return its result. A thread runs one function
        at a time, and waiting tenants take turns. Requests of more than LONG_BYTES use a second thread. Requests
        with their own chat template (`has_template`) use a third thread, because a template may take long.
        """
        if has_template:
            return await self._own.run(tenant, work)
        return await (self._short if size <= LONG_BYTES else self._long).run(tenant, work)

    def encode_completion(self, fields: CompletionFields, limits: PromptLimits) -> list[Prompt]:
        """Return the prompts of a completion. The request contains them as texts or as token ids. If a text has far too
        many tokens, it is refused before it is encoded completely. Special tokens in a text are recognised, because the
        client writes the whole prompt."""
        given = fields.prompt
        if isinstance(given, str):
            many: list[Any] = [given]
        elif given and set(map(type, given)) == {int}:
            many = [given]
        else:
            many = given
        if not many:
            raise bad_request("prompt is empty: send a text, token ids, or a list of these", "prompt")
        if any(isinstance(item, int) for item in many):
            raise bad_request("prompt mixes token ids with texts or lists: send one kind", "prompt")
        if fields.suffix:
            many = [self._infilling(item, fields.suffix) for item in many]
        texts = [item for item in many if isinstance(item, str)]
        if texts and self.tokenizer is None:
            raise bad_request("this model has no tokenizer: send prompts as token ids", "prompt")
        for item in many:
            if not isinstance(item, str):
                if len(item) > limits.tokens and not limits.truncates:
                    raise context_too_long(len(item), 0, limits.tokens, "prompt")
                check_tokens(item, limits.vocab_size, "prompt")
        if not texts and not fields.echo:
            return [self.truncate(Prompt(ids), limits.keep) for ids in many]
        how = {"add_special_tokens": fields.add_special_tokens is not False}

        def encode(text: str) -> list[int]:
            assert self.tokenizer is not None
            return list(self.tokenizer(text, **how)["input_ids"])

        def make(item: Any) -> Prompt:
            if isinstance(item, str):
                return self.truncate(Prompt(_encode(item, limits, "prompt", encode), item), limits.keep)
            found = self.truncate(Prompt(item), limits.keep)
            return Prompt(found.tokens, self.text(found.tokens)) if fields.echo else found

        return [make(item) for item in many]

    def _infilling(self, prompt: str | list[int], suffix: str) -> str:
        """Return the prompt that makes the model write the text between `prompt` and `suffix`."""
        known = () if self.tokenizer is None else self.tokenizer.get_added_vocab()
        form = next((one for one in INFILLING if all(token in known for token in one)), None)
        if form is None:
            raise bad_request(
                "suffix: this model has no infilling tokens: send a prompt without suffix", "suffix"
            )
        if not isinstance(prompt, str):
            raise bad_request("suffix needs prompts as text, not as token ids", "suffix")
        before, between, after = form
        return before + prompt + between + suffix + after

    def encode_chat(self, fields: ChatFields, limits: PromptLimits) -> Prompt:
        """Return the prompt that the chat template writes. Control tokens in the texts of the request are encoded as
        text. Control tokens of the template become tokens.
        """
        if not fields.messages:
            raise bad_request("messages is empty: send at least one", "messages")
        if fields.chat_template and self._templates is None:
            raise bad_request(
                "chat_template is not allowed: templates are code; use the server's, or start it with --allow-chat-template",
                "chat_template",
            )
        if self.tokenizer is None or not (self.tokenizer.chat_template or fields.chat_template):
            raise bad_request(
                "this model has no chat template: use /v1/completions, or start the server with --chat-template FILE",
                "messages",
            )
        on = bool(fields.continue_final_message)
        generate = not on if fields.add_generation_prompt is None else fields.add_generation_prompt
        if on and generate:
            raise bad_request(
                "continue_final_message and add_generation_prompt exclude each other: set one",
                "continue_final_message",
            )
        more = self._template_variables(fields)
        forms = _ContentForms() if fields.chat_template else self._forms
        messages = [_read_content(i, message, limits, forms) for i, message in enumerate(fields.messages)]
        if limits.has_media and limits.keep is not None:
            raise bad_request(
                "truncate_prompt_tokens cannot truncate a prompt with images or audio: omit it",
                "truncate_prompt_tokens",
            )
        if any("tool_calls" in message for message in messages):
            check_values([messages], "messages")  # now including the parsed arguments of tool calls
        prompt = self._render(
            messages, more, generate, on, bool(fields.add_special_tokens), limits, fields.chat_template
        )
        texts = _document_texts(fields.messages)
        if not texts or prompt.text is None or prompt.has_media or limits.keep is not None:
            return prompt
        return replace(
            prompt, documents=self._document_ranges(prompt, texts, bool(fields.add_special_tokens))
        )

    def _document_ranges(
        self, prompt: Prompt, texts: list[str], special: bool
    ) -> tuple[tuple[int, int], ...]:
        """Return the token ranges of documents in a rendered chat. A token that is only partly inside a document is
        left out. The result is empty in two cases: the tokenizer does not report the positions of tokens, or texts of
        the chat contain control tokens.
        """
        tokenizer, text = self.tokenizer, prompt.text
        if text is None or not getattr(tokenizer, "is_fast", False):
            return ()
        assert tokenizer is not None
        found = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        if list(found["input_ids"]) != prompt.tokens:
            return ()
        offsets = found["offset_mapping"]
        ranges, at, token = [], 0, 0
        for document in texts:
            start = text.find(document, at)
            if start < 0:
                continue
            at = start + len(document)
            while token < len(offsets) and offsets[token][0] < start:
                token += 1
            first = token
            while token < len(offsets) and offsets[token][1] <= at:
                token += 1
            if token > first:
                ranges.append((first, token))
        return tuple(ranges)

    def _template_variables(self, fields: ChatFields) -> dict[str, Any]:
        """Return the template variables besides the messages. Raises ApiError for a reserved name."""
        given = fields.chat_template_kwargs or {}
        for name in given:
            if name in self._reserved or name.startswith("_"):
                raise bad_request(
                    f"chat_template_kwargs: {name[:64]!r} is reserved: use another name, or omit it",
                    "chat_template_kwargs",
                )
        known = {
            "tools": None if fields.tool_choice == "none" else fields.tools,
            "documents": fields.documents,
            "reasoning_effort": fields.reasoning_effort,
        }
        return {name: value for name, value in {**known, **given}.items() if value is not None}

    def _render(
        self,
        messages: list[dict[str, Any]],
        more: dict[str, Any],
        generate: bool,
        on: bool,
        special: bool,
        limits: PromptLimits,
        template: str | None,
    ) -> Prompt:
        """Render the chat template and encode the result. Raises ApiError if the template fails or exceeds a limit.

        - `more`: the template variables besides the messages.
        - `generate`: the prompt ends with the start of an answer.
        - `on`: the answer continues the final message.
        - `special`: the tokenizer adds its special tokens.
        - `template`: the request's own template, or None.
        """
        control = self._any_control if template else self._control
        assert self.tokenizer is not None and control is not None
        tokenizer = self.tokenizer
        most = RENDERED_CHARACTERS if limits.truncates else limits.max_characters
        marked, variables, mark = control.mark(messages, more)
        most += MARK_CHARACTERS if mark else 0
        try:
            if template:
                assert self._templates is not None
                text = self._templates.render(
                    self.template_seconds,
                    most,
                    conversations=[marked],
                    chat_template=template,
                    add_generation_prompt=generate,
                    continue_final_message=on,
                    **tokenizer.special_tokens_map,
                    **variables,
                )
            else:
                with render_limits(most, self.template_seconds):
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
            why = (why.replace(mark, "") if mark else why)[:MAX_REASON_CHARACTERS]
            refused = "the chat template rejects these messages"  # the reason of the template may contain text of the messages
            raise bad_request(f"{refused}: {why}", "messages", logged=refused) from None

        def encode(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=special)["input_ids"])

        images = () if limits.images is None else tuple(limits.images.found)
        audio = () if limits.audio is None else tuple(limits.audio.found)
        if not mark:
            found = Prompt(_encode(text, limits, "messages", encode), text, images=images, audio=audio)
            return self.truncate(found, limits.keep)
        text, wanted, encoder = control.unmark(text, mark, encode, special)
        if limits.has_media:
            if encoder is not encode:  # the model's processor would read control tokens in texts as tokens
                raise bad_request(
                    "messages: with images or audio, texts may not contain control tokens of this model: remove them",
                    "messages",
                )
            return Prompt(_encode(text, limits, "messages", encode), text, images=images, audio=audio)
        return self.truncate(Prompt(_encode(wanted, limits, "messages", encoder), text), limits.keep)

    def truncate(self, prompt: Prompt, keep: int | None) -> Prompt:
        """Return the last `keep` tokens of a prompt. None keeps all."""
        if keep is None or len(prompt.tokens) <= keep:
            return prompt
        ids = prompt.tokens[len(prompt.tokens) - keep :]
        return Prompt(ids, None if prompt.text is None else self.text(ids))

    def text(self, ids: list[int]) -> str:
        """Return the text of token ids."""
        return "" if self.tokenizer is None else str(self.tokenizer.decode(ids))

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens in a part of an answer."""
        if self.tokenizer is None or not text:
            return 0
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def bad_words(self, words: list[str]) -> list[list[int]]:
        """Return the token sequences of words that must not be sampled. Each word has one sequence without a leading
        space. The sequence with a leading space is added if it has the same length and another first token.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise bad_request("this model has no tokenizer: use logit_bias", "bad_words")
        found: list[list[int]] = []
        for word in words:
            alone, spaced = (
                list(tokenizer(text, add_special_tokens=False)["input_ids"])
                for text in (word.lstrip(), " " + word.lstrip())
            )
            if not alone:
                raise bad_request(f"bad_words: {word[:64]!r} has no tokens: remove it", "bad_words")
            found.append(alone)
            if len(spaced) == len(alone) and spaced[0] != alone[0]:
                found.append(spaced)
        return found

    def token_strings(self, ids: list[int]) -> list[str]:
        """Return tokens in the tokenizer's own notation."""
        return [] if self.tokenizer is None else list(self.tokenizer.convert_ids_to_tokens(ids))

    def token_text(self, token: int) -> str:
        """Return the text of a token for log-probabilities. If the token is only a part of a character, return
        PARTIAL_TOKEN, followed by the token in the tokenizer's own notation.
        """
        if self.tokenizer is None:
            return f"{PARTIAL_TOKEN}{token}"
        found = self._token_texts.get(token)
        if found is None:
            if len(self._token_texts) >= MAX_TOKEN_TEXTS:
                self._token_texts.clear()
            found = str(self.tokenizer.decode([token]))
            if BROKEN in found:
                found = f"{PARTIAL_TOKEN}{self.tokenizer.convert_ids_to_tokens(token)}"
            self._token_texts[token] = found
        return found

    def text_offsets(self, ids: list[int], start: int, text: str | None = None) -> tuple[list[int], int]:
        """Return the offset of each token's first character, and the offset after the last token. The first offset is
        `start`.

        Without `text`, the length of a token is the length of its own text. With `text`, offsets are positions in
        `text`. If the text of a token, such as a special token, does not occur in `text` at its offset, the token
        has length 0. Several tokens that form one character have the same offset.
        """
        offsets, at = [], start
        partial: list[int] = []

        def after(piece: str) -> int:
            if text is None or text.startswith(piece, at):
                return at + len(piece)
            # some tokenizers drop the space of a single token
            return at + 1 + len(piece) if text.startswith(f" {piece}", at) else at

        for token in ids:
            piece = self.token_text(token)
            if piece.startswith(PARTIAL_TOKEN):
                offsets.append(at)
                partial.append(token)
                piece = self.text(partial)
                if BROKEN in piece:
                    continue
            elif partial:  # the character was never completed
                at = after(self.text(partial))
                offsets.append(at)
            else:
                offsets.append(at)
            partial.clear()
            at = after(piece)
        return offsets, at


def _encode(text: str, limits: PromptLimits, param: str, encode: Encode) -> list[int]:
    """Return the tokens of a text. If the prompt will be truncated, return only the last tokens: those to keep, and
    some before them.

    Raises ApiError for too many characters, or if the start of the text already has far too many tokens.
    """
    if limits.truncates and limits.keep is not None:
        return _encode_tail(text, limits.keep, param, encode)
    if len(text) > limits.max_characters:
        raise _too_many_characters(len(text), limits.max_characters, param)
    if len(text) > SAMPLE_CHARACTERS * limits.tokens:
        size = max(MIN_PIECE_CHARACTERS, 2 * limits.tokens)
        count = 0
        for start in range(0, len(text), size):
            count += len(encode(text[start : start + size]))
            if count > 2 * limits.tokens:
                raise context_too_long(count, 0, limits.tokens, param, at_least=True)
    return encode(text)


def _encode_tail(text: str, keep: int, param: str, encode: Encode) -> list[int]:
    """Return at least the last `keep` tokens of a text, or all tokens of a shorter text. The time grows with `keep`,
    not with the length of the text.
    """
    size, most = SAMPLE_CHARACTERS * keep + MIN_PIECE_CHARACTERS, characters_for(keep)
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
        f"{param}: a text of {count:,} characters exceeds the limit of {most:,}: shorten it",
        param,
        "context_length_exceeded",
    )


@dataclass(frozen=True, slots=True)
class _ContentForms:
    """The kinds of message content that a chat template supports: texts (`texts`), and lists of parts (`parts`)."""

    texts: bool = True
    parts: bool = True

    @staticmethod
    def of(tokenizer: Any) -> _ContentForms:
        """Return the forms of message contents that the tokenizer's chat template supports: plain texts, lists of parts,
        or both. To find out, render a test message in each form. If both fail, the result is plain texts, so that the
        first request gets the template's own error.
        """

        def writes(content: Any) -> bool:
            try:
                found = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
            except _REFUSALS:
                return False
            return (
                PROBE in found and TYPE_KEY.search(found) is None
            )  # a template without support for lists writes the list itself, with its keys

        parts = writes([{"type": "text", "text": PROBE}])
        return _ContentForms(writes(PROBE) or not parts, parts)

    def check_parts(self, kind: str, where: str) -> None:
        """Raise ApiError unless the template supports lists of parts, which messages with images or audio have. The
        error message names `kind` (images or audio) and `where` (the message)."""
        if not self.parts:
            raise bad_request(
                f"{where}: the chat template has no place for {kind}: start the server with --chat-template FILE",
                "messages",
            )


def _read_content(
    place: int, message: dict[str, Any], limits: PromptLimits, forms: _ContentForms
) -> dict[str, Any]:
    """Return `message` with its content in a form that the template supports. Content without images and audio becomes
    one text, or one text part if the template supports only parts. Content with images or audio becomes a list of
    parts. Raises ApiError for other content. `place` is the index of the message in the request, for error messages.
    """
    where = f"messages[{place}]"
    role = message.get("role")
    if not isinstance(role, str):
        raise bad_request(f"{where}: role must be a string", "messages")
    if ROLE.fullmatch(role) is None:  # templates write the role between control tokens
        raise bad_request(
            f"{where}: role {role[:64]!r} must be 1 to 64 letters, digits, spaces or _.-",
            "messages",
        )
    content = message.get("content")
    if message.get("tool_calls"):
        message = {**message, "tool_calls": _parse_tool_calls(where, message["tool_calls"])}
    if content is None and message["role"] == "assistant":
        content = ""
    if isinstance(content, str):
        return {**message, "content": content if forms.texts else _text_parts(content)}
    if not isinstance(content, list):
        raise bad_request(f"{where}: content must be a string or a list of parts", "messages")
    parts: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else part
        if kind in ("text", "document") and isinstance(part, dict):
            if not isinstance(part.get("text"), str):
                raise bad_request(
                    f"{where}: a content part of type {kind} needs the field text, a string", "messages"
                )
            parts.append({"type": "text", "text": part["text"]})
        elif kind == "image_url" and isinstance(part, dict) and limits.images is not None:
            limits.images.add(part, where)
            forms.check_parts("images", where)
            parts.append({"type": "image"})
        elif kind in AUDIO_PARTS and isinstance(part, dict) and limits.audio is not None:
            limits.audio.add(part, where)
            forms.check_parts("audio", where)
            parts.append({"type": "audio"})
        else:
            raise bad_request(
                f"{where}: content parts of type {kind!r} are not supported: send text", "messages"
            )
    if all(part["type"] == "text" for part in parts):
        text = "".join(part["text"] for part in parts)
        return {**message, "content": text if forms.texts else _text_parts(text)}
    return {**message, "content": parts}


def _document_texts(messages: list[dict[str, Any]]) -> list[str]:
    """Return the texts of all document parts of a chat, without spaces around them, because templates may strip them."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return [text for part in parts if part.get("type") == "document" and (text := part["text"].strip())]


def _text_of(content: str | list[dict[str, Any]]) -> str:
    """Return the text of a content without images and audio."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _text_parts(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}]


def _parse_tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Return tool calls with parsed arguments, as templates expect them."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise bad_request(f"{where}: tool_calls must be a list of objects", "messages")
    found = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                check_structure(function["arguments"].encode())
                with paused_gc():
                    read = msgspec.json.decode(function["arguments"] or "{}")
            except (msgspec.DecodeError, RecursionError):
                raise bad_request(f"{where}: arguments of a tool call must be JSON", "messages") from None
            check_values([read], f"{where}: the arguments of a tool call", "messages")
            call = {**call, "function": {**function, "arguments": read}}
        found.append(call)
    return found


def with_public_prefix(
    fields: ChatFields, prompt: Prompt, encoder: PromptEncoder, limits: PromptLimits
) -> Prompt:
    """Return the prompt of a chat with the number of tokens of its public messages. Raises ApiError 400 for a chat with
    images or audio, because the positions of its tokens are known only after the engine process has expanded them.
    """
    public = 0 if fields.cache is None else fields.cache.public_messages or 0
    if not public:
        return prompt
    if prompt.has_media:
        raise bad_request(refused("public messages, images"), "cache")
    return replace(prompt, public=chat_position(fields, public, prompt, encoder, limits))


def chat_position(
    fields: ChatFields,
    messages: int,
    prompt: Prompt,
    encoder: PromptEncoder,
    limits: PromptLimits,
    characters: int | None = None,
) -> int:
    """Return how many tokens of `prompt`, the prompt of a whole chat, belong to its first `messages` messages. With
    `characters`, the last of these messages is first shortened to this many characters. Return 0 if the template
    refuses these messages alone.

    To find the number, the messages are rendered and encoded alone. The result is the number of their leading tokens
    that equal the first tokens of `prompt`.
    """
    part = [dict(message) for message in fields.messages[:messages]]
    if part and characters is not None:
        part[-1]["content"] = _text_of(part[-1]["content"])[:characters]
    filler = {"role": "user", "content": ""}
    for some in (part, [*part, filler]):
        if not some:
            continue
        try:
            one = msgspec.structs.replace(
                fields, messages=some, add_generation_prompt=False, continue_final_message=None
            )
            tokens = encoder.encode_chat(one, limits).tokens
        except ApiError:
            continue
        pairs = enumerate(zip(tokens, prompt.tokens, strict=False))
        return next((place for place, (a, b) in pairs if a != b), min(len(tokens), len(prompt.tokens)))
    return 0
