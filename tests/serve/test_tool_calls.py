"""Tool calls: formats of models, whole and in streams; forced calls; messages of calls and results."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from kvloom.serve.api.answers import ANSWER, TOOL_CALL_PARSERS, AnswerFormats, Piece, last_marker
from kvloom.serve.api.answers.reasoning import DeepSeekReasoning, QwenReasoning, ReasoningParser
from kvloom.serve.api.answers.tool_calls import ForcedCalls, ToolCallParser, detect_parser
from tests.engine.made_tokenizers import byte_level
from tests.serve.running import MODEL, Running, running

HERMES = """{%- if tools %}Tools:{% for t in tools %} {{ t | tojson }}{% endfor %}
Write calls as <tool_call>{"name": …, "arguments": …}</tool_call>.
{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] -%}
<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>
{%- endfor %}{% endfor %}{% if add_generation_prompt %}[assistant]{% if think %}<think>
{% endif %}{% endif %}"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"city": {"enum": ["Oslo", "Ulm"]}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}

A = ("f", '{"a": 1}')
B = ("g-2", '{"b": {"c": "}]\\"é", "d": [1, {}]}}')
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "hello", "hello", []),
    ("hermes", "a < b \n ", "a < b \n ", []),
    ("hermes", 'So.\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "So.", [A]),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {A[1]}}}</tool_call>\n<tool_call>\n{{"name": "g-2", "arguments": {B[1]}}}</tool_call>\n', "", [A, B]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [A]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [A]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),  # the answer was cut
    ("hermes", "<tool_call>nothing", "<tool_call>nothing", []),
    ("hermes", '<tool_call>{"what": 1}</tool_call>', '<tool_call>{"what": 1}</tool_call>', []),
    ("hermes", "<tool_call>", "<tool_call>", []),
    ("hermes", "end <tool_c", "end <tool_c", []),
    ("qwen", f'<tool_call>{{"name": "f", "arguments": {A[1]}}}</tool_call>', "", [A]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [A]),
    ("llama3_json", f' <|python_tag|>{{"name": "f", "parameters": {A[1]}}}; {{"name": "g-2", "parameters": {B[1]}}}', "", [A, B]),
    ("llama3_json", 'The JSON is {"a": 1}', 'The JSON is {"a": 1}', []),
    ("llama3_json", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ("llama3_json", '{"age": 3} years', '{"age": 3} years', []),
    ("mistral", f'Yes[TOOL_CALLS] [{{"name": "f", "arguments": {A[1]}}}, {{"name": "g-2", "arguments": {B[1]}}}]', "Yes", [A, B]),
    ("mistral", f"[TOOL_CALLS]f[ARGS]{A[1]}[TOOL_CALLS]g-2[CALL_ID]x1[ARGS]{B[1]}", "", [A, B]),
    ("mistral", f"[TOOL_CALLS]f{A[1]}", "", [A]),
    ("mistral", "[TOOL_CALLS]f", "[TOOL_CALLS]f", []),
    ("mistral", "[1, 2] [TOOL", "[1, 2] [TOOL", []),
    ("pythonic", '[f(a=1), a.g(b={"c": [True, None, "x)"]})]', "", [A, ("a.g", '{"b": {"c": [true, null, "x)"]}}')]),
    ("pythonic", "[f()]", "", [("f", "{}")]),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "[f(1)]", "[f(1)]", []),
    ("pythonic", "[f(a=open('x'))]", "[f(a=open('x'))]", []),
    ("pythonic", "[f(a=1", "[f(a=1", []),
    ("pythonic", "plain", "plain", []),
    ("pythonic", "[" * 3000, "[" * 3000, []),
    ("qwen3_coder", "a <tool_call>b", "a <tool_call>b", []),
    ("qwen3_coder", "So.\n<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n", "So.", [("f", '{"a": "1"}')]),
    ("qwen3_coder", "<tool_call>\n<function=typed>\n<parameter=n>\n1\n</parameter>\n<parameter=s>\n 1\n\n</parameter>\n<parameter=o>\n{\"x\": [1]}\n</parameter>\n<parameter=b>\nTrue\n</parameter>\n<parameter=m>\nnull\n</parameter>\n</function>\n</tool_call>", "", [("typed", '{"n": 1, "s": " 1\\n", "o": {"x": [1]}, "b": true, "m": null}')]),
    ("qwen3_coder", "<function=f>\n</function>\n</tool_call><tool_call><function=g-2><parameter=q>a < b</parameter></function></tool_call>", "", [("f", "{}"), ("g-2", '{"q": "a < b"}')]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2", "", [("f", '{"a": "1"')]),  # cut
    ("qwen3_coder", "<tool_call>\n<function=f", "<tool_call><function=f", []),
    ("qwen3_coder", "x <function=f\n> y", "x <function=f\n> y", []),
]  # fmt: skip


SCHEMAS: dict[str, Any] = {
    "typed": {
        "properties": {
            "n": {"type": "integer"},
            "s": {"type": "string"},
            "o": {"type": "object"},
            "b": {"type": "boolean"},
            "m": {"type": ["string", "null"]},
        }
    }
}


def parts(pieces: list[Piece]) -> tuple[str, list[tuple[str, str]]]:
    calls: list[list[str]] = []
    for piece in pieces:
        if piece.kind == "call":
            assert (piece.id is not None) == (piece.index == len(calls))
            if piece.id is not None:
                assert piece.name
                calls.append([piece.name, ""])
            calls[-1][1] += piece.text
    content = "".join(piece.text for piece in pieces if piece.kind == "content")
    return content, [(name, arguments) for name, arguments in calls]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_a_text_has_the_same_parts_whole_and_in_pieces(
    name: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for size in (len(text), 1, 2, 3, 7):
        parser = TOOL_CALL_PARSERS[name](SCHEMAS)
        pieces = [p for i in range(0, len(text), size) for p in parser.feed(text[i : i + size])]
        assert parts([*pieces, *parser.finish()]) == (content, calls), size


def test_arguments_arrive_before_their_call_ends() -> None:
    parser = TOOL_CALL_PARSERS["hermes"]()
    seen = [
        parser.feed(t)
        for t in ('<tool_call>{"name": "f", "argum', 'ents": {"a"', ": [1,", " 2]}", "}</tool_")
    ]
    texts = [[(piece.name, piece.text) for piece in pieces] for pieces in seen]
    assert texts == [[], [("f", '{"a"')], [(None, ": [1,")], [(None, " 2]}")], []]


def test_a_long_answer_costs_in_proportion_to_its_length() -> None:
    """Quadratic work on these texts takes minutes."""
    endless = '{"name": "f", "arguments": {"a": "' + "x" * 100_000
    for name, begin in (
        ("hermes", "<tool_call>"),
        ("llama3_json", ""),
        ("mistral", "[TOOL_CALLS]["),
        ("pythonic", "["),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>"),
    ):
        for text in (begin + endless, begin + "[" * 40_000, "<" * 40_000, "word " * 10_000):
            parser = TOOL_CALL_PARSERS[name]()
            count = sum(len(parser.feed(text[i : i + 4])) for i in range(0, len(text), 4))
            assert count + len(parser.finish()) > 0


def test_forced_calls_are_read_and_a_cut_one_has_no_content() -> None:
    for text, wanted in (
        (f'[{{"name": "f", "arguments": {A[1]}}}, {{"name": "g-2", "arguments": {B[1]}}}]', [A, B]),
        ('[{"name": "f", "arguments": {"a', [("f", '{"a')]),
        ('[{"name": "', []),
    ):
        parser = ForcedCalls()
        pieces = [piece for letter in text for piece in parser.feed(letter)]
        assert parts([*pieces, *parser.finish()]) == ("", wanted)


CALL = '{"name": "weather", "arguments": {"city": "Oslo", "days": 1}}'
BAD = '{"name": "weather", "arguments": {"city": "Rome", "days": 1}}'
FREE = '{"name": "clock", "arguments": {"any": [1]}}'
STRICT_CASES = [
    ("hermes", "hello <tool_", True),
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", True),
    ("hermes", f"So.\n<tool_call>{CALL}</tool_call>\n<tool_call>{FREE}</tool_call> bye", True),
    ("hermes", f"<tool_call>\n{BAD}\n</tool_call>", False),
    ("hermes", "a <tool_call> b", False),
    ("llama3_json", "hello {", True),
    ("llama3_json", CALL.replace("arguments", "parameters"), True),
    ("llama3_json", "; ".join([CALL, FREE]).replace("arguments", "parameters"), True),
    ("llama3_json", BAD.replace("arguments", "parameters"), False),
]


@pytest.mark.parametrize(("name", "text", "allowed"), STRICT_CASES)
def test_strict_functions_follow_their_schemas_and_text_is_free(name: str, text: str, allowed: bool) -> None:
    llguidance = pytest.importorskip("llguidance")
    strict = {**WEATHER["function"], "strict": True}  # type: ignore[dict-item]
    formats = AnswerFormats(TOOL_CALL_PARSERS[name])
    rules = formats.strict_grammar([strict, CLOCK["function"]])
    assert rules is not None
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_lark(ANSWER + rules)
    )
    tokens = list(text.encode())
    assert not matcher.is_error(), matcher.get_error()
    found = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
    assert found == allowed


def test_strict_without_effect_is_a_warning() -> None:
    strict = [{"name": "f", "strict": True}]
    hermes = AnswerFormats(TOOL_CALL_PARSERS["hermes"], shows_tools=True)
    assert hermes.tools_warning(False, strict) is None
    assert hermes.strict_grammar([{"name": "f"}]) is None
    for formats in (
        AnswerFormats(TOOL_CALL_PARSERS["pythonic"], shows_tools=True),
        AnswerFormats(TOOL_CALL_PARSERS["hermes"], shows_tools=True, special=True),
    ):
        assert "strict has no effect" in (formats.tools_warning(False, strict) or "")
        assert formats.tools_warning(True, strict) is None


def test_the_format_is_detected_from_the_template() -> None:
    def name(template: str) -> str | None:
        found = detect_parser(template)
        return None if found is None else found.__name__

    assert name(HERMES) == "HermesParser"
    assert name("<tool_call>\n<function={{ f.name }}>") == "Qwen3CoderParser"
    assert name("{{ '[TOOL_CALLS]' }}") == "MistralParser"
    assert name('<|start_header_id|> {"name": …, "parameters": …}') == "Llama3JsonParser"
    assert name("<|python_start|>") == "PythonicParser"
    assert name("{{ messages }}") is None
    assert AnswerFormats.of(None) == AnswerFormats()
    assert isinstance(TOOL_CALL_PARSERS["mistral"](), ToolCallParser)
    assert len(TOOL_CALL_PARSERS["mistral"].new_id()) == 9


@pytest.fixture(scope="module")
def hermes(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    template = tmp_path_factory.mktemp("template") / "hermes.jinja"
    template.write_text(HERMES)
    options = ("--chat-template", str(template), "--reasoning-parser", "qwen3")
    thinks = tmp_path_factory.mktemp("models") / MODEL
    shutil.copytree(folder, thinks)
    byte_level("<think>", "</think>", "<tool_call>").save_pretrained(thinks)
    with running(thinks, "--pool", "64MiB", *options) as found:
        yield found


@pytest.fixture
def client(hermes: Running) -> OpenAI:
    return hermes.client()


USER: list[Any] = [{"role": "user", "content": "weather?"}]
TEXT = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)


def written(text: str) -> dict[str, Any]:
    """Fields that make the model write a text."""
    return {"extra_body": {"grammar": f"start: {json.dumps(text)}"}, "max_tokens": 400, "temperature": 0}


def test_calls_of_the_model_are_parsed(client: OpenAI) -> None:
    tools: Any = [WEATHER, CLOCK]
    found = client.chat.completions.create(model=MODEL, messages=USER, tools=tools, **written(TEXT))
    choice = found.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    calls: Any = choice.message.tool_calls
    assert [(c.type, c.function.name, c.function.arguments) for c in calls] == [
        ("function", "weather", '{"city": "Oslo"}'),
        ("function", "clock", "{}"),
    ]
    assert len({c.id for c in calls}) == 2
    one = client.chat.completions.create(
        model=MODEL, messages=USER, tools=tools, parallel_tool_calls=False, **written(TEXT)
    )
    assert len(one.choices[0].message.tool_calls or []) == 1
    for more in ({"tool_choice": "none", "tools": tools}, {}):
        plain = client.chat.completions.create(model=MODEL, messages=USER, **more, **written(TEXT))
        assert (plain.choices[0].message.content, plain.choices[0].finish_reason) == (TEXT, "stop")
        assert plain.choices[0].message.tool_calls is None


def test_calls_are_streamed_as_deltas(client: OpenAI) -> None:
    tools: Any = [WEATHER, CLOCK]
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=USER, tools=tools, stream=True, stream_options={"include_usage": True}, **written(TEXT)
        )
    )  # fmt: skip
    content, calls, finishes = "", dict[int, list[str]](), []
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            finishes.append(choice.finish_reason)
            for call in choice.delta.tool_calls or []:
                assert call.function is not None
                if call.id:
                    assert call.type == "function"
                    calls[call.index] = [call.function.name or "", ""]
                else:
                    assert call.function.name is None
                calls[call.index][1] += call.function.arguments or ""
    assert chunks[0].choices[0].delta.role == "assistant"
    assert content == "Let me see."
    assert calls == {0: ["weather", '{"city": "Oslo"}'], 1: ["clock", "{}"]}
    assert [reason for reason in finishes if reason] == ["tool_calls"]
    assert len(chunks) > 10  # arguments arrive token by token
    assert chunks[-1].usage is not None


def test_the_clients_own_accumulation_has_the_calls(client: OpenAI) -> None:
    tools: Any = [WEATHER, CLOCK]
    with client.chat.completions.stream(model=MODEL, messages=USER, tools=tools, **written(TEXT)) as stream:
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls or []
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ("weather", '{"city": "Oslo"}'),
        ("clock", "{}"),
    ]


def check_forced(calls: Any, names: set[str]) -> None:
    assert calls
    for call in calls:
        assert call.function.name in names
        read = json.loads(call.function.arguments)
        if call.function.name == "weather":
            assert read["city"] in ("Oslo", "Ulm")
            assert read["days"] in (1, 2)
        else:
            assert read == {}


NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_follows_the_schema(client: OpenAI, choice: Any) -> None:
    tools: Any = [WEATHER, CLOCK]
    names = {"weather", "clock"} if choice == "required" else {"weather"}
    for seed in range(3):
        found = client.chat.completions.create(
            model=MODEL, messages=USER, tools=tools, tool_choice=choice, parallel_tool_calls=False, max_tokens=300, seed=seed
        )  # fmt: skip
        message = found.choices[0].message
        check_forced(message.tool_calls, names)
        assert message.content is None
        assert len(message.tool_calls or []) == 1
        assert found.choices[0].finish_reason == "tool_calls"
    with client.chat.completions.stream(
        model=MODEL, messages=USER, tools=tools, tool_choice=choice, parallel_tool_calls=False, max_tokens=300
    ) as stream:
        check_forced(stream.get_final_completion().choices[0].message.tool_calls, names)


def test_a_strict_call_follows_the_schema(client: OpenAI) -> None:
    """A bias makes the model begin a call. Only the grammar makes it a valid one."""
    begin = byte_level("<think>", "</think>", "<tool_call>").convert_tokens_to_ids("<tool_call>")
    tools: Any = [{"type": "function", "function": {**WEATHER["function"], "strict": True}}]  # type: ignore[dict-item]
    fields: Any = {"messages": USER, "max_tokens": 200, "parallel_tool_calls": False}
    answer = client.chat.completions.create(
        model=MODEL, tools=tools, logit_bias={str(begin): 100}, extra_body={"ignore_eos": True}, **fields
    )
    check_forced(answer.choices[0].message.tool_calls, {"weather"})
    text = client.chat.completions.create(model=MODEL, tools=tools, logit_bias={str(begin): -100}, **fields)
    assert text.choices[0].message.content
    assert not text.choices[0].message.tool_calls


def test_strict_reaches_the_grammar_from_every_api(hermes: Running) -> None:
    begin = byte_level("<think>", "</think>", "<tool_call>").convert_tokens_to_ids("<tool_call>")
    function: Any = WEATHER["function"]
    more = {"model": MODEL, "logit_bias": {str(begin): 100}, "ignore_eos": True}
    messages = {
        "messages": USER,
        "max_tokens": 200,
        "tools": [{"name": "weather", "input_schema": function["parameters"], "strict": True}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    }
    status, _, found = hermes.send("POST", "/v1/messages", {**more, **messages})
    assert status == 200, found
    (call,) = [block for block in found["content"] if block["type"] == "tool_use"]
    assert (call["input"]["city"] in ("Oslo", "Ulm"), call["input"]["days"] in (1, 2)) == (True, True)
    responses = {
        "input": "hi",
        "max_output_tokens": 200,
        "tools": [{"type": "function", **function, "strict": True}],
        "parallel_tool_calls": False,
    }
    status, _, found = hermes.send("POST", "/v1/responses", {**more, **responses})
    assert status == 200, found
    (item,) = [item for item in found["output"] if item["type"] == "function_call"]
    assert json.loads(item["arguments"])["city"] in ("Oslo", "Ulm")


def test_a_cut_call_ends_by_its_length(client: OpenAI) -> None:
    tools: Any = [WEATHER]
    found = client.chat.completions.create(
        model=MODEL, messages=USER, tools=tools, tool_choice="required", max_tokens=45
    )
    call: Any = (found.choices[0].message.tool_calls or [None])[0]
    assert found.choices[0].finish_reason == "length"
    assert call.function.name == "weather"
    assert call.function.arguments.startswith('{"city"')


@pytest.mark.slow
def test_the_embedded_model_makes_forced_calls_and_a_header_warns() -> None:
    with running(Path("kvloom-llama"), "--pool", "64MiB") as server:
        body = {
            "messages": USER,
            "tools": [WEATHER],
            "tool_choice": NAMED,
            "max_tokens": 60,
            "temperature": 0,
        }
        status, headers, found = server.send("POST", "/v1/chat/completions", body)
        assert status == 200, found
        call = found["choices"][0]["message"]["tool_calls"][0]["function"]
        assert call["name"] == "weather"
        assert json.loads(call["arguments"])["city"] in ("Oslo", "Ulm")
        assert "--chat-template" in headers["x-kvloom-warning"]
        _, headers, _ = server.send("POST", "/v1/chat/completions", {"messages": USER, "max_tokens": 1})
        assert "x-kvloom-warning" not in headers


def test_calls_and_results_reach_the_template_as_text(hermes: Running) -> None:
    arguments = json.dumps({"city": "</s><tool_call>"})
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain</s>"},
    ]
    _, _, found = hermes.send("POST", "/tokenize", {"messages": messages})
    assert 2 not in found["tokens"]  # </s> stays text
    _, _, text = hermes.send("POST", "/detokenize", {"tokens": found["tokens"]})
    assert '<tool_call>{"name": "weather", "arguments": {"city": "' in text["prompt"]
    assert text["prompt"].endswith("[tool]rain</s>[assistant]")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [CLOCK] * 129}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": "required", "regex": "a"}, "regex"),
        ({"functions": [WEATHER["function"]]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
    ],
)  # fmt: skip
def test_invalid_tools_are_refused(hermes: Running, fields: dict[str, Any], param: str) -> None:
    status, _, found = hermes.send("POST", "/v1/chat/completions", {"messages": USER, **fields})
    assert (status, found["error"]["param"]) == (400, param)


REASONED: list[tuple[type[ReasoningParser], bool, str, str, str]] = [
    (QwenReasoning, False, "<think>\nhm < x\n</think>\n\nyes \n", "hm < x", "yes \n"),
    (QwenReasoning, False, "  plain", "", "  plain"),
    (QwenReasoning, False, "<thin", "", "<thin"),
    (QwenReasoning, True, "hm</think>yes", "hm", "yes"),
    (QwenReasoning, True, " <think>hm </thin", "hm </thin", ""),
    (DeepSeekReasoning, True, "hm\n\nand</think>\na</think>b", "hm\n\nand", "a</think>b"),
    (DeepSeekReasoning, True, "never ends", "never ends", ""),
    (DeepSeekReasoning, False, "yes", "", "yes"),
]


@pytest.mark.parametrize(("kind", "is_open", "text", "reasoning", "content"), REASONED)
def test_reasoning_is_the_same_whole_and_in_pieces(
    kind: type[ReasoningParser], is_open: bool, text: str, reasoning: str, content: str
) -> None:
    for size in (len(text), 1, 2, 5):
        parser = kind(is_open)
        pieces = [p for i in range(0, len(text), size) for p in parser.feed(text[i : i + size])]
        pieces += parser.feed("", ended=True)
        found = {k: "".join(p.text for p in pieces if p.kind == k) for k in ("reasoning", "content")}
        assert found == {"reasoning": reasoning, "content": content}


def test_the_prompt_decides_whether_reasoning_is_open() -> None:
    assert [QwenReasoning.opens(text) for text in ("a<think>\n", "<think>\n\n</think>\n\n", "a")] == [
        True,
        False,
        False,
    ]
    assert [DeepSeekReasoning.opens(text) for text in ("a<think>\n", "</think>\n\n", "a")] == [
        True,
        False,
        True,
    ]


def test_a_continued_message_decides_by_its_last_marker() -> None:
    assert [last_marker(text) for text in ("a<think>b", "<think>a</think>b", "b", "")] == [
        "<think>",
        *["</think>"] * 3,
    ]
    assert DeepSeekReasoning.opens(last_marker("<think>b"))
    assert not DeepSeekReasoning.opens(last_marker("b"))


THOUGHT = byte_level("<think>", "</think>")
LETTER, END = (THOUGHT(text)["input_ids"] for text in ("a", "</think>"))
THINKS: dict[str, Any] = {
    "temperature": 0,
    "max_tokens": 300,
    "chat_template_kwargs": {"think": True},
    "logit_bias": {str(LETTER[0]): 100, str(END[0]): 90},  # a few letters, then the end of reasoning
    "frequency_penalty": 2,
}


def test_reasoning_is_split_from_content(hermes: Running, client: OpenAI) -> None:
    """A structure holds after the reasoning."""
    assert len(END) == 1
    body = {"messages": USER, **THINKS, "structured_outputs": {"choice": ["b/c"]}}
    status, _, found = hermes.send("POST", "/v1/chat/completions", body)
    assert status == 200, found
    message = found["choices"][0]["message"]
    assert message["content"] == "b/c"
    assert set(message["reasoning_content"]) == {"a"}
    assert message["reasoning"] == message["reasoning_content"]
    more: Any = {name: body[name] for name in ("chat_template_kwargs", "structured_outputs")}
    chunks = client.chat.completions.create(
        model=MODEL, messages=USER, stream=True, temperature=0, max_tokens=300, logit_bias=body["logit_bias"], frequency_penalty=2, extra_body=more
    )  # fmt: skip
    deltas = [choice.delta.model_dump() for chunk in chunks for choice in chunk.choices]
    reasoning = [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta]
    assert "".join(reasoning) == message["reasoning_content"]
    assert len(reasoning) > 1
    assert "".join(delta["content"] or "" for delta in deltas) == "b/c"


def test_schemas_and_forced_calls_follow_reasoning(hermes: Running) -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": {"enum": ["x"]}}}
    calls = {"tools": [WEATHER], "tool_choice": NAMED, "stop": []}
    messages = []
    for more in ({"response_format": schema}, calls):
        status, _, found = hermes.send("POST", "/v1/chat/completions", {"messages": USER, **THINKS, **more})
        assert status == 200, found
        messages.append(found["choices"][0]["message"])
    assert all(message["reasoning_content"] for message in messages)
    assert messages[0]["content"] == '"x"'
    assert messages[1]["content"] is None
    assert messages[1]["tool_calls"][0]["function"]["name"] == "weather"


def test_a_cut_reasoning_has_no_content_and_a_closed_prompt_no_reasoning(hermes: Running) -> None:
    _, _, cut = hermes.send("POST", "/v1/chat/completions", {"messages": USER, **THINKS, "max_tokens": 2})
    message = cut["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == (None, "aa")
    plain = {**THINKS, "chat_template_kwargs": {}, "max_tokens": 2}
    _, _, found = hermes.send("POST", "/v1/chat/completions", {"messages": USER, **plain})
    assert found["choices"][0]["message"]["content"] == "aa"
    assert "reasoning_content" not in found["choices"][0]["message"]


def test_a_schema_that_no_grammar_can_hold_is_refused(hermes: Running) -> None:
    function = {"name": "f", "parameters": {"type": "string", "pattern": "("}}
    body = {
        "messages": USER,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
    }
    status, _, found = hermes.send("POST", "/v1/chat/completions", body)
    assert (status, found["error"]["param"]) == (400, "tools"), found
