"""`kvloom share`: memory of a separate process, which outlives its clients."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvloom.cli import main
from kvloom.tiers import open_tier
from kvloom.tiers.testing.conformance import get, put


def test_memory_is_shared_with_holders_of_the_secret_until_terminated(tmp_path: Path) -> None:
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
            for numbers in (range(8), range(4, 12)):  # one after the other, as servers start and end
                tier = open_tier(f"{told['address']}?secret={secret}")
                assert put(tier, numbers).ok.all()
                tier.close()
            tier = open_tier(f"{told['address']}?secret={secret}&by=connection")
            assert get(tier, range(12)).ok.all()
            assert tier.stats().objects == 12
            process.send_signal(
                signal.SIGSTOP
            )  # as for a sleeping process: any of its threads may receive the signal
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
        (["64MiB", "--listen", "0.0.0.0:0"], "is reachable from other hosts"),
        (["64MiB", "--secret", "/nonexistent"], "No such file"),
        (["64MiB", "--secret", "/dev/null"], "secret file /dev/null has 0 bytes: use 16 to 4096"),
        (["64MiB", "--allow-uid", "1001"], "give --socket PATH"),
        (["8388607TiB"], "8388607TiB of shared memory cannot be allocated"),
    ],
)
def test_invalid_arguments_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["share", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_port_in_use_is_reported_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(["share", "16MiB", "--listen", where]) == 2
    said = capsys.readouterr().err
    assert f"cannot listen on {where}: Address already in use; choose another address with --listen" in said
