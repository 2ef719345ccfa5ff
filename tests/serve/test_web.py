"""The server for web pages and behind TLS: allowed origins, certificates, keys of the command line, the API's description."""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.certificates import certificate
from tests.serve.running import MODEL, Running, running

pytestmark = pytest.mark.slow  # servers of its own

PAGE = "https://page.example:8443"


@pytest.fixture(scope="module")
def open_to_page(folder: Path) -> Iterator[Running]:
    """A server without keys that one web page may use."""
    with running(folder, "--pool", "16MiB", "--cors-origin", PAGE) as found:
        yield found


def test_an_allowed_origin_may_use_the_server(open_to_page: Running) -> None:
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization,content-type"
    status, headers, _ = open_to_page.send("OPTIONS", "/v1/chat/completions", headers=asked)
    assert (status, headers["access-control-allow-origin"]) == (200, PAGE)
    assert "authorization" in headers["access-control-allow-headers"]
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 2, "stream": True}
    status, headers, _ = open_to_page.send("POST", "/v1/completions", body, {"Origin": PAGE})
    assert (status, headers["access-control-allow-origin"]) == (200, PAGE)
    assert "x-request-id" in headers["access-control-expose-headers"]


@pytest.mark.parametrize(
    "headers", [{"Origin": "https://other.example"}, {"Host": "other.example", "Origin": PAGE}]
)
def test_other_origins_and_hosts_stay_refused(open_to_page: Running, headers: dict[str, str]) -> None:
    status, got, _ = open_to_page.send("POST", "/v1/completions", {"prompt": "hi"}, headers)
    assert status == 403
    assert "access-control-allow-origin" not in got


def test_without_the_option_no_origin_is_allowed(server: Running) -> None:
    assert server.send("GET", "/v1/models", headers={"Origin": PAGE})[0] == 403
    _, headers, _ = server.send("GET", "/v1/models", headers={"Origin": "http://localhost:3000"})
    assert "access-control-allow-origin" not in headers


def test_the_root_leads_to_the_dashboard(server: Running) -> None:
    status, headers, _ = server.send("GET", "/")
    assert (status, headers["location"]) == (307, "/dashboard")


def test_the_description_has_the_fields_of_requests(server: Running) -> None:
    status, _, found = server.send("GET", "/openapi.json")
    assert (status, found["openapi"]) == (200, "3.1.0")
    body = found["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    fields = found["components"]["schemas"][body["$ref"].rpartition("/")[2]]
    assert fields["required"] == ["messages"]
    assert {"temperature", "tools", "stream"} <= set(fields["properties"])
    assert "logits_processors" not in fields["properties"]  # refused
    assert {"/v1/models/{name}", "/health", "/version", "/tokenize"} <= set(found["paths"])
    for path, methods in found["paths"].items():
        for operation in methods.values():
            assert operation["summary"] != path, "an endpoint without a summary"
    text = json.dumps(found)
    for name in _references(found):
        assert name in found["components"]["schemas"], text


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"].rpartition("/")[2]
        for inner in value.values():
            yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def test_the_page_of_the_api_needs_no_script(server: Running) -> None:
    status, headers, page = server.send("GET", "/docs")
    assert status == 200
    assert "/v1/chat/completions" in page
    assert "messages (required)" in page
    assert "<script" not in page
    assert "http" not in page.replace("https://kvloom", "")
    assert headers["content-security-policy"].startswith("default-src 'none'")


def test_models_and_version(server: Running) -> None:
    assert server.send("GET", f"/v1/models/{MODEL}")[2]["id"] == MODEL
    assert server.send("GET", "/v1/models/other")[0] == 404
    assert server.send("GET", "/version")[2]["version"]


@pytest.mark.slow
def test_https_with_client_certificates_and_keys(folder: Path, tmp_path: Path) -> None:
    cert, private = certificate(tmp_path)
    tls = ("--ssl-certfile", str(cert), "--ssl-keyfile", str(private), "--ssl-ca-certs", str(cert))
    os.environ["KVLOOM_API_KEY"] = "key-of-nobody"  # not used beside --api-key
    try:
        with running(
            folder, "--pool", "16MiB", "--api-key", "key-of-ops-1", "--api-key", "key-of-ops-2", *tls
        ) as server:
            assert server.url.startswith("https://127.0.0.1:")
            trusting = ssl.create_default_context(cafile=str(cert))
            with pytest.raises((urllib.error.URLError, OSError)):
                fetch(server, trusting, "key-of-ops-1")  # without a client certificate
            trusting.load_cert_chain(cert, private)
            assert fetch(server, trusting, "key-of-ops-1") == 200
            assert fetch(server, trusting, "key-of-ops-2", "/kvloom/state") == 200  # an admin key
            assert fetch(server, trusting, "key-of-nobody") == 401
            assert not any("key-of-" in line for line in server.said)
    finally:
        del os.environ["KVLOOM_API_KEY"]


@pytest.mark.slow
def test_the_key_of_the_environment(folder: Path) -> None:
    os.environ["KVLOOM_API_KEY"] = "key-of-the-shell"
    try:
        with running(folder, "--pool", "16MiB") as server:
            assert any("requests need the API key of $KVLOOM_API_KEY" in line for line in server.said)
            assert server.send("GET", "/v1/models")[0] == 401
            assert server.send("GET", "/v1/models", key="key-of-the-shell")[0] == 200
    finally:
        del os.environ["KVLOOM_API_KEY"]


def fetch(server: Running, context: ssl.SSLContext, key: str, path: str = "/v1/models") -> int:
    request = urllib.request.Request(server.url + path, headers={"Authorization": f"Bearer {key}"})
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    try:
        with opener.open(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
