"""The fields of a request, and their conversion to sampling parameters. msgspec checks types, and SamplingParams
checks values.

There are OpenAI's fields, fields of other servers (top_k, min_p, ignore_eos, …), and fields of the cache (tenant,
priority, ttl, cache, session_id). Unknown fields are ignored. Fields in UNSUPPORTED are refused, because ignoring them
would change the answer. docs/server.md lists all fields.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from kvloom.combinations import refused
from kvloom.core import PUBLIC_TENANT, Objective
from kvloom.engine import SamplingParams
from kvloom.serve.api.answers import check_tools, forced_functions
from kvloom.serve.api.json_limits import check_structure, check_values, paused_gc
from kvloom.serve.errors import ApiError, bad_request

__all__ = [
    "MAX_GRAMMAR_CHARACTERS",
    "UNSUPPORTED",
    "ChatFields",
    "CompletionFields",
    "RequestFields",
    "StreamOptions",
    "beam_width",
    "check_fields",
    "check_tokens",
    "engine_error",
    "read_fields",
    "sampling_params",
]

MAX_STOPS = 16
MAX_PIN_SECONDS = 86400
MAX_STOP_CHARACTERS = 256
MAX_LOGPROBS = 20
MAX_BEST_OF = 32
MAX_BAD_WORDS = 128
MAX_RANGES, MAX_RANGE_PRIORITY = 16, 100
MAX_DOCUMENTS = 256
"""Largest number of documents of a prompt."""
"""Largest number of token ranges (`cache.retain`) of one request, and largest absolute value of their priority."""
MAX_GRAMMAR_CHARACTERS = 1 << 16
INTEGERS = range(-(1 << 63), 1 << 63)
MAX_STOP_TOKENS = 1024
NESTED_FIELDS = ("messages", "tools", "tool_choice", "documents", "chat_template_kwargs")
MAX_TOP_K = (1 << 31) - 1

_FIELD = re.compile(r"`\$\.([A-Za-z_]\w*)")
_WORD = re.compile(r"[a-z_]+")


UNSUPPORTED: dict[str, str] = {
    "audio": "answers are text only",
    "function_call": "use tool_choice",
    "functions": "use tools",
    "logits_processors": "requests cannot contain code",
    "prompt_embeds": "send text or token ids",
    "return_tokens_as_token_ids": "use return_token_ids",
    "web_search_options": "web search is not supported",
}
"""Fields of other servers that kvloom does not support, each with the alternative or the reason."""


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Schema(msgspec.Struct, frozen=True):
    schema: dict[str, Any] | bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    type: str
    json_schema: Schema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """Structured output in the format of vLLM's API."""

    json: dict[str, Any] | bool | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class RetainFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sets the priority of the tokens [start, stop) for `ttl` seconds. Pages of tokens with a positive priority are
    evicted later than other pages, and pages of tokens with a negative priority earlier. Without `stop` the range has
    no end. Without `ttl` the priority does not expire.
    """

    start: int = 0
    stop: int | None = None
    priority: int = 1
    ttl: float | None = None


class CacheFields(msgspec.Struct, frozen=True):
    """Caching options of a request.

    - `store` states whether the request adds pages to the cache, and `read` whether it uses cached pages.
    - `retain` sets priorities of token ranges.
    - `pin` is the number of seconds for which the prompt is pinned in the pool.
    - `public_tokens` or `public_messages` mark the first tokens, or the first messages of a chat, as a public prefix,
      which all tenants share.
    - `documents` are token ranges [start, end) of the prompt whose K and V may be reused at another place, if the
      server allows this.
    """

    store: bool | None = None
    read: bool | None = None
    retain: list[RetainFields] | None = None
    pin: float | None = None
    public_tokens: int | None = None
    public_messages: int | None = None
    documents: list[tuple[int, int]] | None = None

    @property
    def is_public(self) -> bool:
        """Whether the request marks a public prefix."""
        return bool(self.public_tokens or self.public_messages)


class SloFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The objective of a request, in milliseconds: the longest allowed time to the first token, between two tokens, and
    for the whole answer. See `core.Objective`.
    """

    ttft_ms: float | None = None
    tbt_ms: float | None = None
    deadline_ms: float | None = None

    def objective(self) -> Objective:
        """Return the limits of TTFT, time between tokens and deadline as an `Objective`. Raises ApiError if a limit is
        not positive."""
        try:
            return Objective(self.ttft_ms, self.tbt_ms, self.deadline_ms)
        except ValueError as error:
            raise bad_request(str(error), "slo") from None


class TransferFields(msgspec.Struct, frozen=True):
    """vLLM's fields for the hand-over of a prompt from a prefill worker to a decode worker. The request to the prefill
    worker sets `do_remote_decode`. The response of the prefill worker contains the fields for the request to the decode
    worker: `do_remote_prefill`, and the address of the prefill worker's host memory (`remote_host`, `remote_port`).

    Pages are found by hash, so block ids, engine ids and token counts are accepted but not used. `encode_host` and
    `encode_port` are fields of kvloom, not of vLLM. They name the encode worker for the images of the request.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_host: str | None = None
    remote_port: int | None = None
    encode_host: str | None = None
    encode_port: int | None = None

    @property
    def encoder(self) -> str | None:
        """The address (host:port) of the encode worker for the images, or None if the request names none."""
        return _address(self.encode_host, self.encode_port)

    @property
    def awaited_peer(self) -> str | None:
        """The address (host:port) at which the prefill worker shares its host memory, or None if this worker computes
        the prompt."""
        return _address(self.remote_host, self.remote_port) if self.do_remote_prefill else None


def _address(host: str | None, port: int | None) -> str | None:
    if host is None or port is None:
        return None
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class RequestFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that completions and chats share. Unsupported fields are declared too, so that they can be refused."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    regex: str | None = None
    grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    resume_token_ids: list[int] | None = None
    """Output tokens that another worker has generated for the same request. The answer begins with these tokens."""
    tenant: str | None = None
    priority: int | None = None
    ttl: float | None = None
    cache: CacheFields | None = None
    read: bool | None = None  # deprecated: cache.read
    session_id: str | None = None
    end_session: bool | None = None
    cache_salt: str | None = None
    lossy: bool | None = None
    slo: SloFields | None = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    kv_transfer_params: TransferFields | None = None
    logits_processors: Any = None
    prompt_embeds: Any = None
    return_tokens_as_token_ids: Any = None
    web_search_options: Any = None


class CompletionFields(RequestFields, frozen=True, kw_only=True):
    prompt: str | list[int | str | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class ChatFields(RequestFields, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    modalities: list[str] | None = None


Some = TypeVar("Some", bound=msgspec.Struct)


def read_fields(body: bytes, kind: type[Some]) -> Some:
    """Parse the JSON of a body into the struct `kind`. Raises ApiError with the name of an invalid field. Takes up to
    0.2 s for the largest accepted body.
    """
    if not body.strip():
        raise bad_request("the request body is empty: send a JSON object")
    check_structure(body)
    try:
        with paused_gc():
            fields = msgspec.json.decode(body, type=kind)
            for nested in NESTED_FIELDS:
                check_values([getattr(fields, nested, None)], nested)
    except msgspec.ValidationError as error:
        message = str(error)
        at = _FIELD.search(message)
        missing = re.search(r"required field `(\w+)`", message)
        name = missing[1] if missing else at[1] if at else None
        raise bad_request(f"{name}: {message}" if name and not missing else message, name) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the request body is not JSON: {error}") from None
    if isinstance(fields, RequestFields):
        check_fields(fields)
    return fields


def check_tokens(tokens: Sequence[int], vocabulary: int, param: str) -> None:
    """Raise ApiError for token ids outside the vocabulary."""
    for token in (min(tokens), max(tokens)) if tokens else ():
        if not 0 <= token < vocabulary:
            raise bad_request(
                f"{param}: token {format_integer(token)} is outside the vocabulary, 0 to {vocabulary - 1}",
                param,
            )


def format_integer(number: int) -> str:
    """Return an integer for an error message. Python refuses to format integers with thousands of digits."""
    return str(number) if number.bit_length() < 256 else f"of {number.bit_length():,} bits"


def check_fields(fields: RequestFields) -> None:
    """Raise ApiError for invalid values that SamplingParams does not check."""
    for name, instead in UNSUPPORTED.items():
        value = getattr(fields, name)
        if value is not None and value is not False and value not in ("", [], {}):
            raise bad_request(f"{name} is not supported: {instead}", name)
    for name in ("seed", "priority"):
        value = getattr(fields, name)
        if value is not None and value not in INTEGERS:
            raise bad_request(f"{name} {value} does not fit 64 bits", name)
    if fields.top_k is not None and fields.top_k > MAX_TOP_K:
        raise bad_request(f"top_k {fields.top_k} exceeds any vocabulary; 0 keeps every token", "top_k")
    if fields.ttl is not None and not 0 < fields.ttl < math.inf:
        raise bad_request(f"ttl {fields.ttl} must be a positive number of seconds", "ttl")
    if fields.slo is not None:
        fields.slo.objective()
    pin = None if fields.cache is None else fields.cache.pin
    if pin is not None and not 0 < pin <= MAX_PIN_SECONDS:
        raise bad_request(f"cache: pin {pin} must be from 0 to {MAX_PIN_SECONDS:,} seconds", "cache")
    _check_public(fields)
    _check_documents(fields)
    _check_retain(() if fields.cache is None else fields.cache.retain or ())
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARACTERS for stop in stops):
        raise bad_request(
            f"stop allows {MAX_STOPS} texts of {MAX_STOP_CHARACTERS} characters; {len(stops)} were sent",
            "stop",
        )
    if len(fields.stop_token_ids or ()) > MAX_STOP_TOKENS:
        raise bad_request(
            f"stop_token_ids allows {MAX_STOP_TOKENS:,} tokens; {len(fields.stop_token_ids or ()):,} were sent",
            "stop_token_ids",
        )
    if fields.resume_token_ids and (fields.n or 1) > 1:
        raise bad_request("resume_token_ids needs n = 1", "resume_token_ids")
    if fields.end_session and fields.session_id is None:
        raise bad_request("end_session requires session_id", "end_session")
    if fields.tenant == PUBLIC_TENANT:
        raise bad_request(f"tenant {PUBLIC_TENANT!r} is reserved: choose another name", "tenant")
    for name in ("tenant", "session_id", "cache_salt"):
        if len(getattr(fields, name) or "") > MAX_STOP_CHARACTERS:
            raise bad_request(f"{name} is longer than {MAX_STOP_CHARACTERS} characters", name)
    for name in ("regex", "grammar"):
        if len(getattr(fields, name) or "") > MAX_GRAMMAR_CHARACTERS:
            raise bad_request(f"{name} is longer than {MAX_GRAMMAR_CHARACTERS:,} characters", name)
    if fields.truncate_prompt_tokens is not None and fields.truncate_prompt_tokens < -1:
        raise bad_request(
            f"truncate_prompt_tokens {fields.truncate_prompt_tokens} must be a number of tokens to keep, or -1 for as many as fit",
            "truncate_prompt_tokens",
        )
    if not 0 <= (fields.prompt_logprobs or 0) <= MAX_LOGPROBS:
        raise bad_request(
            f"prompt_logprobs {fields.prompt_logprobs} must lie in 0 to {MAX_LOGPROBS}", "prompt_logprobs"
        )
    if fields.prompt_logprobs is not None and fields.stream:
        raise bad_request(refused("prompt_logprobs, stream"), "prompt_logprobs")
    words = fields.bad_words or []
    if len(words) > MAX_BAD_WORDS or not all(0 < len(word) <= MAX_STOP_CHARACTERS for word in words):
        raise bad_request(
            f"bad_words allows {MAX_BAD_WORDS} texts of 1 to {MAX_STOP_CHARACTERS} characters; {len(words)} were sent",
            "bad_words",
        )
    _check_samples(fields)
    if fields.stream_options is not None and not fields.stream:
        raise bad_request("stream_options require stream: true", "stream_options")
    if isinstance(fields, CompletionFields):
        _check_completion(fields)
    elif isinstance(fields, ChatFields):
        _check_chat(fields)


def beam_width(fields: RequestFields) -> int:
    """Return the number of beams, or 1 without beam search. As in vLLM, `use_beam_search` without `beam_width`
    uses the larger of `best_of` and `n`.
    """
    if fields.beam_width is not None or not fields.use_beam_search:
        return fields.beam_width or 1
    return max(fields.best_of or 1, fields.n or 1)


def _check_samples(fields: RequestFields) -> None:
    n, best_of, width = fields.n or 1, fields.best_of, beam_width(fields)
    if fields.use_beam_search and width < 2:
        raise bad_request("use_beam_search needs beam_width, best_of or n above 1", "use_beam_search")
    for name, value in (("best_of", best_of), ("beam_width", width)):
        if value is not None and not 0 < value <= MAX_BEST_OF:
            raise bad_request(f"{name} {value} must lie in n to {MAX_BEST_OF}", name)
    if fields.stream and width > 1:
        raise bad_request(refused("beams, stream"), "stream")
    if fields.stream and best_of is not None and best_of > n:
        raise bad_request(refused("best_of, stream"), "best_of")
    if width < 2 and (fields.length_penalty is not None or fields.early_stopping is not None):
        name = "length_penalty" if fields.length_penalty is not None else "early_stopping"
        raise bad_request(f"{name} needs beam search: set use_beam_search or beam_width", name)


def _check_public(fields: RequestFields) -> None:
    cache = fields.cache or CacheFields()
    for name in ("public_tokens", "public_messages"):
        value = getattr(cache, name)
        if value is not None and not 0 <= value < 1 << 31:
            raise bad_request(f"cache: {name} {value} must be 0 or more", "cache")
    if cache.public_tokens and cache.public_messages:
        raise bad_request("cache: send either public_tokens or public_messages", "cache")
    if not cache.public_messages:
        return
    if not isinstance(fields, ChatFields):
        raise bad_request("cache: public_messages needs a chat: send public_tokens", "cache")
    if cache.public_messages > len(fields.messages):
        raise bad_request(
            f"cache: public_messages {cache.public_messages} exceeds the {len(fields.messages)} messages",
            "cache",
        )


def _check_documents(fields: RequestFields) -> None:
    ranges = () if fields.cache is None else fields.cache.documents or ()
    if len(ranges) > MAX_DOCUMENTS:
        raise bad_request(
            f"cache: {len(ranges)} documents exceed the limit of {MAX_DOCUMENTS}: send fewer", "cache"
        )
    if ranges and isinstance(fields, ChatFields):
        raise bad_request(
            "cache: documents are token ranges of a completion: in a chat, send document parts", "cache"
        )
    last = 0
    for start, end in ranges:
        if not last <= start < end < 1 << 31:
            raise bad_request(
                f"cache: document [{start}, {end}] is empty, or begins before token {last}: send ranges in order, without "
                "overlap",
                "cache",
            )
        last = end


def _check_retain(ranges: Sequence[RetainFields]) -> None:
    if len(ranges) > MAX_RANGES:
        raise bad_request(f"cache: {len(ranges)} ranges in retain exceed the limit of {MAX_RANGES}", "cache")
    for one in ranges:
        if not 0 <= one.start < (MAX_TOP_K if one.stop is None else min(one.stop, MAX_TOP_K)):
            raise bad_request(
                f"cache: retain from token {one.start} to {one.stop} is empty or negative: use 0 <= start < stop",
                "cache",
            )
        if not -MAX_RANGE_PRIORITY <= one.priority <= MAX_RANGE_PRIORITY:
            raise bad_request(
                f"cache: retain priority {one.priority} must lie in {-MAX_RANGE_PRIORITY} to {MAX_RANGE_PRIORITY}",
                "cache",
            )
        if one.ttl is not None and not 0 < one.ttl < math.inf:
            raise bad_request(f"cache: retain ttl {one.ttl} must be a positive number of seconds", "cache")


def _check_completion(fields: CompletionFields) -> None:
    if fields.echo and fields.logprobs is not None and fields.stream:
        raise bad_request(refused("echo with logprobs, stream"), "echo")
    if not 0 <= (fields.logprobs or 0) <= MAX_LOGPROBS:
        raise bad_request(f"logprobs {fields.logprobs} must lie in 0 to {MAX_LOGPROBS}", "logprobs")


def _check_chat(fields: ChatFields) -> None:
    if any(kind != "text" for kind in fields.modalities or ()):
        raise bad_request(
            f"modalities {fields.modalities} cannot be had here: answers are text", "modalities"
        )
    check_tools(fields.tools)
    forced_functions(fields.tools, fields.tool_choice)
    if fields.top_logprobs is not None and not fields.logprobs:
        raise bad_request("top_logprobs require logprobs: true", "top_logprobs")
    if not 0 <= (fields.top_logprobs or 0) <= MAX_LOGPROBS:
        raise bad_request(
            f"top_logprobs {fields.top_logprobs} must lie in 0 to {MAX_LOGPROBS}", "top_logprobs"
        )
    if len(fields.chat_template or "") > MAX_GRAMMAR_CHARACTERS:
        raise bad_request(
            f"chat_template is longer than {MAX_GRAMMAR_CHARACTERS:,} characters", "chat_template"
        )
    if fields.max_tokens is not None and fields.max_completion_tokens not in (None, fields.max_tokens):
        raise bad_request("max_tokens and max_completion_tokens differ: send one", "max_tokens")


def sampling_params(
    fields: CompletionFields | ChatFields,
    max_tokens: int,
    vocabulary: int,
    bad_token_ids: Sequence[Sequence[int]] = (),
    defaults: Mapping[str, float] | None = None,
) -> SamplingParams:
    """Return the sampling parameters of a request. `bad_token_ids` are the tokens of its bad words. `defaults` are the
    model's values of fields that the request does not set. Beams ignore them. Raises ApiError for invalid values.
    """
    given: dict[str, Any] = {
        name: value
        for name in (
            "temperature", "top_p", "top_k", "min_p", "n", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens",
            "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "regex", "grammar",
            "include_stop_str_in_output", "skip_special_tokens", "best_of", "allowed_token_ids", "length_penalty", "early_stopping",
        )
        if (value := getattr(fields, name, None)) is not None
    }  # fmt: skip
    given["bad_token_ids"] = bad_token_ids
    if (width := beam_width(fields)) > 1:
        given["beam_width"] = width
        given.setdefault("temperature", 0.0)
        if fields.use_beam_search:
            given.pop("best_of", None)  # the number of beams
    if isinstance(fields, ChatFields):
        given["logprobs"] = (fields.top_logprobs or 0) if fields.logprobs else None
    else:
        given["logprobs"] = fields.logprobs
    if width == 1:
        given = {**(defaults or {}), **given}
    echoed = isinstance(fields, CompletionFields) and fields.echo and fields.logprobs is not None
    asked = (fields.prompt_logprobs, fields.logprobs if echoed else None)
    given["prompt_logprobs"] = max((int(most) for most in asked if most is not None), default=None)
    if given.get("top_k") == -1:  # the value that other servers use for "all"
        given["top_k"] = 0
    for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
        beyond = next((token for token in getattr(fields, name) or () if token >= vocabulary), None)
        if beyond is not None:
            raise bad_request(f"{name}: token {beyond} is outside the vocabulary of {vocabulary}", name)
    given["json_schema"] = _schema(fields.response_format)
    for name, form in _structured(fields.structured_outputs):
        if given.get(name) is not None:
            raise bad_request(
                f"structured_outputs: {name} is also set as a field; send one form", "structured_outputs"
            )
        given[name] = form
    try:
        return SamplingParams(max_tokens=max_tokens, **given)
    except ValueError as error:
        raise engine_error(str(error)) from None


def _schema(wanted: ResponseFormat | None) -> str | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return '{"type": "object"}'
    if wanted.type != "json_schema":
        raise bad_request(
            f"response_format: type {wanted.type!r} is not one of text, json_object, json_schema",
            "response_format",
        )
    schema = None if wanted.json_schema is None else wanted.json_schema.schema
    if schema is None:
        raise bad_request("response_format: json_schema requires json_schema.schema", "response_format")
    check_values([schema], "response_format")
    text = msgspec.json.encode(schema).decode()
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise bad_request(
            f"response_format: the schema is longer than {MAX_GRAMMAR_CHARACTERS:,} characters",
            "response_format",
        )
    return text


def _structured(wanted: StructuredOutputs | None) -> list[tuple[str, str]]:
    """Return the structures that the field `structured_outputs` requires, as pairs: the name of the field in
    SamplingParams, and its value."""
    if wanted is None:
        return []
    found = [(name, form) for name in ("regex", "grammar") if (form := getattr(wanted, name)) is not None]
    if wanted.json is not None:
        check_values([wanted.json], "structured_outputs")
        text = wanted.json if isinstance(wanted.json, str) else msgspec.json.encode(wanted.json).decode()
        found.append(("json_schema", text))
    if wanted.json_object:
        found.append(("json_schema", '{"type": "object"}'))
    if wanted.choice is not None:
        if not wanted.choice:
            raise bad_request("structured_outputs: choice needs at least one text", "structured_outputs")
        if len("|".join(wanted.choice)) > MAX_GRAMMAR_CHARACTERS:
            raise _too_much_structure()
        found.append(("regex", "|".join(re.escape(text) for text in wanted.choice)))
    if len(found) > 1 or any(len(form) > MAX_GRAMMAR_CHARACTERS for _, form in found):
        raise _too_much_structure()
    return found


def _too_much_structure() -> ApiError:
    return bad_request(
        f"structured_outputs allows one form of up to {MAX_GRAMMAR_CHARACTERS:,} characters",
        "structured_outputs",
    )


def engine_error(message: str) -> ApiError:
    """Convert an error message of SamplingParams or the engine to an error response.

    If the message starts with the name of a request field, the field `param` of the response is this name."""
    word = _WORD.match(message)
    name = "" if word is None else word[0]
    if name == "json_schema":
        name = "response_format"
    known = name in {*ChatFields.__struct_fields__, *CompletionFields.__struct_fields__}
    return bad_request(message, name if known else None, logged=f"invalid {name or 'request'}")
