"""A request continues after output tokens that another engine has generated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvloom.engine import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    one = LLM("kvloom-llama", pool_bytes=32 << 20)
    yield one
    one.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.2},
        {"temperature": 0, "regex": "[a-z ]{5,30}"},
    ],
)
def test_a_resumed_request_has_the_same_tokens_and_text(llm: LLM, fields: dict[str, object]) -> None:
    params = SamplingParams(max_tokens=24, **fields)  # type: ignore[arg-type]
    engine, prompt = llm.engine, llm._ids("def main(x):")
    whole = engine.add(prompt, params, text=True)
    engine.run()
    assert whole.text is not None
    text = whole.text.take()
    for count in (1, len(whole.output) // 2, len(whole.output)):
        resumed = engine.add(prompt, params, text=True, resume=whole.output[:count])
        engine.run()
        assert resumed.output == whole.output
        assert resumed.finish_reason == whole.finish_reason
        assert resumed.text is not None
        assert resumed.text.take() == text


def test_logprobs_cannot_be_resumed(llm: LLM) -> None:
    with pytest.raises(ValueError, match="without logprobs"):
        llm.engine.add([5, 6], SamplingParams(max_tokens=4, logprobs=1), resume=[7])
