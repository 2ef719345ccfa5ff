"""One tiny model and one server without keys, shared by all tests that do not end it."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.serve.receiver import Receiver
    from tests.serve.running import Running

NEEDED = ("msgspec", "starlette", "uvicorn", "httptools", "prometheus_client", "openai", "opentelemetry.sdk")
MISSING = [name for name in NEEDED if find_spec(name.partition(".")[0]) is None]
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

    slow = (
        "--read-seconds",
        "1.5",
        "--request-seconds",
        "1.5",
        "--max-connections",
        "300",
        "--grammar-seconds",
        "0.5",
    )
    with running(folder, "--pool", "64MiB", "--max-body", "1MiB", *slow) as found:
        yield found


@pytest.fixture(scope="session")
def observed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Receiver]]:
    """A server that is watched: keys of two tenants and of an operator (key-of-red-1, key-of-blue-1, key-of-admin-1), and an
    OTLP receiver that its traces go to."""
    from tests.serve.receiver import receiving
    from tests.serve.running import running

    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    admin = {"tenant": "ops", "admin": True}
    keys.write_text(json.dumps({"key-of-red-1": "red", "key-of-blue-1": "blue", "key-of-admin-1": admin}))
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "200"  # milliseconds; the sdk's own setting
    with receiving() as receiver:
        more = ("--api-keys", str(keys), "--otlp", receiver.url, "--pool", "512KiB")
        with running(folder, *more) as found:
            yield found, receiver
    del os.environ["OTEL_BSP_SCHEDULE_DELAY"]
