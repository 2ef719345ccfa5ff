"""`make chaos`: real routers, workers and disk tiers under faults, for some minutes. The seed decides the faults.

| fault             | how                                                                                      |
|-------------------|------------------------------------------------------------------------------------------|
| kill              | `kill -9` of a worker, of its engine process, or of a router, which then start again     |
| stop              | SIGSTOP of a process, and SIGCONT up to 3 seconds later                                   |
| reset, partition  | a TCP proxy before each worker cuts all connections, or forwards nothing for some seconds |
| slow              | the proxy delays every piece of data                                                     |
| corrupt           | a byte of a segment file of a disk tier changes                                          |
| disk full         | a file fills the file system of a disk tier                                              |
| disk read-only    | the file system is mounted read-only, mostly while its worker is dead                    |
| events            | a relay loses, repeats or reorders events of a worker                                    |

Clients send requests with known answers, and send a failed request again. Checks: no answer and no beginning of a
stream is wrong, every attempt ends before its deadline, every request is answered once the faults have ended. At the
end, no process has more descriptors or threads than before, and no shared memory or process is left.

Each disk tier has its own small tmpfs. If this user may not mount, it has a folder, and the two faults of the file
system are left out. A jump of the system's clock is not injected, because it would reach every process of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import zmq
import zmq.asyncio

ATTEMPT_SECONDS = 90.0
DISK_BYTES = 12 << 20
TOKENS = 24


def free_port() -> int:
    """Return a free port of five digits, so that an address can be replaced by another of the same length."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one:
            port = int(one.getsockname()[1])
        if 10000 <= port:
            return port


class Proxy:
    """Forwards TCP connections to a worker, and replaces the address of its events by that of a relay."""

    def __init__(self, target: int, replaced: tuple[bytes, bytes]) -> None:
        self.port, self._target, self._replaced = free_port(), target, replaced
        self.delay, self.connected = 0.0, asyncio.Event()
        self.connected.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    def reset(self) -> int:
        """Cut all connections. Return their number."""
        writers = list(self._writers)
        for writer in writers:
            writer.transport.abort()
        return len(writers) // 2

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.reset()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        try:
            await asyncio.gather(self._pump(reader, back, False), self._pump(there, writer, True))
        finally:
            self._writers -= {writer, back}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: bool) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                await self.connected.wait()
                if self.delay:
                    await asyncio.sleep(self.delay)
                writer.write(data.replace(*self._replaced) if answers else data)
                await writer.drain()
        with suppress(OSError, RuntimeError):
            writer.close()


class EventRelay:
    """Passes the events of a worker on, and loses, repeats or reorders some of them."""

    def __init__(self, source: str, port: int, chance: random.Random, counts: Counter[str]) -> None:
        self._source, self._port, self._chance, self._counts = source, port, chance, counts
        self.rate = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self, context: zmq.asyncio.Context) -> None:
        self._task = asyncio.create_task(self._run(context))

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self, context: zmq.asyncio.Context) -> None:
        held: list[bytes] | None = None
        with context.socket(zmq.SUB) as inward, context.socket(zmq.PUB) as outward:
            inward.setsockopt(zmq.SUBSCRIBE, b"")
            inward.connect(self._source)
            outward.bind(f"tcp://127.0.0.1:{self._port}")
            while True:
                message: list[bytes] = await inward.recv_multipart()
                draw = self._chance.random() / self.rate if self.rate else 9.0
                if draw < 1 / 3:
                    self._counts["event lost"] += 1
                    continue
                await outward.send_multipart(message)
                if draw < 2 / 3:
                    self._counts["event repeated"] += 1
                    await outward.send_multipart(message)
                elif draw < 1 and held is None:
                    self._counts["event reordered"] += 1
                    held = message
                elif held is not None:
                    await outward.send_multipart(held)
                    held = None


@dataclass
class Server:
    """A process that is started again on the same port after a kill."""

    kind: str
    port: int
    command: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    baseline: dict[str, int] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.starts += 1

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(30)

    def engines(self) -> list[int]:
        """Process ids of the engine processes of a worker."""
        return [pid for pid in children(self.pid) if b"engine_process" in command_line(pid)]

    def usage(self) -> dict[str, int]:
        """Descriptors, threads and resident bytes of the process and its children."""
        found = Counter[str]()
        for pid in [self.pid, *children(self.pid)]:
            with suppress(OSError):
                found["descriptors"] += len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208
                found["threads"] += len(os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208
                pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
                found["memory"] += int(pages) * os.sysconf("SC_PAGE_SIZE")
        return dict(found)


def children(pid: int) -> list[int]:
    """Return the process ids of the children of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(word) for word in task.read_text().split()]
    return found


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


class Chaos:
    """One run: the servers, the clients and the faults."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.chance = given, random.Random(given.seed)
        self.counts: Counter[str] = Counter()
        self.folder = Path(tempfile.mkdtemp(prefix="kvloom-chaos-"))
        self.disks: list[Path] = []
        self.mounted: list[Path] = []
        self.errors: list[str] = []
        self.answers = self.attempts = self.wrong = self.hung = 0
        self.failed: Counter[str] = Counter()
        self.times: list[float] = []
        self.is_ending = False
        self.calls: list[dict[str, Any]] = []
        self.expected: list[str] = []
        self.shared_memory = set(os.listdir("/dev/shm"))  # noqa: PTH208
        self.workers, self.proxies, self.relays = list[Server](), list[Proxy](), list[EventRelay]()
        self.routers: list[Server] = []

    # -- servers ----------------------------------------------------------------------------------

    def _make_disk(self, number: int) -> Path:
        path = self.folder / f"disk-{number}"
        path.mkdir(mode=0o700)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "kvloom-chaos", str(path)],
            capture_output=True,
            check=False,
        )
        if done.returncode == 0:
            self.mounted.append(path)
        self.disks.append(path)
        return path

    def make_servers(self) -> None:
        python = [sys.executable, "-m", "kvloom.cli"]
        for number in range(self.given.workers):
            port, events, replay, relay = (free_port() for _ in range(4))
            command = [
                *(
                    *python,
                    "serve",
                    "kvloom-llama",
                    "--port",
                    str(port),
                    "--pool",
                    "8MiB",
                    "-q",
                    "--threads",
                    "1",
                ),
                *("--drain-seconds", "0", "--kv-events", f"tcp://127.0.0.1:{events}"),
                *("--kv-events-replay", f"tcp://127.0.0.1:{replay}", "--tier", "host:4MiB?write=through"),
                *("--tier", f"disk:{self._make_disk(number)}:8MiB?optional=1"),
            ]
            self.workers.append(Server("worker", port, command, self.folder / f"worker-{number}.log"))
            old, new = f"tcp://127.0.0.1:{events}".encode(), f"tcp://127.0.0.1:{relay}".encode()
            self.proxies.append(Proxy(port, (old, new)))
            self.relays.append(EventRelay(old.decode(), relay, self.chance, self.counts))
        named = [word for proxy in self.proxies for word in ("--worker", f"http://127.0.0.1:{proxy.port}")]
        for number in range(self.given.routers):
            port = free_port()
            command = [*python, "route", "--port", str(port), "--log-level", "error", *named]
            command += [
                "--silent-seconds",
                "5",
                "--wait-seconds",
                "60",
                "--deadline-seconds",
                str(ATTEMPT_SECONDS - 10),
            ]
            self.routers.append(Server("router", port, command, self.folder / f"router-{number}.log"))

    @property
    def servers(self) -> list[Server]:
        return [*self.workers, *self.routers]

    async def wait_ready(self, session: aiohttp.ClientSession, seconds: float) -> None:
        """Wait until every server answers."""
        end = time.monotonic() + seconds
        for server in self.servers:
            while True:
                with suppress(aiohttp.ClientError, OSError, TimeoutError):
                    limit = aiohttp.ClientTimeout(total=5)
                    async with session.get(f"{server.url}/health", timeout=limit) as answer:
                        if answer.status == 200:
                            break
                if time.monotonic() > end:
                    raise TimeoutError(
                        f"the {server.kind} at {server.url} does not answer; its log is {server.log}"
                    )
                await asyncio.sleep(0.2)

    # -- clients ----------------------------------------------------------------------------------

    def make_calls(self) -> None:
        chance = random.Random(7)
        stems = ["".join(chance.choice("abcdefgh ") for _ in range(300)) for _ in range(3)]
        for number in range(12):
            own = "".join(chance.choice("abcdefgh ") for _ in range(chance.choice((20, 200))))
            call: dict[str, Any] = {
                "prompt": stems[number % 3] + own,
                "max_tokens": TOKENS,
                "ignore_eos": True,
            }
            call |= {"temperature": 0} if number % 4 else {"temperature": 1.0, "seed": number}
            self.calls.append(call)

    async def client(self, session: aiohttp.ClientSession, number: int) -> None:
        """Send requests, each again until it is answered, until the run ends."""
        chance = random.Random(f"{self.given.seed} client {number}")
        while not self.is_ending:
            which = chance.randrange(len(self.calls))
            began = time.monotonic()
            while True:
                router = self.routers[chance.randrange(len(self.routers))]
                if await self._attempt(session, router.url, which, chance.random() < 0.7):
                    self.answers += 1
                    self.times.append(time.monotonic() - began)
                    break
                if time.monotonic() - began > self.given.seconds + 300:
                    self.errors.append(f"request {which} has no answer 300 s after the faults ended")
                    break
                await asyncio.sleep(0.2)

    async def _attempt(self, session: aiohttp.ClientSession, url: str, which: int, stream: bool) -> bool:
        """Send a request once. Return whether it was answered completely."""
        self.attempts += 1
        parts: list[str] = []
        complete = False
        try:
            async with asyncio.timeout(ATTEMPT_SECONDS):
                body = {"model": self.model, **self.calls[which], "stream": stream}
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    if answer.status != 200:
                        self.failed[f"status {answer.status}"] += 1
                        return False
                    if not stream:
                        parts.append((await answer.json())["choices"][0]["text"])
                        return self._compare(which, "".join(parts), True)
                    async for line in answer.content:
                        if line.startswith(b"data: [DONE]"):
                            complete = True
                        elif line.startswith(b"data: "):
                            event = json.loads(line[6:])
                            if "error" in event:
                                self.failed["error in a stream"] += 1
                                return False
                            parts += [choice["text"] for choice in event["choices"]]
        except TimeoutError:
            self.hung += 1
            self.errors.append(f"an attempt of request {which} did not end within {ATTEMPT_SECONDS:.0f} s")
        except (aiohttp.ClientError, OSError) as error:
            self.failed[type(error).__name__] += 1
        return self._compare(which, "".join(parts), complete)

    def _compare(self, which: int, text: str, complete: bool) -> bool:
        """Compare an answer, or the beginning of one, with the known answer. Return `complete`."""
        wanted = self.expected[which]
        if text != wanted if complete else not wanted.startswith(text):
            self.wrong += 1
            self.errors.append(f"request {which}: {text[:80]!r} is not {wanted[:80]!r}")
        return complete

    model = ""

    # -- faults -----------------------------------------------------------------------------------

    async def inject(self, session: aiohttp.ClientSession, end: float) -> None:
        """Inject faults until `end`."""
        kinds = {
            "corrupt": 30, "events": 12, "reset": 20, "slow": 8, "stop": 12, "partition": 5,
            "disk full": 4, "disk read-only": 4, "kill engine": 3, "kill worker": 2, "kill router": 2,
        }  # fmt: skip
        tasks: set[asyncio.Task[None]] = set()
        last_kill = 0.0
        while time.monotonic() < end:
            kind = self.chance.choices(list(kinds), list(kinds.values()))[0]
            if kind.startswith("kill"):
                if time.monotonic() - last_kill < self.given.kill_pause:
                    continue
                last_kill = time.monotonic()
            task = asyncio.create_task(self._fault(kind))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            await asyncio.sleep(self.given.pause * 2 * self.chance.random())
        if tasks:
            await asyncio.gather(*tasks)
        for relay in self.relays:
            relay.rate = 0.0
        for server in self.servers:  # an engine process may be stopped, or a server dead
            assert server.process is not None
            if server.process.poll() is not None:
                server.start()

    async def _fault(self, kind: str) -> None:
        number = self.chance.randrange(len(self.workers))
        worker, proxy, seconds = self.workers[number], self.proxies[number], 3 * self.chance.random()
        if kind == "corrupt":
            self._corrupt(self.disks[number])
        elif kind == "events":
            relay = self.relays[number]
            relay.rate = self.chance.choice((0.0, 0.3, 0.9))
        elif kind == "reset":
            self.counts["connection reset"] += proxy.reset()
        elif kind == "slow":
            self.counts["slow network"] += 1
            proxy.delay = 0.2 * self.chance.random()
            await asyncio.sleep(seconds)
            proxy.delay = 0.0
        elif kind == "partition":
            self.counts["partition"] += 1
            proxy.connected.clear()
            await asyncio.sleep(2 * seconds)
            proxy.connected.set()
        elif kind == "stop":
            await self._stop(
                self.chance.choice([*worker.engines(), worker.pid, self.chance.choice(self.routers).pid]),
                seconds,
            )
        elif kind.startswith("disk"):
            await self._spoil_disk(kind, self.disks[number], seconds)
        elif kind == "kill engine":
            for pid in worker.engines():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    self.counts[kind] += 1
        else:
            server = worker if kind == "kill worker" else self.chance.choice(self.routers)
            if server.process is not None and server.process.poll() is None:
                self.counts[kind] += 1
                server.process.kill()
                await asyncio.to_thread(server.process.wait)
                spoils = (
                    server is worker and self.disks[number] in self.mounted and self.chance.random() < 0.4
                )
                if spoils and await asyncio.to_thread(self._mount_again, self.disks[number], "ro"):
                    self.counts["disk read-only"] += 1
                await asyncio.sleep(seconds / 3)
                server.start()
                if spoils:
                    await asyncio.sleep(20)
                    await asyncio.to_thread(self._mount_again, self.disks[number], "rw")

    async def _stop(self, pid: int, seconds: float) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            self.counts["process stopped"] += 1
            await asyncio.sleep(seconds)
            os.kill(pid, signal.SIGCONT)

    def _corrupt(self, disk: Path) -> None:
        """Change bytes of a segment file."""
        files = [path for path in disk.glob("*.seg") if path.stat().st_size]
        if not files:
            return
        path = self.chance.choice(files)
        with suppress(OSError), path.open("r+b", buffering=0) as file:
            for _ in range(3):
                at = self.chance.randrange(path.stat().st_size)
                file.seek(at)
                old = file.read(1)
                file.seek(at)
                file.write(bytes([old[0] ^ (1 << self.chance.randrange(8))]))
                self.counts["byte of a disk tier changed"] += 1

    async def _spoil_disk(self, kind: str, disk: Path, seconds: float) -> None:
        if disk not in self.mounted:
            return
        if kind == "disk full":
            ballast = disk / "ballast"
            with suppress(OSError), ballast.open("wb") as file:
                self.counts[kind] += 1
                while True:
                    file.write(bytes(1 << 16))
                    file.flush()
            await asyncio.sleep(seconds)
            with suppress(OSError):
                ballast.unlink(missing_ok=True)
            return
        if await asyncio.to_thread(self._mount_again, disk, "ro"):
            self.counts[kind] += 1
            await asyncio.sleep(seconds)
            await asyncio.to_thread(self._mount_again, disk, "rw")

    @staticmethod
    def _mount_again(disk: Path, mode: str) -> bool:
        """Mount a disk read-only or writable. Linux refuses "ro" while a file is open for writing."""
        command = ["mount", "-o", f"remount,{mode}", str(disk)]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    # -- the run ----------------------------------------------------------------------------------

    async def run(self) -> dict[str, Any]:
        context = zmq.asyncio.Context()
        self.make_servers()
        self.make_calls()
        try:
            for proxy, relay in zip(self.proxies, self.relays, strict=True):
                await proxy.start()
                relay.start(context)
            for server in self.servers:
                server.start()
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            async with aiohttp.ClientSession(connector=connector) as session:
                return await self._run(session)
        finally:
            for server in self.servers:
                server.stop()
            for proxy, relay in zip(self.proxies, self.relays, strict=True):
                proxy.close()
                relay.stop()
            context.destroy(linger=0)
            await asyncio.to_thread(self._remove_files)

    def _remove_files(self) -> None:
        for path in self.mounted:
            subprocess.run(["umount", "-l", str(path)], capture_output=True, check=False)
        if not self.errors:
            shutil.rmtree(self.folder, ignore_errors=True)

    async def _run(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        await self.wait_ready(session, 600)
        async with session.get(f"{self.workers[0].url}/v1/models") as answer:
            self.model = (await answer.json())["data"][0]["id"]
        for call in self.calls:
            body = {"model": self.model, **call, "stream": False}
            async with session.post(f"{self.workers[0].url}/v1/completions", json=body) as answer:
                self.expected.append((await answer.json())["choices"][0]["text"])
        began = time.monotonic()
        clients = [asyncio.create_task(self.client(session, number)) for number in range(self.given.clients)]
        await asyncio.sleep(min(15.0, self.given.seconds / 8))
        for server in self.servers:
            server.baseline = server.usage()
        await self.inject(session, began + self.given.seconds)
        await self.wait_ready(session, 600)
        self.is_ending = True
        await asyncio.gather(*clients)
        quiet = await self._check_leaks()
        return {
            "seed": self.given.seed,
            "seconds": round(time.monotonic() - began, 1),
            "faults": sum(self.counts.values()),
            "by_kind": dict(sorted(self.counts.items())),
            "attempts": self.attempts,
            "answers": self.answers,
            "wrong": self.wrong,
            "hung": self.hung,
            "failed_attempts": dict(self.failed),
            "restarts": sum(server.starts - 1 for server in self.servers),
            "median_s": round(sorted(self.times)[len(self.times) // 2], 2) if self.times else None,
            "longest_s": round(max(self.times, default=0.0), 1),
            "disk": "tmpfs" if self.mounted else "folder (mount is not permitted)",
            "usage": quiet,
            "errors": self.errors[:20],
            "logs": str(self.folder) if self.errors else None,
        }

    async def _check_leaks(self) -> list[dict[str, Any]]:
        """Wait until the servers are idle, compare their usage with that before the faults, and stop them."""
        await asyncio.sleep(10)
        found = []
        for server in self.servers:
            before, after = server.baseline, server.usage()
            found.append({"server": server.kind, "starts": server.starts, "before": before, "after": after})
            for name, slack in (("descriptors", 24), ("threads", 12), ("memory", 200 << 20)):
                if after.get(name, 0) > before.get(name, 0) + slack:
                    self.errors.append(
                        f"the {server.kind} has {after[name]} {name}, before the faults {before[name]}"
                    )
        pids = [pid for server in self.servers for pid in [server.pid, *children(server.pid)]]
        await asyncio.gather(*(asyncio.to_thread(server.stop) for server in self.servers))
        await asyncio.sleep(2)
        left = [pid for pid in pids if b"kvloom" in command_line(pid)]
        if left:
            self.errors.append(f"{len(left)} processes still run after their servers ended")
        segments = {name for name in set(os.listdir("/dev/shm")) - self.shared_memory if "kvloom" in name}  # noqa: PTH208
        if segments:
            self.errors.append(f"shared memory is left: {sorted(segments)}")
        return found


def rows(found: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the rows of the report."""
    yield from ((f"  {name}", count) for name, count in found["by_kind"].items())
    for name in (
        "faults",
        "restarts",
        "attempts",
        "answers",
        "wrong",
        "hung",
        "median_s",
        "longest_s",
        "disk",
    ):
        yield name.replace("_s", " seconds"), found[name]
    yield from ((f"  failed: {name}", count) for name, count in found["failed_attempts"].items())


def main() -> int:
    """Run the command. Return 1 if an invariant did not hold, or if fewer faults were injected than asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--seconds", type=float, default=600, help="how long faults are injected (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--routers", type=int, default=2)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument(
        "--pause", type=float, default=0.5, help="mean seconds between faults (default %(default)s)"
    )
    parser.add_argument(
        "--kill-pause", type=float, default=25, help="least seconds between kills (default %(default)s)"
    )
    parser.add_argument(
        "--least-faults", type=int, default=1000, help="fail with fewer faults (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = asyncio.run(Chaos(given).run())
    if found["faults"] < given.least_faults:
        found["errors"].append(f"only {found['faults']} faults were injected, of {given.least_faults}")
    if found["wrong"]:
        found["errors"].append(f"{found['wrong']} answers are wrong")
    if given.json:
        print(json.dumps(found, indent=1))
    else:
        for name, value in rows(found):
            print(f"{name:34} {value}")
        for error in found["errors"]:
            print(f"FAILED: {error}")
    return 1 if found["errors"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
