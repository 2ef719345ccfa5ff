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
