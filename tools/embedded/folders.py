"""What is left of a training: a folder that AutoModelForCausalLM loads, with a model card and the curve of its losses.

Weights are bfloat16 safetensors. A folder is whole at any time: files are put in place by renaming.
"""

from __future__ import annotations

import copy
import json
import re
import tarfile
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

__all__ = ["card", "distilled_card", "pack", "save", "save_with_card", "today"]

_ABOUT = {
    "llama": "A Llama: full attention in every layer.",
    "hybrid": (
        "A hybrid of full attention, sliding windows of 256 tokens and recurrent (Mamba-2) layers: a GraniteMoeHybrid whose "
        "`layer_types` say sliding_attention too. Its own forward makes no mask for that kind: `generate()` makes them (its "
        "generation config names the static cache, which does), kvloom needs none, and a bare call needs `attention_mask` "
        "as a mapping from kind to mask (`transformers.masking_utils.create_masks_for_generate`)."
    ),
    "draft": "A draft for speculative decoding with the Llama beside it: the same tokenizer, a ninth of the weights.",
}
_MEASURED = (
    "Files held out by the hash of their path, measured with the bfloat16 weights computed in float32, in windows of the "
    "training's row length."
)
_KEPT = "The weights kept are those best on every second window of them."
_KEPT_OF_PUPIL = "The weights kept are the last: its teacher judges, not the text."
_USE = (
    "For trying and measuring the cache without a download: it writes plausible Python and knows nothing. Not for code that "
    "anyone runs. The standard library's text may come back word for word."
)


def save(model: Any, tokenizer: Any, folder: Path, training: dict[str, Any], corpus: dict[str, Any]) -> None:
    """Write the folder, whole or not at all."""
    save_with_card(model, tokenizer, folder, training, card(training, corpus))


def save_with_card(model: Any, tokenizer: Any, folder: Path, training: dict[str, Any], text: str) -> None:
    """Like `save`, with the model card `text`."""
    small = copy.deepcopy(model).to("cpu", torch.bfloat16)
    small.config._attn_implementation = None
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        fresh = Path(temporary)
        small.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        (fresh / "training.json").write_text(json.dumps(training, indent=1) + "\n")
        (fresh / "README.md").write_text(text)
        for file in fresh.iterdir():
            file.chmod(0o644)
            file.replace(folder / file.name)


def card(training: dict[str, Any], corpus: dict[str, Any]) -> str:
    """The model card: data, steps, held-out loss, licence, use."""
    name, phases, held = training["name"], training["phases"], training.get("held_out", {})
    rows = [
        f"| {kind} | {one['tokens']:,} | {one['nats_per_token']:.4f} | {one['bits_per_byte']:.4f} |"
        for kind, one in held.items()
    ]
    learned = [
        f"- {phase['objective']}: {phase['steps']:,} steps of {phase['batch_tokens']:,} tokens in rows of "
        f"{phase['sequence']:,} ({phase['tokens']:,} tokens, {phase['epochs']:.1f} epochs), {phase['seconds']:.0f} s on "
        f"{phase['device']}; AdamW, peak learning rate {phase['rate']:g}, cosine."
        for phase in phases
    ]
    parts = ", ".join(
        f"{one['bytes'] / 1e6:.1f} MB {kind} ({one['documents']:,})"
        for kind, one in sorted(corpus["train"].items())
    )
    data = (
        f"Sources and documentation of Python's standard library ({', '.join(corpus['sources'])}), and questions and answers "
        f"cut from them: {parts}; {corpus['train_tokens']:,} tokens. Licence of the data: {corpus['licence']}."
    )
    return "\n".join(
        [
            f"# kvloom embedded model: {name}",
            "",
            _ABOUT[name],
            "",
            f"{training['weights']:,} weights in bfloat16, context {training['context']:,} tokens, vocabulary "
            f"{corpus['vocabulary']:,} (byte-level BPE). Made by `tools/train_embedded.py`, {training['date']}"
            + ("." if training["finished"] else "; **stopped before its time**."),
            "",
            "## Data",
            "",
            data,
            "",
            "## Training",
            "",
            *learned,
            "",
            "## Held-out loss",
            "",
            f"{_MEASURED} {_KEPT if len(phases) == 1 else _KEPT_OF_PUPIL}",
            "",
            "| text | tokens | nats per token | bits per byte |",
            "|---|---|---|---|",
            *rows,
            "",
            "## Use",
            "",
            _USE,
            "",
        ]
    )


def distilled_card(before: str, training: dict[str, Any]) -> str:
    """Return the card of a draft whose training was continued. `before` is its previous card. The section on acceptance
    replaces the held-out loss, which was that of the previous weights."""
    phase, found = training["phases"][-1], training["acceptance"]
    weights = f"{training['weights']:,} weights"
    made = f"Made by `tools/train_embedded.py`, {training['date']}."
    learned = (
        f"- {phase['objective']}: {phase['steps']:,} steps of {phase['batch_tokens']:,} tokens in rows of "
        f"{phase['sequence']:,} ({phase['generated_tokens']:,} generated tokens), {phase['seconds']:.0f} s on "
        f"{phase['device']}; AdamW, peak learning rate {phase['rate']:g}, cosine. Prompts from: "
        f"{', '.join(phase['prompts'])}."
    )
    rows = [
        f"| {when} | {one['greedy']:.3f} | {one['sampled']:.3f} | {one['tokens']:.2f} |"
        for when, one in found.items()
    ]
    meaning = (
        "The Llama continues held-out files, greedily or at temperature 1. `greedy` is the share of its greedy tokens that "
        "are also the draft's most likely token, `sampled` is 1 - TV at temperature 1 (TV: total variation distance). The "
        "weights kept are those with the largest sum of both."
    )
    acceptance = [
        "## Acceptance",
        "",
        meaning,
        "",
        "| last phase | greedy | sampled | tokens per step with 4 draft tokens |",
        "|---|---|---|---|",
        *rows,
        "",
    ]
    text = re.sub(r"[\d,]+ weights", weights, before, count=1)
    text = re.sub(r"Made by `tools/train_embedded.py`, \S+", made, text, count=1)
    head, _, rest = text.partition("## Held-out loss" if "## Held-out loss" in text else "## Acceptance")
    return (
        f"{head.rstrip()}\n{learned}\n\n" + "\n".join(acceptance) + f"\n## Use{rest.partition('## Use')[2]}"
    )


def pack(folder: Path, target: Path) -> Path:
    """One folder as `target`/NAME.tar.gz."""
    target.mkdir(parents=True, exist_ok=True)
    packed = target / f"{folder.name}.tar.gz"
    with tarfile.open(packed, "w:gz", compresslevel=6) as archive:
        for file in sorted(folder.iterdir()):
            archive.add(file, f"{folder.name}/{file.name}", recursive=False)
    return packed


def today() -> str:
    return datetime.now(UTC).date().isoformat()
