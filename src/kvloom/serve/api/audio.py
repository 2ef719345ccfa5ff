"""The audio clips of a request: base64 in `input_audio` parts, and data URLs in `audio_url` parts. Nothing is fetched
from the network.

This module reads only bytes and headers. The engine process decodes the samples. Call the functions outside the event
loop.
"""

from __future__ import annotations

from typing import Any

from kvloom.combinations import refused
from kvloom.engine import wav_seconds
from kvloom.serve.auth import Limits
from kvloom.serve.errors import bad_request

from .images import URL_CHARACTERS, decode_base64

__all__ = ["AUDIO_PARTS", "RequestAudio"]

AUDIO_PARTS = ("input_audio", "audio_url")
"""Types of content parts with an audio clip."""


class RequestAudio:
    """Collects the audio clips of one request within the server's limits. `refusal` is the reason why the model accepts
    no audio, or "" if it accepts audio.
    """

    def __init__(self, limits: Limits, model: str, refusal: str) -> None:
        self.found: list[bytes] = []
        self._limits, self._model, self._refusal = limits, model, refusal
        self._bytes, self._seconds = 0, 0.0

    def add(self, part: dict[str, Any], where: str) -> None:
        """Read the clip of a content part (a part of a message). `where` names the part in error messages. Raises
        ApiError if the clip is invalid or exceeds a limit."""
        self._check_count(where, "messages")
        text = _of_url(part, where) if part["type"] == "audio_url" else _of_fields(part, where)
        self._check_bytes(max(0, len(text) * 3 // 4 - 2), where, "messages")
        self._add(decode_base64(text, f"{where}: the audio"), where, "messages")

    def add_file(self, data: bytes, param: str) -> None:
        """Read the clip of a form. `param` is the name of its field. Raises ApiError if the clip is invalid or exceeds a
        limit."""
        self._check_count(param, param)
        self._check_bytes(len(data), param, param)
        self._add(data, param, param)

    def _check_count(self, where: str, param: str) -> None:
        if self._refusal:
            raise bad_request(
                refused("audio, model", where=where, model=self._model, reason=self._refusal), param
            )
        if len(self.found) >= self._limits.clips:
            raise bad_request(
                f"{where}: more than {self._limits.clips} audio clips, the limit of a request (--max-audio-clips): send "
                "fewer",
                param,
            )

    def _check_bytes(self, count: int, where: str, param: str) -> None:
        self._bytes += count
        if self._bytes > self._limits.audio_bytes:
            raise bad_request(
                f"{where}: the audio clips of the request have {self._bytes:,} bytes; the limit is "
                f"{self._limits.audio_bytes:,} (--max-audio-bytes): send shorter ones",
                param,
            )

    def _add(self, data: bytes, where: str, param: str) -> None:
        try:
            self._seconds += wav_seconds(data)
        except ValueError as error:
            raise bad_request(f"{where}: {error}", param) from None
        if self._seconds > self._limits.audio_seconds:
            raise bad_request(
                f"{where}: the audio clips of the request last {self._seconds:.1f} seconds; the limit is "
                f"{self._limits.audio_seconds:g} (--max-audio-seconds): send shorter ones",
                param,
            )
        self.found.append(data)


def _of_fields(part: dict[str, Any], where: str) -> str:
    """Return the base64 text of an `input_audio` part."""
    given = part.get("input_audio")
    if not isinstance(given, dict) or not isinstance(given.get("data"), str):
        raise bad_request(
            f'{where}: a part of type input_audio needs {{"input_audio": {{"data": BASE64, "format": "wav"}}}}',
            "messages",
        )
    form = given.get("format", "wav")
    if form != "wav":
        raise bad_request(
            f"{where}: audio of format {str(form)[:64]!r} is not supported: send wav", "messages"
        )
    data: str = given["data"]
    return data


def _of_url(part: dict[str, Any], where: str) -> str:
    """Return the base64 text of an `audio_url` part."""
    given = part.get("audio_url")
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str):
        raise bad_request(
            f'{where}: a part of type audio_url needs {{"audio_url": {{"url": "data:…"}}}}', "messages"
        )
    head, comma, body = url.partition(",")
    if not head[:URL_CHARACTERS].lower().startswith("data:"):
        raise bad_request(
            f"{where}: audio URL {url[:URL_CHARACTERS]!r}: nothing is fetched from the network: send a data: URL with "
            "base64",
            "messages",
        )
    if not comma or not head.lower().endswith(";base64"):
        raise bad_request(
            f"{where}: a data URL needs base64, such as data:audio/wav;base64,UklGR…", "messages"
        )
    return body
