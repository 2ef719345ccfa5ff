"""The command-line arguments of an engine, for `kvloom serve` and `kvloom generate`. Does not import torch.

An argument becomes a setting of the engine if its destination is a field of `EngineConfig` or a parameter of
`engine_config`.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from kvloom.arguments import DEVICE, DTYPE, KV_DTYPE, THREADS, device, dtype, number, size, whole
from kvloom.config_file import add_config_argument
from kvloom.core import DEFAULT_POLICY, POLICIES

from .config import MEASURED, EngineConfig

__all__ = ["add_engine_arguments", "engine_settings"]

KV_SCALES = "scales for int8 and fp8: dynamic (default), checkpoint, or a file from `kvloom calibrate`"
LOAD_FORMAT = (
    "random: create random weights; MODEL may then also be a config.json or a name of `kvloom plan --list`"
)
POLICY = f"which cached pages are evicted first: {', '.join(POLICIES)}, or an entry point of kvloom.policies (default: {DEFAULT_POLICY})"
CHECKPOINT = (
    "tokens between checkpoints, in models with windows or states; more checkpoints find more prefixes and "
    "take more of the pool (default: 0, where prompts end or branch; measurements may choose an interval for state snapshots)"
)
TIER = (
    "a tier; give the fastest first: host:64GiB, disk:/path:1TiB, or redis://, mooncake://, nixl://, s3:// and "
    "peer:// with an address and ?capacity=64GiB&…; repeatable (docs/tiers.md)"
)
EVENTS = "publish block events for routers on this ZMQ address, such as tcp://127.0.0.1:5557 (default: nowhere; docs/cluster.md)"
EVENTS_TOPIC = "with --kv-events: topic of the events; {model} is the served name, {host} the host name (default: empty; for llm-d: kv@ADDRESS:PORT@{model})"
ROLE = (
    "prefill: offer the pages of every prompt to other workers; decode: pull pages that prefill workers compute; "
    "encode: only encode images for other workers (needs --tier host:SIZE?share=PORT); "
    "both: each request selects its role (default: both; docs/disaggregation.md)"
)
ENCODER = (
    "encode worker that encodes the images of requests: peer://HOST:PORT?secret=FILE, the address that it shares; "
    "repeatable (default: images are encoded here; docs/disaggregation.md)"
)
ENCODE = "seconds to wait for an encode worker, after which the image is encoded here (default: 10)"
HAND_OVER = (
    "seconds without a new page from a prefill worker, after which the rest is computed here (default: 10)"
)
LOAD = "pages in tiers: load or recompute, whichever is faster (auto); always load; never load, only store (default: auto)"
INVARIANT = "make the tokens of a request independent of the other requests in a batch, also on a GPU; slower"
SAMPLING = (
    "values of what a request does not set: those of the model's generation_config.json (model), or those of the OpenAI "
    "API (default: model; docs/models.md)"
)
SPECULATE = (
    "propose draft tokens and verify several in one step: ngram (from the prompt), suffix (also from past answers), "
    "draft=MODEL (a small model with the same tokenizer), mtp (multi-token-prediction heads of the checkpoint), "
    "eagle=FOLDER (an EAGLE-3 head), mtp,tree=NODES or eagle=FOLDER,tree=NODES (a head that drafts trees), "
    "several in order (suffix,draft=MODEL), auto (suffix), or off (default: off; docs/speculation.md)"
)
TENSOR_PARALLEL = (
    "compute the model on N ranks, each with its own process and device, 1/N of the weights and 1/N of every page; "
    "--pool is the size on each rank (default: 1; docs/tensor_parallel.md)"
)
EXPERT_PARALLEL = (
    "with --tensor-parallel: each rank has some whole experts of a mixture, instead of a part of every expert "
    "(docs/tensor_parallel.md)"
)
CONTEXT_PARALLEL = (
    "divide the context of every sequence between N processes, each with the whole weights and, in full-attention layers, "
    "1/N of the tokens of every block; --pool is the size on each rank (default: 1; docs/context_parallel.md)"
)
RANK_BACKEND = (
    "how ranks exchange tensors: auto (nccl on GPUs, gloo on CPUs), or gloo, which passes tensors of GPUs through host "
    "memory and lets several ranks use one GPU (default: auto)"
)
RANK_SECONDS = "with --tensor-parallel or --context-parallel: seconds to wait for another rank in a step, after which the engine stops (default: 60)"
TEXT_ONLY = (
    "load a model of images or audio without its other parts; ranks, draft models and heads are then available "
    "(docs/models.md)"
)
LORA = "LoRA adapter, for requests with model=NAME; repeatable (docs/lora.md)"
MAX_LORAS = "largest number of adapters that run at the same time; also allows adapters to be loaded later (default: as many as --lora)"
LORA_TARGETS = "linear layers that adapters may target, separated by commas, such as q_proj,v_proj (default: all supported)"
FIXED = (
    "setting that measurements must not change: chunk (prompt tokens of a step, to meet --slo-tbt), drafts (length of drafts) or "
    "snapshots (tokens between state snapshots); repeatable (default: all change; `kvloom explain --settings`)"
)
SLO_TTFT = "milliseconds to the first token: a request that would take longer is refused at once (default: no objective)"
SLO_TBT = "mean milliseconds between tokens: a request that would get them more slowly is refused at once (default: no objective)"
_SETTINGS = {one.name for one in fields(EngineConfig)} | {
    "load",
    "hand_over_seconds",
    "grammar_seconds",
    "grammar_memory",
}


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for weights, page pool, prefix cache, tiers, steps and limits, and `--config`."""
    add_config_argument(parser)
    add = parser.add_argument_group("model").add_argument
    add("--dtype", type=dtype, default="auto", metavar="D", help=DTYPE)
    add("--device", type=device, metavar="D", help=DEVICE)
    add("--load-format", choices=("auto", "random"), default="auto", help=LOAD_FORMAT)
    add("--threads", type=whole(1), metavar="N", help=THREADS)
    add("--tensor-parallel", type=whole(1), default=1, metavar="N", help=TENSOR_PARALLEL)
    add("--expert-parallel", action="store_true", help=EXPERT_PARALLEL)
    add("--context-parallel", type=whole(1), default=1, metavar="N", help=CONTEXT_PARALLEL)
    add("--rank-backend", choices=("auto", "gloo"), default="auto", help=RANK_BACKEND)
    add("--rank-seconds", type=number(0, above=True), default=60.0, metavar="S", help=RANK_SECONDS)
    add("--text-only", action="store_true", help=TEXT_ONLY)
    add(
        "--max-context",
        type=whole(1),
        metavar="N",
        help="largest number of tokens of a sequence (default: the model's limit)",
    )

    add = parser.add_argument_group("KV cache").add_argument
    pool = "size of the page pool (default: 1GiB; on a GPU the memory that --memory-fraction leaves)"
    add("--pool", type=size, metavar="SIZE", dest="pool_bytes", help=pool)
    add("--max-pool", type=size, metavar="SIZE", dest="max_pool_bytes",
        help="let the pool grow to this size while serving, and shrink again (default: it keeps its size)")  # fmt: skip
    add("--min-pool", type=size, metavar="SIZE", dest="min_pool_bytes",
        help="with --max-pool: smallest size of the pool (default: an eighth of --pool)")  # fmt: skip
    free = "with --max-pool: device memory left to other processes; the pool shrinks when they need more (default: 1GiB)"
    add("--keep-free", type=size, default="1GiB", metavar="SIZE", help=free)
    idle = (
        "with --max-pool: seconds without a request after which the pool releases unused memory (default: 30)"
    )
    add("--idle-seconds", type=number(0), default=30.0, metavar="S", help=idle)
    fraction = "share of GPU memory to use, without --pool (default: 0.9)"
    add("--memory-fraction", type=number(0, 1, above=True), default=0.9, metavar="F", help=fraction)
    add("--kv-dtype", metavar="D", help=KV_DTYPE)
    add("--kv-scales", default="dynamic", metavar="S", help=KV_SCALES)
    add("--block-tokens", type=whole(16, 256), default=16, metavar="N",
        help="tokens of a block: 16, 32, 64, 128 or 256 (default: 16)")  # fmt: skip
    add("--eviction-policy", default=DEFAULT_POLICY, metavar="NAME", help=POLICY)
    add("--public-prefixes", type=size, default=0, metavar="SIZE", dest="public_bytes",
        help="bytes of the pool for public prefixes, which all tenants share (default: 0, which refuses them; docs/server.md)")  # fmt: skip
    add("--reuse-documents", type=number(0, 1), metavar="SHARE",
        help="copy the K and V of marked documents, and compute this share of their tokens, such as 0.15; answers are then "
        "approximate (default: off; docs/documents.md)")  # fmt: skip
    add("--checkpoint-every", type=whole(0), default=0, metavar="N", help=CHECKPOINT)
    add("--tier", action="append", default=[], dest="tiers", metavar="TIER", help=TIER)
    add("--role", choices=("both", "prefill", "decode", "encode"), default="both", help=ROLE)
    add("--hand-over-seconds", type=number(0, above=True), default=10.0, metavar="S", help=HAND_OVER)
    add("--encoder", action="append", default=[], dest="encoders", metavar="PEER", help=ENCODER)
    add("--encode-seconds", type=number(0, above=True), default=10.0, metavar="S", help=ENCODE)
    add("--kv-events", metavar="ADDRESS", help=EVENTS)
    add(
        "--kv-events-replay",
        metavar="ADDRESS",
        help="with --kv-events: address at which routers request past events",
    )
    add("--kv-events-hashes", choices=("int64", "bytes"), default="int64",
        help="with --kv-events: format of block hashes: signed 64-bit integers, or all their bytes (default: int64)")  # fmt: skip
    add("--kv-events-topic", default="", metavar="TOPIC", help=EVENTS_TOPIC)
    add("--kv-events-encoding", choices=("map", "array"), default="map",
        help="with --kv-events: events as maps (vLLM 0.32) or as arrays (earlier vLLM, llm-d) (default: map)")  # fmt: skip
    add("--kv-events-tier-tokens", action="store_true",
        help="with --kv-events: events of tiers also contain parents and token ids, for Dynamo's indexer")  # fmt: skip
    add("--kv-events-key", metavar="FILE",
        help="with --kv-events: file with CURVE keys; only routers with the same keys get events (default: plain; docs/cluster.md)")  # fmt: skip
    add("--load", choices=("auto", "always", "never"), default="auto", help=LOAD)

    add = parser.add_argument_group("LoRA adapters (docs/lora.md)").add_argument
    add("--lora", action="append", default=[], metavar="NAME=FOLDER", help=LORA)
    add("--max-loras", type=whole(0), default=0, metavar="N", help=MAX_LORAS)
    add("--max-lora-rank", type=whole(1, 512), metavar="N",
        help="largest rank of an adapter (default: the largest rank of --lora, or 16)")  # fmt: skip
    add("--lora-targets", type=_names, default=[], metavar="NAMES", help=LORA_TARGETS)

    add = parser.add_argument_group("objectives (docs/admission.md)").add_argument
    add("--slo-ttft", type=number(0, above=True), metavar="MS", help=SLO_TTFT)
    add("--slo-tbt", type=number(0, above=True), metavar="MS", help=SLO_TBT)

    add = parser.add_argument_group("steps and limits").add_argument
    budget = "largest number of prompt tokens in a step (default: depends on the device)"
    add("--token-budget", type=whole(1), metavar="N", help=budget)
    add(
        "--max-running",
        type=whole(1),
        default=256,
        metavar="N",
        help="largest number of answers that run at once (default: 256)",
    )
    add("--sampling-defaults", choices=("model", "openai"), default="model", help=SAMPLING)
    add("--batch-invariant", action="store_true", help=INVARIANT)
    add("--speculate", default="off", metavar="HOW", help=SPECULATE)
    add("--fixed", action="append", default=[], choices=MEASURED, metavar="NAME", help=FIXED)
    drafts = "largest number of draft tokens of a request in one step (default: 4 for a draft model or EAGLE head, 3 for mtp, else 16); the largest depth of a tree"
    add("--draft-tokens", type=whole(1, 64), metavar="N", help=drafts)
    seconds = "limit of CPU seconds to compile one grammar, and for its masks in each step (default: 2)"
    add("--grammar-seconds", type=number(0.01), default=2.0, metavar="S", help=seconds)
    memory = "limit of the memory of one grammar; all grammars together may use eight times as much (default: 256MiB)"
    add("--grammar-memory", type=size, default="256MiB", metavar="SIZE", help=memory)


def _names(text: str) -> list[str]:
    """Return the names in a comma-separated text."""
    return [name for name in text.split(",") if name]


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return those parsed arguments that are engine settings, by name. `engine_config`, `LLM` and the engine process
    accept them."""
    return {name: value for name, value in vars(args).items() if name in _SETTINGS}
