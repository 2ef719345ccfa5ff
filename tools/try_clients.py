"""Run client packages against `kvloom serve` and print a table: client, version, result.

    make clients            or   python tools/try_clients.py --work DIR [--only openai litellm ...] [--json]

Each package gets a virtual environment below --work; packages come from the configured index. The server is started with
the embedded model, on loopback, with aliases for the model names that OpenAI's tests have built in.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

MODEL = "kvloom-llama"
ALIASES = ("gpt-6-astra", "gpt-3.5-turbo-instruct", "text-embedding-3-small", "model")
LIMIT = 900
"""Seconds for one client."""
TESTS = ("test_completions.py", "chat/test_completions.py", "test_embeddings.py", "test_models.py")
SENT = "(create or retrieve or list) and not all_params and not delete"
STORED = "TestCompletions and (retrieve or list) or TestAsyncCompletions and (retrieve or list)"
"""OpenAI's tests that are left out: `all_params` sends nonsense such as a logit bias for the token "foo"; stored
completions and deleted models belong to OpenAI's platform."""
BASE64 = "Embeddings and (strict or aiohttp)"
"""Left out, too: the client asks for base64, and its strict mode then rejects the text."""

SNIPPETS = {
    "litellm": """
import litellm
chat = dict(messages=[{"role": "user", "content": "def add(a, b):"}], api_base=URL, max_tokens=64)
tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties":
        {"city": {"type": "string", "maxLength": 8}}, "required": ["city"], "additionalProperties": False}}}
forced = {"type": "function", "function": {"name": "weather"}}
assert litellm.completion(model="openai/" + MODEL, **chat).choices[0].message.content
assert [c for c in litellm.completion(model="openai/" + MODEL, stream=True, **chat)]
assert litellm.completion(model="hosted_vllm/" + MODEL, **chat).choices[0].message.content
assert litellm.completion(model="openai/" + MODEL, tools=[tool], tool_choice=forced, **chat).choices[0].message.tool_calls
assert litellm.text_completion(model="text-completion-openai/" + MODEL, prompt="def add(", api_base=URL).choices[0].text
assert litellm.embedding(model="openai/" + MODEL, input=["abc"], api_base=URL).data[0]["embedding"]
""",
    "langchain-openai": """
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, ConfigDict, Field
class City(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=8)
chat = ChatOpenAI(model=MODEL, base_url=URL, max_tokens=64, temperature=0)
assert chat.invoke("def add(").content
assert list(chat.stream("def add("))
for method in ("json_schema", "function_calling"):
    assert isinstance(chat.with_structured_output(City, method=method).invoke("a city"), City), method
assert ChatOpenAI(model=MODEL, base_url=URL, max_tokens=16, use_responses_api=True).invoke("def add(").content
assert OpenAIEmbeddings(model=MODEL, base_url=URL, check_embedding_ctx_length=False).embed_query("a")
assert OpenAI(model=MODEL, base_url=URL, max_tokens=8).invoke("def add(")
""",
    "instructor": """
import instructor, openai
from pydantic import BaseModel, ConfigDict, Field
class City(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: str = Field(max_length=8)
client = openai.OpenAI(base_url=URL, api_key="none")
for more in ({}, {"mode": instructor.Mode.TOOLS}, {"mode": instructor.Mode.JSON_SCHEMA}):
    made = instructor.from_openai(client, **more).chat.completions
    ask = [{"role": "user", "content": "a city"}]
    assert isinstance(made.create(model=MODEL, response_model=City, messages=ask, max_tokens=64, max_retries=0), City)
""",
    "anthropic": """
import anthropic
client = anthropic.Anthropic(base_url=URL.removesuffix("/v1"), api_key="none")
ask = dict(model=MODEL, max_tokens=16, messages=[{"role": "user", "content": "def add("}])
assert client.messages.create(**ask).content[0].text
with client.messages.stream(**ask) as stream:
    assert "".join(stream.text_stream)
assert client.messages.count_tokens(model=MODEL, messages=ask["messages"]).input_tokens
""",
}
"""Calls of each client library. They need a model that answers, not one that answers well."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server: its URL, and the folder of its model's tokenizer."""

    url: str
    folder: str


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one client."""

    client: str
    version: str
    passed: bool
    detail: str


def environment(work: Path, name: str, packages: list[str]) -> Path:
    """Return the Python of a virtual environment that has `packages`; made on first use."""
    folder = work / name
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        (folder / "ready").touch()
    return python


def version(python: Path, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def call(command: list[str], **environ: str) -> tuple[bool, str]:
    """Run a client. Return whether it succeeded, and its output."""
    given = {**os.environ, "OPENAI_API_KEY": "none", **environ}
    try:
        done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return False, f"no answer within {LIMIT} s"
    return done.returncode == 0, done.stdout + done.stderr


def openai_tests(work: Path, server: Server) -> Result:
    """Run the tests of OpenAI's client, out of its source distribution."""
    needed = [
        "openai",
        "aiohttp",
        "httpx_aiohttp",
        "rich",
        "respx",
        "dirty-equals",
        "nest_asyncio",
        "inline-snapshot",
    ]
    python = environment(work, "openai", [*needed, "pytest", "pytest-asyncio", "pytest-xdist"])
    found = version(python, "openai")
    source = work / f"openai-{found}"
    if not source.exists():
        fetch = [
            str(python),
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary",
            ":all:",
            f"openai=={found}",
        ]
        subprocess.run([*fetch, "-d", str(work)], check=True)
        with tarfile.open(work / f"openai-{found}.tar.gz") as archive:
            archive.extractall(work, filter="data")
    chosen = f"{SENT} and not ({STORED}) and not ({BASE64})"
    files = [str(source / "tests" / "api_resources" / name) for name in TESTS]
    run = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-n",
        "1",
        "--rootdir",
        str(source),
        "-k",
        chosen,
        *files,
    ]
    passed, output = call(run, TEST_API_BASE_URL=server.url, PYTHONPATH=str(source))
    return Result("openai", found, passed, _last_line(output))


def snippet(name: str, more: tuple[str, ...] = ()) -> Callable[[Path, Server], Result]:
    """Return a check that runs the calls of `SNIPPETS`."""

    def check(work: Path, server: Server) -> Result:
        python = environment(work, name, [name, *more])
        code = f"URL, MODEL = {server.url!r}, {MODEL!r}\n{SNIPPETS[name]}"
        passed, output = call([str(python), "-c", code])
        return Result(name, version(python, name), passed, "all calls" if passed else _last_line(output))

    return check


def llm_command(work: Path, server: Server) -> Result:
    python = environment(work, "llm", ["llm"])
    home = work / "llm-home"
    home.mkdir(exist_ok=True)
    entry = f'- model_id: kv\n  model_name: {MODEL}\n  api_base: "{server.url}"\n'
    (home / "extra-openai-models.yaml").write_text(entry)
    command = [str(python.with_name("llm")), "-m", "kv", "-o", "max_tokens", "16", "def add("]
    passed, output = call(command, LLM_USER_PATH=str(home))
    return Result("llm", version(python, "llm"), passed and bool(output.strip()), _last_line(output))


def aiperf(work: Path, server: Server) -> Result:
    python = environment(work, "aiperf", ["aiperf"])
    command = [
        str(python.with_name("aiperf")),
        "profile",
        "--model",
        MODEL,
        "--url",
        server.url.removesuffix("/v1"),
    ]
    command += [
        "--endpoint-type",
        "chat",
        "--streaming",
        "--tokenizer",
        server.folder,
        "--request-count",
        "8",
    ]
    command += ["--concurrency", "2", "--isl", "64", "--osl", "16", "--ui", "none"]
    passed, output = call([*command, "--output-artifact-dir", str(work / "aiperf-out")])
    return Result("aiperf", version(python, "aiperf"), passed, "8 streams" if passed else _last_line(output))


def guidellm(work: Path, server: Server) -> Result:
    python = environment(work, "guidellm", ["guidellm"])
    command = [
        str(python.with_name("guidellm")),
        "run",
        "--tokenizer",
        f"kind=huggingface_auto,model={server.folder}",
    ]
    command += ["--backend", f"kind=openai_http,target={server.url.removesuffix('/v1')},model={MODEL}"]
    command += [
        "--data",
        "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
        "--profile",
        "kind=concurrent,streams=2",
    ]
    command += ["--constraint", "kind=max_requests,count=6", "--disable-console-interactive"]
    passed, output = call([*command, "--output", f"kind=json,path={work / 'guidellm.json'}"])
    return Result(
        "guidellm", version(python, "guidellm"), passed, "6 streams" if passed else _last_line(output)
    )


CLIENTS: dict[str, Callable[[Path, Server], Result]] = {
    "openai": openai_tests,
    "litellm": snippet("litellm", ("mcp",)),
    "langchain-openai": snippet("langchain-openai"),
    "instructor": snippet("instructor"),
    "anthropic": snippet("anthropic"),
    "llm": llm_command,
    "aiperf": aiperf,
    "guidellm": guidellm,
}


@contextmanager
def serving() -> Iterator[Server]:
    """Start a server on a free port of the loopback address; stop it at the end."""
    command = [sys.executable, "-m", "kvloom.cli", "serve", MODEL, "--port", "0"]
    for alias in ALIASES:
        command += ["--alias", alias]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if found := re.search(r"serves .+ at (http://\S+);", line):
                from kvloom.models.specs import folder_of

                yield Server(f"{found[1]}/v1", str(folder_of(MODEL)))
                return
        raise SystemExit("the server did not start")
    finally:
        process.terminate()
        process.wait(60)


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1].strip("= ")[:160] if lines else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(".clients"),
        help="folder for virtual environments (default: .clients)",
    )
    parser.add_argument(
        "--only", nargs="*", choices=CLIENTS, default=list(CLIENTS), help="clients to run (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    results = []
    with serving() as server:
        for name in args.only:
            print(f"{name} ...", file=sys.stderr)
            results.append(CLIENTS[name](args.work.resolve(), server))
    if args.json:
        print(json.dumps([asdict(one) for one in results], indent=2))
    else:
        print("| client | version | result |\n|---|---|---|")
        for one in results:
            print(f"| {one.client} | {one.version} | {'passes' if one.passed else 'FAILS'}: {one.detail} |")
    return 0 if all(one.passed for one in results) else 1


if __name__ == "__main__":
    sys.exit(main())
