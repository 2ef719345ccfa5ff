"""Where kernels run, what a process inherits, and the profiles of the property tests.

Without a GPU, Triton's kernels run in its interpreter: set before anything imports Triton. Property tests see the same
examples on every run, or (make fuzz) new ones each time; a machine that runs the kernel tests alone may lack hypothesis.
"""

import gc
import os
import shutil
import signal
from collections.abc import Iterator

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


@pytest.fixture(scope="session", autouse=True)
def private_directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers create their secret and sockets in a directory of the test run, not in the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.delenv("XDG_RUNTIME_DIR", raising=False)
        yield


LONG_FOLDERS = ("cluster", "serve", "engine", "adapters", "bench")
"""Folders whose files take long. They run first, so that no worker process has a long file at the end."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first. Mark the parameter sets of tests with `few(n)` as slow, but for n of them at equal
    distances."""
    ranks = {name: rank for rank, name in enumerate(LONG_FOLDERS)}
    items.sort(key=lambda item: ranks.get(item.path.parent.name, len(ranks)))
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
