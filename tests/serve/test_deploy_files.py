"""deploy/systemd, deploy/prometheus and deploy/docker: keys, arguments and metrics that exist, rules that hold."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvloom.arguments import Parser
from kvloom.cli import COMMANDS
from kvloom.config_file import apply_configuration
from kvloom.serve import serve_command
from kvloom.tiers.registry import check_tiers
from tests.serve.running import Running

promql = pytest.importorskip(
    "promql_parser", reason="queries are read with the package promql-parser (extra dev)"
)

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
UNIT = DEPLOY / "systemd" / "kvloom.service"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"
HADOLINT = Path(os.environ.get("KVLOOM_HADOLINT", DEPLOY.parent / "build" / "hadolint" / "bin" / "hadolint"))


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text(encoding="utf-8"))
    return parser


def test_the_unit_starts_a_command_that_exists() -> None:
    program, command, *words = unit()["Service"]["ExecStart"].split()
    assert Path(program).name == "kvloom"
    assert command in COMMANDS
    parser = Parser()
    serve_command.arguments(parser)
    assert parser.parse_args(words).config == "/etc/kvloom/kvloom.toml"


def test_the_unit_limits_the_rights_of_the_server_and_lets_requests_finish() -> None:
    service = unit()["Service"]
    assert service["DynamicUser"] == service["NoNewPrivileges"] == service["ProtectHome"] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] == ""
    assert int(service["LimitNOFILE"]) > 4096
    assert service["KillMode"] == "mixed"
    parser = Parser()
    serve_command.arguments(parser)
    assert int(service["TimeoutStopSec"]) > parser.get_default("drain_seconds")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    file = tmp_path / "kvloom.service"

    def verify(text: str) -> subprocess.CompletedProcess[str]:
        file.write_text(text, encoding="utf-8")
        command = ["systemd-analyze", "verify", "--man=no", str(file)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    text = UNIT.read_text(encoding="utf-8").replace("/opt/kvloom/bin/kvloom", sys.executable)
    done = verify(text)
    assert (done.returncode, [line for line in done.stderr.splitlines() if file.name in line]) == (0, [])
    assert "KillMod" in verify(text.replace("KillMode=", "KillMod=")).stderr


def test_the_configuration_of_the_unit_is_understood() -> None:
    parser = Parser()
    serve_command.arguments(parser)
    words, found = apply_configuration("serve", parser, [f"--config={DEPLOY / 'systemd' / 'kvloom.toml'}"])
    values = parser.parse_args(words)
    assert (values.port, values.log_format) == (8000, "json")
    check_tiers(values.tiers)
    assert "drain_seconds" in found
    folders = re.findall(r"disk:(/[^:]+):", str(values.tiers))
    assert folders
    assert all(one.startswith(f"/var/lib/{unit()['Service']['StateDirectory']}/") for one in folders)


def alerts() -> list[dict[str, Any]]:
    return [
        rule
        for group in yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
        for rule in group["rules"]
    ]


def named(query: str) -> set[tuple[str, frozenset[str]]]:
    """The metrics of a query, each with the labels that its selectors name."""
    found: set[tuple[str, frozenset[str]]] = set()

    def note(node: Any) -> bool:
        if isinstance(node, promql.VectorSelector):
            found.add((node.name, frozenset(re.findall(r"(\w+)[!=]", str(node.matchers)))))
        return True

    promql.walk(promql.parse(query), note)
    return found


def served(text: str) -> dict[str, set[str]]:
    """The series of a /metrics page and their labels. A series without samples has no labels."""
    found: dict[str, set[str]] = {"up": {"job", "instance"}}
    for family in text_string_to_metric_families(text):
        ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        for end in ends:
            found.setdefault(family.name + end, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("rule", alerts(), ids=lambda rule: rule["alert"])
def test_an_alert_has_what_a_reader_needs(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert {"summary", "action"} == rule["annotations"].keys()
    assert named(rule["expr"])
    for words in re.findall(r"`kvloom (\w+)", rule["annotations"]["action"]):
        assert words in COMMANDS
    known = {action for command in (serve_command,) for action in _flags(command)}
    assert set(re.findall(r"--[a-z-]+", rule["annotations"]["action"])) <= known


def _flags(command: Any) -> set[str]:
    parser = Parser()
    command.arguments(parser)
    return {flag for action in parser._actions for flag in action.option_strings}


@pytest.mark.slow
def test_every_alert_names_metrics_that_are_served(server: Running) -> None:
    server.complete(prompt="something", max_tokens=2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["-m", "kvloom.cli", "route", "--port", str(port), "--worker", server.url, "--no-tokenize"]
    router = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while True:
            try:
                with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                    of_router = answer.read().decode()
                break
            except OSError:
                assert time.monotonic() < end, "the router does not answer"
                time.sleep(0.2)
    finally:
        router.terminate()
        router.wait(30)
    found = served(server.send("GET", "/metrics")[2]) | served(of_router)
    assert "kvloom_no_such_metric" not in found
    for rule in alerts():
        for name, labels in named(rule["expr"]):
            assert name in found, f"{rule['alert']}: {name} is not served"
            assert not found[name] or labels <= found[name] | {"job", "instance"}, rule["alert"]


@pytest.mark.parametrize("name", ["bug", "feature"])
def test_the_forms_for_issues_have_github_s_keys(name: str) -> None:
    form = yaml.safe_load((DEPLOY.parent / f".github/ISSUE_TEMPLATE/{name}.yml").read_text(encoding="utf-8"))
    assert {"name", "description", "body"} <= form.keys()
    assert all(part["type"] in ("markdown", "textarea", "input", "dropdown") for part in form["body"])
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert len({part["id"] for part in fields}) == len(fields)
    assert any(part.get("validations", {}).get("required") for part in fields)
    for words in re.findall(r"`kvloom (\w+)", str(form)):
        assert words in COMMANDS


def test_the_scrape_configuration_reads_the_alerts() -> None:
    found = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    assert found["rule_files"] == [ALERTS.name]
    jobs = {one["job_name"] for one in found["scrape_configs"]}
    assert jobs == {"kvloom", "kvloom-router"}
    assert all("credentials_file" in one["authorization"] for one in found["scrape_configs"])


def test_the_image_has_a_pinned_base_a_user_and_a_health_check() -> None:
    text = DOCKERFILE.read_text(encoding="utf-8").replace("\\\n", " ")
    base = re.search(r"^ARG BASE=python:(\S+)$", text, re.MULTILINE)
    assert base is not None
    assert re.fullmatch(r"\d+\.\d+\.\d+-slim-[a-z]+", base[1])
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE}"}
    last = text.rpartition("FROM ")[2]
    assert re.search(r"^USER [1-9]\d*$", last, re.MULTILINE)
    assert "ADD " not in text
    assert "sudo" not in text
    for line in re.findall(r"^RUN .*(?:apt-get|pip) install.*$", text, re.MULTILINE):
        assert ("--no-install-recommends" in line and "rm -rf /var/lib/apt/lists/*" in line) or (
            "--no-cache-dir" in line
        ), line


@pytest.mark.skipif(
    not HADOLINT.exists(), reason="no hadolint: `make test-full` installs it in build/hadolint"
)
def test_hadolint_accepts_the_dockerfile() -> None:
    done = subprocess.run([HADOLINT, DOCKERFILE], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
def test_the_health_check_of_the_image_answers(server: Running) -> None:
    check = re.search(r'HEALTHCHECK .*?CMD \["python", "-c", "(.*?)"\]', DOCKERFILE.read_text(), re.DOTALL)
    assert check is not None

    def run(port: int) -> int:
        done = subprocess.run(
            [sys.executable, "-c", check[1]], env={"KVLOOM_PORT": str(port)}, capture_output=True, timeout=30, check=False
        )  # fmt: skip
        return done.returncode

    assert run(int(server.url.rpartition(":")[2])) == 0
    with socket.create_server(("127.0.0.1", 0)) as free:
        closed = free.getsockname()[1]
    assert run(closed) != 0


def test_the_constraints_of_the_image_are_the_locked_versions() -> None:
    command = re.search(r"RUN (sed .*?) > constraints.txt", DOCKERFILE.read_text())
    assert command is not None
    root = DEPLOY.parent
    shown = subprocess.run(
        ["bash", "-c", command[1]], cwd=root, capture_output=True, text=True, timeout=30, check=True
    ).stdout.splitlines()
    lock = (root / "requirements.lock").read_text(encoding="utf-8")
    assert len(shown) == len(re.findall(r"^[a-z][\w.-]*==", lock, re.MULTILINE)) > 50
    assert all(re.fullmatch(r"[a-z][\w.-]*==[\w.!]+( ; .*)?", line) for line in shown)
