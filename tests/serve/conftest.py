"""A tiny model, and servers that tests share if they do not end them. The start of a server is expensive."""

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


GUARDED_TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] + (more or '') }}</s>{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


@pytest.fixture(scope="session")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recording that `guarded` writes."""
    return tmp_path_factory.mktemp("record") / "traffic.jsonl.gz"


@pytest.fixture(scope="session")
def guarded(folder: Path, record: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server whose tenants have limits: two keys of red, a weight for blue, a quota for small, an objective that is never
    met for late. The objective of all others is always met. Its template repeats a text of the request."""
    from tests.serve.running import running

    made = tmp_path_factory.mktemp("guarded")
    keys, template = made / "keys.json", made / "template.jinja"
    tenants = {
        "key-of-red-1": "red",
        "key-of-red-2": "red",
        "key-of-blue-1": {"tenant": "blue", "weight": 1},
        "key-of-small-1": {"tenant": "small", "quota": 64 << 10},
        "key-of-late-1": {"tenant": "late", "slo_ttft": 1e-4},
        "key-of-admin-1": {"tenant": "ops", "admin": True},
    }
    keys.write_text(json.dumps(tenants))
    keys.chmod(0o600)
    template.write_text(GUARDED_TEMPLATE)
    more = (
        *("--pool", "64MiB", "--host", "0.0.0.0", "--max-running", "16", "--max-priority", "1000000000"),
        *("--slo-tbt", "1e9", "--chat-template", str(template), "--record", str(record)),
    )
    with running(folder, "--api-keys", str(keys), *more) as found:
        found.url = found.url.replace("0.0.0.0", "127.0.0.1")
        found.complete("key-of-blue-1", prompt="measure the steps", max_tokens=20, ignore_eos=True)
        yield found


@pytest.fixture(scope="session")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recording that `small` writes."""
    return tmp_path_factory.mktemp("traffic") / "traffic.jsonl"


@pytest.fixture(scope="session")
def small(folder: Path, traffic: Path) -> Iterator[Running]:
    """A server whose pool holds 63 blocks. It records its traffic."""
    from tests.serve.running import running

    with running(folder, "--pool", "256KiB", "--record", str(traffic)) as found:
        yield found
