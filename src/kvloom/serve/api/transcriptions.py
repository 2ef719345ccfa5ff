"""POST /v1/audio/transcriptions and /v1/audio/translations, in OpenAI's format: a form with an audio file, for Whisper.

A request runs as a completion. The engine process makes its prompts, from the language and the task, and divides a
long clip into windows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from kvloom.engine import Segment
from kvloom.serve.errors import bad_request
from kvloom.serve.worker import Delta, ImagePrompt, Ready

from .generation import CheckedRequest, CompletionEndpoint
from .prompts import Prompt, PromptEncoder, PromptLimits
from .request_fields import ChatFields, CompletionFields, check_fields
from .responses import CompletionResponse, ResponseBuilder

__all__ = ["TranscriptionsEndpoint", "TranslationsEndpoint", "read_form", "subtitles"]

FORMATS = ("json", "text", "srt", "vtt", "verbose_json")
STAMPED = ("srt", "vtt", "verbose_json")
"""Formats with time stamps."""
WORDS = (
    "timestamp_granularities: time stamps of words need the weights of cross attention, which the attention kernels do "
    "not return: use segment"
)
MAX_PARTS = 64


class _TranscriptionFields(CompletionFields, frozen=True, kw_only=True):
    """A transcription or a translation to English, as a completion."""

    file: bytes
    language: str
    format: str


class TranscriptionsEndpoint(CompletionEndpoint):
    content_type = "multipart/form-data"
    task = "transcribe"

    def read(self, body: bytes) -> CompletionFields:
        form = read_form(body)
        file = form.pop("file", None)
        if not file:
            raise bad_request("file is missing: send a WAV file", "file")
        given = {name: value.decode(errors="replace") for name, value in form.items()}
        for name in ("prompt", "stream", "chunking_strategy", "include[]"):
            if given.pop(name, "").lower() not in ("", "false"):
                raise bad_request(f"{name} is not supported: leave it out", name)
        shape = given.pop("response_format", "json")
        _check_granularities(given.pop("timestamp_granularities[]", ""), shape)
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
            format=shape,
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
        stamped = fields.format in STAMPED
        return msgspec.structs.replace(made, task=self.task, language=fields.language, timestamps=stamped)

    def response(self, request: CheckedRequest) -> ResponseBuilder:
        assert isinstance(request.fields, _TranscriptionFields)
        return _TranscriptionResponse(self.task, request.fields, *request.builder_arguments)


class TranslationsEndpoint(TranscriptionsEndpoint):
    """Translates speech to English. Unlike OpenAI's API, it accepts the language of the speech."""

    task = "translate"


class _TranscriptionResponse(CompletionResponse):
    prefix = "transcription"

    def __init__(self, task: str, fields: _TranscriptionFields, *given: Any) -> None:
        super().__init__(*given)
        self._task, self._format, self._temperature = task, fields.format, fields.temperature
        is_json = fields.format.endswith("json")
        self.content_type = b"application/json" if is_json else b"text/plain; charset=utf-8"

    def whole(self, deltas: list[Delta]) -> bytes:
        [delta] = deltas
        self._count(delta)
        made = delta.transcript
        assert made is not None
        if self._format == "text":
            return f"{made.text}\n".encode()
        if self._format in ("srt", "vtt"):
            return subtitles(made.segments, self._format).encode()
        used = self.usage
        usage: dict[str, Any] = {
            "type": "tokens", "input_tokens": used.prompt, "output_tokens": used.completion,
            "total_tokens": used.prompt + used.completion,
        }  # fmt: skip
        if self._format == "json":
            return msgspec.json.encode({"text": made.text, "usage": usage})
        segments = [
            {
                "id": i, "seek": one.seek, "start": round(one.start, 2), "end": round(one.end, 2), "text": one.text,
                "tokens": one.tokens, "temperature": self._temperature, "avg_logprob": one.avg_logprob,
                "compression_ratio": one.compression_ratio,
            }
            for i, one in enumerate(made.segments)
        ]  # fmt: skip
        answer = {
            "task": self._task, "language": made.language, "duration": round(made.seconds, 3), "text": made.text,
            "segments": segments, "usage": usage,
        }  # fmt: skip
        return msgspec.json.encode(answer)


def subtitles(segments: Sequence[Segment], shape: str) -> str:
    """Return the text of a file with subtitles. `shape` is "srt" or "vtt"."""
    mark = "," if shape == "srt" else "."

    def clock(seconds: float) -> str:
        thousandths = round(seconds * 1000)
        minutes, rest = divmod(thousandths, 60_000)
        return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{mark}{rest % 1000:03}"

    blocks = [] if shape == "srt" else ["WEBVTT\n"]
    for number, one in enumerate(segments, 1):
        name = f"{number}\n" if shape == "srt" else ""
        blocks.append(f"{name}{clock(one.start)} --> {clock(one.end)}\n{one.text.strip()}\n")
    return "\n".join(blocks)


def _check_granularities(given: str, shape: str) -> None:
    """Raise ApiError for time stamps that are not supported. `given` has names, separated by commas."""
    names = [name for name in given.split(",") if name]
    name = "timestamp_granularities"
    if names and shape != "verbose_json":
        raise bad_request(f"{name} needs response_format verbose_json", name)
    if "word" in names:
        raise bad_request(WORDS, name)
    if set(names) - {"segment"}:
        raise bad_request(f"{name} {given[:64]!r} is not known; known: segment", name)


def read_form(body: bytes) -> dict[str, bytes]:
    """Return the fields of a form (multipart/form-data). The boundary is the first line of the body. The values of a list,
    such as `include[]`, are joined by commas. Raises ApiError for another body."""
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
        key = name[1].decode(errors="replace")
        form[key] = form[key] + b"," + value if key in form and key.endswith("[]") else value
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
