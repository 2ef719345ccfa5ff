"""Encoder-decoder models behind the server: completions of a tiny BART, transcriptions of a tiny Whisper."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kvloom.engine import SamplingParams, Segment
from kvloom.serve.api.transcriptions import read_form, subtitles
from kvloom.serve.errors import ApiError
from kvloom.serve.worker import Add, ImagePrompt
from kvloom.serve.worker.image_prompts import ImagePrompts
from kvloom.serve.worker.messages import Cancel
from kvloom.serve.worker.worker import Worker
from tests.engine.test_encoder_decoder_llm import MOST, segments_of, transcribed
from tests.engines import make_engine
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
    assert text == wanted(task="transcribe") + "\n"  # the language is detected
    translated = client.audio.translations.create(file=clip, model="tiny-whisper", extra_body=more)
    assert translated.text == wanted(task="translate")
    german = client.audio.translations.create(
        file=clip, model="tiny-whisper", extra_body={**more, "language": "de"}
    )
    assert german.text == wanted(language="de", task="translate")
    whole = client.audio.transcriptions.create(file=clip, model="tiny-whisper")  # as long as the model allows
    assert whole.text.startswith(text[:4].strip())
    for options, error in (
        ({"language": "xx"}, "known: de, en"),
        ({"file": ("a.wav", b"RIFF", "audio/wav")}, "not a WAV file"),
        ({"prompt": "Names:"}, "prompt is not supported"),
        ({"response_format": "xml"}, "known: json, text, srt, vtt, verbose_json"),
        ({"timestamp_granularities": ["segment"]}, "needs response_format verbose_json"),
        (
            {"response_format": "verbose_json", "timestamp_granularities": ["word", "segment"]},
            "weights of cross attention",
        ),
    ):
        with pytest.raises(openai.BadRequestError, match=error):
            client.audio.transcriptions.create(**{"file": clip, "model": "tiny-whisper", **options})


@pytest.mark.slow
def test_a_long_clip_has_segments_with_time_stamps(tmp_path: Path) -> None:
    path, model, processor = whisper_folder(tmp_path, hop=100, ends=True)
    samples = recording(1, 2.6, RATE)
    clip = ("clip.wav", wav(samples, RATE, 4), "audio/wav")
    with running(path, "--name", "tiny-whisper", "--pool", "4MiB") as server:
        client, more = server.client(), {"max_tokens": MOST}
        given: dict[str, Any] = {"file": clip, "model": "tiny-whisper", "extra_body": more}
        made = client.audio.transcriptions.create(
            **given, response_format="verbose_json", timestamp_granularities=["segment"]
        )
        wanted = segments_of(model, processor, samples, return_timestamps=True)
        assert [one.tokens for one in made.segments] == [tokens for _, _, tokens in wanted]
        times = [(one.start, one.end) for one in made.segments]
        assert times == [(pytest.approx(start), pytest.approx(end)) for start, end, _ in wanted]
        assert (made.language, made.duration, made.task) == ("en", 2.6, "transcribe")
        plain = client.audio.transcriptions.create(**given)
        assert plain.text == made.text
        assert plain.usage.output_tokens == sum(len(one.tokens) for one in made.segments)
        titles = client.audio.transcriptions.create(**given, response_format="srt")
        assert titles.startswith("1\n00:00:00,000 --> 00:00:00,080\n")
        assert titles.count("-->") == len(wanted)


def test_a_transcription_can_be_cancelled_between_windows(tmp_path: Path) -> None:
    path, model, processor = whisper_folder(tmp_path, hop=100, ends=True)
    engine = make_engine(model, 4 << 20, tokenizer=processor.tokenizer)
    assert engine.vision is not None
    worker = Worker(engine, images=ImagePrompts(str(path), engine.vision, processor))
    clip, params = wav(recording(1, 2.6, RATE), RATE, 4), SamplingParams(max_tokens=MOST, temperature=0)
    prompt = ImagePrompt("", [], False, 64, audio=[clip], task="transcribe")
    worker.handle(Add(1, [0], params, image_prompt=prompt))
    worker.handle(Add(2, [0], params, image_prompt=prompt))
    deltas: list[Any] = []
    ends = time.monotonic() + 120
    while engine.vision.encoder_runs < 3 and time.monotonic() < ends:  # the third window of both
        worker.step()
    worker.handle(Cancel(2))
    while not deltas and time.monotonic() < ends:
        found = worker.step()
        deltas += found.deltas if found is not None else []
    [delta] = deltas
    assert (delta.id, delta.transcript.language) == (1, "en")
    assert delta.tokens == delta.transcript.tokens
    assert not engine.busy
    engine.cache.take_copies()
    assert engine.cache.stats()["in_use_pages"] == 0


def test_subtitles_have_a_clock_and_numbers() -> None:
    segments = [Segment(0.5, 61.25, " One ", [1]), Segment(61.25, 3661.0, "Two", [2])]
    assert subtitles(segments, "srt") == (
        "1\n00:00:00,500 --> 00:01:01,250\nOne\n\n2\n00:01:01,250 --> 01:01:01,000\nTwo\n"
    )
    assert subtitles(segments[:1], "vtt") == "WEBVTT\n\n00:00:00.500 --> 00:01:01.250\nOne\n"


def test_a_form_is_split_into_its_fields() -> None:
    body = (
        b'--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm\r\n'
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
        b"\r\n--y\r\n\x00\r\r\n--x--\r\n"
    )
    assert read_form(body) == {"model": b"m", "file": b"\r\n--y\r\n\x00\r"}
    listed = b'--x\r\nContent-Disposition: form-data; name="a[]"\r\n\r\n'
    assert read_form(listed + b"1\r\n" + listed + b"2\r\n--x--\r\n") == {"a[]": b"1,2"}
    for wrong in (b"", b"{}", body[:-6], b"--x\r\n\r\nm\r\n--x--\r\n", b"--x\r\n" * 100):
        with pytest.raises(ApiError, match="form"):
            read_form(wrong)
