"""Train an EAGLE-3 head for a model, on the sources of Python's standard library, and measure its acceptance.

    python tools/train_head.py --model kvloom-llama --out head --seconds 120
    kvloom generate kvloom-llama "def f(" --speculate eagle=head

The head learns the model's distributions: first from the model's hidden states, then from its own (`--rounds`). Modules
with which acceptance is measured are left out. Needs no network.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from kvloom.engine import LLM, SamplingParams
from kvloom.models.heads import EagleHead, new_eagle_head
from kvloom.models.loading import load
from kvloom.models.specs import folder_of

__all__ = ["main"]

MEASURED = ("heapq", "bisect", "shlex", "textwrap", "calendar", "fnmatch", "sched", "copy")
FIELDS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("rms_norm_eps", "rope_parameters", "hidden_act"),
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", default="kvloom-llama", help="the target: a folder or an embedded model")
    add("--out", type=Path, required=True, help="folder of the head")
    add("--seconds", type=float, default=120.0, help="time of training")
    add("--steps", type=int, default=100_000, help="steps of training at most")
    add("--rounds", type=int, default=2, help="draft tokens that training follows")
    add("--tokens", type=int, default=1024, help="tokens of a step, in rows of 256")
    add("--rate", type=float, default=2e-3, help="largest learning rate")
    add(
        "--trees",
        type=int,
        nargs="*",
        default=[],
        help="numbers of draft tokens for which chains and trees are compared",
    )
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    target, tokenizer = load(folder_of(args.model), torch.float32, "cpu")
    fields = {name: getattr(target.config, name) for name in FIELDS}
    head = new_head(target, fields)
    text = corpus(tokenizer)
    train(target, head, text, args)
    save(head, fields, args.out)
    measured = measure(args.model, f"eagle={args.out}")
    for nodes in args.trees:
        chain = measure(args.model, f"eagle={args.out}", nodes)["tokens_a_row"]
        tree = measure(args.model, f"eagle={args.out},tree={nodes}")["tokens_a_row"]
        measured[f"tokens_a_row_of_{nodes}"] = {"chain": chain, "tree": tree}
    print(json.dumps(measured))
    return 0


def new_head(target: Any, fields: dict[str, Any]) -> EagleHead:
    """Return a head that shares the target's matrices of the vocabulary."""
    head = new_eagle_head(fields, target, len(target.lm_head.weight))
    model = head.model
    model.set_input_embeddings(target.get_input_embeddings())
    model.lm_head.weight = nn.Parameter(target.lm_head.weight.detach().clone())
    return head


def corpus(tokenizer: Any) -> torch.Tensor:
    """Return the tokens of the standard library, without the measured modules."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [
        file.read_text(encoding="utf-8", errors="replace") for file in files if file.stem not in MEASURED
    ]
    ids = [token for text in texts for token in tokenizer(text, truncation=False).input_ids]
    return torch.tensor(ids)


def train(target: Any, head: EagleHead, text: torch.Tensor, args: argparse.Namespace) -> None:
    """Train the head for `args.seconds` or `args.steps`, with a learning rate that falls to 0."""
    weights = [weight for weight in head.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, args.rate, betas=(0.9, 0.95), weight_decay=0.0)
    began, rng, length, steps = time.monotonic(), random.Random(0), 256, 0
    while (done := max((time.monotonic() - began) / args.seconds, steps / args.steps)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = args.rate * min(1.0, (steps + 1) / 20) * (1 - done)
        starts = [rng.randrange(len(text) - length) for _ in range(args.tokens // length)]
        tokens = torch.stack([text[start : start + length] for start in starts])
        losses = step(target, head, tokens, args.rounds)
        optimizer.zero_grad()
        sum(losses).backward()  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        steps += 1
        if steps % 10 == 1:
            shown = " ".join(f"{loss.item():.3f}" for loss in losses)
            print(f"{steps} steps, {done:.0%}: {shown}", file=sys.stderr)
    head.requires_grad_(False).eval()


def step(target: Any, head: EagleHead, tokens: torch.Tensor, rounds: int) -> list[torch.Tensor]:
    """Return the cross entropy with the target's distribution, for each token of a draft."""
    with torch.no_grad():
        found = target(tokens, output_hidden_states=True)
        wanted = found.logits.softmax(-1).flatten(0, 1)
        read = torch.cat([found.hidden_states[count] for count in head.after], -1)
        embedded = target.get_input_embeddings()(tokens)
    states, losses = head.fc(read), []
    decoder = head.model.get_decoder()
    outputs: list[torch.Tensor] = []
    hook = decoder.layers[0].register_forward_hook(lambda _, __, output: outputs.append(output))
    for _ in range(rounds):
        before = functional.pad(states[:, :-1], (0, 0, 1, 0))
        normed = decoder(inputs_embeds=torch.cat((embedded, before), -1)).last_hidden_state
        losses.append(functional.cross_entropy(head.model.lm_head(normed).flatten(0, 1), wanted))
        states = outputs[-1]
    hook.remove()
    return losses


def save(head: EagleHead, fields: dict[str, Any], folder: Path) -> None:
    """Write a head in the public layout of EAGLE-3."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {}
    for name, weight in head.state_dict().items():
        new = name.removeprefix("model.").removeprefix("model.").replace("layers.0.", "midlayer.")
        if "embed_tokens" not in new:
            kept[new] = weight.to(torch.bfloat16).contiguous()
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": len(kept["lm_head.weight"]),
        "draft_vocab_size": len(kept["lm_head.weight"]),
        **fields,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def measure(model: str, speculate: str, draft_tokens: int | None = None) -> dict[str, Any]:
    """Return the acceptance of greedy drafts after the beginnings of the measured modules, by position."""
    llm = LLM(
        model,
        speculate=speculate,
        draft_tokens=draft_tokens,
        pool_bytes=64 << 20,
        dtype="float32",
        device="cpu",
    )
    assert llm.engine.speculation is not None
    llm.engine.speculation.controller = None
    library = Path(sysconfig.get_paths()["stdlib"])
    prompts = [(library / f"{name}.py").read_text(encoding="utf-8")[:1500] for name in MEASURED]
    llm.generate(prompts, SamplingParams(max_tokens=96, temperature=0, ignore_eos=True))
    stats = llm.engine.speculation.stats
    by_position = [a / p for a, p in zip(stats.accepted, stats.proposed, strict=True)]
    return {
        "acceptance": round(sum(stats.accepted) / sum(stats.proposed), 3),
        "by_position": [round(share, 3) for share in by_position],
        "tokens_a_row": round(stats.tokens / stats.rows, 2),
    }


if __name__ == "__main__":
    sys.exit(main())
