"""The command as a user runs it: its output and its exit code, of a process or of `main`, which is faster."""

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from kvloom.arguments import Parser, elapsed
from kvloom.cli import COMMANDS, main


def kvloom(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvloom.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def called(capsys: pytest.CaptureFixture[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in this process."""
    code = main(arguments)
    shown = capsys.readouterr()
    return subprocess.CompletedProcess(arguments, code, shown.out, shown.err)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        *([name, "--help"] for name in COMMANDS),
        *(["bench", name, "--help"] for name in ("index", "serve", "tiers")),
    ],
)
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    done = called(capsys, *arguments)
    assert done.returncode == 0
    assert "usage: kvloom" in done.stdout
    assert done.stderr == ""


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a parser and the parsers of its subcommands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in dict.fromkeys(action.choices.values()):
                yield from parsers(below)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_argument_is_described(name: str) -> None:
    module, words = COMMANDS[name]
    command = Parser(prog=f"kvloom {name}", description=words)
    import_module(module).arguments(command)
    for parser in parsers(command):
        assert parser.description, parser.prog
        for action in parser._actions:
            assert action.help or isinstance(action, argparse._SubParsersAction), (parser.prog, action.dest)


def test_plan_in_json() -> None:
    done = kvloom(
        "plan", "ministral-8b", "--context", "131072", "--concurrency", "2", "--gpu-memory", "80GiB", "--json"
    )
    assert (done.returncode, done.stderr) == (0, "")
    got = json.loads(done.stdout)
    assert got["bytes_per_token"] == 147_456
    assert got["slab_bytes"] == 589_824
    assert [row["layers"] for row in got["groups"]] == [9, 27]
    assert got["schemes"].keys() == {"contiguous", "uniform", "kvloom"}
    for scheme in got["schemes"].values():
        assert scheme.keys() == {"bytes", "waste", "max_requests"}
        assert scheme["max_requests"] > 0
    assert got["schemes"]["uniform"]["waste"] == 0.5625


def test_max_requests_is_null_without_gpu_memory(capsys: pytest.CaptureFixture[str]) -> None:
    got = json.loads(called(capsys, "plan", "llama-3-8b", "--json").stdout)
    assert {scheme["max_requests"] for scheme in got["schemes"].values()} == {None}


def test_plan_accepts_load_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    done = called(
        capsys,
        *(
            "plan",
            "llama-3.2-11b-vision",
            "--context",
            "43",
            "--image-tokens",
            "6193",
            "--max-context",
            "4096",
        ),
        *("--kv-dtype", "fp8", "--block-tokens", "32", "--draft", "llama-3.2-1b", "--json"),
    )
    got = json.loads(done.stdout)
    assert (got["context"], got["image_tokens"], got["max_context"]) == (43, 6193, 4096)
    assert (got["kv_dtype"], got["block_tokens"], len(got["groups"])) == ("fp8", 32, 3)


def test_plan_in_tables_is_readable_when_piped() -> None:
    done = kvloom("plan", "gemma-3-12b", "--gpu-memory", "40GiB")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "sliding 1024" in done.stdout
    assert "40 GiB" in done.stdout


def test_a_path_to_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for path in (folder, folder / "config.json"):
        got = json.loads(called(capsys, "plan", str(path), "--json").stdout)
        assert (got["model"], got["bytes_per_token"]) == ("my-model", 2 * 2 * 64 * 2)


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    names = called(capsys, "plan", "--list").stdout.split()
    assert {"llama-3-70b", "gemma-3-27b", "qwen3-next-80b"} <= set(names)
    assert json.loads(called(capsys, "plan", "--list", "--json").stdout) == names


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "usage"),
        (["plan"], "no model given"),
        (["plan", "llama-3-70"], "did you mean llama-3-70b"),
        (["plan", "meta-llama/Llama-3.1-8B-Instruct"], "llama-3.1-8b"),
        (["plan", "zzz"], "--list"),
        (["plan", "no/such/config.json"], "no file 'no/such/config.json'"),
        (["plan", "llama-3-8b", "--context", "-5"], "-5 is out of range"),
        (["plan", "llama-3-8b", "--context", "many"], "'many' is not an integer"),
        (["plan", "llama-3-8b", "--concurrency", "0"], "0 is out of range"),
        (["plan", "llama-3-8b", "--gpu-memory", "80"], "80 is 80 bytes; did you mean 80GiB?"),
        (["plan", "llama-3-8b", "--gpu-memory", "80 gigs"], "'80 gigs' is not understood"),
        (["plan", "llama-3-8b", "--gpu-memory=-1GiB"], "'-1GiB' is not understood"),
        (["plan", "llama-3-8b", "--kv-dtype", "int3"], "'int3' is not known"),
        (["plan", "llama-3-8b", "--image-tokens", "5"], "takes no images"),
        (["plan", "llama-3-8b", "--block-tokens", "10"], "multiple of 16"),
        (["plan", "llama-3-8b", "--context", "100", "--max-context", "50"], "shorter than the request's 100"),
        (["plan", "llama-3-8b", "--draft", "nothing-like-it"], "'nothing-like-it' is not known"),
        (["bench", "nothing"], "'nothing' is not one of index, kernels"),
    ],
)
def test_bad_input_is_named_and_exits_with_two(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    done = called(capsys, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench"], "no benchmark given: use one of index, kernels"),
        (["plann"], "unknown command 'plann'; did you mean plan?"),
        (["zzz"], "commands: plan, generate"),
        (["--nothing"], "--nothing is not a known argument"),
        (
            ["plan", "llama-3-8b", "--contxt", "5"],
            "--contxt 5 is not a known argument; did you mean --context?",
        ),
        (["plan", "--context"], "--context: expected one argument"),
        (
            ["serve", "m", "--pipeline-parallel", "2"],
            "the ranks would compute one after the other: set tensor",
        ),
        (["generate", "m", "--pp-size=2"], "kvloom does not divide a model by layers"),
        (["replay"], "TRACE must be given (see `kvloom replay --help`)"),
        (["serve", "--port", "99999"], "--port: 99999 is out of range; it must be 0 to 65,535"),
        (["serve", "--pool", "lots"], "--pool: size 'lots' is not understood"),
        (["serve", "--dtype", "int3"], "--dtype: unknown dtype 'int3'; use bfloat16"),
        (["serve", "--memory-fraction", "1.5"], "1.5 is out of range; it must be above 0, and 1 at most"),
        (["serve", "--read-seconds", "inf"], "--read-seconds: inf is out of range"),
        (["serve", "--tier", "attic:1GiB"], "tier 'attic:1GiB' has no known scheme"),
        (["serve", "nothing-like-it"], "there is no model 'nothing-like-it'"),
        (["generate", "nothing-like-it", "hello"], "there is no model 'nothing-like-it'"),
        (["generate", "kvloom-llama", "hello", "--tier", "host:1GiB", "--tier", "host:1GiB"], "2 host tiers"),
        (["generate", "kvloom-llama"], "give a PROMPT or --tokens"),
        (["calibrate", "nothing-like-it", "--prompts", "x", "--out", "x"], "there is no model"),
        (["share", "lots"], "size 'lots' is not understood"),
        (["top", "--url", "localhost:99999"], "--url: 'localhost:99999' is not the address of a server"),
        (["explain", "--url", "localhost:1"], "no server at http://localhost:1 (Connection refused)"),
    ],
)
def test_errors_are_reported_in_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert (len(shown.err.splitlines()), shown.out) == (1, "")


def test_early_errors_need_no_torch() -> None:
    code = (
        "import sys; from kvloom.cli import main; "
        "assert main(['serve', '--tier', 'attic:1']) == main(['generate', 'kvloom-llama', 'x', '--kv-dtype', 'int3']) == 2; "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_prompt_from_standard_input() -> None:
    command = [sys.executable, "-m", "kvloom.cli", "generate", "kvloom-llama"]
    options = ["--device", "cpu", "--max-tokens", "4"]
    said = [
        subprocess.run(
            [*command, *prompt, *options],
            input=text,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        for prompt, text in (
            (["def add(a, b):"], ""),
            (["-"], "def add(a, b):\n"),
            (["-"], ""),
            (["-", "-"], "a"),
        )
    ]
    assert [done.returncode for done in said] == [0, 0, 2, 2]
    assert said[0].stdout == said[1].stdout
    assert said[0].stdout.strip()
    assert "standard input is empty" in said[2].stderr
    assert "- is given twice" in said[3].stderr


def test_seconds_are_shown_while_a_command_waits(capsys: pytest.CaptureFixture[str]) -> None:
    with elapsed("loading", shown=True):
        end = time.monotonic() + 30
        shown = ""
        while "loading ... " not in shown:
            assert time.monotonic() < end
            time.sleep(0.1)
            shown += capsys.readouterr().err
    assert capsys.readouterr().err.endswith("\r\x1b[K")
    with elapsed("loading", shown=False):
        pass
    assert capsys.readouterr().err == ""


def test_the_package_lists_its_names_without_loading_them() -> None:
    code = (
        "import sys, kvloom; assert {'LLM', 'SamplingParams', '__version__'} <= set(dir(kvloom)); "
        "print(kvloom.__version__); assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    said = kvloom("--version")
    assert (said.returncode, said.stdout) == (0, f"kvloom {done.stdout}")


def test_ctrl_c_ends_a_command_quietly() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "kvloom.cli", "share", "16MiB", "--slab", "1MiB", "--listen", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        text=True,
    ) as sharing:
        assert sharing.stdout is not None
        assert "peer://" in sharing.stdout.readline()
        sharing.send_signal(signal.SIGINT)
        assert sharing.wait(20) == 0
    waits = "import time, kvloom.plan.command as c; c.run = lambda args: (print('on', flush=True), time.sleep(60)); "
    code = waits + "import sys; from kvloom.cli import main; sys.exit(main(['plan']))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "on\n"
        waiting.send_signal(signal.SIGINT)
        _, said = waiting.communicate(timeout=20)
        assert (waiting.returncode, said) == (130, "\n")


def test_a_closed_pipe_is_no_error() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "kvloom.cli", "plan", "--list"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as listing:
        assert listing.stdout is not None
        listing.stdout.close()
        assert listing.stderr is not None
        assert listing.stderr.read() == ""


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{broken", "not valid JSON"),
        (b"[1, 2]", "holds a list"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"{}", "no model_type"),
        (b'{"model_type": "llama", "num_hidden_layers": -1}', "num_hidden_layers is -1"),
        (b'{"model_type": "unheard_of"}', "'unheard_of' is not known"),
    ],
)
def test_bad_files_are_named_and_exit_with_two(
    tmp_path: Path, content: bytes, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    done = called(capsys, "plan", str(path))
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys; from kvloom.cli import main; main(['plan', 'llama-3-8b']); "
        "assert 'torch' not in sys.modules; assert 'transformers' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_missing_package_is_named_with_a_remedy() -> None:
    code = (
        "import sys; sys.modules['uvicorn'] = None; from kvloom.cli import main; "
        "sys.exit(main(['serve', '--port', '0']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "uvicorn is not installed: pip install 'kvloom[" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_plan_in_the_docs_is_what_the_command_prints() -> None:
    page = (Path(__file__).parent.parent / "docs" / "sizing.md").read_text(encoding="utf-8")
    shown = page.partition("```console\n$ kvloom plan ")[2].partition("```")[0]
    command, _, output = shown.partition("\n")
    printed = kvloom("plan", *command.split()).stdout
    assert [line.rstrip() for line in printed.splitlines()] == output.splitlines()
