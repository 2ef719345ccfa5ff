"""Encoder-decoder models by `LLM` and `kvloom generate`: texts, clips and the first tokens of the decoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvloom.cli import main
from kvloom.engine import LLM, SamplingParams
from tests.models.audio_folder import recording, wav
from tests.models.encoder_decoder_folders import RATE, bart_folder, whisper_folder
from tests.models.tiny_encoder_decoders import NEW, expected

GREEDY = SamplingParams(max_tokens=NEW, temperature=0)


def open_llm(path: Path) -> LLM:
    return LLM(str(path), dtype="float32", device="cpu", pool_bytes=4 << 20)


def transcribed(model: Any, processor: Any, samples: Any, **options: Any) -> list[int]:
    """The new tokens of Whisper's own generate()."""
    features = processor.feature_extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
    with torch.inference_mode():
        found = model.generate(features, max_new_tokens=NEW, do_sample=False, **options)
    tokens: list[int] = found[0].tolist()
    return tokens[-NEW:]


def test_a_text_is_the_input_of_the_encoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, model, tokenizer = bart_folder(tmp_path)
    llm = open_llm(path)
    ids = tokenizer("hello there")["input_ids"]
    wanted = expected("bart", model, ids)[1:]
    for prompt in ("hello there", ids):
        [found] = llm.generate(prompt, GREEDY)
        assert found.outputs[0].token_ids == wanted
        assert found.prompt_token_ids == [2]  # the prompt of the decoder
    assert found.outputs[0].text == tokenizer.decode(wanted)
    assert "".join(delta.text for delta in llm.stream("hello there", GREEDY)) == tokenizer.decode(wanted)
    [after] = llm.generate({"prompt": "hello there", "decoder_prompt": "abc"}, GREEDY)
    begun = [2, *tokenizer("abc")["input_ids"]]
    assert after.outputs[0].token_ids == expected("bart", model, ids, begun)[len(begun) :]
    command = ["generate", str(path), "hello there", "--max-tokens", str(NEW), "--temperature", "0", "--json"]
    assert main([*command, "--dtype", "float32", "--device", "cpu", "--pool", "4MiB"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["outputs"][0]["token_ids"] == wanted


def test_a_clip_is_the_input_of_whispers_encoder(tmp_path: Path) -> None:
    path, model, processor = whisper_folder(tmp_path)
    llm, samples = open_llm(path), recording(1, rate=RATE)
    wanted = transcribed(model, processor, samples, language="en", task="transcribe")
    clip = wav(samples, RATE, 4)
    for prompt in ("", "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>", []):
        [found] = llm.generate({"prompt": prompt, "audio": [clip]}, GREEDY)
        assert found.outputs[0].token_ids == wanted
        assert len(found.prompt_token_ids) == 4
    assert found.num_cached_tokens == 3
    assert llm.engine.vision is not None
    assert llm.engine.vision.encoder_runs == 1
    german = "<|startoftranscript|><|de|><|translate|><|notimestamps|>"
    [other] = llm.generate({"prompt": german, "audio": [(samples, RATE)]}, GREEDY)
    assert other.outputs[0].token_ids == transcribed(
        model, processor, samples, language="de", task="translate"
    )
    assert llm.engine.vision.encoder_runs == 1, "the encoder's output does not depend on the language"
    with pytest.raises(ValueError, match=r"longer than the 1\.0 seconds"):
        llm.generate({"prompt": "", "audio": [(recording(1, 1.5, RATE), RATE)]}, GREEDY)
    with pytest.raises(ValueError, match="needs one audio clip, not 0"):
        llm.generate([2], GREEDY)


def segments_of(
    model: Any, processor: Any, samples: Any, **options: Any
) -> list[tuple[float, float, list[int]]]:
    """The segments of Whisper's own generate()."""
    extractor = processor.feature_extractor
    long = {"truncation": False, "padding": "longest"} if len(samples) > extractor.n_samples else {}
    features = extractor(samples, sampling_rate=RATE, return_tensors="pt", **long).input_features
    with torch.inference_mode():
        found = model.generate(
            features, max_new_tokens=MOST, do_sample=False, return_segments=True, task="transcribe", **options
        )
    return [(float(one["start"]), float(one["end"]), one["tokens"].tolist()) for one in found["segments"][0]]


MOST = 12


def test_transcripts_have_generates_languages_segments_and_windows(tmp_path: Path) -> None:
    path, model, processor = whisper_folder(tmp_path, hop=100, ends=True)
    llm, params = open_llm(path), SamplingParams(max_tokens=MOST, temperature=0)
    clips = [(recording(seed, seconds, RATE), RATE) for seed, seconds in ((1, 0.7), (1, 2.6), (2, 2.6))]
    found = llm.transcribe(clips, timestamps=True, params=params)
    assert {one.language for one in found} == {"de", "en"}, "both languages are detected"
    for (samples, _), made in zip(clips, found, strict=True):
        wanted = segments_of(model, processor, samples, return_timestamps=True)
        assert [one.tokens for one in made.segments] == [tokens for _, _, tokens in wanted]
        times = [time for one in made.segments for time in (one.start, one.end)]
        assert times == pytest.approx([time for start, end, _ in wanted for time in (start, end)])
        assert made.seconds == len(samples) / RATE
    assert len(found[1].segments) > 3, "the clip has several windows, and a window several segments"
    assert found[1].finish_reason == "length"
    assert all(one.avg_logprob < 0 for made in found for one in made.segments)
    [plain] = llm.transcribe(clips[0], params=params)
    assert [plain.tokens] == [tokens for _, _, tokens in segments_of(model, processor, clips[0][0])]
    assert (plain.segments[0].start, plain.segments[0].end) == (0, 0.7)
    [english] = llm.transcribe(clips[0], language="en", timestamps=True, params=params)
    wanted = segments_of(model, processor, clips[0][0], return_timestamps=True, language="en")
    assert [one.tokens for one in english.segments] == [tokens for _, _, tokens in wanted]
    assert english.language == "en" != found[0].language
    [whole] = llm.transcribe(clips[1])  # as long as the model allows
    assert whole.seconds == 2.6
    assert llm.engine.cache.stats()["in_use_pages"] == 0


def test_transcripts_that_cannot_be_made_are_refused(tmp_path: Path) -> None:
    llm = open_llm(whisper_folder(tmp_path)[0])
    clip = (recording(1, rate=RATE), RATE)
    with pytest.raises(ValueError, match="known: de, en"):
        llm.transcribe(clip, language="xx")
    with pytest.raises(ValueError, match="one answer, not 2"):
        llm.transcribe(clip, params=SamplingParams(n=2))
    assert llm.engine.vision is not None
    llm.engine.vision.first_timestamp = None
    with pytest.raises(ValueError, match="need no_timestamps_token_id"):
        llm.transcribe(clip, timestamps=True)
    text = open_llm(bart_folder(tmp_path)[0])
    with pytest.raises(ValueError, match="does not transcribe audio"):
        text.transcribe(clip)
    with pytest.raises(ValueError, match="timestamps needs a Whisper model"):
        text.generate("hello", SamplingParams(timestamps=True))
