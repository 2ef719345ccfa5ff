"""Audio clips in requests: from base64 to tokens, and everything that is refused."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvloom.serve.api.audio import RequestAudio
from kvloom.serve.auth import Limits
from kvloom.serve.errors import ApiError
from tests.models.audio_folder import audio_folder, recording, wav
from tests.serve.running import Running, running

NEW = 6


def base(data: bytes) -> str:
    return base64.b64encode(data).decode()


def part(data: bytes, form: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base(data), "format": form}}


def link(url: str) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": url}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    return audio_folder(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def hearing(made: tuple[Path, Any, Any]) -> Iterator[Running]:
    with running(made[0], "--name", "tiny-audio", "--pool", "16MiB", "--max-audio-seconds", "3") as found:
        yield found


def ask(server: Running, content: Any, **fields: Any) -> tuple[int, Any]:
    body = {
        "model": "tiny-audio", "messages": [{"role": "user", "content": content}], "temperature": 0,
        "return_token_ids": True, "max_tokens": NEW, **fields,
    }  # fmt: skip
    status, _, answer = server.send("POST", "/v1/chat/completions", body)
    return status, answer


@pytest.mark.slow
def test_clips_give_generates_tokens_and_hit_the_cache(hearing: Running, made: tuple[Path, Any, Any]) -> None:
    _, model, processor = made
    clips = [wav(recording(1), width=4), wav(recording(2), width=4)]
    heard = [recording(1), recording(2)]
    words = "[user]Compare <|AUDIO|> with <|AUDIO|>.[assistant]"
    given = processor(text=words, audio=heard, add_special_tokens=False, return_tensors="pt")
    with torch.inference_mode():
        found = model.generate(**given, max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0].tolist()
    count = given["input_ids"].shape[1]
    for first in (part(clips[0]), link(f"data:audio/wav;base64,{base(clips[0])}")):
        status, answer = ask(hearing, [text("Compare "), first, text(" with "), part(clips[1]), text(".")])
        assert status == 200, answer
        assert answer["choices"][0]["token_ids"] == found[count:]
        assert answer["usage"]["prompt_tokens"] == count
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == count - 1
    other = [text("Compare "), part(wav(recording(3))), text(" with "), part(clips[1]), text(".")]
    status, answer = ask(hearing, other)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] <= len("[user]Compare ")
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Hear "}, part(clips[0])]}]
    status, _, answer = hearing.send(
        "POST", "/v1/responses", {"model": "tiny-audio", "input": items, "max_output_tokens": NEW}
    )
    assert status == 200, answer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([part(b"ID3 an mp3", "mp3")], "audio of format 'mp3' is not supported: send wav"),
        ([part(b"ID3 not a wav file")], "not a WAV file that can be decoded"),
        ([{"type": "input_audio", "input_audio": {"data": "%%"}}], "the audio is not valid base64"),
        ([{"type": "input_audio"}], "a part of type input_audio needs"),
        ([link("https://example.com/a.wav")], "nothing is fetched from the network"),
        ([link("data:audio/wav,abc")], "a data URL needs base64"),
        ([{"type": "audio_url"}], "a part of type audio_url needs"),
        ([part(wav(recording(1, 1.5)))], "longer than the 1.0 seconds that the model takes"),
        ([part(wav(recording(1, 2.0)))] * 2, "last 4.0 seconds; the limit is 3 (--max-audio-seconds)"),
        ([part(wav(recording(1, rate=16_001), rate=16_001))], "16001 samples per second cannot be converted"),
    ],
)
def test_clips_that_cannot_be_read_are_refused_with_the_reason(
    hearing: Running, content: Any, message: str
) -> None:
    status, answer = ask(hearing, content)
    assert status == 400
    assert message in answer["error"]["message"]


def test_limits_and_models_without_audio() -> None:
    clip = part(wav(recording(1)))
    audio = RequestAudio(Limits(clips=1), "tiny", "")
    audio.add(clip, "messages[0]")
    with pytest.raises(ApiError, match="more than 1 audio clips"):
        audio.add(clip, "messages[0]")
    with pytest.raises(ApiError, match=r"bytes; the limit is 1,000 \(--max-audio-bytes\)"):
        RequestAudio(Limits(audio_bytes=1000), "tiny", "").add(clip, "messages[0]")
    with pytest.raises(ApiError, match="model 'tiny' accepts no audio: it has no ears; send text"):
        RequestAudio(Limits(), "tiny", "it has no ears").add(clip, "messages[0]")
