"""Malformed and odd requests to a real server and a real router: `python -m tools.stress.fuzz --seconds 60 --seed 1`.

The server has keys of two tenants and of an admin, and the router has an admin key. A seed decides all requests:

| kind    | requests                                                                                          |
|---------|---------------------------------------------------------------------------------------------------|
| framing | conflicting or odd lengths and encodings, pipelined requests, odd request lines and header lines   |
| bytes   | valid requests with changed, repeated, missing or added bytes, sent in parts of any size           |
| fields  | valid requests in which some fields have values of other types, huge numbers or odd texts          |
| floods  | thousands of headers, long header lines and paths, bodies that never end                           |
| slow    | heads and bodies that stop in the middle                                                           |

The run fails if a request gets a status of 500 or above (except 503), no end, or more answers than it has requests. It
also fails if a log has a traceback, or if a server afterwards is not healthy, has open requests, does not answer as
before, or has kept descriptors or threads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from .chaos import Server, free_port

__all__ = ["Fuzz"]

KEYS = {"fuzz-key-of-a": "a", "fuzz-key-of-b": "b"}
ADMIN = "fuzz-key-of-admin"
REQUEST_SECONDS = 2
"""Seconds in which servers must receive a request."""
JUNK: list[Any] = [
    None, True, False, -1, 0, 1, 2, 0.5, -0.0, 1e-300, -1e308, 1e308, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1,
    10**400, "", "0", "1e999", "\u00b2", "\u0663", "\x00", "\ud800", "\ufeff", "\u202e\u0000", "\U0001f469\u200d\U0001f4bb" * 20,
    "a" * 70_000, "../../etc/passwd", [], [[]], [-1], [2**40], [[1], [-1]], [None], ["a", 1], {}, {"": ""},
    {"type": "text"}, {"a": {"b": [1]}}, [{}], [True], [[[[1]]]],
]  # fmt: skip
LITERALS = [
    b"NaN",
    b"Infinity",
    b"-0",
    b"1" * 5000,
    b"0x10",
    b"1e400",
    b'"\\ud800"',
    b"\xff",
    b"nul",
    b"[" * 200,
]
"""Values that are no JSON, or that JSON parsers read in different ways."""
CHAT = {"role": "user", "content": "hi"}
FIELDS: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": "hi", "max_tokens": 1, "n": 1, "best_of": 1, "temperature": 0, "top_p": 1, "top_k": 5, "min_p": 0,
        "logprobs": 1, "prompt_logprobs": 1, "echo": True, "stop": "x", "seed": 1, "stream": True, "priority": 1, "ttl": 5,
        "stream_options": {"include_usage": True}, "logit_bias": {"5": 1}, "cache_salt": "s", "session_id": "s",
        "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1}, "slo": {"ttft_ms": 5},
        "resume_token_ids": [5], "cache": {"read": True}, "tenant": "t", "user": "u", "response_format": {"type": "json_object"},
        "truncate_prompt_tokens": 5, "min_tokens": 1, "stop_token_ids": [5], "return_token_ids": True, "documents": ["d"],
        "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "use_beam_search": False, "suffix": "",
    },
    "/v1/chat/completions": {
        "messages": [CHAT], "max_tokens": 1, "max_completion_tokens": 1, "n": 1, "logprobs": True, "top_logprobs": 2,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "tool_choice": "auto", "stream": True,
        "chat_template_kwargs": {"x": 1}, "response_format": {"type": "text"}, "add_generation_prompt": True,
        "continue_final_message": False, "parallel_tool_calls": True, "reasoning_effort": "low", "stop": ["x"], "seed": 1,
    },
    "/v1/responses": {"input": "hi", "max_output_tokens": 16, "instructions": "x", "stream": True, "text": {}, "store": False,
                      "previous_response_id": None, "metadata": {"a": "b"}, "tools": [], "include": [], "truncation": "auto"},
    "/v1/messages": {"messages": [CHAT], "max_tokens": 1, "system": "x", "stop_sequences": ["x"], "stream": True,
                     "metadata": {"user_id": "u"}, "thinking": {"type": "disabled"}, "tools": [], "tool_choice": {"type": "auto"}},
    "/v1/messages/count_tokens": {"messages": [CHAT], "system": "x"},
    "/v1/embeddings": {"input": "hi", "encoding_format": "float", "dimensions": 4},
    "/v1/audio/transcriptions": {"file": "x", "language": "en"},
    "/tokenize": {"prompt": "hi", "messages": [CHAT], "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"tokens": [5, 6]},
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "/nowhere", "load_inplace": False},
    "/v1/unload_lora_adapter": {"lora_name": "x"},
    "/v1/sessions/s": {},
    "/admin/pool": {"bytes": "64MiB"},
    "/admin/role": {"role": "both"},
    "/admin/models": {"model": "/nowhere", "name": "x"},
    "/register": {"url": "ftp://x", "instance_id": "i", "endpoint": "nothing", "model_name": "m", "hash_model": "h"},
    "/unregister": {"instance_id": "i", "url": "x"},
    "/query": {"model_name": "kvloom-llama", "token_ids": [1] * 40, "tenant_id": "t", "cache_salt": "s"},
}  # fmt: skip
PAGES = [
    "/health", "/ping", "/version", "/metrics", "/v1/models", "/v1/models/x", "/kvloom/worker", "/kvloom/state", "/workers",
    "/kvloom/requests", "/kvloom/requests?limit=-1", "/kvloom/requests?until=nan", "/kvloom/requests/x", "/dashboard",
    "/dashboard/..%2f..%2fetc/passwd", "/dashboard/%00", "/openapi.json", "/docs", "/admin/pool", "/admin/role", "/%ff",
    "//v1/models", "/v1/../health", "/v1/models?%", "/kvloom/state?since=1e999", "/kvloom/state?at=-1", "*", "http://x/health",
]  # fmt: skip


def http(
    method: str, path: str, body: bytes | None = None, key: str | None = None, more: bytes = b""
) -> bytes:
    """Return a valid request. `more` are further header lines."""
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n".encode("latin-1", "replace")
    head += b"" if key is None else b"Authorization: Bearer %s\r\n" % key.encode()
    if body is not None:
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
    return head + more + b"\r\n" + (body or b"")


def framings(body: bytes, hidden: bytes) -> list[bytes]:
    """Return requests whose length two parsers may read in different ways. `hidden` is a request in their body."""
    post = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    post += b"Authorization: Bearer fuzz-key-of-a\r\n"
    chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    length = b"Content-Length: %d\r\n" % len(body)
    chunked = b"Transfer-Encoding: chunked\r\n"
    return [
        post + length + chunked + b"\r\n" + chunk + hidden,
        post + b"Content-Length: 4\r\n" + chunked + b"\r\n" + chunk + hidden,
        post + length + b"Content-Length: 3\r\n\r\n" + body + hidden,
        post + b"Content-Length: +%d\r\n\r\n" % len(body) + body + hidden,
        post + b"Content-Length: 0x%x\r\n\r\n" % len(body) + body + hidden,
        post + b"Content-Length: %d,%d\r\n\r\n" % (len(body), len(body)) + body + hidden,
        post + b"Content-Length: -1\r\n\r\n" + body,
        post + b"Content-Length: 99999999999999999999999\r\n\r\n" + body,
        post + b"Content-Length:\r\n\r\n" + body,
        post + b"Content-Length : %d\r\n\r\n" % len(body) + body + hidden,
        post + b"Transfer-Encoding : chunked\r\n\r\n" + chunk + hidden,
        post + b"Transfer-Encoding: xchunked\r\n\r\n" + chunk + hidden,
        post + b"Transfer-Encoding: chunked, identity\r\n\r\n" + chunk + hidden,
        post + b"Transfer-Encoding: identity\r\n" + length + b"\r\n" + body,
        post + b"Transfer-Encoding:\tchunked\r\n\r\n" + chunk,
        post + b"Transfer-Encoding: chunked\r\n\tfolded\r\n\r\n" + chunk,
        post + b"X: a\r\n b: c\r\n" + length + b"\r\n" + body,
        post + chunked + b"\r\n-1\r\n" + body,
        post + chunked + b"\r\nffffffffffffffff\r\n" + body,
        post + chunked + b"\r\nfffffffffffffffff0\r\n" + body,
        post + chunked + b"\r\n%x;%s\r\n%s\r\n0\r\n\r\n" % (len(body), b"x" * 70_000, body),
        post + chunked + b"\r\n%x\n%s\n0\n\n" % (len(body), body),
        post.replace(b"\r\n", b"\n") + length.replace(b"\r\n", b"\n") + b"\n" + body,
        post.replace(b"\r\n", b"\r") + b"\r" + body,
        post.replace(b"HTTP/1.1", b"HTTP/9.9") + length + b"\r\n" + body,
        post.replace(b"HTTP/1.1", b"HTTP/1.0") + length + b"\r\n" + body,
        post.replace(b"POST", b"PO ST") + length + b"\r\n" + body,
        post.replace(b"Host: localhost\r\n", b"") + length + b"\r\n" + body,
        post.replace(b"Host: localhost", b"Host: evil.example\r\nHost: localhost") + length + b"\r\n" + body,
        post + length + b"Expect: 100-continue\r\n\r\n" + body,
        post + length + b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AA\r\n\r\n" + body,
        post + length + b"Connection: close, Authorization\r\n\r\n" + body,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        b"GET /health\r\n\r\n",
        b"\r\n" * 1000 + http("GET", "/health"),
        b"\x00" * 1000,
    ]  # fmt: skip


def floods() -> list[bytes]:
    """Return requests that are much larger than usual, or that do not end."""
    many = b"".join(b"X-%d: y\r\n" % number for number in range(20_000))
    lists = b'{"model": "kvloom-llama", "prompt": [' + b"[]," * 300_000 + b"[]]}"
    deep = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    return [
        http("GET", "/health", more=many),
        http("GET", "/health", more=b"X: " + b"y" * 2_000_000 + b"\r\n"),
        http("GET", "/" + "y" * 200_000),
        http("GET", "/v1/models?" + "a=b&" * 10_000),
        http("POST", "/v1/completions", lists, "fuzz-key-of-a"),
        http("POST", "/v1/completions", deep, "fuzz-key-of-a"),
        http("POST", "/tokenize", b'{"prompt": "' + b"\\u0000" * 100_000 + b'"}', "fuzz-key-of-a"),
        http("POST", "/v1/completions", b"x" * 3_000_000, "fuzz-key-of-a"),
        http("POST", "/v1/completions", None, "fuzz-key-of-a", b"Transfer-Encoding: chunked\r\n")
        + b"10000\r\n%s\r\n" % (b"x" * 65536) * 40,
        b"GET /health HTTP/1.1\r\n" + b"X: y\r\n" * 500,
    ]


class Fuzz:
    """One run."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.chance = random.Random(given.seed)
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.model = "kvloom-llama"

    # -- requests -----------------------------------------------------------------------------------

    def request(self) -> tuple[str, bytes]:
        """Return a random request, and its kind."""
        chance = self.chance
        draw = chance.random()
        if draw < 0.15:
            hidden = http("GET", "/v1/models", key="fuzz-key-of-a")
            return "framing", chance.choice(framings(self.body("/v1/completions"), hidden))
        if draw < 0.4:
            return "bytes", self.changed(self.valid())
        if draw < 0.93:
            return "fields", self.valid(junk=True)
        if draw < 0.97:
            return "floods", chance.choice(floods())
        whole = self.valid()
        return "slow", whole[: chance.randrange(1, len(whole))]

    def valid(self, junk: bool = False) -> bytes:
        """Return a request that servers can parse. With `junk`, some fields have odd values."""
        chance = self.chance
        if chance.random() < 0.15:
            return http(
                chance.choice(["GET", "GET", "HEAD", "POST", "DELETE", "OPTIONS", "X"]),
                chance.choice(PAGES),
                key=self.key(),
            )
        path = chance.choice(list(FIELDS))
        return http("POST", path, self.body(path, junk), self.key(), self.header() if junk else b"")

    def key(self) -> str | None:
        return self.chance.choice([*KEYS, *KEYS, ADMIN, ADMIN, "fuzz-key-of-nobody", None])

    def header(self) -> bytes:
        """Return an odd header line, or none."""
        odd = [
            b"x-request-id: " + b"i" * 5000,
            b"x-request-id: \xff\x00"[:-1],
            b"traceparent: 00-zz",
            b"Origin: null",
        ]
        odd += [
            b"Accept-Encoding: \xff",
            b"Content-Type: text/\xff",
            b"Authorization: Basic !",
            b"x-api-key: \xe9",
        ]
        return self.chance.choice(odd) + b"\r\n" if self.chance.random() < 0.2 else b""

    def body(self, path: str, junk: bool = False) -> bytes:
        chance = self.chance
        known = FIELDS[path]
        first = list(known)[:2]
        more = chance.sample(list(known), min(len(known), chance.randrange(4)))
        fields = {"model": self.model, **{name: known[name] for name in dict.fromkeys([*first, *more])}}
        if not junk:
            return json.dumps(fields).encode()
        names = chance.sample(list(fields), chance.choice((1, 1, 1, 2, 3)) if len(fields) > 2 else 1)
        for name in names:
            fields[name] = self.odd(fields[name])
        if chance.random() < 0.1:
            fields[chance.choice(["", "\x00", "__proto__", "a" * 300, "\ud800"])] = chance.choice(JUNK)
        text = json.dumps(fields).encode()
        if chance.random() < 0.1:
            text = text.replace(b": 1", b": " + chance.choice(LITERALS), 1)
        return json.dumps(chance.choice(JUNK)).encode() if chance.random() < 0.03 else text

    def odd(self, value: Any) -> Any:
        """Return junk, or a value with junk inside."""
        chance = self.chance
        if isinstance(value, dict) and value and chance.random() < 0.6:
            name = chance.choice(list(value))
            return {**value, name: self.odd(value[name])}
        if isinstance(value, list) and value and chance.random() < 0.6:
            return [*value[1:], self.odd(value[0])]
        return chance.choice(JUNK)

    def changed(self, data: bytes) -> bytes:
        """Return a request with changed, repeated, missing or added bytes."""
        chance, made = self.chance, bytearray(data)
        for _ in range(chance.choice((1, 1, 2, 4, 16))):
            at = chance.randrange(len(made) + 1)
            end = min(len(made), at + chance.choice((1, 1, 2, 8, 64)))
            change: Callable[[], None] = chance.choice(
                (
                    lambda at=at, end=end: made.__setitem__(slice(at, end), chance.randbytes(end - at)),
                    lambda at=at, end=end: made.__delitem__(slice(at, end)),
                    lambda at=at, end=end: made.__setitem__(slice(at, at), made[at:end]),
                    lambda at=at: made.__setitem__(
                        slice(at, at), chance.choice((b"\r\n", b"\x00", b":", b" ", b"\xff", b"9" * 30))
                    ),
                )
            )
            change()
        return bytes(made)

    # -- one exchange -------------------------------------------------------------------------------

    async def exchange(self, server: Server, kind: str, data: bytes) -> None:
        """Send a request in parts, and check the answer."""
        began = time.monotonic()
        received = b""
        try:
            async with asyncio.timeout(self.given.deadline):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                try:
                    with suppress(ConnectionError):
                        for part in self.parts(data):
                            writer.write(part)
                            await writer.drain()
                            if self.chance.random() < 0.2:
                                await asyncio.sleep(0)
                    received = await self.answer(reader, data.startswith(b"HEAD "))
                finally:
                    writer.transport.abort()
        except TimeoutError:
            self.fail(
                server, kind, data, f"no end within {time.monotonic() - began:.0f} s; got {received[:80]!r}"
            )
            return
        statuses = [int(word[:3]) for word in received.split(b"HTTP/1.1 ")[1:] if word[:3].isdigit()]
        self.counts[f"{kind} {statuses[0] if statuses else 'closed'}"] += 1
        if any(status >= 500 and status != 503 for status in statuses):
            self.fail(server, kind, data, f"status {statuses}: {received[-300:]!r}")
        if kind == "framing" and len([status for status in statuses if status == 200]) > 1:
            self.fail(server, kind, data, f"answers {statuses} to one request: {received[:400]!r}")

    def parts(self, data: bytes) -> list[bytes]:
        """Cut a request into up to four parts."""
        cuts = sorted(self.chance.randrange(len(data) + 1) for _ in range(self.chance.choice((0, 0, 1, 3))))
        return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]

    async def answer(self, reader: asyncio.StreamReader, has_no_body: bool) -> bytes:
        """Return all bytes until the server closes the connection, or is silent after an answer."""
        received = b""
        with suppress(ConnectionError):
            while True:
                silence = 1.0 if is_complete(received, has_no_body) else None
                try:
                    async with asyncio.timeout(silence):
                        part = await reader.read(1 << 16)
                except TimeoutError:
                    if silence is None:
                        raise
                    return received
                if not part:
                    return received
                received += part
        return received

    def fail(self, server: Server, kind: str, data: bytes, why: str) -> None:
        shown = data if len(data) < 1500 else data[:1500] + b"..."
        self.failures.append(f"{server.kind}, {kind}: {why}\n    request: {shown!r}")

    # -- the run ------------------------------------------------------------------------------------

    async def run(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="kvloom-fuzz-") as name:
            folder = Path(name)
            servers = self.servers(folder)
            for one in servers:
                one.start()
            try:
                return await self._run(servers)
            finally:
                for one in reversed(servers):
                    one.stop()

    def servers(self, folder: Path) -> list[Server]:
        """Return a server and a router in front of it."""
        keys = folder / "keys.json"
        entries: dict[str, Any] = {**KEYS, ADMIN: {"tenant": "operator", "admin": True}}
        keys.write_text(json.dumps(entries))
        keys.chmod(0o600)
        limits = ["--request-seconds", str(REQUEST_SECONDS), "--max-body", "2MiB"]
        worker, router = free_port(), free_port()
        kvloom = [sys.executable, "-m", "kvloom.cli"]
        serve = ["serve", "kvloom-llama", "--port", str(worker), "-q", "--threads", "1", "--pool", "64MiB"]
        serve += ["--api-keys", str(keys), *limits]
        route = [
            "route",
            "--port",
            str(router),
            "--worker",
            f"http://127.0.0.1:{worker}",
            "--worker-key",
            ADMIN,
        ]
        route += ["--admin-key", ADMIN, "--wait-seconds", "2", "--deadline-seconds", "30", *limits]
        return [
            Server("server", worker, [*kvloom, *serve], folder / "server.log"),
            Server("router", router, [*kvloom, *route], folder / "router.log"),
        ]

    async def _run(self, servers: list[Server]) -> dict[str, Any]:
        for one in servers:
            await asyncio.to_thread(wait_healthy, one)
        expected = [await asyncio.to_thread(self.known_answer, one) for one in servers]
        await asyncio.sleep(2)
        before = [one.usage() for one in servers]
        end = time.monotonic() + self.given.seconds

        async def client() -> None:
            while time.monotonic() < end and len(self.failures) < 20:
                server = self.chance.choice(servers)
                kind, data = self.request()
                await self.exchange(server, kind, data)

        await asyncio.gather(*(client() for _ in range(self.given.clients)))
        await asyncio.sleep(REQUEST_SECONDS + 8)
        for one, answer, usage in zip(servers, expected, before, strict=True):
            await asyncio.to_thread(self.check_after, one, answer, usage)
        return {
            "requests": sum(self.counts.values()),
            "counts": dict(sorted(self.counts.items())),
            "failures": self.failures,
        }

    def known_answer(self, server: Server) -> str:
        body = {"model": self.model, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        headers = {"Authorization": "Bearer fuzz-key-of-a", "Content-Type": "application/json"}
        asked = Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
        with urlopen(asked, timeout=120) as answer:
            return str(json.loads(answer.read())["choices"][0]["text"])

    def check_after(self, server: Server, expected: str, before: dict[str, int]) -> None:
        """Check that a server is as before the run."""
        wait_healthy(server)
        if self.known_answer(server) != expected:
            self.failures.append(f"{server.kind}: the answer to a known prompt has changed")
        asked = Request(f"{server.url}/metrics", headers={"Authorization": f"Bearer {ADMIN}"})
        with urlopen(asked, timeout=60) as answer:
            lines = answer.read().decode().splitlines()
        names = ("kvloom_open_requests", "kvloom_running", "kvloom_router_running", "kvloom_router_waiting")
        for line in lines:
            if line.startswith(names) and float(line.rpartition(" ")[2]):
                self.failures.append(f"{server.kind}: {line} after the run")
        after = server.usage()
        for name, slack in (("descriptors", 16), ("threads", 8)):
            if after[name] > before[name] + slack:
                self.failures.append(f"{server.kind}: {after[name]} {name}, before the run {before[name]}")
        log = server.log.read_text(errors="replace")
        if "Traceback" in log:
            self.failures.append(
                f"{server.kind}: traceback in the log: {log[log.index('Traceback') :][:3000]}"
            )


def is_complete(received: bytes, has_no_body: bool) -> bool:
    """Return whether the last answer of some bytes is complete."""
    head, found, rest = received.rpartition(b"HTTP/1.1 ")[2].partition(b"\r\n\r\n")
    if not found or has_no_body:
        return bool(found)
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(rest) >= int(line.partition(b":")[2])
        if line == b"transfer-encoding: chunked":
            return rest.endswith(b"0\r\n\r\n")
    return True


def wait_healthy(server: Server, seconds: float = 300) -> None:
    """Wait until a server answers that it is healthy."""
    end = time.monotonic() + seconds
    while True:
        with suppress(OSError), urlopen(f"{server.url}/health", timeout=10) as answer:
            if answer.status == 200:
                return
        if time.monotonic() > end:
            raise TimeoutError(f"the {server.kind} is not healthy: {server.log.read_text()[-800:]}")
        time.sleep(0.2)


def main() -> int:
    """Run the command. Return 1 if a check failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="length of the run (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=6, help="connections at a time (default %(default)s)")
    parser.add_argument("--deadline", type=float, default=60, help="seconds in which a request must end")
    found = asyncio.run(Fuzz(parser.parse_args()).run())
    print(f"{found['requests']} requests")
    for name, count in found["counts"].items():
        print(f"  {name:20} {count}")
    for failure in found["failures"]:
        print(f"FAILED: {failure}")
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
