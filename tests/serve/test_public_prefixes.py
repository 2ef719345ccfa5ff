"""Public prefixes over HTTP: which keys may mark them, what other tenants hit, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvloom.serve.auth import Caps
from kvloom.serve.auth.keys import read_keys
from kvloom.serve.errors import ApiError
from tests.serve.running import MODEL, Running, running

RED, BLUE, GREEN = "key-of-red-1", "key-of-blue-1", "key-of-green-1"
PROMPT = [5 + i % 200 for i in range(100)]
SYSTEM = "You answer short questions about the weather in large cities. Be polite, and never guess."


@pytest.mark.parametrize("as_json", [False, True])
def test_a_key_file_allows_public_prefixes(as_json: bool, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    rows = {
        RED: {"tenant": "red", "public": True},
        BLUE: {"tenant": "blue", "public": True, "admin": True},
        GREEN: "green",
    }
    lines = f"{RED} red 2GiB public\n{BLUE} blue public admin\n{GREEN} green\n"
    file.write_text(json.dumps(rows) if as_json else lines)
    keys = read_keys(str(file), Caps(public=False))
    assert [keys.caps(name).public for name in ("red", "blue", "green")] == [True, True, False]
    assert keys.is_admin(f"Bearer {BLUE}")
    keys.caps("red").check(1, None, None, public=True)
    with pytest.raises(ApiError, match="this key may not mark a public prefix"):
        keys.caps("green").check(1, None, None, public=True)
    keys.caps("green").check(1, None, None, public=False)


def test_bad_key_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(json.dumps({RED: {"tenant": "public prefixes"}}))
    with pytest.raises(ValueError, match="reserved"):
        read_keys(str(file))
    file.write_text(json.dumps({RED: {"tenant": "red", "public": "yes"}}))
    with pytest.raises(ValueError, match=r"public \(true\)"):
        read_keys(str(file))
    file.write_text(f"{RED} red public\n{BLUE} red\n")
    with pytest.raises(ValueError, match="or public in an earlier key"):
        read_keys(str(file))


def test_a_server_without_public_prefixes_refuses_the_mark(server: Running) -> None:
    def refused(path: str = "/v1/completions", **fields: Any) -> str:
        status, _, found = server.send("POST", path, {"model": MODEL, "max_tokens": 1, **fields})
        assert status == 400, found
        return str(found["error"]["message"])

    assert "--public-prefixes SIZE" in refused(prompt=PROMPT, cache={"public_tokens": 64})
    assert "needs a chat" in refused(prompt=PROMPT, cache={"public_messages": 1})
    assert "must be 0 or more" in refused(prompt=PROMPT, cache={"public_tokens": -1})
    assert "is reserved" in refused(prompt=PROMPT, tenant="public prefixes")
    chat = {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": "hello"}]}
    assert "exceeds the 1 messages" in refused(**chat, cache={"public_messages": 2})  # type: ignore[arg-type]
    both = {"public_messages": 1, "public_tokens": 2}
    assert "either public_tokens or public_messages" in refused(**chat, cache=both)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def sharing(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with public prefixes: red and blue may mark them, green may not."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{RED} red public\n{BLUE} blue public admin\n{GREEN} green\n")
    keys.chmod(0o600)
    with running(folder, "--pool", "8MiB", "--api-keys", str(keys), "--public-prefixes", "1MiB") as found:
        yield found


@pytest.mark.slow
def test_tenants_share_a_marked_prefix_over_http(sharing: Running) -> None:
    def cached(key: str, **more: Any) -> int:
        found = sharing.complete(key, prompt=PROMPT, max_tokens=2, **more)["usage"]["prompt_tokens_details"]
        return int(found["cached_tokens"])

    mark = {"cache": {"public_tokens": 70}}
    assert [cached(RED, **mark), cached(RED, **mark), cached(BLUE, **mark)] == [0, 99, 64]
    assert cached(GREEN) == 0
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, **mark}
    status, _, found = sharing.send("POST", "/v1/completions", body, key=GREEN)
    assert (status, found["error"]["param"]) == (400, "cache")
    sharing.wait_for(
        lambda: sharing.metrics(BLUE)['kvloom_tenant_bytes{tenant="public prefixes",state="used"}'] > 0
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_public_messages_of_chats_are_shared(sharing: Running, path: str) -> None:
    def cached(key: str, question: str) -> int:
        messages = [{"role": "user", "content": question}]
        body: dict[str, Any] = {"model": MODEL, "max_tokens": 1, "cache": {"public_messages": 1}}
        if path == "/v1/messages":
            body |= {"system": path + SYSTEM, "messages": messages}
        else:
            body["messages"] = [{"role": "system", "content": path + SYSTEM}, *messages]
        status, _, found = sharing.send("POST", path, body, key=key)
        assert status == 200, found
        if path == "/v1/messages":
            return int(found["usage"]["cache_read_input_tokens"])
        return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])

    first = cached(RED, "Is it cold in Oslo?")
    assert first < 16, "the two chats differ in their first block"
    assert cached(BLUE, "Is it cold in Oslo?") == len("[system]" + path + SYSTEM) // 16 * 16


@pytest.mark.slow
def test_tokenize_returns_the_public_tokens(sharing: Running) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "hello"}]
    body = {"model": MODEL, "messages": messages, "cache": {"public_messages": 1}}
    _, _, found = sharing.send("POST", "/tokenize", body, key=RED)
    assert found["public_tokens"] == len("[system]" + SYSTEM)
    assert "public_tokens" not in sharing.send("POST", "/tokenize", body | {"cache": {}}, key=RED)[2]
