"""Engine restarts and server shutdown: open requests get errors, running ones may finish."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kvloom.cli import main
from tests.serve.running import MODEL, Running, running

LONG: dict[str, Any] = {
    "model": MODEL,
    "prompt": "go on",
    "max_tokens": 4000,
    "extra_body": {"ignore_eos": True},
}


@pytest.fixture(scope="module")
def mortal(folder: Path) -> Iterator[Running]:
    """A server that is ended here."""
    with running(
        *(folder, "--pool", "16MiB", "--drain-seconds", "20", "--max-running", "4", "--max-queue", "2"),
        *("--silent-seconds", "3"),
    ) as found:
        yield found


def test_a_killed_engine_restarts_and_serves(mortal: Running) -> None:
    stream = mortal.client().completions.create(stream=True, **LONG)
    next(stream)
    caught: list[openai.APIStatusError] = []

    def wait() -> None:
        try:
            mortal.client().completions.create(**LONG)
        except openai.APIStatusError as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    mortal.wait_for(lambda: mortal.metrics()["kvloom_running"] == 2)
    os.kill(mortal.engine, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="engine"):
        list(stream)
    waiting.join(10)
    assert caught
    assert caught[0].status_code == 503
    assert caught[0].code == "engine_died"
    status, headers, told = mortal.send("POST", "/v1/completions", {"model": MODEL, "prompt": "hi"})
    assert (status, told["error"]["code"]) == (503, "engine_loading")
    assert int(headers["retry-after"]) > 0
    assert mortal.send("GET", "/health")[0] == 503
    mortal.wait_for(mortal.healthy, 60)
    assert mortal.complete(prompt="hi", max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3
    told = mortal.metrics()
    assert told["kvloom_engine_restarts_total"] == 1
    assert told["kvloom_in_use_pages"] == 0
    assert any("died by signal 9" in line for line in mortal.said)


@pytest.mark.slow
def test_a_hung_engine_is_restarted_and_a_paused_one_is_not(mortal: Running) -> None:
    engine, restarts = _engines(mortal)[-1], mortal.metrics()["kvloom_engine_restarts_total"]
    stream = mortal.client().completions.create(stream=True, **{**LONG, "max_tokens": 400})
    next(stream)
    os.kill(engine, signal.SIGSTOP)
    time.sleep(1.5)
    os.kill(engine, signal.SIGCONT)
    *_, last = stream
    assert last.choices[0].finish_reason == "length"
    stream = mortal.client().completions.create(stream=True, **LONG)
    next(stream)
    os.kill(engine, signal.SIGSTOP)
    with pytest.raises(openai.APIError, match=r"engine process sent no message for 3 s and was killed"):
        list(stream)
    assert mortal.send("GET", "/health")[0] == 503
    mortal.wait_for(lambda: not _alive(engine), 10)
    mortal.wait_for(mortal.healthy, 60)
    assert mortal.complete(prompt="hi", max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3
    assert mortal.metrics()["kvloom_engine_restarts_total"] == restarts + 1
    assert any("was killed because it sent no message for 3 s" in line for line in mortal.said)


def test_requests_beyond_the_queue_limit_are_refused(mortal: Running) -> None:
    streams = [mortal.client().completions.create(stream=True, **LONG) for _ in range(4)]
    with pytest.raises(openai.RateLimitError, match="queue is full") as caught:
        mortal.client().completions.create(**{**LONG, "n": 3})
    assert caught.value.code == "rate_limit_exceeded"
    assert caught.value.response.headers["retry-after"] == "1"
    for stream in streams:
        stream.close()
    mortal.wait_for(mortal.idle, 10)


def test_sigterm_drains_running_requests_and_refuses_new_ones(mortal: Running) -> None:
    asked = {**LONG, "max_tokens": 600}
    stream = mortal.client().completions.create(stream=True, **asked)
    next(stream)
    mortal.process.send_signal(signal.SIGTERM)
    mortal.wait_for(lambda: any("draining" in line for line in mortal.said))
    status, headers, told = mortal.send("POST", "/v1/completions", {"model": MODEL, "prompt": "hi"})
    assert (status, told["error"]["code"]) == (503, "draining")
    assert int(headers["retry-after"]) > 0
    assert mortal.send("GET", "/health")[:1] == (503,)
    *_, last = stream
    assert last.choices[0].finish_reason == "length"
    assert mortal.process.wait(15) == 0
    end = time.monotonic() + 10
    while any(_alive(pid) for pid in _engines(mortal)):
        assert time.monotonic() < end, "an engine outlived its server"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_second_signal_exits_at_once_with_the_engine(folder: Path) -> None:
    with running(folder, "--pool", "16MiB") as found:
        stream = found.client().completions.create(stream=True, **LONG)
        next(stream)
        found.process.send_signal(signal.SIGINT)
        found.wait_for(lambda: any("draining" in line for line in found.said))
        found.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="the server is stopping; this answer was cut off"):
            list(stream)
        assert found.process.wait(10) == 0
        assert any("1 request cut off" in line for line in found.said)


def test_invalid_options_are_reported_at_start(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k\n")
    recording = tmp_path / "traffic.jsonl"
    recording.write_text("yesterday's")
    for wrong, said in (
        (
            ["--host", "0.0.0.0"],
            "no API keys: use --api-keys FILE or --api-key KEY; --no-auth is for a loopback",
        ),
        (["--host", "999.1.1.1"], "host '999.1.1.1' is neither an IP address nor a known name"),
        (["--host", "192.0.2.1", "--api-key", "key-of-ops-1"], "use an address of this machine with --host"),
        (["--no-auth", "--api-key", "key-of-ops-1"], "--no-auth and --api-key exclude each other"),
        (["--api-key", "short"], "key 1 of --api-key: a key must have at least 8 characters"),
        (["--api-key", "with a space"], "printable ASCII without spaces"),
        (["--cors-origin", "*"], "lets every web page use the server"),
        (["--cors-origin", "https://example.org/page"], "is not an origin"),
        (["--ssl-keyfile", str(keys)], "need --ssl-certfile"),
        (["--ssl-certfile", str(tmp_path / "none")], "there is no such file"),
        (["--ssl-certfile", str(keys)], "cannot be used"),
        (["--tier", "host:1"], "host tier of 1 bytes is too small"),
        (["--tier", f"disk:{tmp_path}/kv:1GiB?optional=maybe"], "optional='maybe' must be 0 or 1"),
        (["--host", "0.0.0.0", "--no-auth"], "no API keys"),
        (["--no-auth", "--api-keys", str(keys)], "use one of them"),
        (["--api-keys", str(keys)], "line 1"),
        (["--api-keys", str(tmp_path / "none")], "none"),
        (["--port", "70000"], "70000"),
        (["--pool", "much"], "much"),
        (["--drain-seconds", "-1"], "--drain-seconds: -1"),
        (["--record", str(recording)], "traffic.jsonl exists"),
        (["--device", "cuda:99"], "there is no device 'cuda:99'"),
        (["--silent-seconds", "0.5"], "--silent-seconds 0.5"),
        (["--step-seconds", "0.5"], "--step-seconds 0.5"),
        (["--host", "no.such.host.invalid", "--api-keys", str(keys)], "line 1"),
    ):
        assert main(["serve", str(folder), "--port", "0", *wrong]) == 2
        assert said in capsys.readouterr().err
    assert recording.read_text() == "yesterday's"
    for model in (str(tmp_path / "nothing"), str(tmp_path), "no-such-name", "llama-3-70b", "kvloom-none"):
        assert main(["serve", model]) == 2
        assert model in capsys.readouterr().err


def test_a_pool_that_is_too_small_ends_the_server(folder: Path) -> None:
    with pytest.raises(AssertionError, match="too small"), running(folder, "--pool", "1KiB"):
        pass


def _engines(found: Running) -> list[int]:
    again = [int(line.split("as process ")[1].split()[0]) for line in found.said if "as process" in line]
    return [found.engine, *again]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
