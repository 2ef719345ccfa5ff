"""The offline API, from a folder on disk: text and token ids, in the prompts' order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import kvloom
from kvloom.cli import main
from kvloom.engine.request import SamplingParams
from tests.models.test_attention import expected, tiny

WORDS = [f"w{i}" for i in range(64)]
GREEDY = SamplingParams(max_tokens=6, temperature=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer of 64 words."""
    path = tmp_path_factory.mktemp("model")
    tiny("llama").save_pretrained(path)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(path)
    return path


def test_a_folder_answers_text_and_ids(folder: Path) -> None:
    llm = kvloom.LLM(str(folder), pool_bytes=1 << 22, device="cpu")
    prompts = ["w5 w6 w7", [9, 8, 7, 6], "w33"]
    results = llm.generate(prompts, GREEDY, progress=True)
    ids = [[5, 6, 7], [9, 8, 7, 6], [33]]
    wanted = expected(tiny("llama"), ids, 6)
    assert [result.prompt_token_ids for result in results] == ids
    assert [result.prompt_token_ids + result.outputs[0].token_ids for result in results] == wanted
    assert results[0].outputs[0].text == " ".join(WORDS[token] for token in wanted[0][3:])
    assert {result.outputs[0].finish_reason for result in results} == {"length"}


def test_one_prompt_or_many_and_params_for_each() -> None:
    llm = kvloom.LLM(tiny("llama"), pool_bytes=1 << 22)
    assert len(llm.generate([5, 6, 7], GREEDY)) == 1
    short = SamplingParams(max_tokens=2, temperature=0)
    results = llm.generate([[5, 6, 7], list(range(3, 40))], [short, GREEDY])
    assert [len(result.outputs[0].token_ids) for result in results] == [2, 6]
    again = llm.generate([list(range(3, 40))], GREEDY)
    assert again[0].num_cached_tokens == 36
    assert again[0].outputs == results[1].outputs


def test_what_is_wrong_is_said_and_leaves_nothing_behind() -> None:
    llm = kvloom.LLM(tiny("llama"), pool_bytes=1 << 22)
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.generate("text", GREEDY)
    with pytest.raises(ValueError, match="2 sampling parameters for 1 prompts"):
        llm.generate([[5, 6]], [GREEDY, GREEDY])
    with pytest.raises(ValueError, match="exceed the model's 128"):
        llm.generate([[5, 6], [7] * 200], GREEDY)
    assert not llm.engine.scheduler.busy
    assert llm.engine.cache.stats()["held_pages"] == 0
    assert torch.is_inference_mode_enabled() is False


def test_the_command_goes_on_from_text_and_ids(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = expected(tiny("llama"), [[5, 6, 7], [9, 8]], 4)
    assert main(["generate", str(folder), "w5 w6 w7", "--tokens", "9 8", "--max-tokens", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [" ".join(WORDS[t] for t in wanted[0][3:]), " ".join(WORDS[t] for t in wanted[1][2:])]
    assert main(["generate", str(folder), "--tokens", "9,8", "--max-tokens", "4", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown[0]["outputs"][0]["token_ids"] == wanted[1][2:]
    for wrong, said in (
        ([str(folder)], "give a PROMPT"),
        ([str(folder), "--tokens", "9 x"], "invalid literal"),
        ([str(folder), "w5", "--temperature", "-1"], "must not be negative"),
        ([str(folder), "w5", "--pool", "1KiB"], "is too small"),
        ([str(folder / "nothing"), "w5"], "nothing"),
    ):
        assert main(["generate", *wrong]) == 2
        assert said in capsys.readouterr().err
