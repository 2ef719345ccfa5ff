"""Chat templates render the same text as transformers, and end at a limit of characters, time or values."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from kvloom.models.specs import folder_of
from kvloom.serve.api.json_limits import MAX_DEPTH, check_values
from kvloom.serve.api.prompts import PromptEncoder, PromptLimits, load_tokenizer
from kvloom.serve.api.request_fields import ChatFields, CompletionFields
from kvloom.serve.errors import ApiError
from tests.engine.made_tokenizers import byte_fallback, byte_level, words

PLAIN = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
RICH = """{%- macro part(m) -%}
    {%- set text %}{{ m.role | upper }}: {{ m.content | trim }}{% endset -%}
    {{ text }}{% for c in m.tool_calls or [] %}({{ c.function.arguments | tojson }}){% endfor %}
{%- endmacro -%}
{%- set ns = namespace(seen=[], text='') -%}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif -%}
{%- for d in documents or [] %}{{ '=' * 4 ~ d.title + '\n' }}{% endfor -%}
{%- for m in messages -%}
    {%- if m.role == 'skipped' %}{% continue %}{% endif -%}
    {%- set ns.seen = ns.seen + [m.role] -%}
    {%- set ns.text = ns.text ~ loop.index -%}
    {{ part(m) }}
    {%- if m.role == 'assistant' %}{% generation %}{{ m.content.split('</think>')[-1].replace('a', 'bb') }}{% endgeneration %}{% endif -%}
{%- endfor -%}
{{ ns.seen | join('/') }}{{ messages | map(attribute='role') | join(',') }}{{ ', '.join(ns.seen) }}{{ ns.text }}
{%- if enable_thinking %}<think>{% endif -%}
"""
CHAT = [
    {"role": "system", "content": "  be brief "},
    {"role": "user", "content": "héllo\n<b>wörld</b> 'quoted' \"twice\" 你好"},
    {"role": "assistant", "content": "<think>hm</think>a banana", "tool_calls": [{"function": {"name": "f", "arguments": {"city": "Ulm"}}}]},
    {"role": "skipped", "content": "x"},
    {"role": "user", "content": "and \u202e then?  "},
]  # fmt: skip
ROOM = PromptLimits(4096, 4096)


def encode_chat(
    prompts: PromptEncoder, messages: list[dict[str, Any]], room: PromptLimits = ROOM, **more: Any
) -> tuple[str, list[int]]:
    found = prompts.encode_chat(ChatFields(messages=messages, **more), room)
    assert found.text is not None
    return found.text, found.tokens


def with_template(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    tokenizer.chat_template = template
    return tokenizer


MORE: list[dict[str, Any]] = [
    {},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": ["ü"]}}}]},
    {"documents": [{"title": "t", "text": "x"}], "add_generation_prompt": False},
    {"chat_template_kwargs": {"enable_thinking": True}},
]


@pytest.mark.parametrize(
    ("template", "more"),
    [
        *((PLAIN, more) for more in [*MORE, {"continue_final_message": True}]),
        *((RICH, more) for more in MORE),
    ],
)
@pytest.mark.parametrize(
    "make", [byte_level, byte_fallback, words, lambda: load_tokenizer(folder_of("kvloom-llama"))]
)
def test_text_and_tokens_are_those_of_transformers(template: str, make: Any, more: dict[str, Any]) -> None:
    tokenizer = with_template(make(), template)
    fields = {"add_generation_prompt": not more.get("continue_final_message"), **more}
    given = {**fields, **fields.pop("chat_template_kwargs", {})}
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, **given)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert encode_chat(PromptEncoder(tokenizer), CHAT, **more) == (text, ids)
    assert tokenizer.apply_chat_template(CHAT, tokenize=False, **given) == text  # without limits, too


REPEATS = [
    "{% for m in messages %}{{ m['content'] + more }}{% endfor %}",
    "{% for m in messages %}{{ m['content'] }}{{ more }}{% endfor %}",
    "{% macro f() %}{% for m in messages %}{{ more }}{% endfor %}{% endmacro %}{{ f() }}",
    "{% set x %}{% for m in messages %}{{ more }}{% endfor %}{% endset %}{{ x }}",
    "{% set ns = namespace(all=[]) %}{% for m in messages %}{% set ns.all = ns.all + [more] %}{% endfor %}{{ ns.all | join('-') }}",
    "{% set ns = namespace(all=[]) %}{% for m in messages %}{% set ns.all = ns.all + [more] %}{% endfor %}{{ '-'.join(ns.all) }}",
    "{{ ('x' * (messages | length)).replace('x', more) }}",
    "{{ ('x' * (messages | length)) | replace('x', more) }}",
    "{{ more * (messages | length) }}",
    "{{ more.rjust(many) }}",
]


@pytest.mark.parametrize("template", REPEATS)
def test_a_repeating_template_stops_at_the_limit(template: str) -> None:
    """Whole, these texts have 60 MB and more."""
    prompts = PromptEncoder(with_template(byte_level(), template))
    messages = [{"role": "user", "content": "x"}] * 1000
    more = {"more": "y" * 60_000, "many": 70_000_000}
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match="limit of 65,536 characters") as caught:
            encode_chat(prompts, messages, chat_template_kwargs=more)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.status == 400
    assert peak < 30_000_000


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% set x = c['role'] %}{% endfor %}{% endfor %}{% endfor %}",
        "{% for a in messages %}{% for b in messages %}{{ messages | selectattr('role', 'equalto', 'no') | list | length }}{% endfor %}{% endfor %}",
    ],
)
def test_a_slow_template_is_stopped(template: str) -> None:
    prompts = PromptEncoder(with_template(byte_level(), template), template_seconds=0.2)
    began = time.monotonic()
    with pytest.raises(ApiError, match=r"0\.2 seconds"):
        encode_chat(prompts, [{"role": "user", "content": "x"}] * 300)
    assert time.monotonic() - began < 30  # without a limit, much longer, and nothing is raised


@pytest.mark.parametrize(
    "name",
    ["eos_token", "bos_token", "pad_token", "unk_token", "messages", "tools", "documents", "conversation", "chat_template", "tokenize",
     "add_generation_prompt", "continue_final_message", "self", "loop", "namespace", "raise_exception", "range", "_x", "padding"],
)  # fmt: skip
def test_reserved_template_variables_are_refused(name: str) -> None:
    prompts = PromptEncoder(with_template(byte_level(), PLAIN))
    with pytest.raises(ApiError, match=f"'{name}'") as caught:
        encode_chat(prompts, CHAT[:1], chat_template_kwargs={name: "y"})
    assert caught.value.param == "chat_template_kwargs"


def test_values_are_counted_and_nesting_is_bounded() -> None:
    assert check_values([{"ab": "cde"}, ["f", 1, None]], "messages") == 6
    deep: Any = []
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    check_values([deep], "messages")
    with pytest.raises(ApiError, match="64 levels"):
        check_values([[deep]], "messages")
    with pytest.raises(ApiError, match="131,072 values"):
        check_values([[[1] * 70_000, [2] * 70_000]], "messages")


def test_a_failing_template_gives_a_clear_error() -> None:
    prompts = PromptEncoder(
        with_template(
            byte_level(), "{{ 1 // (messages[0].content | int) }}{{ messages[1].content.nothing() }}"
        )
    )
    for content in ("0", "1"):
        with pytest.raises(ApiError, match="rejects") as caught:
            encode_chat(prompts, [{"role": "user", "content": content}] * 2)
        assert caught.value.status == 400


@pytest.fixture(scope="module")
def llama() -> PromptEncoder:
    return PromptEncoder(load_tokenizer(folder_of("kvloom-llama")))


def completion(prompts: PromptEncoder, text: str, room: PromptLimits) -> list[int]:
    (found,) = prompts.encode_completion(CompletionFields(prompt=text), room)
    return found.tokens


def test_a_truncated_prompt_has_the_tokens_of_the_whole(llama: PromptEncoder) -> None:
    """Its text is much longer than what is tokenised of it."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    whole = llama.tokenizer(text)["input_ids"]  # type: ignore[union-attr]
    assert len(text) > 100_000
    for keep in (1, 7, 300, 2000):
        assert completion(llama, text, PromptLimits(4095, 4096, keep)) == whole[-keep:]
    assert (
        completion(llama, text[:500], PromptLimits(4095, 4096, 4000))
        == llama.tokenizer(text[:500])["input_ids"]
    )  # type: ignore[union-attr]


def test_work_on_a_long_text_is_bounded_by_the_tokens_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters that reach the tokenizer are counted."""
    tokenizer = byte_level()
    prompts, read = PromptEncoder(tokenizer), [0]
    encode = type(tokenizer).__call__

    def counted(self: Any, text: str, **more: Any) -> Any:
        read[0] += len(text)
        return encode(self, text, **more)

    monkeypatch.setattr(type(tokenizer), "__call__", counted)
    long = "x" * 8_000_000
    assert completion(prompts, long, PromptLimits(4095, 320, 100)) == tokenizer("x" * 100)["input_ids"]
    assert len(completion(prompts, long, PromptLimits(4095, 320, 4000))) == 4000
    for room in (
        PromptLimits(4095, 320),
        PromptLimits(4095, 320, 5000),
        PromptLimits(65_536, 320, characters=65_536),
    ):
        with pytest.raises(ApiError) as caught:
            completion(prompts, long, room)
        assert caught.value.code == "context_length_exceeded"
    with pytest.raises(ApiError, match="or more"):
        completion(prompts, long[:60_000], PromptLimits(4095, 320))
    assert read[0] < 100_000
