"""/v1/embeddings: values, formats, usage, and what is refused."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.serve.running import MODEL, Running


@pytest.fixture(scope="module")
def wanted(folder: Path) -> Any:
    """Return a function that computes an embedding by Hugging Face's own forward pass."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def compute(given: str | list[int], pooling: str = "mean") -> Any:
        ids = tokenizer(given)["input_ids"] if isinstance(given, str) else given
        with torch.inference_mode():
            states = model.base_model(torch.tensor([ids])).last_hidden_state[0]
        pooled = states[-1] if pooling == "last" else states.mean(0)
        return torch.nn.functional.normalize(pooled, dim=0).numpy()

    return compute


def ask(server: Running, given: Any, **fields: Any) -> Any:
    status, _, found = server.send("POST", "/v1/embeddings", {"model": MODEL, "input": given, **fields})
    assert status == 200, found
    return found


def vectors(found: Any) -> Any:
    assert [entry["index"] for entry in found["data"]] == list(range(len(found["data"])))
    return np.array([entry["embedding"] for entry in found["data"]])


def test_embeddings_are_hugging_faces_hidden_states(server: Running, wanted: Any) -> None:
    texts = ["a text", "another, much longer text " * 9, "x"]
    for given in (texts[0], texts, [5, 6, 7], [[5, 6, 7], [8]]):
        many = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
        for pooling in ("mean", "last"):
            found = ask(server, given, pooling=pooling)
            expected = np.stack([wanted(one, pooling) for one in many])
            np.testing.assert_allclose(vectors(found), expected, atol=2e-5)
            tokens = sum(len(one) for one in many)  # every byte is a token
            assert found["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
            assert (found["object"], found["model"]) == ("list", MODEL)
    server.wait_for(server.idle)


def test_openais_client_reads_them_and_base64_has_the_same_values(server: Running) -> None:
    plain = vectors(ask(server, ["a", "b"]))
    encoded = ask(server, ["a", "b"], encoding_format="base64")["data"]
    decoded = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in encoded]
    np.testing.assert_allclose(decoded, plain, atol=1e-6)
    found = server.client().embeddings.create(model=MODEL, input=["a", "b"])
    np.testing.assert_allclose([one.embedding for one in found.data], plain, atol=1e-6)


def test_dimensions_shorten_to_unit_length(server: Running) -> None:
    whole = vectors(ask(server, "some text"))[0]
    short = vectors(ask(server, "some text", dimensions=8))[0]
    np.testing.assert_allclose(short, whole[:8] / np.linalg.norm(whole[:8]), atol=1e-6)


def test_invalid_requests_name_their_field(server: Running) -> None:
    for fields, param in (
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": [5, "x"]}, "input"),
        ({"input": [400]}, "input"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "dimensions": 33}, "dimensions"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "pooling": "cls"}, "pooling"),
        ({"input": "x" * 5000}, "input"),
        ({}, "input"),
    ):
        status, _, found = server.send("POST", "/v1/embeddings", {"model": MODEL, **fields})
        assert (status, found["error"]["param"]) == (400, param), found
    status, _, found = server.send("POST", "/v1/embeddings", {"model": "other", "input": "x"})
    assert status == 404
