"""A kvloom worker and Dynamo's indexer: `python -m tests.cluster.dynamo_run PYTHON FOLDER [OPTION …]`.

PYTHON has the package ai-dynamo-runtime. The options are those of `kvloom serve`. test_gateways.py runs this module in
a network namespace of its own, because Dynamo's indexer listens on all addresses.

The worker has a pool and host memory for a few prompts, and a disk tier for all of them. After each prompt, the blocks
that the indexer reports for the first prompt must be those that the worker's events name, in each tier. At the end the
first prompt is repeated. The last line of the output lists the tokens of the first prompt that a lookup finds, after
each prompt: [in the pool, and then in host memory, and then on disk].
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

from kvloom.events_wire import BlockStored, EventBatch, Subscriber
from tests.cluster.fleet import Process, free_port, started, until
from tests.serve.running import MODEL, model_folder

BLOCK = 16
PROMPTS = 8


class Followed:
    """The media of each block, from the worker's events; and the blocks of the first prompt, in order."""

    def __init__(self, events: str, replay: str) -> None:
        self.media: dict[Any, set[str]] = {}
        self.first: list[Any] = []
        self.subscriber = Subscriber(events, replay, self.apply)
        threading.Thread(target=lambda: asyncio.run(self.subscriber.run()), daemon=True).start()

    def apply(self, batch: EventBatch) -> None:
        for event in batch.events:
            if (
                isinstance(event, BlockStored)
                and event.tokens[:BLOCK] == prompt(0)[:BLOCK]
                and not self.first
            ):
                self.first = list(event.block_hashes)
            for block in getattr(event, "block_hashes", ()):
                media = self.media.setdefault(block, set())
                (media.add if isinstance(event, BlockStored) else media.discard)(event.medium)

    def reach(self) -> list[int]:
        """The tokens of the first prompt that a lookup finds in the pool; and then in host memory; and then on disk."""
        found, place = [], 0
        for medium in ("GPU", "CPU", "DISK"):
            while place < len(self.first) and medium in self.media[self.first[place]]:
                place += 1
            found.append(place * BLOCK)
        return found


def prompt(number: int) -> list[int]:
    return [(i * 7 + number * 13) % 200 + 5 for i in range(100)]


def main() -> None:
    python, folder, options = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    model = str(model_folder(folder))
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    with ExitStack() as stack:
        words = ["serve", model, "--name", MODEL, "--pool", "128KiB", "--max-context", "256"]
        words += ["--tier", "host:64KiB", "--tier", f"disk:{folder}/kv:64MiB"]
        words += ["--kv-events", events, "--kv-events-replay", replay, *options]
        worker = stack.enter_context(started(folder / "worker.log", *words))
        until(worker.is_healthy)
        port = free_port()
        command = [python, "-m", "dynamo.indexer", "--port", str(port), "--block-size", str(BLOCK)]
        with (folder / "indexer.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        stack.callback(process.wait, 30)
        stack.callback(process.terminate)
        indexer = Process(process, f"http://127.0.0.1:{port}", folder / "indexer.log")
        followed = Followed(events, replay)

        def reported(number: int) -> list[int] | None:
            """What the indexer reports for a prompt. None if it does not answer yet."""
            try:
                status, answer = indexer.send(
                    "POST", "/query", {"token_ids": prompt(number), "model_name": MODEL}
                )
            except OSError:
                return None
            found = answer["instances"].get("1", {}) if status == 200 else {}
            return [found.get(tier, 0) for tier in ("gpu", "cpu", "disk")]

        def complete(number: int) -> int:
            body = {"model": MODEL, "prompt": prompt(number), "max_tokens": 2, "temperature": 0}
            status, answer = worker.send("POST", "/v1/completions", body)
            assert status == 200, answer
            return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

        until(lambda: reported(0) is not None)
        registered = {"instance_id": 1, "model_name": MODEL, "block_size": BLOCK}
        registered |= {"endpoint": events, "replay_endpoint": replay}
        status, answer = indexer.send("POST", "/register", registered)
        assert status == 201, answer
        warm = count(PROMPTS)  # a subscription takes a moment: send prompts until both have events
        until(
            lambda: complete(next(warm)) == 0 and bool(followed.media) and (reported(PROMPTS) or [0])[0] > 0
        )
        seen: list[list[int]] = []
        for number in range(PROMPTS):
            complete(number)
            until(lambda: len(followed.first) == 6 and reported(0) == followed.reach())
            seen.append(followed.reach())
        loaded = complete(0)
        until(lambda: reported(0) == followed.reach() == [loaded] * 3)
        seen.append(followed.reach())
        print(json.dumps(seen))


if __name__ == "__main__":
    main()
