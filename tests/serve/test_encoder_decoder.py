"""Encoder-decoder models behind the server: completions of a tiny BART, transcriptions of a tiny Whisper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kvloom.serve.api.transcriptions import read_form
from kvloom.serve.errors import ApiError
from tests.engine.test_encoder_decoder_llm import transcribed
from tests.models.audio_folder import recording, wav
from tests.models.encoder_decoder_folders import RATE, bart_folder, whisper_folder
from tests.models.tiny_encoder_decoders import NEW, expected
from tests.serve.running import Running, running


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    return bart_folder(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def translating(made: tuple[Path, Any, Any]) -> Iterator[Running]:
    with running(made[0], "--name", "tiny-bart", "--pool", "4MiB") as found:
        yield found


@pytest.mark.slow
def test_the_prompt_of_a_completion_is_the_input_of_the_encoder(
    translating: Running, made: tuple[Path, Any, Any]
) -> None:
    _, model, tokenizer = made
    body = {"model": "tiny-bart", "temperature": 0, "max_tokens": NEW, "return_token_ids": True}
    for text in ("hello there", "hello there", "x" * 128):  # the limits of encoder and decoder are separate
        ids = tokenizer(text)["input_ids"]
        status, _, answer = translating.send("POST", "/v1/completions", {**body, "prompt": text})
        assert status == 200, answer
        assert answer["choices"][0]["token_ids"] == expected("bart", model, ids)[1:]
        assert answer["usage"]["prompt_tokens"] == len(ids)
    status, _, answer = translating.send("POST", "/v1/completions", {**body, "prompt": "x" * 129})
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    status, _, answer = translating.send(
        "POST", "/v1/completions", {**body, "prompt": "x", "max_tokens": 128}
    )
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    return whisper_folder(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def hearing(heard: tuple[Path, Any, Any]) -> Iterator[Running]:
    with running(heard[0], "--name", "tiny-whisper", "--pool", "4MiB") as found:
        yield found


@pytest.mark.slow
def test_transcriptions_and_translations_give_generates_text(
    hearing: Running, heard: tuple[Path, Any, Any]
) -> None:
    _, model, processor = heard
    samples = recording(1, rate=RATE)
    clip = ("clip.wav", wav(samples, RATE, 4), "audio/wav")
    client, more = hearing.client(), {"max_tokens": NEW}

    def wanted(**options: Any) -> str:
        tokens = transcribed(model, processor, samples, **options)
        return str(processor.tokenizer.decode(tokens, skip_special_tokens=True)).strip()

    for language in ("de", "en"):
        found = client.audio.transcriptions.create(
            file=clip, model="tiny-whisper", language=language, extra_body=more
        )
        assert found.text == wanted(language=language, task="transcribe")
    text = client.audio.transcriptions.create(
        file=clip, model="tiny-whisper", response_format="text", extra_body=more
    )
    assert text == found.text + "\n"  # English is the default
    translated = client.audio.translations.create(file=clip, model="tiny-whisper", extra_body=more)
    assert translated.text == wanted(language="en", task="translate")
    german = client.audio.translations.create(
        file=clip, model="tiny-whisper", extra_body={**more, "language": "de"}
    )
    assert german.text == wanted(language="de", task="translate")
    whole = client.audio.transcriptions.create(file=clip, model="tiny-whisper")  # as long as the model allows
    assert whole.text.startswith(found.text[:4])
    for options, error in (
        ({"language": "xx"}, "known: de, en"),
        ({"file": ("a.wav", b"RIFF", "audio/wav")}, "not a WAV file"),
        ({"prompt": "Names:"}, "prompt is not supported"),
        ({"response_format": "srt"}, "known: json, text"),
    ):
        with pytest.raises(openai.BadRequestError, match=error):
            client.audio.transcriptions.create(**{"file": clip, "model": "tiny-whisper", **options})


def test_a_form_is_split_into_its_fields() -> None:
    body = (
        b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n'
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
        b"\r\n--y\r\n\x00\r\r\n--x--\r\n"
    )
    assert read_form(body) == {"model": b"m", "file": b"\r\n--y\r\n\x00\r"}
    for wrong in (b"", b"{}", body[:-6], b"--x\r\n\r\nm\r\n--x--\r\n", b"--x\r\n" * 100):
        with pytest.raises(ApiError, match="form"):
            read_form(wrong)
