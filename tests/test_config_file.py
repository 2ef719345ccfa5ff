"""Values for arguments from a TOML file and the environment: precedence, errors, `kvloom config show`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvloom.arguments import Parser
from kvloom.cli import main
from kvloom.config_file import apply_configuration
from kvloom.serve import serve_command
from kvloom.serve.server_options import ModelOptions

FILE = """
[engine]
eviction-policy = "fifo"
tier = ["host:1GiB", "disk:/a:1GiB"]
pool = "64MiB"
[serve]
model = "kvloom-hybrid"
port = 8001
pool = "128MiB"
no_auth = true
[generate]
max-tokens = 3
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "kvloom.toml"
    found.write_text(FILE)
    return found


def parsed(*argv: str) -> dict[str, object]:
    parser = Parser(prog="kvloom serve")
    serve_command.arguments(parser)
    words, _ = apply_configuration("serve", parser, argv)
    return vars(parser.parse_args(words))


def test_the_file_sets_arguments_and_the_commands_table_wins(path: Path) -> None:
    values = parsed("--config", str(path))
    assert values["eviction_policy"] == "fifo"
    assert values["tiers"] == ["host:1GiB", "disk:/a:1GiB"]
    assert (values["model"], values["port"]) == ("kvloom-hybrid", 8001)
    assert values["pool_bytes"] == 128 << 20
    assert values["no_auth"] is True


def test_environment_wins_over_the_file_and_arguments_over_both(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLOOM_CONFIG", str(path))
    monkeypatch.setenv("KVLOOM_PORT", "8002")
    monkeypatch.setenv("KVLOOM_TIER", "host:2GiB disk:/b:1GiB")
    monkeypatch.setenv("KVLOOM_NO_AUTH", "0")
    values = parsed()
    assert (values["port"], values["tiers"]) == (8002, ["host:2GiB", "disk:/b:1GiB"])
    assert values["no_auth"] is False
    values = parsed("kvloom-llama", "--port=8003", "--tier", "host:3GiB")
    assert (values["model"], values["port"], values["tiers"]) == ("kvloom-llama", 8003, ["host:3GiB"])


MODELS = """
[serve]
memory = "64MiB"
tool-call-parser = "none"
[engine]
tier = ["host:1GiB"]
batch-invariant = true
[models.first]
max-context = 100
[models.kvloom-hybrid]
tier = []
batch-invariant = false
[models.coder]
model = "kvloom-draft"
kv-dtype = "int8"
tool-call-parser = "qwen3_coder"
"""


def served(path: Path, *argv: str) -> list[ModelOptions]:
    parser = Parser(prog="kvloom serve")
    serve_command.arguments(parser)
    words, _ = apply_configuration("serve", parser, ["--config", str(path), *argv])
    return list(serve_command._models(parser.parse_intermixed_args(words), (), "info"))


def test_the_file_sets_options_of_each_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "models.toml"
    path.write_text(MODELS)
    models = served(path, "kvloom-llama", "kvloom-hybrid", "--name", "first")
    assert [model.served_name for model in models] == ["first", "kvloom-hybrid", "coder"]
    settings = [model.start.settings for model in models]
    assert [each["max_context"] for each in settings] == [100, None, None]
    assert [each["tiers"] for each in settings] == [["host:1GiB"], [], ["host:1GiB"]]
    assert [each["batch_invariant"] for each in settings] == [True, False, True]
    assert [each["kv_dtype"] for each in settings] == [None, None, "int8"]
    assert [model.chat.tool_call_parser for model in models if model.chat] == ["none", "none", "qwen3_coder"]
    assert main(["config", "show", "--config", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["coder.kv_dtype"] == {"value": "int8", "from": f"{path} [models.coder]"}


def test_the_file_alone_lists_models(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(
        "[models.one]\nmodel = 'kvloom-draft'\npool = '8MiB'\n[models.two]\nmodel = 'kvloom-draft'\n"
    )
    with pytest.raises(ValueError, match="2 models need --memory SIZE"):
        served(path)
    assert [model.served_name for model in served(path, "--pool", "16MiB")] == ["one", "two"]
    assert [model.start.settings["pool_bytes"] >> 20 for model in served(path, "--pool", "16MiB")] == [8, 16]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[serve]\nports = 1", "[serve] 'ports' is not an argument; did you mean 'port'?"),
        ("[server]\nport = 1", "'server' is not one of the tables [engine], [serve], [generate], [chat]"),
        ("port = 1", "'port' is not one of the tables"),
        ("[serve]\nport = [1]", "port [1] must be one value"),
        ("[engine]\ntier = 'host:1GiB'", "tier 'host:1GiB' must be a list"),
        ("[serve]\nno-auth = 'yes'", "no-auth 'yes' must be true or false"),
        ("[serve]\nport = 'x'", "--port: 'x' is not an integer"),
        ("[serve", "is not TOML"),
        ("[models]\nx = 1", "[models] 'x' must be a table: [models.x]"),
        (
            "[models.x]\npool = '1MiB'",
            "[models.x] has no model: add model = …, or serve a model with --name x",
        ),
        ("[models.x]\nport = 1", "[models.x] 'port' is not an argument"),
    ],
)
def test_errors_name_the_entry(
    content: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(content)
    assert main(["serve", "--config", str(file)]) == 2
    assert said in capsys.readouterr().err


def test_a_missing_file_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--config", str(tmp_path / "no.toml")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_show_prints_values_and_where_they_are_from(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVLOOM_MAX_QUEUE", "7")
    assert main(["config", "show", "--config", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["port"] == {"value": 8001, "from": f"{path} [serve]"}
    assert shown["eviction_policy"] == {"value": "fifo", "from": f"{path} [engine]"}
    assert shown["max_queue"] == {"value": 7, "from": "$KVLOOM_MAX_QUEUE"}
    assert shown["host"] == {"value": "127.0.0.1", "from": "default"}
    assert main(["config", "show", "generate", "--config", str(path), "--changed"]) == 0
    text = capsys.readouterr().out
    assert "max-tokens" in text
    assert "[generate]" in text
    assert "temperature" not in text
