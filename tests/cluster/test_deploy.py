"""`kvloom deploy`: the cluster file, and a cluster on a local Ray that is killed, scaled and restarted."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("zmq")
pytest.importorskip("aiohttp")

from kvloom.cli import main
from kvloom.cluster.deploy import ClusterFile
from kvloom.cluster.deploy.replicas import by_load, claim_port, command_of, free_port
from tests.cluster.fleet import until
from tests.cluster.test_encode_workers import PATH as CHATS, chat as image_chat
from tests.models.image_folder import image_folder
from tests.serve.running import MODEL, model_folder

ROOT = Path(__file__).parent.parent.parent
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
WORKERS: dict[str, Any] = {"decode": {"model": "m"}}
TLS_TABLE = {"cluster": {"certificate": "/c", "certificate-key": "/k", "authority": "/a"}}


def ray_python() -> str | None:
    """A Python that has Ray: this one, or that of `make test-full`."""
    for found in (os.environ.get("KVLOOM_RAY_PYTHON"), sys.executable, str(ROOT / "build/ray/bin/python")):
        if found and Path(found).exists():
            done = subprocess.run(
                [found, "-c", "import ray.serve"], capture_output=True, timeout=120, check=False
            )
            if done.returncode == 0:
                return found
    return None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({}, "there are no workers"),
        ({"wrong": {}}, "unknown table [wrong]"),
        ({"workers": {"a": {}}}, "[workers.a] needs model"),
        ({"workers": {"a": {"model": "m", "role": "x"}}}, "role 'x' must be one of prefill, decode, both, encode"),
        ({"workers": {"a": {"model": "m", "replicas": 0}}}, "replicas 0 must be a whole number of at least 1"),
        ({"workers": {"a": {"model": "m", "replicas": 3, "max-replicas": 2}}}, "max-replicas 2 is below replicas 3"),
        ({"workers": {"a": {"model": "m", "role": "prefill"}}}, "needs host-memory"),
        ({"workers": {"a": {"model": "m", "role": "encode"}}}, "needs host-memory"),
        (
            {
                "workers": {
                    "a": {"model": "m", "role": "encode", "host-memory": "1GiB", "share-port": 7402},
                    "b": {"model": "m", "role": "prefill", "host-memory": "1GiB"},
                }
            },
            "share-port of a and b: both may use port 7402",
        ),
        ({"workers": {"a": {"model": "m", "gpu": 1}}}, "unknown key 'gpu' in [workers.a]"),
        ({"workers": WORKERS, "router": {"arguments": {"unknown": 1}}}, "arguments of router: unrecognized"),
        ({"workers": {"a": {"model": "m", "arguments": {"pool": "many"}}}}, "arguments of a: argument --pool"),
        (
            {"workers": {"a": {"model": "m", "host-memory": "1GiB"}}, "cluster": {"bind": "node"}},
            "need peer-secret",
        ),
        ({"workers": {"a": {"model": "m", "replicas": 10**12}}}, "replicas 1000000000000 must be at most 10000"),
        ({"workers": {"a": {"model": "m", "host-memory": 5}}}, "host-memory 5 must be a text in quotes"),
        ({"workers": {"a": {"model": "m", "cpus": 10**400}}}, "must be a number from 0 to"),
        ({"workers": WORKERS, "cluster": {"peer-secret": ["x"]}}, "peer-secret ['x'] must be a text in quotes"),
        ({"workers": WORKERS, "cluster": {"environment": "A=b"}}, "environment must be a table"),
        ({"workers": WORKERS, "router": {"port": 70000}}, "port 70000 must be at most 65535"),
        ({"workers": WORKERS, "router": {"drain-seconds": float("nan")}}, "drain-seconds nan must be a number"),
        ({"workers": WORKERS, "router": {"start-seconds": float("inf")}}, "start-seconds inf must be a number"),
    ],
)  # fmt: skip
def test_mistakes_in_the_file_are_named(found: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        ClusterFile.from_dict(found)


@pytest.mark.parametrize("content", [b"a = " + b"[" * 5000, b"\xff\xfe", b"a = = 1"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cluster.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(str(path))):
        ClusterFile.read(str(path))


def test_commands_of_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        '[cluster]\nbind = "node"\npeer-secret = "/s"\n[router]\nport = 9000\n[router.arguments]\nno-tokenize = true\n'
        '[workers.p]\nmodel = "m"\nrole = "prefill"\nhost-memory = "1GiB"\nshare-port = 7000\n'
        '[workers.d]\nmodel = "m"\nrole = "decode"\nhost-memory = "2GiB"\n[workers.d.arguments]\npool = "1GiB"\n'
    )
    assert main(["deploy", str(path), "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["router"] == ["kvloom.cli", "route", "--no-tokenize", "--host", "NODE", "--port", "9000"]
    assert "host:1GiB?share=NODE:7000&secret=/s" in found["p"]
    peers = [word for word in found["d"] if word.startswith("peer://")]
    assert peers == [f"peer://NODE:{port}?optional=1&write=back&secret=/s" for port in (7000, 7001, 7002)]
    assert found["d"][1:5] == ["serve", "m", "--pool", "1GiB"]
    cluster = ClusterFile.read(str(path))
    changed = ClusterFile.from_dict({"workers": {"d": {"model": "m2"}}})
    assert cluster.digest(cluster.workers[1]) == ClusterFile.read(str(path)).digest(cluster.workers[1])
    assert cluster.digest(cluster.workers[1]) != changed.digest(changed.workers[0])
    assert "--tier" not in command_of(changed, changed.workers[0], "h", [1, 2, 3, 4], [], [])
    secured = ClusterFile.from_dict({**TLS_TABLE, "workers": {"d": {"model": "m"}}})
    assert secured.digest(secured.router) != changed.digest(changed.router)
    router, worker = (
        command_of(secured, group, "h", [1, 2, 3, 4], [], [])
        for group in (secured.router, secured.workers[0])
    )
    served = ["--ssl-certfile", "/c", "--ssl-keyfile", "/k"]
    as_client = ["--worker-ca-certs", "/a", "--worker-certfile", "/c", "--worker-keyfile", "/k"]
    assert router[-10:] == served + as_client
    at = worker.index("--ssl-certfile")
    assert worker[at : at + 6] == [*served, "--ssl-ca-certs", "/a"]
    with pytest.raises(ValueError, match="needs the files certificate, certificate-key, authority"):
        ClusterFile.from_dict({"cluster": {"certificate": "/c"}, "workers": {"d": {"model": "m"}}})
    path.write_text("[cluster\n")
    assert main(["deploy", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_workers_ask_the_encode_workers_of_their_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.toml"
    start = '[cluster]\nbind = "node"\npeer-secret = "/s"\n'
    chat = '[workers.chat]\nmodel = "m"\n[workers.other]\nmodel = "n"\n'
    encode = '[workers.images]\nmodel = "m"\nrole = "encode"\nhost-memory = "1GiB"\nreplicas = 2\n'
    path.write_text(start + chat + encode)
    assert main(["deploy", str(path), "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["images", "chat", "other", "router"], "encode workers start first"
    assert found["images"][1:] == [
        "serve", "m", "--host", "NODE", "--port", "0", "--role", "encode", "--drain-seconds", "30",
        "--tier", "host:1GiB?share=NODE:7500&secret=/s",
    ]  # fmt: skip
    asked = [word for word in found["chat"] if word.startswith("peer://")]
    assert asked == [f"peer://NODE:{port}?secret=/s" for port in range(7500, 7504)]
    assert found["chat"].count("--encoder") == 4
    assert "--encoder" not in found["other"], "it has another model"
    cluster, alone = ClusterFile.read(str(path)), ClusterFile.from_dict({"workers": {"chat": {"model": "m"}}})
    assert cluster.digest(cluster.workers[0]) != alone.digest(alone.workers[0])
    assert cluster.digest(cluster.workers[1]) == cluster.digest(cluster.workers[1])
    path.write_text(start + encode + chat + "[workers.chat.arguments]\nencoder = ['peer://x:1']\n")
    assert main(["deploy", str(path), "--dry-run", "--json"]) == 0
    assert "peer://x:1" in json.loads(capsys.readouterr().out)["chat"], "further encode workers may be named"


def test_replicas_that_start_at_once_claim_different_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        first = used.getsockname()[1]
        two = range(first, first + 3)
        ports, claims = zip(*(claim_port("127.0.0.1", two) for _ in range(2)), strict=True)
        assert ports == (first + 1, first + 2), "the first port is in use"
        with pytest.raises(OSError, match="no port from"):
            claim_port("127.0.0.1", two)
        claims[0].close()
        port, claim = claim_port("127.0.0.1", two)
        assert port == ports[0]
        for one in (claim, claims[1]):
            one.close()


def test_the_load_decides_about_the_number_of_replicas() -> None:
    about = SimpleNamespace(target_ongoing_requests=4.0)
    context = SimpleNamespace(
        aggregated_metrics={"load": {"a": 5.0, "b": 4.0}}, capacity_adjusted_min_replicas=1, config=about
    )
    assert by_load(context)[0] == 3
    context.aggregated_metrics = {}
    assert by_load(context)[0] == 1


@pytest.mark.parametrize("victim", ["actor", "supervisor"])
def test_a_supervised_process_ends_with_its_parent(tmp_path: Path, victim: str) -> None:
    pid = tmp_path / "pid"
    child = (
        f"import os, pathlib, time; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); time.sleep(600)"
    )
    watched = [sys.executable, "-m", "kvloom.cluster.deploy.supervised", "5", sys.executable, "-c", child]
    parent = f"import subprocess, time; subprocess.Popen({watched!r}, stdin=subprocess.PIPE); time.sleep(600)"
    is_direct = victim == "supervisor"
    process = subprocess.Popen(
        watched if is_direct else [sys.executable, "-c", parent], stdin=subprocess.PIPE
    )
    until(lambda: pid.exists() and pid.read_text() != "")
    number = int(pid.read_text())
    process.kill()
    process.wait(30)
    until(lambda: not is_running(number))


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@contextmanager
def ray_head(python: str) -> Iterator[str]:
    """A Ray of this machine alone; its address."""
    port = free_port("127.0.0.1")
    with tempfile.TemporaryDirectory(prefix="kr", ignore_cleanup_errors=True) as folder:
        command = [
            python, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--node-ip-address", "127.0.0.1",
            "--port", str(port), "--include-dashboard", "false", "--num-cpus", "4", "--temp-dir", folder,
            "--disable-usage-stats",
        ]  # fmt: skip
        with (Path(folder) / "head.log").open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env={**os.environ, **TOKEN}
            )
        try:
            until(lambda: "Ray runtime started" in (Path(folder) / "head.log").read_text())
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


def deployed(python: str, file: Path, *more: str) -> dict[str, dict[str, Any]]:
    command = [python, "-m", "kvloom.cli", "deploy", str(file), "--json", *more]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, check=False, env={**os.environ, **TOKEN}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {one["group"]: one for one in json.loads(done.stdout)} if done.stdout.strip() else {}


def send(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, {"content-type": "application/json"}), timeout=120) as answer:
        return json.loads(answer.read())


def process_at(url: str) -> int:
    """The pid of the kvloom process that serves at a URL."""
    port = url.rpartition(":")[2].encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"kvloom.cli" in words[:4] and port in words:
                return int(folder.name)
    raise AssertionError(f"no process serves at {url}")


@pytest.mark.slow
def test_a_cluster_on_ray_survives_kills_scales_and_restarts(tmp_path: Path) -> None:
    python = ray_python()
    if python is None:
        pytest.skip(
            "Ray is not installed: `make test-full` installs it below build/ray, or pip install 'kvloom[ray]'"
        )
    folder = model_folder(tmp_path)
    file = tmp_path / "cluster.toml"
    port, share = free_port("127.0.0.1"), free_port("127.0.0.1")
    with ray_head(python) as address:
        common = 'cpus = 0.1\ndrain-seconds = 5\nhost-memory = "32MiB"'
        flags = 'pool = "32MiB"\nquiet = true\nthreads = 1\ndevice = "cpu"'
        file.write_text(
            f'[cluster]\nname = "t"\nray = "{address}"\n[router]\nport = {port}\ncpus = 0.1\ndrain-seconds = 5\n'
            f'[workers.prefill]\nmodel = "{folder}"\nrole = "prefill"\nshare-port = {share}\n{common}\n'
            f"[workers.prefill.arguments]\n{flags}\n"
            f'[workers.decode]\nmodel = "{folder}"\nrole = "decode"\nmax-replicas = 2\ntarget-requests = 2\n'
            f"scale-seconds = 1\n{common}\n[workers.decode.arguments]\n{flags}\n"
        )
        first = deployed(python, file)
        assert {name: one["status"] for name, one in first.items()} == dict.fromkeys(first, "RUNNING")
        router = first["router"]["urls"][0]
        assert router == f"http://127.0.0.1:{port}"

        def alive() -> set[str]:
            try:
                found = send(f"{router}/workers")["workers"]
            except OSError:
                return set()
            return {one["url"] for one in found if one["alive"]}

        until(lambda: len(alive()) == 2)
        body = {
            "model": MODEL,
            "prompt": [7 * i % 250 + 20 for i in range(400)],
            "max_tokens": 40,
            "temperature": 0,
        }
        expected = send(f"{router}/v1/completions", body)["choices"][0]["text"]
        metrics = urlopen(f"{router}/metrics", timeout=30).read().decode()
        assert "kvloom_router_hand_overs_total 1" in metrics

        # A killed worker is replaced.
        decode = first["decode"]["urls"][0]
        os.kill(process_at(decode), signal.SIGKILL)
        until(lambda: len(alive() - {decode}) == 2, 300)
        assert send(f"{router}/v1/completions", body)["choices"][0]["text"] == expected

        # An unchanged file restarts nothing; load adds a worker; a rolling restart loses no request.
        before = alive()
        deployed(python, file)
        assert alive() >= before
        answers: list[str] = []
        stop = threading.Event()

        def ask() -> None:
            while not stop.is_set():
                answers.append(send(f"{router}/v1/completions", body)["choices"][0]["text"])

        askers = [threading.Thread(target=ask) for _ in range(8)]
        for one in askers:
            one.start()
        try:
            until(lambda: len(alive()) >= 3, 300)
            restarted = file.read_text().replace(
                'quiet = true\nthreads = 1\ndevice = "cpu"\n[workers.decode]',
                'quiet = true\ndevice = "cpu"\n[workers.decode]',
            )
            assert restarted != file.read_text()
            file.write_text(restarted)  # the prefill group changed: only its worker restarts
            deployed(python, file)
            until(lambda: len(alive()) >= 3, 300)
        finally:
            stop.set()
            for one in askers:
                one.join(120)
        assert len(answers) > 16
        assert set(answers) == {expected}
        after = deployed(python, file, "--status")
        assert not set(after["prefill"]["urls"]) & set(first["prefill"]["urls"])
        deployed(python, file, "--stop")
        until(lambda: not alive(), 120)


@pytest.mark.slow
def test_encode_workers_on_ray_and_a_restart_that_loses_no_request(tmp_path: Path) -> None:
    python = ray_python()
    if python is None:
        pytest.skip(
            "Ray is not installed: `make test-full` installs it below build/ray, or pip install 'kvloom[ray]'"
        )
    pytest.importorskip("PIL")
    folder = image_folder(tmp_path)[0]
    file = tmp_path / "cluster.toml"
    port, share = free_port("127.0.0.1"), free_port("127.0.0.1")
    with ray_head(python) as address:
        flags = f'name = "{MODEL}"\nquiet = true\nthreads = 1\ndevice = "cpu"\n'
        common = f'model = "{folder}"\ncpus = 0.1\ndrain-seconds = 20\n'
        file.write_text(
            f'[cluster]\nname = "e"\nray = "{address}"\n[router]\nport = {port}\nreplicas = 2\ncpus = 0.1\n'
            "start-seconds = 300\n[router.arguments]\nwait-seconds = 100\n"
            f'[workers.images]\nrole = "encode"\nhost-memory = "8MiB"\nshare-port = {share}\n{common}'
            f"[workers.images.arguments]\n{flags}"
            f'[workers.chat]\nreplicas = 2\n{common}[workers.chat.arguments]\n{flags}pool = "4MiB"\n'
        )
        first = deployed(python, file)
        assert {name: one["status"] for name, one in first.items()} == dict.fromkeys(first, "RUNNING")
        assert first["images"]["role"] == "encode"
        routers = sorted(first["router"]["urls"])
        assert routers == [f"http://127.0.0.1:{port + number}" for number in range(2)]

        def totals(url: str) -> dict[str, Any]:
            return dict(send(f"{url}/kvloom/state")["totals"])

        def can_ask(url: str) -> bool:
            workers = send(f"{url}/workers")["workers"]
            return sum(one["alive"] for one in workers) == 3 and any(one.get("encodes") for one in workers)

        until(lambda: all(map(can_ask, routers)), 120)
        expected = {n: send(f"{routers[n % 2]}{CHATS}", image_chat(n))["choices"] for n in range(8)}
        assert sum(totals(url)["named_encoders"] for url in routers) == 8

        # All groups restart, while requests run. A load balancer would try the other router, as `ask` does.
        stop, answers, errors = threading.Event(), [], []

        def ask(number: int) -> None:
            while not stop.is_set():
                number += 1
                try:
                    answer = send_to_one(
                        routers[number % 2 :] + routers[: number % 2], image_chat(number % 8)
                    )
                    answers.append(answer["choices"] == expected[number % 8])
                except Exception as error:  # noqa: BLE001  shown below
                    body = error.read() if isinstance(error, HTTPError) else b""
                    errors.append(f"{error}: {body!r}")

        askers = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
        for one in askers:
            one.start()
        try:
            after = deployed(python, file, "--restart")
        finally:
            stop.set()
            for one in askers:
                one.join(240)
        assert errors == []
        assert len(answers) > 8
        assert all(answers)
        for group in ("images", "chat"):
            assert not set(after[group]["urls"]) & set(first[group]["urls"]), "all workers are new"
        assert {one["status"] for one in after.values()} == {"RUNNING"}
        assert sorted(after["router"]["urls"]) == routers, "clients know these ports"
        until(lambda: can_ask(routers[0]), 120)
        assert send(f"{routers[0]}{CHATS}", image_chat(9))["choices"]
        assert totals(routers[0])["named_encoders"] > 0
        deployed(python, file, "--stop")


def send_to_one(urls: list[str], body: dict[str, Any]) -> Any:
    """Send a chat to the first of `urls` that accepts the connection."""
    for url in urls:
        try:
            return send(f"{url}{CHATS}", body)
        except URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError):
                raise
    raise AssertionError("no router accepts connections")
