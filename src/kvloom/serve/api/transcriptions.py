"""POST /v1/audio/transcriptions and /v1/audio/translations, in OpenAI's format: a form with an audio file, for Whisper.

A request runs as a completion. The engine process makes the prompt from the language and the task.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from kvloom.serve.errors import bad_request
from kvloom.serve.worker import Delta, ImagePrompt, Ready

from .generation import CheckedRequest, CompletionEndpoint
from .prompts import Prompt, PromptEncoder, PromptLimits
from .request_fields import ChatFields, CompletionFields, check_fields
from .responses import CompletionResponse, ResponseBuilder

__all__ = ["TranscriptionsEndpoint", "TranslationsEndpoint", "read_form"]

FORMATS = ("json", "text")
MAX_PARTS = 64


class _TranscriptionFields(CompletionFields, frozen=True, kw_only=True):
    """A transcription or a translation to English, as a completion."""

    file: bytes
    language: str
    text_only: bool


class TranscriptionsEndpoint(CompletionEndpoint):
    content_type = "multipart/form-data"
    task = "transcribe"

    def read(self, body: bytes) -> CompletionFields:
        form = read_form(body)
        file = form.pop("file", None)
        if not file:
            raise bad_request("file is missing: send a WAV file", "file")
        given = {name: value.decode(errors="replace") for name, value in form.items()}
        for name in ("prompt", "stream", "timestamp_granularities[]", "chunking_strategy", "include[]"):
            if given.pop(name, "").lower() not in ("", "false"):
                raise bad_request(f"{name} is not supported: leave it out", name)
        shape = given.pop("response_format", "json")
        if shape not in FORMATS:
            raise bad_request(
                f"response_format {shape[:64]!r} is not supported; known: {', '.join(FORMATS)}",
                "response_format",
            )
        fields = _TranscriptionFields(
            prompt="",
            model=given.pop("model", None),
            temperature=_number(given, "temperature", 0.0),
            max_tokens=_whole(given, "max_tokens"),
            seed=_whole(given, "seed"),
            tenant=given.pop("tenant", None),
            cache_salt=given.pop("cache_salt", None),
            file=file,
            language=given.pop("language", ""),
            text_only=shape == "text",
        )
        if given:
            raise bad_request(f"{next(iter(given))[:64]} is not a field of this endpoint: leave it out")
        check_fields(fields)
        return fields

    def prompts(
        self, fields: CompletionFields | ChatFields, prompts: PromptEncoder, limits: PromptLimits
    ) -> list[Prompt]:
        assert isinstance(fields, _TranscriptionFields)
        assert limits.audio is not None
        limits.audio.add_file(fields.file, "file")
        return [Prompt([0], "", audio=(fields.file,))]  # the engine process makes the tokens

    def _image_prompt(
        self, fields: CompletionFields | ChatFields, prompt: Prompt, tenant: str, facts: Ready
    ) -> ImagePrompt | None:
        made = super()._image_prompt(fields, prompt, tenant, facts)
        assert isinstance(fields, _TranscriptionFields)
        assert made is not None
        return msgspec.structs.replace(made, task=self.task, language=fields.language)

    def response(self, request: CheckedRequest) -> ResponseBuilder:
        assert isinstance(request.fields, _TranscriptionFields)
        return _TranscriptionResponse(request.fields.text_only, *request.builder_arguments)


class TranslationsEndpoint(TranscriptionsEndpoint):
    """Translates speech to English. Unlike OpenAI's API, it accepts the language of the speech."""

    task = "translate"


class _TranscriptionResponse(CompletionResponse):
    prefix = "transcription"

    def __init__(self, text_only: bool, *given: Any) -> None:
        super().__init__(*given)
        self._text_only = text_only
        self.content_type = b"text/plain; charset=utf-8" if text_only else b"application/json"

    def whole(self, deltas: list[Delta]) -> bytes:
        [delta] = deltas
        self._count(delta)
        text = str(self._choice(delta)["text"]).strip()
        if self._text_only:
            return f"{text}\n".encode()
        used = self.usage
        usage = {
            "type": "tokens", "input_tokens": used.prompt, "output_tokens": used.completion,
            "total_tokens": used.prompt + used.completion,
        }  # fmt: skip
        return msgspec.json.encode({"text": text, "usage": usage})


def read_form(body: bytes) -> dict[str, bytes]:
    """Return the fields of a form (multipart/form-data). The boundary is the first line of the body. Raises ApiError
    for another body."""
    first, _, _ = body.partition(b"\r\n")
    if not re.fullmatch(rb"--[ -~]{1,70}", first):
        raise bad_request("the request body is not a form: send multipart/form-data with a file")
    parts = (b"\r\n" + body).split(b"\r\n" + first, MAX_PARTS + 2)
    if len(parts) > MAX_PARTS + 2 or not parts[-1].startswith(b"--"):
        raise bad_request(f"the form is not complete, or has more than {MAX_PARTS} fields")
    form: dict[str, bytes] = {}
    for part in parts[1:-1]:
        head, found, value = part.partition(b"\r\n\r\n")
        name = re.search(rb'(?i)content-disposition:[^\r\n]*?\bname="([^"\r\n]{1,100})"', head)
        if not found or name is None:
            raise bad_request("a field of the form has no name")
        form[name[1].decode(errors="replace")] = value
    return form


def _number(given: dict[str, str], name: str, default: float) -> float:
    try:
        return float(given.pop(name, "") or default)
    except ValueError:
        raise bad_request(f"{name} is not a number", name) from None


def _whole(given: dict[str, str], name: str) -> int | None:
    text = given.pop(name, "")
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise bad_request(f"{name} is not a whole number", name)
    return int(text)
