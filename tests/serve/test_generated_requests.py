"""Requests that are generated from /openapi.json, against a server on the embedded model. No request gets a status of
500 or above, and the server stays healthy."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any
from urllib.parse import quote, urlsplit

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.database import InMemoryExampleDatabase

from .running import Running, running

SECONDS = 60.0
JUNK = st.sampled_from(
    [
        None, True, -1, 0, 1, 2, 0.5, -1e308, 2**31, 2**63, 2**64, 99999999999, 10**400, "", "0", "²", "٣", "\x00", "\ud800",
        "text", "é" * 100, [], [[]], [-1], [99999999999], [[1], [-1]], [[[1]]], ["a", 1], [None], {}, {"type": "text"},
        {"a": {"b": [1]}},
    ]
)  # fmt: skip
SMALL = {"max_tokens", "max_completion_tokens", "min_tokens", "n", "best_of", "max_output_tokens"}
"""Fields that decide how long an answer takes. Their values are small, so that many requests fit into a minute."""
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "system", "assistant", "tool", "x"]),
            "content": st.text(max_size=8) | JUNK,
        }
    ),
    min_size=1,
    max_size=3,
)
WORDS = [
    "model", "prompt", "input", "messages", "system", "instructions", "max_tokens", "max_output_tokens", "temperature",
    "top_p", "top_k", "stream", "tools", "tool_choice", "stop_sequences", "metadata", "thinking", "text", "reasoning",
    "chat_template_kwargs", "cache_control", "output_config", "top_logprobs", "parallel_tool_calls", "previous_response_id", "store", "include", "truncation", "echo", "return_token_strs", "tokens",
]  # fmt: skip


class Requests:
    """Strategies for the requests of a description. `counts` counts the requests by endpoint and status."""

    def __init__(self, description: dict[str, Any], model: str) -> None:
        self._schemas, self._model = description["components"]["schemas"], model
        self.counts: Counter[tuple[str, int]] = Counter()
        self.operations = [
            (method.upper(), path, operation)
            for path, methods in description["paths"].items()
            for method, operation in methods.items()
            # Administrators may stop a server or change its models. /metrics and pages take no input.
            if not (path.startswith("/admin") and method != "get")
        ]

    def value(self, schema: dict[str, Any], name: str = "") -> st.SearchStrategy[Any]:
        """Values of a schema. One in six is another value."""
        if name in SMALL:
            return st.sampled_from([1, 1, 1, 2, 3, 0, -1, 2**63])
        if name == "model":
            return st.sampled_from([self._model] * 8 + ["none", 1])
        if name == "messages":
            return MESSAGES | MESSAGES | JUNK
        good = self._good(schema)
        return st.integers(0, 5).flatmap(lambda chance: JUNK if chance == 0 else good)

    def _good(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        if "$ref" in schema:
            return self.body(self._schemas[schema["$ref"].rpartition("/")[2]])
        if "anyOf" in schema:
            return st.one_of([self._good(one) for one in schema["anyOf"]])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        kinds = schema.get("type", "any")
        return st.one_of(
            [self._of_type(kind, schema) for kind in ([kinds] if isinstance(kinds, str) else kinds)]
        )

    def _of_type(self, kind: str, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        if kind == "object":
            return self.body(schema)
        if kind == "array":
            return st.lists(self._good(schema.get("items") or {}), max_size=4)
        return {
            "string": st.text(max_size=20),
            "integer": st.integers(-2, 400),
            "number": st.floats(-2, 3) | st.floats(allow_nan=False, allow_infinity=False),
            "boolean": st.booleans(),
            "null": st.none(),
        }.get(kind, JUNK)

    def body(self, schema: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
        """Objects with all required and up to four other fields."""
        fields = {name: self.value(one, name) for name, one in schema.get("properties", {}).items()}
        required = {name: fields[name] for name in schema.get("required", ()) if name in fields}
        for name in ("model", *SMALL & {"max_tokens"}):
            if name in fields:
                required[name] = fields[name]
        others = [name for name in fields if name not in required]
        if not others:
            return st.fixed_dictionaries(required)
        chosen = st.lists(st.sampled_from(others), max_size=4, unique=True)
        return chosen.flatmap(
            lambda names: st.fixed_dictionaries(required | {name: fields[name] for name in names})
        )

    def requests(
        self, method: str, path: str, operation: dict[str, Any]
    ) -> st.SearchStrategy[tuple[str, Any]]:
        """(path with its parameters, body) of an endpoint."""
        words = st.text(min_size=1, max_size=6) | st.sampled_from(
            [self._model, "..", "²", "9" * 4000, "\x00", "%"]
        )
        named = words.map(lambda word: path.partition("{")[0] + quote(word, safe="") if "{" in path else path)
        query = st.sampled_from(
            ["", "", "?limit=1", "?limit=", "?limit=²", "?limit=" + "9" * 4000, "?limit=٣", "?x", "?=&&"]
        )
        paths = st.tuples(named, query).map(lambda both: both[0] + quote(both[1], safe="?=&"))
        if method == "GET":
            return st.tuples(paths, st.none())
        content = operation.get("requestBody", {}).get("content", {}).get("application/json")
        if content:
            good = self._good(content["schema"])
        else:
            free = st.dictionaries(
                st.sampled_from([word for word in WORDS if word not in SMALL]),
                JUNK | st.text(max_size=5),
                max_size=5,
            )
            known = {
                "model": st.just(self._model),
                "max_tokens": st.just(1),
                "max_output_tokens": st.just(16),
            }
            chat = st.fixed_dictionaries(
                {**known, "messages": MESSAGES, "input": st.text(max_size=5) | MESSAGES | JUNK}
            )
            good = st.tuples(chat, free).map(lambda both: {**both[0], **both[1]})
        return st.tuples(paths, st.one_of(good, good, good, good, JUNK, st.binary(max_size=20)))


@pytest.fixture(scope="module")
def embedded() -> Iterator[Running]:
    with running("kvloom-llama", "--pool", "64MiB") as found:
        yield found


def exchange(server: Running, method: str, path: str, body: Any) -> tuple[int, str]:
    """Send a request, and read the whole answer, also that of a stream."""
    connection = HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    try:
        connection.request(method, path, data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}
"""Requests that the server must still answer."""


@pytest.mark.slow
def test_no_generated_request_gets_a_server_error(embedded: Running) -> None:
    _, description = exchange(embedded, "GET", "/openapi.json", None)
    (model,) = (one["id"] for one in json.loads(exchange(embedded, "GET", "/v1/models", None)[1])["data"][:1])
    made = Requests(json.loads(description), model)
    with_body = [one for one in made.operations if one[0] == "POST" and one[1] not in ("/ping",)]
    end = time.monotonic() + SECONDS

    def check(operation: tuple[str, str, dict[str, Any]], seconds: float, examples: int) -> None:
        method, name, _ = operation
        stop, failed = min(end, time.monotonic() + seconds), set[int]()

        @settings(
            max_examples=examples,
            database=InMemoryExampleDatabase(),
            suppress_health_check=list(HealthCheck),
            deadline=None,
        )
        @given(made.requests(*operation))
        def send(request: tuple[str, Any]) -> None:
            if time.monotonic() > stop and not failed:
                return
            path, body = request
            status, text = exchange(embedded, method, path, body)
            failed.update([status] if status >= 500 else [])
            made.counts[f"{method} {name}", status] += 1
            assert status < 500, (method, path, body, status, text[:500])
            assert '"code":500' not in text.replace(" ", ""), (method, path, body, text[:500])

        send()

    for operation in made.operations:
        if operation not in with_body:
            check(operation, 1.0, 15)
    for left, operation in zip(range(len(with_body), 0, -1), with_body, strict=True):
        check(operation, (end - time.monotonic()) / left, 400)
    print(f"{made.counts.total()} requests: {dict(made.counts)}")
    assert made.counts.total() > 100
    for path, body in GOOD.items():
        assert exchange(embedded, "POST", path, {"model": model, **body})[0] == 200
    embedded.wait_for(embedded.healthy)
    embedded.wait_for(embedded.idle)
    assert not [line for line in embedded.said if "Traceback" in line]


IDS = [
    [-1], [99999999999], [2**70], [[1, 2], [-1]], [[[1]]], ["a", 1], [1, "a"], [1.5], [True], [None], [[]], [],
    {"a": 1}, -1, 99999999999,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("ids", IDS, ids=repr)
def test_token_ids_out_of_range_are_refused(server: Running, ids: object) -> None:
    for fields in (
        {},
        {"echo": True},
        {"echo": True, "logprobs": 1, "max_tokens": 0},
        {"return_token_strs": True},
    ):
        status, _, found = server.send("POST", "/v1/completions", {"prompt": ids, "max_tokens": 1, **fields})
        assert status == 400, (fields, found)
    for path, name in (("/detokenize", "tokens"), ("/tokenize", "prompt")):
        for fields in ({}, {"return_token_strs": True}):
            status, _, found = server.send("POST", path, {name: ids, **fields})
            assert status == 400 or (status == 200 and ids in ([], [[]])), (path, fields, found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "limit", ["²", "9" * 5000, "٣", "-1", "0", "1_0", "+5", " 5", "1e2", "", "\x00", "nan"]
)
def test_a_limit_that_is_no_number_is_refused(server: Running, limit: str) -> None:
    status, _, found = server.send("GET", f"/kvloom/requests?limit={quote(limit)}")
    assert status == 400
    assert found["error"]["param"] == "limit"
    assert len(found["error"]["message"]) < 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "name", "fields"),
    [
        ("/v1/responses", "include", {"include": True}),
        ("/v1/responses", "include", {"include": "text"}),
        ("/v1/messages", "tools", {"tools": True}),
        ("/v1/messages", "tools", {"tools": "text"}),
        ("/v1/messages", "chat_template_kwargs", {"thinking": {}, "chat_template_kwargs": [1]}),
        ("/v1/messages", "cache_control", {"cache_control": {"type": "ephemeral", "ttl": ["5m"]}}),
    ],
)
def test_a_field_of_another_type_is_refused(
    server: Running, path: str, name: str, fields: dict[str, Any]
) -> None:
    chat = {
        "input": "a",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 1,
        "max_output_tokens": 1,
    }
    status, _, found = server.send("POST", path, {**chat, **fields})
    assert status == 400
    assert name in found["error"]["message"]
