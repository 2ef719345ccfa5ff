"""The loop that trains one embedded model within a number of seconds, and what measures it.

Weights are kept in float32 and computed in bfloat16 (on a GPU). The learning rate follows the share of the budget that is
spent (seconds, steps or epochs, whichever is spent first), so that it has always come down at the end. What was learned so
far is saved every minute, and when the process is told to stop.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812  (its usual name)

from . import folders, models, tokens

__all__ = ["SAVE_EVERY", "Plan", "Stop", "load", "measure", "rate_at", "train", "windows"]

WARM_UP = 0.03
LOWEST = 0.05
SAVE_EVERY = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to train and for how long. `steps` 0: seconds and epochs alone decide. `held_tokens`: how much of each kind of
    held-out text is measured (0: all). With a `teacher` (a folder), the model
    in `folder` goes on to learn the teacher's distributions."""

    name: str
    data: str
    folder: str
    seconds: float
    rate: float
    epochs: float = 12.0
    steps: int = 0
    batch_tokens: int = 65_536
    sequence: int = tokens.CONTEXT
    measure_every: float = 20.0
    held_tokens: int = 0
    device: str = "cuda"
    compiled: bool = False
    tiny: bool = False
    teacher: str = ""
    seed: int = 0


def rate_at(progress: float) -> float:
    """The share of the peak rate: up in a line, down in a cosine."""
    if progress < WARM_UP:
        return max(progress, 1e-3) / WARM_UP
    turn = (progress - WARM_UP) / (1 - WARM_UP)
    return LOWEST + (1 - LOWEST) * 0.5 * (1 + math.cos(math.pi * min(turn, 1.0)))


def windows(stream: torch.Tensor, sequence: int, rows: int, seed: int) -> Iterator[torch.Tensor]:
    """Batches [rows, sequence + 1] without end: every epoch cuts the stream elsewhere, in another order."""
    if len(stream) < 2 * sequence + 1:
        raise ValueError(
            f"{len(stream)} tokens are too few for rows of {sequence}: give more text or shorter rows"
        )
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(sequence + 1, device=stream.device)
    left = torch.empty(0, dtype=torch.long)
    while True:
        while len(left) < rows:
            phase = int(torch.randint(sequence, (1,), generator=generator))
            count = (len(stream) - 1 - phase) // sequence
            starts = phase + sequence * torch.randperm(count, generator=generator)
            left = torch.cat((left, starts))
        starts, left = left[:rows].to(stream.device), left[rows:]
        yield stream[starts[:, None] + offsets].long()


@torch.no_grad()
def measure(
    model: Any, stream: np.ndarray, sequence: int, rows: int, device: str, every: int = 1
) -> tuple[float, int]:
    """Nats and tokens of every `every`-th window of `stream`: each token but the very first is predicted once."""
    model.eval()
    whole = torch.from_numpy(stream.astype(np.int64))
    pieces = [whole[at : at + sequence + 1] for at in range(0, len(whole) - 1, sequence * every)]
    batches: list[torch.Tensor] = []
    full = [piece for piece in pieces if len(piece) == sequence + 1]
    batches += [torch.stack(full[i : i + rows]) for i in range(0, len(full), rows)]
    batches += [piece[None] for piece in pieces if len(piece) != sequence + 1]
    nats, count = 0.0, 0
    for batch in batches:
        ids = batch.to(device)
        logits = model(input_ids=ids[:, :-1], use_cache=False, **models.masks(model)).logits
        nats += F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").item()
        count += ids[:, 1:].numel()
    model.train()
    return nats, count


class Stop:
    """Set by SIGTERM and SIGINT: the loop ends, measures and saves."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked = True


def train(plan: Plan) -> dict[str, Any]:
    """Train one model and write its folder; what was measured, as in its training.json."""
    stop = Stop()
    torch.manual_seed(plan.seed)
    torch.set_float32_matmul_precision("high" if plan.device.startswith("cuda") else "highest")
    training = _Training(plan)
    for batch in windows(
        training.stream, plan.sequence, training.rows, plan.seed + len(training.record["phases"])
    ):
        progress = training.progress()
        if progress >= 1 or stop.asked:
            break
        training.step(batch, plan.rate * rate_at(progress))
    return training.finish(whole=not stop.asked)


class _Training:
    """One phase of one model: what it learns from, how far it is, what it has measured."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        text, self.held, self.corpus = tokens.read(Path(plan.data))
        if plan.held_tokens:
            _shorten(self.held, self.corpus, plan.held_tokens)
        self.tokenizer = tokens.load_tokenizer(Path(plan.data) / "tokenizer")
        self.model, self.record = _begin(plan, len(self.tokenizer))
        self.model.to(plan.device).train()
        models.for_training(self.model)
        self.teacher = load(plan.teacher).to(plan.device).eval() if plan.teacher else None
        self.run = torch.compile(self.model) if plan.compiled else self.model
        self.optimiser = _optimiser(self.model, plan)
        self.stream = torch.from_numpy(text.astype(np.int32)).to(plan.device)
        self.rows = max(1, plan.batch_tokens // plan.sequence)
        self.phase = _phase(plan, self.rows)
        self.record["phases"].append(self.phase)
        self.best: tuple[float, dict[str, torch.Tensor]] = (math.inf, {})
        """Loss and weights, of the best on held-out text; of a pupil the last, since its teacher judges, not the text."""
        self.loss = torch.tensor(math.nan)
        self.began = self.looked = self.saved = time.perf_counter()

    def progress(self) -> float:
        """The share of the budget that is spent."""
        plan, phase = self.plan, self.phase
        phase["seconds"] = time.perf_counter() - self.began
        steps = phase["steps"] / plan.steps if plan.steps else 0.0
        return float(max(steps, phase["seconds"] / plan.seconds, phase["epochs"] / plan.epochs))

    def mixed(self) -> Any:
        on_gpu = self.plan.device.startswith("cuda")
        return torch.autocast("cuda", torch.bfloat16) if on_gpu else contextlib.nullcontext()

    def step(self, batch: torch.Tensor, rate: float) -> None:
        phase = self.phase
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        with self.mixed():
            logits = self.run(input_ids=batch[:, :-1], use_cache=False, **models.masks(self.model)).logits
            loss = _loss(logits, batch, self.teacher)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if bool(torch.isfinite(norm)):
            self.optimiser.step()
        else:
            phase["skipped_steps"] += 1
        self.optimiser.zero_grad(set_to_none=True)
        self.loss = loss.detach()
        phase["steps"] += 1
        phase["tokens"] += batch.numel() - len(batch)
        phase["epochs"] = phase["tokens"] / len(self.stream)
        now = time.perf_counter()
        if phase["steps"] == 1 or now - self.looked >= self.plan.measure_every:
            self.look()
        if now - self.saved >= SAVE_EVERY:
            self.save()

    def look(self) -> None:
        """Measure on a part of the held-out text, say so, and keep the weights if they are the best."""
        plan, phase = self.plan, self.phase
        with self.mixed():
            pairs = [
                measure(self.model, one, plan.sequence, self.rows, plan.device, 2)
                for one in self.held.values()
            ]
        mean = sum(nats for nats, _ in pairs) / sum(count for _, count in pairs)
        if mean < self.best[0] or self.teacher is not None:
            weights = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
            self.best = mean, weights
        self.looked = time.perf_counter()
        elapsed, loss = self.looked - self.began, self.loss.item()
        look = {"step": phase["steps"], "seconds": elapsed, "loss": loss, "held_out": mean}
        phase["curve"].append({name: round(value, 4) for name, value in look.items()})
        print(
            f"[{plan.name}] {elapsed:5.0f} s  step {phase['steps']:6,}  {phase['epochs']:5.2f} epochs  loss {loss:.3f}  "
            f"held out {mean:.3f}  {phase['tokens'] / elapsed:,.0f} tokens/s",
            flush=True,
        )

    def save(self) -> None:
        folders.save(self.model, self.tokenizer, Path(self.plan.folder), self.record, self.corpus)
        self.saved = time.perf_counter()

    def finish(self, whole: bool) -> dict[str, Any]:
        """Measure what is shipped on all that is held out, and save it."""
        self.look()
        if self.best[1]:
            self.model.load_state_dict(self.best[1])
        rounded = copy.deepcopy(self.model).to(torch.bfloat16).float()
        torch.set_float32_matmul_precision("highest")
        found = _final(rounded, self.held, self.corpus, self.plan, self.rows)
        self.record.update(finished=whole, held_out=found)
        self.save()
        for kind, one in found.items():
            nats, bits = one["nats_per_token"], one["bits_per_byte"]
            print(
                f"[{self.plan.name}] held out {kind}: {nats:.4f} nats per token, {bits:.4f} bits per byte",
                flush=True,
            )
        return self.record


def _phase(plan: Plan, rows: int) -> dict[str, Any]:
    return {
        "objective": "the Llama's distributions" if plan.teacher else "the next token",
        "steps": 0,
        "skipped_steps": 0,
        "tokens": 0,
        "epochs": 0.0,
        "seconds": 0.0,
        "batch_tokens": rows * plan.sequence,
        "sequence": plan.sequence,
        "rate": plan.rate,
        "device": torch.cuda.get_device_name() if plan.device.startswith("cuda") else plan.device,
        "curve": [],
    }


def _shorten(held: dict[str, np.ndarray], corpus: dict[str, Any], limit: int) -> None:
    """The first tokens alone; bytes in proportion, since where they end is not known."""
    for kind, stream in held.items():
        about = corpus["held_out"][kind]
        about["bytes"] = round(about["bytes"] * min(1.0, limit / len(stream)))
        held[kind] = stream[:limit]


def _begin(plan: Plan, vocabulary: int) -> tuple[Any, dict[str, Any]]:
    """A new model and its record, or for a second phase those that the folder holds."""
    if plan.teacher:
        model = load(plan.folder)
        return model, json.loads((Path(plan.folder) / "training.json").read_text())
    model = models.build(plan.name, vocabulary, plan.tiny)
    record = {
        "name": plan.name,
        "date": folders.today(),
        "weights": sum(weight.numel() for weight in model.parameters()),
        "context": model.config.max_position_embeddings,
        "finished": False,
        "phases": [],
        "held_out": {},
    }
    return model, record


def load(folder: str) -> Any:
    """Load a model in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _optimiser(model: Any, plan: Plan) -> torch.optim.Optimizer:
    """AdamW; what is no matrix does not decay."""
    groups = [
        {"params": [w for w in model.parameters() if (w.ndim == 2) == decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.95), fused=plan.device.startswith("cuda"))


def _loss(logits: torch.Tensor, batch: torch.Tensor, teacher: Any) -> torch.Tensor:
    """Cross entropy with the next token; with a teacher, mostly with what it thinks of it."""
    wide = logits.float().flatten(0, 1)
    plain = F.cross_entropy(wide, batch[:, 1:].flatten())
    if teacher is None:
        return plain
    with torch.no_grad():
        thought = teacher(input_ids=batch[:, :-1], use_cache=False).logits.float().flatten(0, 1).softmax(-1)
    return 0.9 * F.cross_entropy(wide, thought) + 0.1 * plain


def _final(
    model: Any, held: dict[str, np.ndarray], corpus: dict[str, Any], plan: Plan, rows: int
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    all_nats, all_count, all_size = 0.0, 0, 0
    for kind, stream in held.items():
        nats, count = measure(model, stream, plan.sequence, rows, plan.device)
        size = corpus["held_out"][kind]["bytes"]
        all_nats, all_count, all_size = all_nats + nats, all_count + count, all_size + size
        found[kind] = _figures(nats, count, size)
    found["all"] = _figures(all_nats, all_count, all_size)
    return found


def _figures(nats: float, count: int, size: int) -> dict[str, Any]:
    return {"tokens": count, "nats_per_token": nats / count, "bits_per_byte": nats / math.log(2) / size}
