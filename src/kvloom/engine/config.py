"""The settings of an engine, which `LLM`, the CLI and the server pass to it. This module contains only values and
does not import torch.

To add a setting, add one field here and, for the command line, one argument in `engine/options.py`. `engine_config`
builds an `EngineConfig` from a flat list of settings. `LLM(...)`, flags and configuration files use this function.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Literal, get_args

from kvloom.combinations import refused
from kvloom.core import DEFAULT_POLICY, Objective, Tenant, parse_size
from kvloom.events_wire import EventSettings
from kvloom.models.specs import KVDtype
from kvloom.tiers import OpenTier, parse_tier, scheme_of
from kvloom.tiers.transfers import TransferConfig

from .sampling import GrammarLimits

__all__ = ["EngineConfig", "LoadRule", "OffloadConfig", "Role", "engine_config"]

MOST_DRAFT_TOKENS = 64
MEASURED = ("chunk", "drafts", "snapshots")
"""Settings that measurements change while the engine runs."""
MOST_TREE_NODES = 63
"""Largest number of nodes (tokens) in a draft tree. In a step, a request has at most 64 tokens: the nodes, and the
last token before them."""
TREE = "tree="
LoadRule = Literal["auto", "always", "never"]
Role = Literal["both", "prefill", "decode", "encode"]
"""Role of a worker in a cluster."""
SamplingDefaults = Literal["model", "openai"]
RankBackend = Literal["auto", "gloo"]
"""How ranks exchange tensors."""
_SIZES = ("pool_bytes", "max_pool_bytes", "min_pool_bytes", "keep_free", "public_bytes")
"""Fields of `EngineConfig` that are sizes in bytes."""


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """Settings for loading pages from tiers."""

    load: LoadRule = "auto"
    """"auto" loads pages if this is faster than recomputing them. "always" loads every page that a tier has. "never"
    loads no page, but still stores pages in tiers.
    """
    deadline_seconds: tuple[float, float] = (0.1, 5.0)
    """Shortest and longest deadline of a load, in seconds. Between these limits, the deadline is twice the time that
    it would take to compute the loaded tokens.
    """
    wait_share: float = 0.04
    """Longest time that a request may lose by waiting for pages, as a fraction of the time to compute its missing
    tokens."""
    hand_over_seconds: float = 10.0
    """Longest time without a new page from a prefill worker, in seconds. After this time, this worker computes the
    rest of the prompt itself."""
    transfers: TransferConfig = field(default_factory=TransferConfig)

    def __post_init__(self) -> None:
        if self.load not in ("auto", "always", "never"):
            raise ValueError(f"load {self.load!r} is not one of auto, always, never")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. The defaults suit one model on one device."""

    pool_bytes: int | None = None
    """Bytes of the page pool. None means 1 GiB on a CPU. On a GPU, None means the rest of `memory_fraction` after
    weights and steps."""
    max_pool_bytes: int | None = None
    """Largest size in bytes of an elastic pool, which grows and shrinks while serving. None means that the pool keeps
    its size.
    """
    min_pool_bytes: int | None = None
    """Smallest size of an elastic pool in bytes. None means an eighth of its first size."""
    keep_free: int = 1 << 30
    """Bytes of device memory that an elastic pool leaves to other processes. If less is free, the pool shrinks."""
    idle_seconds: float = 30.0
    """An elastic pool unmaps slabs without pages after this many seconds without a request."""
    memory_fraction: float = 0.9
    """Fraction of the device's memory that weights, steps and the pool may use together."""
    tensor_parallel: int = 1
    """Number of ranks that compute the model together. Each rank has a process and a device, a part of the weights,
    and a part of every page. Sizes such as `pool_bytes` hold for each rank."""
    expert_parallel: bool = False
    """With `tensor_parallel`: whether each rank has some whole experts of a mixture, instead of a part of every expert."""
    context_parallel: int = 1
    """Number of ranks that divide the context of every sequence. Each rank has a process and the whole weights. In
    full-attention layers it stores `block_tokens / context_parallel` tokens of every block. Sizes such as `pool_bytes`
    hold for each rank. With `tensor_parallel`, there are `tensor_parallel * context_parallel` ranks."""
    rank_backend: RankBackend = "auto"
    """How ranks exchange tensors. "auto" is nccl on GPUs and gloo on CPUs. With "gloo" on GPUs, tensors pass through host
    memory. This takes more time, but several ranks may use one GPU."""
    rank_seconds: float = 60.0
    """With `tensor_parallel` or `context_parallel`: longest time to wait for another rank in a step, in seconds.
    Afterwards the group stops with an error."""
    block_tokens: int = 16
    """Tokens of a block, a power of two from 16 to 256."""
    eviction_policy: str = DEFAULT_POLICY
    """Name of the eviction policy: `adaptive` by default, or another of `kvloom.core.POLICIES`, or of an entry point in `kvloom.policies`."""
    checkpoint_every: int = 0
    """In models with windows or states: tokens between checkpoints, rounded up to blocks. 0 takes checkpoints where
    prompts end or branch. In models with states, 0 also lets measurements choose an interval (see `fixed`).
    """
    token_budget: int | None = None
    """Largest number of prompt tokens in a step. None means 8,192 on a GPU and 2,048 on a CPU."""
    max_running: int | None = None
    """Largest number of running requests. None means 512 on a GPU and 256 on a CPU."""
    text_only: bool = False
    """Whether a model of images or audio is loaded without its other parts. Requests then contain only text, and ranks,
    draft models and heads are available."""
    max_context: int | None = None
    """Largest number of tokens of a sequence. None means the model's limit."""
    kv_dtype: KVDtype | None = None
    """Data type of K and V in the pool. None means the data type of the model."""
    kv_scales: str | os.PathLike[str] = "dynamic"
    """Scales for int8 and fp8. "dynamic" computes a scale for each token and head. "checkpoint" reads static scales
    from the model's checkpoint. A path reads static scales from a file of `kvloom calibrate`."""
    batch_invariant: bool = False
    """Whether a request gets bit-identical results in every batch. In float32 on a CPU, this always holds."""
    sampling_defaults: SamplingDefaults = "model"
    """Values of what a request does not set. "model" takes them from the model's generation config. "openai" takes those
    of the OpenAI API and of `SamplingParams`."""
    ahead: bool | None = None
    """Whether a step is launched before the tokens of the previous step have arrived. None means only on a GPU."""
    cuda_graphs: bool = True
    """Whether steps are replayed from CUDA graphs, on a GPU."""
    speculate: str = "off"
    """Proposers of draft tokens: "ngram", "suffix", "draft=MODEL" (a folder or name), "mtp" (heads of the
    checkpoint), "eagle=FOLDER" (an EAGLE-3 head), or several ("suffix,mtp"). With "tree=NODES" ("mtp,tree=16"), a head
    drafts trees of up to NODES tokens.

    "auto" is "suffix". The controller decides whether proposers are used, and how long drafts are."""
    draft_tokens: int | None = None
    """Largest number of draft tokens of a request in one step. None means 4 for a draft model or an EAGLE head, 3 for
    heads of the checkpoint, and 16 for "ngram" and "suffix". For trees, this is the largest depth."""
    lora: Mapping[str, str] | Sequence[str] = ()
    """LoRA adapters: folders by name, or texts such as "sql=adapters/sql". Requests select an adapter by its name."""
    max_loras: int = 0
    """Largest number of adapters that run at the same time. 0 means as many as `lora` names. A larger number allows
    adapters to be loaded later."""
    max_lora_rank: int | None = None
    """Largest rank of an adapter. None means the largest rank in `lora`, or 16."""
    lora_targets: Sequence[str] = ()
    """Names of the linear layers that adapters may target, such as q_proj. Empty means all that are supported."""
    grammar_limits: GrammarLimits = field(default_factory=GrammarLimits)
    """Time and memory that one grammar may use."""
    tenants: Sequence[Tenant] = ()
    """Tenants with a separate quota or weight."""
    public_bytes: int = 0
    """Bytes of the pool for public prefixes, which all tenants share (`CacheControl.public_tokens`). 0 refuses requests
    that mark a public prefix."""
    reuse_documents: float | None = None
    """Share of each document's tokens that a request computes itself, from 0 to 1. The K and V of the other tokens are
    copied from an earlier computation of the document, so answers are approximate. None computes documents like any
    other text. Requests mark documents (`CacheControl.documents`)."""
    tiers: Sequence[str | OpenTier] = ()
    """Tiers, fastest first: `host:64GiB`, `disk:/path:1TiB`."""
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    """How pages are loaded from the tiers."""
    slo_ttft: float | None = None
    """Default objective for the time to first token, in milliseconds. None means no objective."""
    slo_tbt: float | None = None
    """Default objective for the time between tokens, in milliseconds. None means no objective."""
    fixed: Sequence[str] = ()
    """Settings that measurements must not change while the engine runs, of "chunk" (prompt tokens of a step, to meet
    objectives for the time between tokens), "drafts" (whether and how long drafts are) and "snapshots" (tokens between
    state snapshots, if `checkpoint_every` is 0)."""
    role: Role = "both"
    """Role of a worker. "prefill" offers the pages of every prompt. "decode" computes prompts in short steps.
    "encode" only encodes images for other workers, and is a role of `kvloom serve`."""
    encoders: Sequence[str] = ()
    """Encode workers that encode the images of this engine: `peer://HOST:PORT?secret=FILE`."""
    encode_seconds: float = 10.0
    """Longest time to wait for the embeddings of an image, in seconds. Afterwards the image is encoded here."""
    kv_events: str | None = None
    """ZMQ address on which block events are published, such as `tcp://127.0.0.1:5557`. None means no events."""
    kv_events_replay: str | None = None
    """ZMQ address at which routers request past events and snapshots. None means that routers cannot request events
    that they missed."""
    kv_events_hashes: Literal["int64", "bytes"] = "int64"
    """Format of block hashes in events: "int64" (the first eight bytes as a signed integer) or "bytes" (the whole
    hash)."""
    kv_events_topic: str = ""
    """Topic of the events, such as `kv@10.0.0.7:8000@my-model` for llm-d. Subscribers can filter by its beginning."""
    kv_events_encoding: Literal["map", "array"] = "map"
    """Encoding of an event: "map" (vLLM since version 0.32) or "array" (earlier versions, and llm-d)."""
    kv_events_tier_tokens: bool = False
    """Whether events about blocks in tiers also contain parent hashes and token ids, for Dynamo. Needs about 300 bytes
    of memory per block."""
    kv_events_key: str | None = None
    """File with the CURVE keys of events. Only subscribers with the same keys get events. None means that events are
    not encrypted."""

    @property
    def rank_count(self) -> int:
        """Number of ranks, each with its own process."""
        return self.tensor_parallel * self.context_parallel

    @property
    def objective(self) -> Objective:
        """The default objective, for requests that set no objective."""
        return Objective(self.slo_ttft, self.slo_tbt)

    @property
    def adapters(self) -> dict[str, str]:
        """Folders of the LoRA adapters, by name."""
        if isinstance(self.lora, Mapping):
            return dict(self.lora)
        found: dict[str, str] = {}
        for text in self.lora:
            name, separator, path = text.partition("=")
            if not separator or not name or not path:
                raise ValueError(f"lora {text!r} is not NAME=FOLDER: write it as sql=adapters/sql")
            if name in found:
                raise ValueError(f"lora: the name {name!r} is given twice; it must be unique")
            found[name] = path
        return found

    @property
    def uses_lora(self) -> bool:
        """Whether requests may use LoRA adapters."""
        return bool(self.lora) or self.max_loras > 0

    @property
    def draft_model(self) -> str:
        """Folder or name of the draft model. Empty if there is none."""
        return next((part.removeprefix("draft=") for part in self.proposers if part.startswith("draft=")), "")

    @property
    def head(self) -> str:
        """The proposer that uses a draft head: "mtp" or "eagle=FOLDER". Empty if there is none."""
        return next((part for part in self.proposers if part == "mtp" or part.startswith("eagle=")), "")

    @property
    def proposers(self) -> list[str]:
        """The proposers, in the order in which they are tried."""
        if self.speculate == "off":
            return []
        parts = ["suffix"] if self.speculate == "auto" else self.speculate.split(",")
        return [part for part in parts if not part.startswith(TREE)]

    @property
    def tree_nodes(self) -> int:
        """Largest number of tokens in a draft tree. 0 if drafts are chains."""
        given = [part.removeprefix(TREE) for part in self.speculate.split(",") if part.startswith(TREE)]
        if not given:
            return 0
        if len(given) > 1 or not given[0].isdecimal() or not 2 <= int(given[0]) <= MOST_TREE_NODES:
            raise ValueError(
                f"speculate {self.speculate!r}: tree is a number of nodes from 2 to {MOST_TREE_NODES}, such as tree=16"
            )
        if not self.head:
            raise ValueError(
                f"speculate {self.speculate!r}: only heads draft trees: use mtp or eagle=FOLDER, or remove tree"
            )
        return int(given[0])

    def __post_init__(self) -> None:
        tokens = self.block_tokens
        if not 16 <= tokens <= 256 or tokens & (tokens - 1):
            raise ValueError(f"block_tokens {tokens} must be a power of two from 16 to 256")
        if self.tensor_parallel < 1:
            raise ValueError(f"tensor_parallel {self.tensor_parallel} must be 1 or more")
        if self.context_parallel < 1 or tokens % self.context_parallel:
            raise ValueError(
                f"context_parallel {self.context_parallel} does not divide block_tokens {tokens}: give a power of two, "
                f"up to {tokens}"
            )
        if self.rank_backend not in get_args(RankBackend):
            raise ValueError(
                f"rank_backend {self.rank_backend!r} is not one of {', '.join(get_args(RankBackend))}"
            )
        if self.sampling_defaults not in get_args(SamplingDefaults):
            raise ValueError(f"sampling_defaults {self.sampling_defaults!r} is not one of model, openai")
        if self.rank_seconds <= 0:
            raise ValueError(f"rank_seconds {self.rank_seconds} must be positive")
        self._check_parallel()
        self._check_context_parallel()
        sizes = (self.min_pool_bytes, self.pool_bytes, self.max_pool_bytes)
        given = [size for size in sizes if size is not None]
        if given != sorted(given):
            raise ValueError(
                f"pool sizes {given} must not decrease from min_pool_bytes over pool_bytes to max_pool_bytes"
            )
        if self.role not in get_args(Role):
            raise ValueError(f"role {self.role!r} is not one of {', '.join(get_args(Role))}")
        for url in self.encoders:
            if scheme_of(url) != "peer":
                raise ValueError(f"encoder {url!r} is not a peer: write peer://HOST:PORT?secret=FILE")
            parse_tier(url)
        if self.encode_seconds <= 0:
            raise ValueError(f"encode_seconds {self.encode_seconds} must be positive")
        self._check_proposers()
        _ = self.tree_nodes  # raises for invalid values
        if self.draft_tokens is not None and not 1 <= self.draft_tokens <= MOST_DRAFT_TOKENS:
            raise ValueError(f"draft_tokens {self.draft_tokens} must be from 1 to {MOST_DRAFT_TOKENS}")
        if self.max_loras < 0:
            raise ValueError(f"max_loras {self.max_loras} is negative: it must be 0 or more")
        _ = self.adapters  # raises for invalid values
        if self.reuse_documents is not None:
            self._check_documents(self.reuse_documents)
        if self.checkpoint_every < 0:
            raise ValueError(f"checkpoint_every {self.checkpoint_every} is negative: give tokens, or 0")
        for name in self.fixed:
            if name not in MEASURED:
                raise ValueError(f"fixed {name!r} is not one of {', '.join(MEASURED)}")
        if self.kv_events_replay is not None and self.kv_events is None:
            raise ValueError("kv_events_replay needs kv_events: give the address of the events, too")
        if self.kv_events_key is not None and self.kv_events is None:
            raise ValueError("kv_events_key needs kv_events: give the address of the events, too")
        _ = self.event_settings, self.objective  # raise for invalid values

    def _check_parallel(self) -> None:
        """Raise ValueError for settings that several ranks do not support."""
        count = self.tensor_parallel
        if count == 1:
            if self.expert_parallel:
                raise ValueError(refused("expert parallel, one rank"))
            return
        if self.max_pool_bytes is not None:
            raise ValueError(refused("tensor parallel, elastic pool", count=count))
        if self.batch_invariant:
            raise ValueError(refused("tensor parallel, batch_invariant", count=count))

    def _check_context_parallel(self) -> None:
        """Raise ValueError for settings that context parallelism does not support."""
        count = self.context_parallel
        if count == 1:
            return
        if self.max_pool_bytes is not None:
            raise ValueError(refused("context parallel, elastic pool", count=count))
        if self.batch_invariant:
            raise ValueError(refused("context parallel, batch_invariant", count=count))

    def _check_documents(self, share: float) -> None:
        """Raise ValueError for a share outside 0 to 1, and for settings that do not support the reuse of documents."""
        if not 0 <= share <= 1:
            raise ValueError(f"reuse_documents {share} must be from 0 to 1: the share of tokens to compute")
        if self.draft_model or self.head:
            raise ValueError(refused("documents, draft", name=self.draft_model or self.head))

    def _check_proposers(self) -> None:
        parts = self.proposers
        lookups, weights = ("ngram", "suffix", "mtp"), ("draft=", "eagle=")
        known = all(part in lookups or (part.startswith(weights) and part[6:]) for part in parts)
        if not known or len({part.partition("=")[0] for part in parts}) < len(parts):
            raise ValueError(
                f"speculate {self.speculate!r} is not off, auto, ngram, suffix, mtp, draft=MODEL, eagle=FOLDER or several "
                "of them, such as suffix,draft=MODEL"
            )
        kinds = {part.partition("=")[0] for part in parts} & {"draft", "mtp", "eagle"}
        if len(kinds) > 1:
            raise ValueError(refused("draft model, head", kinds=" and ".join(sorted(kinds))))

    @property
    def event_settings(self) -> EventSettings | None:
        """The addresses and format of published events, or None if no events are published."""
        if self.kv_events is None:
            return None
        return EventSettings(
            self.kv_events,
            self.kv_events_replay,
            self.kv_events_hashes,
            self.kv_events_topic,
            self.kv_events_encoding,
            self.kv_events_tier_tokens,
            key=self.kv_events_key,
        )


def engine_config(
    *,
    load: LoadRule = "auto",
    hand_over_seconds: float = 10.0,
    grammar_seconds: float = 2.0,
    grammar_memory: int | str = 256 << 20,
    **settings: Any,
) -> EngineConfig:
    """Return an `EngineConfig`. `settings` are its fields. The other arguments are fields of `OffloadConfig` and
    `GrammarLimits`. A size may be a number of bytes, or a text such as "256MiB".

    Raises ValueError for an unknown name or an invalid value.
    """
    names = [one.name for one in fields(EngineConfig)]
    for name in settings:
        if name == "pipeline_parallel":
            raise ValueError(refused("pipeline parallel"))
        if name not in names:
            close = get_close_matches(
                name, [*names, "load", "hand_over_seconds", "grammar_seconds", "grammar_memory"], n=1
            )
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"the engine has no setting {name!r}{hint}")
    for name in settings.keys() & _SIZES:
        if settings[name] is not None:
            settings[name] = _size(name, settings[name])
    settings.setdefault("offload", OffloadConfig(load, hand_over_seconds=hand_over_seconds))
    memory = _size("grammar_memory", grammar_memory)
    settings.setdefault("grammar_limits", GrammarLimits(grammar_seconds, memory))
    return EngineConfig(**settings)


def _size(name: str, value: object) -> int:
    """Return the setting `name` in bytes. Raises ValueError if `value` is not a size."""
    if isinstance(value, str):
        try:
            return parse_size(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    if not isinstance(value, int) or value < 0:
        raise ValueError(f'{name} {value!r} is not a size: give bytes, or a text such as "256MiB"')
    return value
