"""Messages between the API process and the engine process, and their encoding.

    API    ──▶ engine    Start (once, first), Add, Cancel, ExpectSession, EndSession, SnapshotRequest, ResizePool,
                         SetRole, LoadAdapter, UnloadAdapter
    engine ──▶ API       Ready or StartFailed (once), then Outputs (one per step); Heartbeat, every second

A message is msgpack with a four-byte length before it. Log-probabilities are triples of token, value and rank.
"""

from __future__ import annotations

import struct
from typing import Any, Literal

import msgspec

from kvloom.core import Objective
from kvloom.engine import GenerationDefaults, Role, SamplingParams, Transcript

__all__ = [
    "HEADER_BYTES",
    "AdapterAnswer",
    "AdapterInfo",
    "Add",
    "Cancel",
    "Delta",
    "EndSession",
    "EngineStats",
    "ExpectSession",
    "FromEngine",
    "GroupInfo",
    "Heartbeat",
    "ImagePrompt",
    "LoadAdapter",
    "Outputs",
    "PoolState",
    "Ready",
    "Rejected",
    "RequestProgress",
    "ResizePool",
    "SetRole",
    "SnapshotRequest",
    "Start",
    "StartFailed",
    "TenantConfig",
    "TenantUsage",
    "TierUsage",
    "ToEngine",
    "TokenLogprob",
    "TokenRange",
    "UnloadAdapter",
    "body_length",
    "frame",
]

_LENGTH = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size

TokenLogprob = tuple[int, float, int]
"""A token, its log-probability and its rank."""


class TenantConfig(msgspec.Struct, frozen=True, array_like=True):
    """A tenant: its name, and its quota of pool bytes (None means no quota). `weight` and `firm` set its share of the
    pool, see `core.Tenant`. `slo_ttft` and `slo_tbt` are the default objective of its requests in milliseconds.
    """

    name: str
    quota: int | None = None
    weight: float = 0.0
    firm: bool = True
    slo_ttft: float | None = None
    slo_tbt: float | None = None


class Start(msgspec.Struct, frozen=True, tag=True):
    """Options of the engine to load.

    | field                     | meaning                                                                               |
    |---------------------------|---------------------------------------------------------------------------------------|
    | `cpu_dtype`               | weight dtype on a CPU where `dtype` is "auto"                                         |
    | `threads`                 | CPU threads of torch; None: the engine's default                                      |
    | `progress`                | show progress bars on stderr                                                          |
    | `observe`                 | False: send neither stats nor request progress                                        |
    | `stream_interval`         | number of tokens per delta of a stream, after its first token                         |
    | `settings`                | settings of the engine: arguments of `engine_config`                                  |
    | `log_level`, `log_format` | level and format of the engine process's log                                          |
    | `share_bytes`             | if models share memory: number of bytes to which this pool can always grow; else None |
    """

    model: str
    dtype: str = "auto"
    cpu_dtype: str = "auto"
    device: str | None = None
    load_format: Literal["auto", "random"] = "auto"
    threads: int | None = None
    tenants: tuple[TenantConfig, ...] = ()
    progress: bool = False
    observe: bool = True
    stream_interval: int = 1
    settings: dict[str, Any] = {}
    log_level: str = "info"
    log_format: Literal["text", "json"] = "text"
    share_bytes: int | None = None


class ImagePrompt(msgspec.Struct, frozen=True, array_like=True):
    """A prompt with images or audio clips. It has the text, with a placeholder for each of them, the encoded images,
    and the clips as WAV files.

    The engine process expands the placeholders. The expanded prompt may have at most `max_prompt_tokens` tokens. If it
    is set, `max_tokens` limits prompt and output together. With a `task` ("transcribe" or "translate") the prompt is
    that of Whisper for this task, and the clip may have any length. `language` is the language of the clip, such as "en";
    if it is empty, the language is detected. With `timestamps`, the answer has time stamps.
    """

    text: str
    images: list[bytes]
    add_special_tokens: bool
    max_prompt_tokens: int
    max_tokens: int | None = None
    audio: list[bytes] = []
    task: str = ""
    language: str = ""
    timestamps: bool = False


class TokenRange(msgspec.Struct, frozen=True, array_like=True):
    """Sets the priority of the tokens [start, stop) for `ttl` seconds. Pages of tokens with a positive priority are
    evicted later than other pages, and pages of tokens with a negative priority earlier. Without `stop` the range has
    no end. Without `ttl` the priority does not expire.
    """

    start: int = 0
    stop: int | None = None
    priority: int = 1
    ttl: float | None = None


class Add(msgspec.Struct, frozen=True, tag=True):
    """Sends one prompt to the engine. The deltas of all answers to this prompt have the same `id`.

    - `stream`: if true, each step with new tokens sends a delta per answer. If false, each returned answer is
      sent as one delta when all answers have finished.
    - `store`, `read`: whether the request adds pages to the cache, and whether it uses cached pages.
    - `salt`: only requests with the same salt share pages.
    - `public_tokens`: length of the public prefix, which all tenants share.
    - `documents`: token ranges whose K and V may be reused at another place.
    - `ends_session`: this is the last request of a session.
    - `lossy`: the request accepts pages that a tier re-encoded.
    - `retain`: priorities of token ranges.
    - `image_prompt`: if set, the prompt is made from it, and `prompt` is not used.
    - `offers_pages`: offload the pages of each computed chunk at once, so that another worker can load them.
    - `awaits_peer`: address (host:port) of another worker, which computes the prompt. The request waits for the
      pages that the other worker computes.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    stream: bool = False
    tenant: str = ""
    session: str | None = None
    priority: int = 0
    ttl: float | None = None
    store: bool = True
    read: bool = True
    salt: str = ""
    ends_session: bool = False
    lossy: bool = False
    retain: list[TokenRange] = []
    image_prompt: ImagePrompt | None = None
    resume: list[int] = []
    """Output tokens that another worker has generated. The answer begins with these tokens."""
    pin: float | None = None
    """Seconds for which the prompt stays in the pool after the request."""
    offers_pages: bool = False
    awaits_peer: str | None = None
    slo: Objective | None = None
    """The objectives of the request. For missing values, the objectives of its tenant or of the server apply."""
    arrived: float | None = None
    """When the request arrived, on the monotonic clock."""
    encoder: str | None = None
    """Address (host:port) of the encode worker that a router chose for the images."""
    lora: str | None = None
    """Name of the LoRA adapter. None means the base model."""
    public_tokens: int = 0
    documents: list[tuple[int, int]] = []


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Cancel all answers to the prompt `id`. The engine sends no further delta of this prompt. If the prompt has
    finished, the message has no effect."""

    id: int


class ExpectSession(msgspec.Struct, frozen=True, tag=True):
    """A session will soon send a request, so its pages may be prefetched."""

    tenant: str
    session: str


class EndSession(msgspec.Struct, frozen=True, tag=True):
    """A session is over. Pages that only this session used are evicted first."""

    tenant: str
    session: str


class SnapshotRequest(msgspec.Struct, frozen=True, tag=True):
    """Request a snapshot of the cache. The next Outputs message contains it."""


class ResizePool(msgspec.Struct, frozen=True, tag=True):
    """Grow or shrink an elastic pool to `pool_bytes`. The engine answers with a PoolState that has the same `number`.

    `share_bytes` is a size to which the pool can always grow. A request that needs more than the present pool, and at
    most `share_bytes`, waits until the pool has grown.
    """

    pool_bytes: int
    number: int = 0
    share_bytes: int | None = None


class SetRole(msgspec.Struct, frozen=True, tag=True):
    """Change the role of the worker for later requests."""

    role: Role


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Load a LoRA adapter. With `replace`, it replaces a loaded adapter of the same name. The engine answers with an
    AdapterAnswer that has the same `number`.
    """

    name: str
    path: str
    replace: bool = False
    number: int = 0


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Unload a LoRA adapter. The engine answers with an AdapterAnswer that has the same `number`."""

    name: str
    number: int = 0


class AdapterInfo(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter.

    - `digest` identifies its config and weights, and salts block hashes.
    - `created` is the Unix time of loading.
    - `requests` is the number of its requests.
    - `is_resident` states that the adapter has a slot on the device.

    An activated LoRA applies only from the last occurrence of `invocation_tokens` in the prompt. For other adapters,
    `invocation_tokens` is empty.
    """

    name: str
    path: str
    digest: str
    rank: int = 0
    created: int = 0
    invocation_tokens: list[int] = []
    requests: int = 0
    is_resident: bool = False


class AdapterAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a LoadAdapter or UnloadAdapter message. `error` is "" on success. `adapters` are all adapters that
    new requests may use."""

    number: int
    error: str
    adapters: list[AdapterInfo]


class Delta(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """New tokens of answer `index` to prompt `id`. The text of the last tokens may follow in a later delta.

    - `cached_tokens`: the number of cached prompt tokens.
    - `finish_reason`: set in the last delta.
    - `prompt_logprobs`: if requested, log-probabilities of all prompt tokens except the first. Only answer 0 has them.
    - `prompt_tokens`: for a prompt with images, the number of its tokens after placeholders are expanded.
    - `embedding`: if requested, the values of the embedding as float32, little-endian.
    - `reused_tokens`: the number of prompt tokens whose K and V were copied from documents.
    - `transcript`: for a prompt with a task, the transcript of the whole clip.
    """

    id: int
    index: int
    text: str
    tokens: list[int]
    cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[list[TokenLogprob]] | None = None
    prompt_logprobs: list[list[TokenLogprob]] | None = None
    prompt_tokens: int | None = None
    embedding: bytes | None = None
    reused_tokens: int = 0
    transcript: Transcript | None = None


class Rejected(msgspec.Struct, frozen=True, array_like=True):
    """A prompt that the engine refuses, and the reason. `is_retryable` states that a later attempt may succeed."""

    id: int
    reason: str
    is_retryable: bool = False
    slo: dict[str, Any] | None = None
    """Objective and prediction of a request that cannot meet its objective, in milliseconds."""


MAX_CHUNKS = 64
"""Largest number of prompt chunks in a RequestProgress message."""


class RequestProgress(msgspec.Struct, frozen=True, array_like=True):
    """Progress of one prompt. The engine sends it when the prompt starts, at its first token, and when all its answers
    have finished.

    Times are on the monotonic clock. 0 means "not yet".

    | field                  | meaning                                                                                |
    |------------------------|----------------------------------------------------------------------------------------|
    | `looked_up`, `started` | times of the lookup in the cache, and of the first work on the prompt                  |
    | `hits`                 | number of cached prompt tokens, by tier                                                |
    | `miss_position`        | the token at which the lookup stopped                                                  |
    | `miss_reason`          | one of the core's MISS_REASONS                                                         |
    | `evicted_at`, `policy` | if the missing pages were evicted: time of the eviction, and name of the policy        |
    | `in_other_tenant`      | whether only another tenant has the first block of this prompt cached                  |
    | `loads`                | loads from tiers: tier, start, end, tokens                                             |
    | `prompt_tokens`        | for a prompt with images: number of prompt tokens with expanded placeholders           |
    | `draft_tokens`         | number of draft tokens that were proposed, for all answers                             |
    | `accepted_tokens`      | number of `draft_tokens` that were accepted                                            |
    | `slo`                  | objective, prediction and outcome (`SloState.report`), or None without an objective    |
    | `chunks`               | computed prompt chunks: start, end, tokens. At most MAX_CHUNKS; more are merged        |
    | `reused_tokens`        | number of prompt tokens whose K and V were copied from documents                       |
    """

    id: int
    looked_up: float
    started: float
    first_token: float
    cached_tokens: int
    hits: dict[str, int]
    miss_position: int
    miss_reason: str
    evicted_at: float | None = None
    policy: str | None = None
    in_other_tenant: bool = False
    preemptions: int = 0
    loads: list[tuple[str, float, float, int]] = []
    prompt_tokens: int | None = None
    draft_tokens: int = 0
    accepted_tokens: int = 0
    slo: dict[str, Any] | None = None
    chunks: list[tuple[float, float, int]] = []
    reused_tokens: int = 0


HistogramCounts = tuple[list[int], float]
"""The counts of a core Histogram, and the sum of its values."""


class TenantUsage(msgspec.Struct, frozen=True, array_like=True):
    """The usage of one tenant.

    - `used`: pool bytes of all its pages. `in_use`: pool bytes of the pages of its running requests.
    - `looked_up_tokens`, `hit_tokens`: numbers of prompt tokens that were looked up, and that were cached.
    - `evictions`: number of its evicted cache entries.
    - `running`, `waiting`: numbers of its requests.
    - `tiers`: its bytes in each tier that counts bytes by tenant.
    """

    used: int = 0
    in_use: int = 0
    looked_up_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    running: int = 0
    waiting: int = 0
    tiers: dict[str, int] = {}


class TierUsage(msgspec.Struct, frozen=True, array_like=True):
    """The content and the traffic of a tier. An object is one stored page. `objects` and `bytes` are the present
    content, and `capacity` is the size in bytes. The other numbers count since the engine started. `reads` and `writes`
    count objects by outcome.

    `breaker` is the state of its circuit breaker: "closed" (in use), "open" (disabled after faults) or "half-open"
    (being probed).
    """

    name: str
    objects: int = 0
    bytes: int = 0
    capacity: int = 0
    reads: dict[str, int] = {}
    writes: dict[str, int] = {}
    bytes_read: int = 0
    bytes_written: int = 0
    evicted: int = 0
    breaker: str = "closed"


class SettingInfo(msgspec.Struct, frozen=True):
    """A setting that measurements change: `kvloom.engine.MeasuredSetting`."""

    name: str
    value: int
    unit: str
    reason: str
    is_fixed: bool = False


class EngineStats(msgspec.Struct, frozen=True):
    """Counters of the engine and its cache since the engine started, and its present load.

    | field                                | meaning                                                                              |
    |--------------------------------------|--------------------------------------------------------------------------------------|
    | `fragmented_bytes`                   | bytes of free pages in slabs that also have other pages                              |
    | `unused_tokens`                      | number of tokens with reserved pages that are not computed yet                       |
    | `miss_reasons`                       | number of lookups by miss reason                                                     |
    | `evicted`                            | number of evictions by kind of entry                                                 |
    | `policy`                             | the comparison of the adaptive eviction policy with LRU: `Inspector.policy`          |
    | `hit_pages`                          | number of pages hit, by kind of layer                                                |
    | `eviction_age`, `reuse_age`          | histograms of the seconds since the last use: of evicted entries, and of hit entries |
    | `drafts`, `draft_seconds_saved`      | number of verified drafts; estimated seconds that drafts saved                       |
    | `proposed_tokens`, `accepted_tokens` | numbers of proposed and of accepted draft tokens, by position in the draft           |
    | `speculation`                        | the last decision about each proposer, and its reason                                |
    | `settings`                           | the settings that measurements change                                                |
    | `offload`                            | counters of the offload manager                                                      |
    | `role`                               | role of the worker: both, prefill, decode or encode                                  |
    | `encoding`                           | counters of `EncodingStats`, or of `EncoderStats` in an encode worker                |
    | `tier_faults`                        | failed operations of tiers, as (tier, operation, outcome, count)                     |
    | `slo`                                | number of requests with an objective, by verdict: admit, defer, refuse               |
    | `slo_ttft_ratio`, `slo_tbt_ratio`    | actual divided by predicted time, of admitted requests                               |
    | `step_times`                         | coefficients of `core.StepTimes`; empty before enough steps were measured            |
    | `needs_growth`                       | whether an open request needs more pages than the pool has                           |
    | `adapters`                           | LoRA adapters, with the number of their requests                                     |
    """

    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    slabs: int = 0
    free_slabs: int = 0
    in_use_pages: int = 0
    cached_pages: int = 0
    in_use_bytes: int = 0
    cached_bytes: int = 0
    looked_up_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    evicted_bytes: int = 0
    moved_pages: int = 0
    nodes: int = 0
    fragmented_bytes: int = 0
    unused_tokens: int = 0
    steps: int = 0
    output_tokens: int = 0
    miss_reasons: dict[str, int] = {}
    evicted: dict[str, int] = {}
    policy: dict[str, float] = {}
    hit_pages: dict[str, int] = {}
    eviction_age: HistogramCounts = ([], 0.0)
    reuse_age: HistogramCounts = ([], 0.0)
    tenants: dict[str, TenantUsage] = {}
    tiers: list[TierUsage] = []
    drafts: int = 0
    proposed_tokens: list[int] = []
    accepted_tokens: list[int] = []
    draft_seconds_saved: float = 0.0
    speculation: dict[str, str] = {}
    settings: list[SettingInfo] = []
    offload: dict[str, int] = {}
    role: str = "both"
    encoding: dict[str, float] = {}
    tier_faults: list[tuple[str, str, str, int]] = []
    slo: dict[str, int] = {}
    slo_ttft_ratio: HistogramCounts = ([], 0.0)
    slo_tbt_ratio: HistogramCounts = ([], 0.0)
    step_times: list[float] = []
    needs_growth: bool = False
    adapters: list[AdapterInfo] = []


class PoolState(msgspec.Struct, frozen=True, array_like=True):
    """The current size and the target size of an elastic pool in bytes, and the largest number of tokens that one
    request may have. `number` is the number of the last ResizePool message that the engine has processed.
    """

    pool_bytes: int
    target_bytes: int
    max_tokens: int
    number: int = 0


class Outputs(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The results of one step. `stats` is set several times a second, and when the engine becomes idle. Otherwise it is
    None.

    `snapshot` is JSON and answers a SnapshotRequest. `pool` is set if the size of the pool has changed, or if a
    ResizePool message needs an answer. `adapters` answers messages about LoRA adapters.
    """

    deltas: list[Delta] = []
    rejected: list[Rejected] = []
    stats: EngineStats | None = None
    snapshot: bytes | None = None
    progress: list[RequestProgress] = []
    pool: PoolState | None = None
    adapters: list[AdapterAnswer] = []


class GroupInfo(msgspec.Struct, frozen=True, array_like=True):
    """A layer group: its index, its kind (full, sliding, chunked, state) and its window. The window is a number of
    tokens, or 0 for a group without a window."""

    index: int
    kind: str
    window: int = 0


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A message of the engine process: the engine is loaded and accepts requests.

    - `max_tokens`: the largest number of tokens of one request, prompt and output together.
    - `tenant_max_tokens`: the same limit for each tenant with a quota.
    - `tiers`: name, capacity and number of stored pages of each tier.
    - `unavailable_tiers`: name of each tier that could not be opened, and the reason.
    - `pool_limits`: the smallest and largest size of an elastic pool.
    - `image_refusal`: the reason why the model accepts no images, or "".
    - `audio_refusal`: the reason why the model accepts no audio, or "".
    - `hash_model`: the text that identifies the model in block hashes.
    - `groups`: the layer groups of the model, without the groups for images and drafts.
    - `max_context`: the largest number of tokens that the model allows in one request.
    - `peer_address`: the address at which other workers read the host memory of this worker, or None.
    - `token_budget`: the largest number of prompt tokens in a step.
    - `encoder_tokens`: the largest number of prompt tokens if an encoder reads the prompt (T5, BART), else 0. The tokens
      of such a prompt do not count in `max_tokens`. `decoder_tokens`: the number of the decoder's first tokens.
    - `adapters`: the LoRA adapters. `adapter_rank`: the largest rank that an adapter may have.
    - `defaults`: the values of the model's generation config, for what requests do not set.
    - `adapter_slots`: how many adapters run at the same time. 0 means that requests may use no adapters.
    """

    device: str
    dtype: str
    vocab_size: int
    max_tokens: int
    tenant_max_tokens: dict[str, int]
    pool_bytes: int
    slab_bytes: int
    block_tokens: int
    bytes_per_token: int
    layout: list[dict[str, Any]]
    load_seconds: float
    tiers: list[tuple[str, int, int]] = []
    unavailable_tiers: list[tuple[str, str]] = []
    pool_limits: tuple[int, int] | None = None
    image_refusal: str = ""
    audio_refusal: str = ""
    hash_model: str = ""
    groups: list[GroupInfo] = []
    max_context: int = 0
    peer_address: tuple[str, int] | None = None
    token_budget: int = 0
    adapters: list[AdapterInfo] = []
    adapter_slots: int = 0
    adapter_rank: int = 0
    encoder_tokens: int = 0
    decoder_tokens: int = 0
    defaults: GenerationDefaults = GenerationDefaults()


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot be loaded. Another attempt would fail, too."""

    reason: str


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """The engine process is alive. `step` is the number of the running step. It is 0 while the engine loads or
    is idle."""

    step: int = 0


ToEngine = (
    Start
    | Add
    | Cancel
    | ExpectSession
    | EndSession
    | SnapshotRequest
    | ResizePool
    | SetRole
    | LoadAdapter
    | UnloadAdapter
)
FromEngine = Ready | StartFailed | Outputs | Heartbeat

_encoder = msgspec.msgpack.Encoder()


def frame(message: ToEngine | FromEngine) -> bytes:
    """Return a message as bytes, with its header."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def body_length(header: bytes) -> int:
    """Return the length of a message body. The header contains this length."""
    return int(_LENGTH.unpack(header)[0])
