"""Continues the training of the draft, on text that the target itself generates, to raise the acceptance of its drafts.

Speculation verifies drafts of the target's own outputs, so most rows are such outputs: the target continues prompts from
the corpus, greedily or with sampling. New rows replace old rows while the draft learns. The loss of a token is

    cross entropy with the target's distribution + TV + cross entropy with the target's most likely token

where TV is the total variation distance of both distributions. Held-out files give the prompts that measure acceptance:

| figure    | of a row that the target generated | meaning                                                             |
|-----------|------------------------------------|---------------------------------------------------------------------|
| `greedy`  | greedily                           | share of tokens that are also the draft's most likely token         |
| `sampled` | at temperature 1                   | mean of 1 - TV                                                      |
| `tokens`  | greedily                           | mean number of tokens of a step with drafts of DRAFT_TOKENS tokens  |

The weights with the largest sum of `greedy` and `sampled` are saved.
"""

from __future__ import annotations

import contextlib
import copy
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812  (its usual name)

from . import folders, tokens
from .training import SAVE_EVERY, Stop, load, rate_at, windows

__all__ = ["Distillation", "acceptance", "distil", "generate", "grow"]

DRAFT_TOKENS = 4
TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
"""Temperatures of generated rows, in turn. 0 is greedy."""
GENERATING = 0.3
"""Share of the time in which the target generates rows."""
CORPUS_EVERY = 4
"""One step in so many learns from rows of the corpus, which are longer."""
HARD = 0.3
"""Weight of the cross entropy with the target's most likely token."""


@dataclass(frozen=True, slots=True)
class Distillation:
    """How to continue the training. `models` has the folders `llama` and `draft`, and `out` gets the new draft.

    | field       | meaning                                                                                          |
    |-------------|--------------------------------------------------------------------------------------------------|
    | `layers`    | layers of the new draft. More layers than the old draft has are added after its last layer       |
    | `row`       | tokens of a generated row: a prompt of different lengths, then the target's output               |
    | `generated` | rows that the target generates at once                                                           |
    | `kept`      | number of such batches from which rows are learned                                               |
    | `held`      | held-out prompts that are measured                                                               |
    """

    models: str
    out: str
    seconds: float
    layers: int = 2
    steps: int = 0
    rate: float = 2e-3
    batch_tokens: int = 49_152
    row: int = 768
    generated: int = 2048
    kept: int = 16
    held: int = 256
    sequence: int = tokens.CONTEXT
    measure_every: float = 10.0
    device: str = "cuda"
    seed: int = 0


@torch.no_grad()
def generate(target: Any, prompts: torch.Tensor, length: int, temperature: torch.Tensor) -> torch.Tensor:
    """Continue the prompts [rows, tokens] to rows of `length` tokens. `temperature` [rows] is 0 for greedy rows."""
    from transformers import DynamicCache

    rows, past = [prompts], DynamicCache()
    last = prompts
    scale = temperature.clamp(min=1e-3)[:, None]
    for _ in range(length - prompts.shape[1]):
        logits = target(input_ids=last, past_key_values=past, use_cache=True, logits_to_keep=1).logits[:, -1]
        scores = logits.float() / scale
        noise = -torch.empty_like(scores).exponential_().log()
        scores = torch.where(temperature[:, None] > 0, scores + noise, scores)
        last = scores.argmax(-1, keepdim=True)
        rows.append(last)
    return torch.cat(rows, 1)


def grow(model: Any, layers: int) -> Any:
    """Return `model` with `layers` layers. Added layers follow its last layer and, at first, do not change its output.
    Raises ValueError if the model has more layers."""
    from transformers import AutoModelForCausalLM

    before = model.config.num_hidden_layers
    if layers == before:
        return model
    if layers < before:
        raise ValueError(f"the draft has {before} layers: --layers {layers} must not be less")
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    grown = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    grown.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        for layer in grown.model.layers[before:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return grown


@torch.no_grad()
def acceptance(
    draft: Any, target: Any, rows: torch.Tensor, start: int, greedy: torch.Tensor
) -> dict[str, float]:
    """Return the figures of the module's table, for generated rows with prompts of `start` tokens. `greedy` [rows] is
    true for greedy rows."""
    same, near = [], []
    for i in range(0, len(rows), 32):
        part = rows[i : i + 32]
        mine, theirs = (
            model(input_ids=part[:, :-1], use_cache=False).logits[:, start - 1 :].float()
            for model in (draft, target)
        )
        same.append(mine.argmax(-1) == part[:, start:])
        near.append(torch.minimum(mine.softmax(-1), theirs.softmax(-1)).sum(-1))
    matches = torch.cat(same)[greedy].cpu()
    return {
        "greedy": matches.float().mean().item(),
        "sampled": torch.cat(near)[~greedy].mean().item(),
        "tokens": tokens_per_step(matches.tolist()),
    }


def tokens_per_step(matches: Sequence[Sequence[bool]]) -> float:
    """Return the mean number of tokens of a step. `matches` states, for each token of each row, whether the draft
    guesses it."""
    steps = count = 0
    for row in matches:
        at = 0
        while at < len(row):
            accepted = 0
            while accepted < DRAFT_TOKENS and at + accepted < len(row) - 1 and row[at + accepted]:
                accepted += 1
            at += accepted + 1
            steps += 1
        count += len(row)
    return count / max(1, steps)


def loss_of(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the module's text over tokens. Both arguments are logits [tokens, vocabulary]."""
    wanted = theirs.softmax(-1)
    logs = mine.log_softmax(-1)
    soft = -(wanted * logs).sum(-1)
    apart = 0.5 * (wanted - logs.exp()).abs().sum(-1)
    hard = F.nll_loss(logs, theirs.argmax(-1))
    return (soft + apart).mean() + HARD * hard


def distil(plan: Distillation, text: torch.Tensor, held: torch.Tensor, sources: list[str]) -> dict[str, Any]:
    """Train and save the draft. Return the figures before and after, and the number of steps.

    `text` is the corpus as one row of tokens, `held` the held-out prompts [rows, tokens]. A process that gets SIGTERM
    or SIGINT saves the best draft so far."""
    return _Run(plan, text, held, sources).train()


class _Run:
    """One training: models, optimiser, generated rows, and the best draft so far."""

    def __init__(
        self, plan: Distillation, text: torch.Tensor, held: torch.Tensor, sources: list[str]
    ) -> None:
        self.plan, self.sources, self.text = plan, sources, text.to(plan.device)
        torch.manual_seed(plan.seed)
        torch.set_float32_matmul_precision("high" if plan.device.startswith("cuda") else "highest")
        old = Path(plan.models) / "draft"
        self.record: dict[str, Any] = json.loads((old / "training.json").read_text())
        self.card = (old / "README.md").read_text()
        self.tokenizer = tokens.load_tokenizer(old)
        self.target = load(str(Path(plan.models) / "llama")).to(plan.device).eval()
        for weight in self.target.parameters():
            weight.requires_grad_(False)
        self.draft = grow(load(str(old)), plan.layers).to(plan.device)
        self.optimiser = torch.optim.AdamW(
            [
                {
                    "params": [w for w in self.draft.parameters() if (w.ndim == 2) == decays],
                    "weight_decay": decay,
                }
                for decays, decay in ((True, 0.05), (False, 0.0))
            ],
            lr=plan.rate,
            betas=(0.9, 0.95),
        )
        self.batches: list[torch.Tensor] = []
        self.made = self.steps = self.learned = 0
        self.generating = 0.0
        self.began = time.perf_counter()
        with self._mixed():
            self.start = held.shape[1]
            heat = torch.arange(len(held), device=plan.device) % 2
            self.held = generate(self.target, held.to(plan.device), self.start + plan.row // 3, heat.float())
            self.greedy = heat == 0
        self.best: tuple[float, dict[str, torch.Tensor], dict[str, float]] = (-1.0, {}, {})
        self.looked = self.saved = 0.0
        self.before = self._look()

    def _mixed(self) -> Any:
        on_gpu = self.plan.device.startswith("cuda")
        return torch.autocast("cuda", torch.bfloat16) if on_gpu else contextlib.nullcontext()

    def train(self) -> dict[str, Any]:
        plan, stop = self.plan, Stop()
        rows = windows(self.text, plan.sequence, max(1, plan.batch_tokens // plan.sequence), plan.seed)
        began = self.began = time.perf_counter()
        while not stop.asked:
            spent = time.perf_counter() - began
            progress = max(spent / plan.seconds, self.steps / plan.steps if plan.steps else 0.0)
            if progress >= 1:
                break
            if not self.batches or self.generating < GENERATING * spent:
                self._generate()
            batch = next(rows) if self.steps % CORPUS_EVERY == CORPUS_EVERY - 1 else self._generated_rows()
            self._step(batch, plan.rate * rate_at(progress))
            now = time.perf_counter()
            if now - self.looked >= plan.measure_every:
                self._look()
            if now - self.saved >= SAVE_EVERY:
                self._save()
        self._look()
        self._save()
        found = {"before": self.before, "after": self.best[2], "steps": self.steps}
        print(json.dumps(found), flush=True)
        return found

    def _generate(self) -> None:
        """Let the target generate a batch of rows. The oldest batch is dropped if there are `kept` batches."""
        plan, began = self.plan, time.perf_counter()
        share = (1 / 12, 1 / 6, 1 / 3, 1 / 2)[self.made % 4]
        prompt = max(4, int(plan.row * share))
        starts = torch.randint(len(self.text) - prompt, (plan.generated,), device=plan.device)
        prompts = self.text[starts[:, None] + torch.arange(prompt, device=plan.device)].long()
        turns = torch.arange(plan.generated, device=plan.device) % len(TEMPERATURES)
        heat = torch.tensor(TEMPERATURES, device=plan.device)[turns]
        with self._mixed():
            rows = generate(self.target, prompts, plan.row, heat)
        self.batches = [*self.batches, rows.to(torch.int32)][-plan.kept :]
        self.made += 1
        if plan.device.startswith("cuda"):
            torch.cuda.synchronize()
        self.generating += time.perf_counter() - began

    def _generated_rows(self) -> torch.Tensor:
        count = max(1, self.plan.batch_tokens // self.plan.row)
        batch = self.batches[int(torch.randint(len(self.batches), (1,)))]
        return batch[torch.randint(len(batch), (count,), device=batch.device)].long()

    def _step(self, batch: torch.Tensor, rate: float) -> None:
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        with self._mixed():
            mine = self.draft(input_ids=batch, use_cache=False).logits
            with torch.no_grad():
                theirs = self.target(input_ids=batch, use_cache=False).logits
        self.loss = loss_of(mine.float().flatten(0, 1), theirs.float().flatten(0, 1))
        self.optimiser.zero_grad(set_to_none=True)
        self.loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), 1.0)
        self.optimiser.step()
        self.steps += 1
        self.learned += batch.numel()

    def _look(self) -> dict[str, float]:
        """Measure acceptance, print it, and store the weights if they are the best so far."""
        self.draft.eval()
        rounded = copy.deepcopy(self.draft).to(torch.bfloat16).float()
        with self._mixed():
            found = acceptance(rounded, self.target, self.held, self.start, self.greedy)
        self.draft.train()
        score = found["greedy"] + found["sampled"]
        if score > self.best[0]:
            weights = {name: value.detach().clone() for name, value in self.draft.state_dict().items()}
            self.best = score, weights, found
        self.looked = time.perf_counter()
        spent = self.looked - self.began
        loss = f"{self.loss.item():.3f}" if self.steps else "-"
        print(
            f"[draft, {self.plan.layers} layers] {spent:5.0f} s  step {self.steps:6,}  loss {loss}  "
            f"greedy {found['greedy']:.4f}  sampled {found['sampled']:.4f}  {found['tokens']:.2f} tokens per step  "
            f"{self.made} batches generated in {self.generating:.0f} s  {self.learned / max(spent, 1e-9):,.0f} tokens/s",
            flush=True,
        )
        return found

    def _save(self) -> None:
        plan, best = self.plan, copy.deepcopy(self.draft)
        best.load_state_dict(self.best[1])
        device = torch.cuda.get_device_name() if plan.device.startswith("cuda") else plan.device
        phase = {
            "objective": "the Llama's distributions on text that it generates",
            "steps": self.steps,
            "tokens": self.learned,
            "generated_tokens": self.made * plan.generated * plan.row,
            "seconds": round(time.perf_counter() - self.began, 1),
            "batch_tokens": plan.batch_tokens,
            "sequence": plan.row,
            "rate": plan.rate,
            "device": device,
            "prompts": self.sources,
        }
        record = {key: value for key, value in self.record.items() if key != "held_out"}
        record["phases"] = [*self.record["phases"], phase]
        record["date"] = folders.today()
        record["weights"] = sum(weight.numel() for weight in best.parameters())
        record["acceptance"] = {"before": self.before, "after": self.best[2]}
        card = folders.distilled_card(self.card, record)
        folders.save_with_card(best, self.tokenizer, Path(plan.out) / "draft", record, card)
        self.saved = time.perf_counter()
