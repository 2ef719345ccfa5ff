"""One tiny model and one server without keys for all tests that do not end it: starting is what costs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.serve.running import Running

NEEDED = ("msgspec", "starlette", "uvicorn", "httptools", "prometheus_client", "openai")
MISSING = [name for name in NEEDED if find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if MISSING else []
if MISSING:
    warnings.warn(
        f"the server's tests are left out: {', '.join(MISSING)} not installed (extras serve and dev)",
        stacklevel=1,
    )


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.serve.running import model_folder

    return model_folder(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[Running]:
    from tests.serve.running import running

    slow = ("--read-seconds", "1.5", "--request-seconds", "1.5", "--max-connections", "300")
    with running(folder, "--pool", "64MiB", "--max-body", "1MiB", *slow) as found:
        yield found
