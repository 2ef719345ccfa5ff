"""The offline API, from a folder on disk: text and token ids, in the prompts' order."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import kvloom
from kvloom.cli import main
from kvloom.core import CacheControl
from kvloom.engine import SamplingParams
from tests.models.zoo import expected, tiny

from .made_tokenizers import byte_level, words

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


def test_model_folder_accepts_texts_and_ids(folder: Path) -> None:
    llm = kvloom.LLM(str(folder), pool_bytes=1 << 22, device="cpu")
    prompts = ["w5 w6 w7", [9, 8, 7, 6], "w33"]
    results = llm.generate(prompts, GREEDY, progress=True)
    ids = [[5, 6, 7], [9, 8, 7, 6], [33]]
    wanted = expected(tiny("llama"), ids, 6)
    assert [result.prompt_token_ids for result in results] == ids
    assert [result.prompt_token_ids + result.outputs[0].token_ids for result in results] == wanted
    assert results[0].outputs[0].text == "".join(f" {WORDS[token]}" for token in wanted[0][3:])
    assert [result.prompt for result in results] == ["w5 w6 w7", None, "w33"]
    assert {result.outputs[0].finish_reason for result in results} == {"length"}


def test_embedded_model_is_loaded_by_name() -> None:
    llm = kvloom.LLM("kvloom-llama", pool_bytes=16 << 20, device="cpu")
    assert next(llm.engine.model.parameters()).dtype == torch.float32
    (result,) = llm.generate("def read(path):", kvloom.SamplingParams(max_tokens=4, temperature=0))
    assert result.outputs[0].text == "\n    return read_"
    with pytest.raises(ValueError, match="no embedded model 'kvloom-none'"):
        kvloom.LLM("kvloom-none")


def test_one_or_many_prompts_with_one_or_many_params() -> None:
    llm = kvloom.LLM(tiny("llama"), pool_bytes=1 << 22)
    assert len(llm.generate([5, 6, 7], GREEDY)) == 1
    short = SamplingParams(max_tokens=2, temperature=0)
    results = llm.generate([[5, 6, 7], list(range(3, 40))], [short, GREEDY])
    assert [len(result.outputs[0].token_ids) for result in results] == [2, 6]
    again = llm.generate([list(range(3, 40))], GREEDY)
    assert again[0].num_cached_tokens == 36
    assert again[0].outputs == results[1].outputs


@pytest.fixture(scope="module")
def speaker() -> kvloom.LLM:
    """Return a tiny Llama with a byte tokenizer; most of its tokens are letters."""
    tokenizer = byte_level("the", " the", "and", " and")
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    return kvloom.LLM(transformers.LlamaForCausalLM(config), pool_bytes=1 << 22, tokenizer=tokenizer)


DRAWN = SamplingParams(max_tokens=60, temperature=1.0, seed=3, ignore_eos=True)


def test_streamed_deltas_match_generate(speaker: kvloom.LLM) -> None:
    prompts = ["once upon", "Grüße, 世"]
    for params in (
        DRAWN,
        replace(DRAWN, n=3, logprobs=2),
        replace(DRAWN, seed=8, stop=["e", "zz"], ignore_eos=False),
    ):
        results = speaker.generate(prompts, params)
        deltas = list(speaker.stream(prompts, params))
        assert len(deltas) > 2 * params.n
        for i, result in enumerate(results):
            for done in result.outputs:
                mine = [delta for delta in deltas if (delta.prompt, delta.index) == (i, done.index)]
                assert "".join(delta.text for delta in mine) == done.text
                assert [token for delta in mine for token in delta.token_ids] == done.token_ids
                assert [delta.finish_reason for delta in mine] == [None] * (len(mine) - 1) + [
                    done.finish_reason
                ]
                if done.logprobs is not None:
                    assert [one for delta in mine for one in delta.logprobs or []] == done.logprobs
                    assert done.cumulative_logprob == pytest.approx(
                        sum(one[t].logprob for t, one in zip(done.token_ids, done.logprobs, strict=True))
                    )
                else:
                    assert done.cumulative_logprob is None


def test_leaving_the_stream_cancels_requests(speaker: kvloom.LLM) -> None:
    stream = speaker.stream(["once", "twice"], replace(DRAWN, n=2))
    assert next(stream).token_ids
    stream.close()  # type: ignore[attr-defined]
    speaker.engine.run()
    assert speaker.engine.cache.stats()["in_use_pages"] == 0
    with pytest.raises(ValueError, match="cannot be streamed: use generate"):
        next(speaker.stream("once", replace(DRAWN, best_of=3)))


def test_stop_text_finishes_a_sample_and_is_removed(speaker: kvloom.LLM) -> None:
    (plain,) = speaker.generate("once upon", DRAWN)
    text = plain.outputs[0].text
    stop = text[20:23]
    for include in (False, True):
        params = replace(DRAWN, stop=["never there", stop], include_stop_str_in_output=include)
        (result,) = speaker.generate("once upon", params)
        done = result.outputs[0]
        assert done.finish_reason == "stop"
        assert done.stop_reason == stop
        assert done.text == text[: text.index(stop) + (len(stop) if include else 0)]
        assert done.token_ids == plain.outputs[0].token_ids[: len(done.token_ids)]
        assert len(done.token_ids) < 60
    late = replace(DRAWN, stop=stop, min_tokens=60)
    assert speaker.generate("once upon", late)[0].outputs[0].text == text


def test_stop_token_finishes_a_sample_and_is_not_decoded(speaker: kvloom.LLM) -> None:
    (plain,) = speaker.generate("once upon", DRAWN)
    stop = plain.outputs[0].token_ids[10]
    place = plain.outputs[0].token_ids.index(stop)
    for stops in ([], ["never there"]):  # with text made while it grows, and at the end
        params = replace(DRAWN, stop_token_ids=(stop,), stop=stops)
        done = speaker.generate("once upon", params)[0].outputs[0]
        assert (done.finish_reason, done.stop_reason) == ("stop", stop)
        assert done.token_ids == plain.outputs[0].token_ids[: place + 1]
        whole = replace(params, include_stop_str_in_output=True)
        assert speaker.generate("once upon", whole)[0].outputs[0].text.startswith(done.text)


def test_output_matches_a_json_schema(speaker: kvloom.LLM) -> None:
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    }
    params = SamplingParams(max_tokens=300, seed=1, n=3, json_schema=schema)
    plain = speaker.generate(["a", "b"], replace(DRAWN, max_tokens=20))
    mixed = [
        params,
        replace(DRAWN, max_tokens=20),
        SamplingParams(max_tokens=90, temperature=0, regex="[a-z]{4}!"),
    ]
    results = speaker.generate(["a", "a", "b"], mixed)
    for done in results[0].outputs:
        assert done.finish_reason == "stop", done
        found = json.loads(done.text)
        assert set(found) == {"name", "ok"}
        assert len(found["name"]) <= 5
    assert results[1].outputs == plain[0].outputs  # others are not touched
    assert re.fullmatch("[a-z]{4}!", results[2].outputs[0].text)
    again = speaker.generate(["a"], params)
    assert [done.text for done in again[0].outputs] == [done.text for done in results[0].outputs]
    with pytest.raises(ValueError, match=r"json_schema: .*strin"):
        speaker.generate("a", SamplingParams(json_schema={"type": "strin"}))
    assert not speaker.engine.busy


def test_command_output_matches_a_json_schema(
    speaker: kvloom.LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    speaker.engine.model.save_pretrained(tmp_path / "model")
    speaker.tokenizer.save_pretrained(tmp_path / "model")
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 3}')
    for given in (str(schema), schema.read_text()):
        assert (
            main(["generate", str(tmp_path / "model"), "a", "--max-tokens", "90", "--json-schema", given])
            == 0
        )
        assert set(json.loads(capsys.readouterr().out)) <= {1, 2}


def test_impossible_grammar_finishes_the_request() -> None:
    pytest.importorskip("llguidance", reason="the extra `grammar` is not installed")
    tokenizer = byte_level()
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    llm = kvloom.LLM(transformers.LlamaForCausalLM(config), pool_bytes=1 << 22, tokenizer=tokenizer)
    (result,) = llm.generate([[5, 6]], SamplingParams(max_tokens=9, temperature=0, regex="zebra"))
    assert (result.outputs[0].finish_reason, result.outputs[0].token_ids) == ("grammar", [])


def test_beams_are_returned_best_first() -> None:
    llm = kvloom.LLM(tiny("llama"), pool_bytes=1 << 22, tokenizer=words())
    (result,) = llm.generate("w5 w6 w7", SamplingParams(max_tokens=6, temperature=0, beam_width=4, n=3))
    assert [done.index for done in result.outputs] == [0, 1, 2]
    totals = [done.cumulative_logprob for done in result.outputs]
    assert totals == sorted(totals, reverse=True)
    assert all(done.text.count(" w") == 6 for done in result.outputs)


def test_refused_prompts_leave_no_request() -> None:
    llm = kvloom.LLM(tiny("llama"), pool_bytes=1 << 22)
    with pytest.raises(ValueError, match="no tokenizer"):
        llm.generate("text", GREEDY)
    with pytest.raises(ValueError, match="2 sampling parameters do not match 1 prompts"):
        llm.generate([[5, 6]], [GREEDY, GREEDY])
    with pytest.raises(ValueError, match="exceed the model's limit of 128"):
        llm.generate([[5, 6], [7] * 200], GREEDY)
    assert not llm.engine.scheduler.busy
    assert llm.engine.cache.stats()["in_use_pages"] == 0
    assert torch.is_inference_mode_enabled() is False


def test_command_accepts_texts_and_ids(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = expected(tiny("llama"), [[5, 6, 7], [9, 8]], 4)
    assert main(["generate", str(folder), "w5 w6 w7", "--tokens", "9 8", "--max-tokens", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    told = ["".join(f" {WORDS[t]}" for t in wanted[0][3:]), "".join(f" {WORDS[t]}" for t in wanted[1][2:])]
    assert lines == told
    assert main(["generate", str(folder), "w5 w6 w7", "--max-tokens", "4", "--stream"]) == 0
    assert capsys.readouterr().out.splitlines() == told[:1]
    stop = WORDS[wanted[0][5]]
    assert main(["generate", str(folder), "w5 w6 w7", "--max-tokens", "4", "--stop", stop]) == 0
    assert capsys.readouterr().out == told[0][: told[0].index(stop)] + "\n"
    drawn = ["--max-tokens", "4", "--n", "3", "--temperature", "1", "--seed", "7"]
    assert main(["generate", str(folder), "w5 w6 w7", *drawn]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main(["generate", str(folder), "w5 w6 w7", "--max-tokens", "2", "--logprobs", "1"]) == 0
    first = json.loads(capsys.readouterr().out)[0]["outputs"][0]["logprobs"][0]
    assert first[str(wanted[0][3])]["decoded_token"] == WORDS[wanted[0][3]]
    assert first[str(wanted[0][3])]["rank"] == 1
    assert main(["generate", str(folder), "w5 w6 w7", "--max-tokens", "1", "--prompt-logprobs", "2"]) == 0
    of_prompt = json.loads(capsys.readouterr().out)[0]["prompt_logprobs"]
    assert of_prompt[0] is None
    with torch.inference_mode():
        odds = tiny("llama")(torch.tensor([[5, 6, 7]])).logits[0].log_softmax(-1)
    for told_of, row, token in zip(of_prompt[1:], odds, (6, 7), strict=False):
        assert told_of[str(token)]["logprob"] == pytest.approx(float(row[token]), abs=1e-4)
        assert len(told_of) in (2, 3)
    assert main(["generate", str(folder), "--tokens", "9,8", "--max-tokens", "4", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown[0]["outputs"][0]["token_ids"] == wanted[1][2:]
    for wrong, said in (
        ([str(folder)], "give a PROMPT"),
        ([str(folder), "--tokens", "9 x"], "integers"),
        ([str(folder), "w5", "--temperature", "-1"], "--temperature: -1 is out of range"),
        ([str(folder), "w5", "--pool", "1KiB"], "is too small"),
        ([str(folder / "nothing"), "w5"], "nothing"),
        ([str(folder), "w5", "w6", "--stream"], "one prompt and one sample"),
        ([str(folder), "w5", "--stream", "--prompt-logprobs", "1"], "without --json, --logprobs or"),
        ([str(folder), "w5", "--n", "2"], "are all the same"),
        ([str(folder), "w5", "--json-schema", "{oops"], "not JSON"),
        ([str(folder), "w5", "--json-schema", "nowhere.json"], "nowhere.json"),
    ):
        assert main(["generate", *wrong]) == 2
        assert said in capsys.readouterr().err


def test_chat_writes_the_prompt_with_the_template() -> None:
    tokenizer = byte_level()
    llm = kvloom.LLM(tiny("llama", vocab_size=len(tokenizer)), pool_bytes=1 << 22, tokenizer=tokenizer)
    hello = [{"role": "user", "content": "hello"}]
    with pytest.raises(ValueError, match="no chat template: use generate"):
        llm.chat(hello)
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{{ mark }}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    ids = tokenizer("[user]hello[assistant]", add_special_tokens=False)["input_ids"]
    assert llm.chat_prompt(hello) == ids
    (one,) = llm.chat(hello, GREEDY)
    assert one.prompt_token_ids == ids
    assert one.outputs == llm.generate([ids], GREEDY)[0].outputs
    first, second = llm.chat([hello, [*hello, {"role": "assistant", "content": "hi"}, *hello]], GREEDY)
    assert first.outputs == one.outputs
    assert len(second.prompt_token_ids) > len(ids)
    assert (
        llm.tokenizer.decode(llm.chat_prompt(hello, add_generation_prompt=False, mark="!")) == "[user]hello!"
    )
    with pytest.raises(ValueError, match="messages is empty"):
        llm.chat([])
    llm.close()


def test_control_decides_what_is_stored_and_shared(folder: Path) -> None:
    llm = kvloom.LLM(str(folder), pool_bytes=1 << 22, device="cpu")
    prompt = [5 + i % 50 for i in range(40)]

    def cached(*controls: CacheControl) -> list[int]:
        return [
            result.num_cached_tokens
            for result in llm.generate([prompt] * len(controls), GREEDY, control=controls)
        ]

    red, blue = CacheControl(tenant="red"), CacheControl(tenant="blue")
    assert cached(CacheControl(store=False)) == [0]
    assert cached(red) == [0]
    assert cached(red)[0] >= 32
    assert cached(blue) == [0]
    assert cached(replace(red, read=False)) == [0]
    with pytest.raises(ValueError, match="2 cache controls do not match 1 prompts"):
        llm.generate([prompt], GREEDY, control=[red, blue])


def test_pinned_prefixes_stay_while_others_are_evicted(folder: Path) -> None:
    llm = kvloom.LLM(str(folder), pool_bytes=1 << 18, device="cpu")
    pinned = [5 + i % 50 for i in range(64)]
    llm.generate([pinned], GREEDY)
    pin = llm.pin(pinned, seconds=1000)
    assert pin.length >= 64
    others = [[3 + (i * 7 + k) % 60 for i in range(90)] for k in range(30)]
    llm.generate(others, GREEDY)
    assert llm.engine.cache.stats()["evictions"]
    assert llm.generate([pinned], GREEDY)[0].num_cached_tokens == 63
    llm.unpin(pin)
    llm.unpin(pin)
    assert llm.engine.cache.inspect.pins() == []
