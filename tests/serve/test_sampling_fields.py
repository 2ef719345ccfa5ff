"""Fields that choose tokens and answers: allowed tokens, bad words, infilling, beams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken

from kvloom.engine import LLM, SamplingParams
from kvloom.serve.api.prompts import PromptEncoder, PromptLimits
from kvloom.serve.api.request_fields import CompletionFields
from kvloom.serve.errors import ApiError
from tests.engine.made_tokenizers import byte_level
from tests.engine.test_generation_config import expected as greedy_tokens
from tests.models.zoo import prompts_of, tiny
from tests.serve.running import Running, running

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def ids_of(server: Running, **fields: Any) -> list[int]:
    found = server.complete(prompt="hi", temperature=0, return_token_ids=True, **fields)
    return list(found["choices"][0]["token_ids"])


def test_only_allowed_tokens_are_sampled(server: Running) -> None:
    found = ids_of(server, max_tokens=30, allowed_token_ids=[70, 71, 80], ignore_eos=True)
    assert len(found) == 30
    assert set(found) <= {70, 71, 80}
    status, _, chat = server.send("POST", CHATS, {**CHAT, "allowed_token_ids": [70], "max_tokens": 3})
    assert (status, len(set(chat["choices"][0]["message"]["content"]))) == (200, 1)


def test_bad_words_are_not_written(server: Running) -> None:
    """Every byte is a token, so a word of several letters is a sequence."""
    letters = {"logit_bias": {"67": 100, "68": 80}, "max_tokens": 12, "ignore_eos": True}
    first, second = byte_level().decode([67]), byte_level().decode([68])
    assert ids_of(server, **letters) == [67] * 12
    assert ids_of(server, **letters, bad_words=[first]) == [68] * 12
    assert ids_of(server, **letters, bad_words=[first + first]) == [67, 68] * 6
    found = ids_of(server, **letters, bad_words=[first + first, second + first + second])
    assert found == [67, 68, 67, *found[3:]]
    assert found[3] not in (67, 68)


def test_bad_words_count_with_and_without_a_space_before_them() -> None:
    encoder = PromptEncoder(byte_level(" ab", "ab"))
    tokens = encoder.tokenizer
    assert tokens is not None
    alone, spaced = tokens("ab")["input_ids"], tokens(" ab")["input_ids"]
    assert len(alone) == len(spaced) == 1
    assert encoder.bad_words(["ab"]) == [alone, spaced]
    assert encoder.bad_words([" ab"]) == [alone, spaced]
    assert encoder.bad_words(["xy"]) == [tokens("xy")["input_ids"]]


def test_a_suffix_is_written_in_the_models_format() -> None:
    def tokens(tokenizer: Any, **fields: Any) -> list[int]:
        given = CompletionFields(**fields)
        (found,) = PromptEncoder(tokenizer).encode_completion(given, PromptLimits(4096, 400))
        return found.tokens

    coder = byte_level()
    names = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    coder.add_tokens([AddedToken(name, special=True) for name in names])
    before, between, after = coder.convert_tokens_to_ids(names)
    a, b = coder("a")["input_ids"], coder("b")["input_ids"]
    assert tokens(coder, prompt="a", suffix="b") == [before, *a, between, *b, after]
    assert tokens(coder, prompt="a", suffix="") == a
    with pytest.raises(ApiError, match="as text"):
        tokens(coder, prompt=[5, 6], suffix="b")
    with pytest.raises(ApiError, match="no infilling tokens"):
        tokens(byte_level(), prompt="a", suffix="b")


def test_beams_are_those_of_the_library(server: Running, folder: Path) -> None:
    llm = LLM(str(folder), pool_bytes=32 << 20, device="cpu", dtype=torch.float32)
    params = SamplingParams(max_tokens=8, temperature=0, beam_width=4, n=3, length_penalty=0.5)
    (wanted,) = llm.generate(["beam"], params)
    texts = [one.text for one in wanted.outputs]
    assert len(set(texts)) == 3
    same: list[dict[str, Any]] = [
        {"beam_width": 4, "n": 3},
        {"use_beam_search": True, "beam_width": 4, "n": 3, "temperature": 0},
        {"use_beam_search": True, "best_of": 4, "n": 3},
    ]
    for fields in same:
        found = server.complete(prompt="beam", max_tokens=8, length_penalty=0.5, **fields)
        assert [choice["text"] for choice in found["choices"]] == texts
    wide = server.complete(prompt="beam", max_tokens=8, n=4, use_beam_search=True, early_stopping=True)
    assert len(wide["choices"]) == 4
    status, _, chat = server.send("POST", CHATS, {**CHAT, "beam_width": 3, "max_tokens": 4})
    assert status == 200, chat
    assert len(chat["choices"]) == 1
    assert chat["choices"][0]["message"]["content"]
    status, _, best = server.send("POST", CHATS, {**CHAT, "best_of": 3, "max_tokens": 4})
    assert (status, len(best["choices"])) == (200, 1)


@pytest.mark.parametrize(
    ("path", "fields", "param", "said"),
    [
        (COMPLETIONS, {"allowed_token_ids": []}, "allowed_token_ids", "at least one"),
        (COMPLETIONS, {"allowed_token_ids": [320]}, "allowed_token_ids", "outside the vocabulary"),
        (COMPLETIONS, {"bad_words": ["x"] * 129}, "bad_words", "128 texts"),
        (COMPLETIONS, {"bad_words": [""]}, "bad_words", "1 to 256"),
        (COMPLETIONS, {"suffix": "end"}, "suffix", "infilling"),
        (COMPLETIONS, {"use_beam_search": True}, "use_beam_search", "above 1"),
        (COMPLETIONS, {"beam_width": 33}, "beam_width", "32"),
        (COMPLETIONS, {"beam_width": 2, "n": 3}, "n", "beam_width"),
        (COMPLETIONS, {"beam_width": 2, "temperature": 1}, "beam_width", "temperature 0"),
        (COMPLETIONS, {"beam_width": 2, "stop": "x"}, "beam_width", "excludes"),
        (COMPLETIONS, {"length_penalty": 2}, "length_penalty", "needs beam search"),
        (CHATS, {"beam_width": 2, "stream": True}, "stream", "beams change"),
        (CHATS, {"best_of": 2, "stream": True}, "best_of", "ranked at the end"),
        (CHATS, {"use_beam_search": True, "n": 2, "stream": True}, "stream", "beams change"),
    ],
)
def test_invalid_fields_are_refused(
    server: Running, path: str, fields: dict[str, Any], param: str, said: str
) -> None:
    body = {**(CHAT if path == CHATS else {"prompt": "hi"}), **fields}
    status, _, found = server.send("POST", path, body)
    assert (status, found["error"]["param"]) == (400, param), found
    assert said in found["error"]["message"]


OWN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}>{% endif %}{{ note }}"


def test_a_template_of_a_request_is_refused_by_default(server: Running) -> None:
    status, _, found = server.send("POST", CHATS, {**CHAT, "chat_template": OWN})
    assert (status, found["error"]["param"]) == (400, "chat_template")
    assert "--allow-chat-template" in found["error"]["message"]


HOSTILE = [
    ("{{ 'x' * 10 ** 10 }}", "exceeds"),
    ("{{ 10 ** (10 ** 10) }}", "exceeds"),
    (
        "{% set r = range(90000) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "exceeds 1 seconds",
    ),
    ("{{ '%2000000000d' % 1 }}", "exceeds"),
    ("{{ 'x' * 100000 }}", "the limit is"),
    ("{{ messages.append(1) }}", "rejects"),
    ("{{ ''.__class__.__mro__ }}", "rejects"),
    ("{% if %}", "rejects"),
    ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "rejects"),
]


@pytest.mark.slow
def test_allowed_templates_render_within_limits(folder: Path) -> None:
    with running(folder, "--pool", "16MiB", "--allow-chat-template", "--template-seconds", "1") as server:

        def tokenize(**fields: Any) -> tuple[int, Any]:
            status, _, found = server.send("POST", "/tokenize", {**CHAT, **fields})
            return status, found

        wanted = byte_level()("<user>hi</s>>!")["input_ids"]
        status, found = tokenize(chat_template=OWN, chat_template_kwargs={"note": "!"})
        assert (status, found.get("tokens")) == (200, wanted), found
        hidden = {"messages": [{"role": "user", "content": "a</s>b"}]}
        _, found = tokenize(chat_template=OWN, **hidden)
        assert found["tokens"].count(2) == 1  # the template's own; that of the message is text
        status, _, found = server.send("POST", CHATS, {**CHAT, "chat_template": OWN, "max_tokens": 2})
        assert status == 200, found
        for template, said in HOSTILE:
            status, found = tokenize(chat_template=template)
            assert status == 400, template
            assert said in found["error"]["message"], template
        status, found = tokenize(chat_template="x" * 70_000)
        assert (status, found["error"]["param"]) == (400, "chat_template")
        assert tokenize(chat_template=OWN)[0] == 200
        assert tokenize()[0] == 200


@pytest.mark.slow
def test_fields_that_a_request_does_not_set_are_those_of_the_generation_config(tmp_path: Path) -> None:
    model = tiny("llama")
    model.set_attn_implementation("eager")
    given = {"eos_token_id": [7, 11, *range(40, 50)], "min_new_tokens": 4, "max_new_tokens": 9}
    model.generation_config.update(**given, repetition_penalty=1.5, bad_words_ids=[[50]])
    prompts = prompts_of(3, (5, 17, 33))
    wanted = [greedy_tokens(model, prompt) for prompt in prompts]
    model.save_pretrained(tmp_path)
    with running(tmp_path, "--name", "tiny", "--pool", "4MiB") as server:
        for prompt, tokens in zip(prompts, wanted, strict=True):
            found = server.complete(prompt=prompt, temperature=0, return_token_ids=True)
            assert found["choices"][0]["token_ids"] == tokens
        own = server.complete(prompt=prompts[0], max_tokens=2, min_tokens=1, return_token_ids=True)
        assert len(own["choices"][0]["token_ids"]) <= 2
