"""An engine that dies and comes back, and a server that ends: who waits is told, who runs may finish."""

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


def test_an_engine_that_is_killed_comes_back_and_serves_on(mortal: Running) -> None:
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
    assert told["kvloom_held_pages"] == 0
    assert any("was ended by signal 9" in line for line in mortal.said)


def test_an_engine_that_hangs_is_ended_and_comes_back_and_one_that_pauses_is_not(mortal: Running) -> None:
    engine = _engines(mortal)[-1]
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
    with pytest.raises(openai.APIError, match=r"engine's process said nothing for 3 s and was ended"):
        list(stream)
    assert mortal.send("GET", "/health")[0] == 503
    mortal.wait_for(lambda: not _alive(engine), 10)
    mortal.wait_for(mortal.healthy, 60)
    assert mortal.complete(prompt="hi", max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3
    assert mortal.metrics()["kvloom_engine_restarts_total"] == 2
    assert any("hung and was ended: it said nothing for 3 s" in line for line in mortal.said)


def test_more_than_the_queue_holds_is_refused(mortal: Running) -> None:
    streams = [mortal.client().completions.create(stream=True, **LONG) for _ in range(4)]
    with pytest.raises(openai.RateLimitError, match="must come later") as caught:
        mortal.client().completions.create(**{**LONG, "n": 3})
    assert caught.value.code == "rate_limit_exceeded"
    assert caught.value.response.headers["retry-after"] == "1"
    for stream in streams:
        stream.close()
    mortal.wait_for(mortal.idle, 10)


def test_sigterm_lets_what_runs_finish_and_nothing_begin(mortal: Running) -> None:
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


def test_a_second_signal_ends_at_once_and_an_engine_never_outlives_its_server(folder: Path) -> None:
    with running(folder, "--pool", "16MiB") as found:
        stream = found.client().completions.create(stream=True, **LONG)
        next(stream)
        found.process.send_signal(signal.SIGINT)
        found.wait_for(lambda: any("draining" in line for line in found.said))
        found.process.send_signal(signal.SIGINT)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        assert found.process.wait(10) == 0
        assert any("1 request cut off" in line for line in found.said)


def test_a_server_that_cannot_start_says_why(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k\n")
    recording = tmp_path / "traffic.jsonl"
    recording.write_text("yesterday's")
    for wrong, said in (
        (["--host", "0.0.0.0"], "no API keys"),
        (["--host", "0.0.0.0", "--no-auth"], "no API keys"),
        (["--no-auth", "--api-keys", str(keys)], "give one of them"),
        (["--api-keys", str(keys)], "line 1"),
        (["--api-keys", str(tmp_path / "none")], "none"),
        (["--port", "70000"], "70000"),
        (["--pool", "much"], "much"),
        (["--drain-seconds", "-1"], "--drain-seconds: -1"),
        (["--record", str(recording)], "traffic.jsonl is there already"),
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
    again = [int(line.split("as process ")[1].split(",")[0]) for line in found.said if "as process" in line]
    return [found.engine, *again]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
