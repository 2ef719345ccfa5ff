"""Encoder-decoder models behind the server: /v1/completions of a tiny BART."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models.encoder_decoder_folders import bart_folder
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
