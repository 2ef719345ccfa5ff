"""`kvloom share`: memory of a process of its own, that outlives who uses it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvloom.cli import main
from kvloom.tiers.opening import open_tier

from .conformance import get, put


def test_memory_is_shared_with_who_has_the_secret_until_it_is_ended(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("sixteen bytes or more\n")
    secret.chmod(0o600)
    command = [sys.executable, "-m", "kvloom.cli", "share", "16MiB", "--listen", "127.0.0.1:0", "--json"]
    with subprocess.Popen(
        [*command, "--slab", "1MiB", "--secret", str(secret)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            assert told["bytes"] == 16 << 20
            for numbers in (range(8), range(4, 12)):  # one after the other, as servers come and go
                tier = open_tier(f"{told['address']}?secret={secret}")
                assert put(tier, numbers).ok.all()
                tier.close()
            tier = open_tier(f"{told['address']}?secret={secret}&by=connection")
            assert get(tier, range(12)).ok.all()
            assert tier.stats().objects == 12
            process.send_signal(signal.SIGSTOP)  # as when it sleeps: any of its threads may be told then
            process.send_signal(signal.SIGCONT)
        finally:
            process.terminate()
        assert process.wait(10) == 0
        tier.close()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["64GiB", "--listen", "here"], "write HOST:PORT"),
        (["64GiB", "--listen", "127.0.0.1:70000"], "write HOST:PORT"),
        (["1MiB"], "less than one slab"),
        (["much"], "'much' is not understood"),
        (["64MiB", "--listen", "0.0.0.0:0"], "can be reached from elsewhere"),
        (["64MiB", "--secret", "/nonexistent"], "No such file"),
        (["64MiB", "--secret", "/dev/null"], "secret /dev/null has 0 bytes: give 16 or more"),
        (["64MiB", "--allow-uid", "1001"], "give --socket PATH"),
        (["8388607TiB"], "8388607TiB cannot be shared here"),
    ],
)
def test_what_makes_no_sense_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["share", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_port_that_is_taken_is_named_with_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["share", "16MiB", "--listen", where]) == 2
    said = capsys.readouterr().err
    assert f"{where} cannot be had: Address already in use; choose another with --listen" in said
