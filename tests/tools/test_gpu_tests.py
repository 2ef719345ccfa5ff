"""The runner of the GPU's tests, on tests that need none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import gpu_tests

TESTS = """
import time
import pytest

@pytest.mark.parametrize("number", range(30))
def test_passes(number):
    pass

def test_is_skipped():
    pytest.skip("for a reason")
"""


TEARDOWN = """
import pytest

@pytest.fixture
def broken():
    yield
    raise RuntimeError("too late")

def test_passes():
    pass

def test_passes_and_breaks(broken):
    pass
"""


def test_all_that_passes_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "test_made.py"
    file.write_text(TESTS)
    assert gpu_tests.main(["--jobs", "2", str(file)]) == 0
    assert "30 passed, 0 failed, 1 skipped" in capsys.readouterr().out


def test_what_fails_hangs_or_is_not_there_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "test_made.py"
    file.write_text(TESTS + "\ndef test_fails():\n    assert 1 == 2\n")
    assert gpu_tests.main(["--jobs", "2", str(file)]) == 1
    told = capsys.readouterr().out
    assert "30 passed, 1 failed, 1 skipped" in told
    assert "assert 1 == 2" in told
    file.write_text(TEARDOWN)
    assert gpu_tests.main(["--jobs", "1", str(file)]) == 1
    assert "2 passed, 1 failed, 0 skipped" in capsys.readouterr().out
    file.write_text("import time\n\ndef test_hangs():\n    time.sleep(60)\n")
    assert gpu_tests.main(["--jobs", "1", "--seconds", "5", str(file)]) == 1
    assert "0 passed, 1 failed" in capsys.readouterr().out
    assert gpu_tests.main([str(tmp_path / "test_absent.py")]) == 1
    assert "nothing to run in" in capsys.readouterr().out


def test_it_knows_the_tests_of_gpus() -> None:
    known = gpu_tests._known()
    assert {
        "tests/models/test_zoo_gpu.py",
        "tests/engine/test_lower_gpu.py",
        "tests/kernels/test_state.py",
    } < set(known)
    assert len(known) == len(set(known))
    assert known[-2:] == list(gpu_tests.ALONE)
