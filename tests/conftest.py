"""Where kernels run, what a process inherits, and the profiles of the property tests.

Without a GPU, Triton's kernels run in its interpreter: set before anything imports Triton. Property tests see the same
examples on every run, or (make fuzz) new ones each time; a machine that runs the kernel tests alone may lack hypothesis.
"""

import gc
import os
import re
import shutil
import signal
import sys
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("kvloom.tiers.testing.conformance")

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

if (
    signal.getsignal(signal.SIGINT) == signal.SIG_IGN
):  # as a shell's background job, whose children would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

try:
    from hypothesis import HealthCheck, settings
except ImportError:
    pass
else:
    settings.register_profile("plain", deadline=None, derandomize=True, max_examples=100, print_blob=True)
    settings.register_profile(
        "fuzz",
        deadline=None,
        max_examples=2000,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile(os.environ.get("KVLOOM_HYPOTHESIS", "plain"))


SLOW_TESTS = set(Path(__file__).with_name("slow_tests.txt").read_text(encoding="utf-8").splitlines())


@pytest.fixture(scope="session", autouse=True)
def private_directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers create their secret and sockets in a directory of the test run, not in the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.delenv("XDG_RUNTIME_DIR", raising=False)
        yield


@pytest.fixture(autouse=True)
def default_dtype() -> Iterator[None]:
    """Tests begin with torch's usual default dtype. Loading a model changes it for a moment, also in other threads, so
    two loads at a time may leave it changed."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_default_dtype"):
        torch.set_default_dtype(torch.float32)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Switch the garbage collector off while tests are collected. Ten thousand tests are no garbage, and neither this nor any
    later run of the collector walks through them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


SHARED_SERVERS = {"server", "observed", "guarded", "small"}
"""Fixtures of tests/serve/conftest.py that start a server for several files."""


@cache
def uses_shared_server(file: str) -> bool:
    """Return whether a function of a test file has a shared server as argument."""
    text = (Path(__file__).parent.parent / file).read_text(encoding="utf-8")
    own = set(re.findall(r"^def (\w+)\(", text, re.MULTILINE))
    arguments = " ".join(re.findall(r"^def \w+\((.*?)\) ->", text, re.MULTILINE | re.DOTALL))
    return bool((SHARED_SERVERS - own) & set(re.findall(r"\w+", arguments)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """With `--dist loadfile`, one process runs all files that share servers, because the start of a server takes long."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            is_shared = file.startswith("tests/serve/") and uses_shared_server(file)
            return "tests/serve" if is_shared else super()._split_scope(nodeid)

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow: the tests in slow_tests.txt, and the parameter sets of tests with `few(n)`, but for n of them at
    equal distances."""
    for item in items:
        if item.nodeid in SLOW_TESTS:
            item.add_marker(pytest.mark.slow)
    sets: dict[tuple[object, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") is not None:
            sets.setdefault((item.parent, getattr(item, "originalname", item.name)), []).append(item)
    for same in sets.values():
        marker = same[0].get_closest_marker("few")
        assert marker is not None
        quick = {int((i + 0.5) * len(same) / marker.args[0]) for i in range(marker.args[0])}
        for i, item in enumerate(same):
            if i not in quick:
                item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Free device memory that earlier tests left, for tests that need the whole device."""
    if item.get_closest_marker("alone") is not None:
        import torch

        gc.collect()
        torch.cuda.empty_cache()
