"""An attacker measures response times, to find out which prompts another tenant has sent.

For each sample, a victim sends a prompt. The attacker, another tenant, measures the time of one request that depends on
this prompt, and of one that does not, in random order and one directly after the other. If the attacker's times reveal
the victim's prompts, one of the two is faster more often than by chance.

| place    | the pages of the victim's prompt are                    | the attacker measures                             |
|----------|---------------------------------------------------------|---------------------------------------------------|
| pool     | in the pool                                             | the victim's prompt, and a new prompt             |
| host     | only in host memory                                     | the same                                          |
| disk     | only on disk                                            | the same                                          |
| prefetch | on disk, and the attacker announces the victim's session| the same                                          |
| eviction | in a pool that is full of prompts of the victim         | its own prompt, which the victim sent, too, or not |
| router   | in the pool of one of two workers                       | the victim's prompt, and a new prompt             |

In the control, one tenant has both roles, and its own prompts are faster. If a busy machine hides this difference, the
times show nothing, and the test is skipped.

$KVLOOM_TIMING_SAMPLES is the number of samples (default: 40).
"""

from __future__ import annotations

import json
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.cluster.fleet import free_port, started, until
from tests.engine.made_tokenizers import byte_level

SAMPLES = int(os.environ.get("KVLOOM_TIMING_SAMPLES", "40"))
TOKENS = 700
LAG = 2
"""Number of prompts that the victim sends after a prompt, before the attacker tries this prompt."""
MODEL = "tiny"
WORDS = [
    "the",
    "of",
    "cache",
    "block",
    "page",
    "token",
    "tier",
    "pool",
    "model",
    "prompt",
    "layer",
    "state",
    "window",
    "head",
    "chunk",
    "router",
    "worker",
]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that takes milliseconds for a prompt, so that a cached prompt is clearly faster."""
    path = tmp_path_factory.mktemp("timing") / MODEL
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    byte_level().save_pretrained(path)
    return path


@contextmanager
def serving(folder: Path, tmp_path: Path, place: str) -> Iterator[str]:
    """Start the servers of a case, and yield the URL that clients use."""
    keys = tmp_path / "keys"
    keys.write_text("key-of-victim victim\nkey-of-attacker attacker\nkey-of-routers routers\n")
    keys.chmod(0o600)
    common = [
        "serve",
        str(folder),
        "--name",
        MODEL,
        "--device",
        "cpu",
        "--threads",
        "1",
        "-q",
        "--api-keys",
        str(keys),
    ]
    # A prompt has about 1.5 MB of pages, so a pool of 4 MiB has space for two, and one of 6 MiB for four.
    pool = {"pool": "256MiB", "eviction": "6MiB", "router": "256MiB"}.get(place, "4MiB")
    disk = ["--tier", f"disk:{tmp_path / 'disk'}:512MiB"]
    tiers = {
        "host": ["--tier", "host:64MiB"],
        "disk": ["--tier", "host:4MiB", *disk],
        "prefetch": ["--tier", "host:4MiB", *disk],
    }.get(place, [])
    with ExitStack() as stack:
        workers = []
        for number in range(2 if place == "router" else 1):
            events, replay = free_port(), free_port()
            flags = [
                "--kv-events",
                f"tcp://127.0.0.1:{events}",
                "--kv-events-replay",
                f"tcp://127.0.0.1:{replay}",
            ]
            more = flags if place == "router" else []
            workers.append(
                stack.enter_context(
                    started(tmp_path / f"worker{number}.log", *common, "--pool", pool, *tiers, *more)
                )
            )
        for worker in workers:
            until(worker.is_healthy)
        url = workers[0].url
        if place == "router":
            named = [word for worker in workers for word in ("--worker", worker.url)]
            tokenizer = ("--tokenizer", str(folder), "--worker-key", "key-of-routers")
            router = stack.enter_context(started(tmp_path / "router.log", "route", *named, *tokenizer))
            until(lambda: router.is_healthy() and router.send("GET", "/workers")[1]["workers"][-1]["alive"])
            url = router.url
        yield url


class Client:
    def __init__(self, url: str, tenant: str) -> None:
        self._connection = HTTPConnection(urlsplit(url).netloc, timeout=120)
        self.cached = 0
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer key-of-{tenant}"}

    def seconds(self, prompt: str, session: str | None = None) -> float:
        """Send a prompt and return the time until the first token. `cached` counts the cached tokens."""
        fields = {} if session is None else {"session_id": session}
        body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0, **fields})
        began = time.perf_counter()
        text = self._send("/v1/completions", body, 200)
        taken = time.perf_counter() - began
        self.cached += json.loads(text)["usage"]["prompt_tokens_details"]["cached_tokens"]
        return taken

    def expect(self, session: str) -> None:
        """Announce a session, so that the server prefetches its pages, and wait for the prefetch."""
        self._send(f"/v1/sessions/{session}", None, 202)
        time.sleep(0.02)

    def _send(self, path: str, body: str | None, status: int) -> bytes:
        self._connection.request("POST", path, body, self._headers)
        answer = self._connection.getresponse()
        text = answer.read()
        assert answer.status == status, text
        return text


class Attack:
    """Measures pairs of requests. `differences` has, for each sample, the time of the request that depends on the
    victim's prompt, less the time of the other one."""

    def __init__(self, place: str, victim: Client, attacker: Client, rng: random.Random) -> None:
        self._place, self._victim, self._attacker, self._rng = place, victim, attacker, rng
        self.differences: list[float] = []
        self._sent: list[str] = []

    @property
    def faster(self) -> int:
        """How often the request that depends on the victim's prompt is faster."""
        return sum(one < 0 for one in self.differences)

    def run(self, samples: int) -> None:
        measure = self._probe_own_pages if self._place == "eviction" else self._send_guess
        for _ in range(samples):
            for_known = measure()
            order = [True, False] if self._rng.random() < 0.5 else [False, True]
            times = {known: for_known(known) for known in order}
            self.differences.append(times[True] - times[False])

    def _send_guess(self) -> Callable[[bool], float]:
        """The victim sends a prompt. Return a function that measures the attacker's request with a prompt of the victim,
        or with a new one. With tiers, this is an older prompt, whose pages later prompts have evicted."""
        while len(self._sent) <= (0 if self._place in ("pool", "router") else LAG):
            self._sent.append(self._prompt())
            self._victim.seconds(self._sent[-1], self._sent[-1][:16])
        prompts = {True: self._sent.pop(0), False: self._prompt()}
        sessions = {known: prompt[:16] for known, prompt in prompts.items()}

        def measure(known: bool) -> float:
            if self._place == "prefetch":
                self._attacker.expect(sessions[known])
            return self._attacker.seconds(prompts[known])

        return measure

    def _probe_own_pages(self) -> Callable[[bool], float]:
        """Return a function that measures how fast the attacker's own prompt is, after the victim has filled the pool,
        and has sent the same prompt or a new one."""

        def measure(known: bool) -> float:
            own = self._prompt()
            self._attacker.seconds(own)
            for _ in range(3):
                self._victim.seconds(self._prompt())
            self._victim.seconds(own if known else self._prompt())
            return self._attacker.seconds(own)

        return measure

    def _prompt(self) -> str:
        return " ".join([f"{self._rng.getrandbits(64):016x}", *self._rng.choices(WORDS, k=TOKENS // 6)])


@pytest.mark.parametrize("place", ["pool", "host", "disk", "prefetch", "eviction", "router"])
def test_response_times_do_not_reveal_what_another_tenant_sent(
    folder: Path, tmp_path: Path, place: str
) -> None:
    rng = random.Random(0)
    with serving(folder, tmp_path, place) as url:
        victim, attacker = Client(url, "victim"), Client(url, "attacker")
        control = Attack(place, victim, victim, rng)
        control.run(30)
        attack = Attack(place, victim, attacker, rng)
        attack.run(SAMPLES)
    # The 95 % confidence interval of a share of one half has this width to each side.
    share, width = attack.faster / SAMPLES, 0.98 / SAMPLES**0.5
    median = 1e3 * statistics.median(attack.differences)
    own = 1e3 * statistics.median(control.differences)
    print(
        f"{place}: control {control.faster} of 30 faster, by {-own:.1f} ms; attacker {attack.faster} of {SAMPLES} "
        f"({share:.3f}, 95 %: {share - width:.3f} to {share + width:.3f}), by {-median:.2f} ms"
    )
    assert victim.cached >= 30 * TOKENS // 2, "a tenant's own prompts are cached"
    if place != "eviction":
        # Prompts of the attacker itself may have their first characters in common, but never a block.
        assert attacker.cached < 8 * SAMPLES
    if control.faster < 25:
        pytest.skip("the machine is too busy: even a cached prompt of the same tenant is not clearly faster")
    # By chance, half of the samples are faster. Four standard deviations happen once in 16,000 runs.
    assert abs(attack.faster - SAMPLES / 2) <= 4 * (SAMPLES / 4) ** 0.5
