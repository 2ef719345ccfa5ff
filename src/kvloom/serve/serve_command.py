"""`kvloom serve`: command-line arguments of the server."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from kvloom.arguments import MAX_NUMBER, MODEL, Parser, number, size, whole
from kvloom.combinations import refused
from kvloom.config_file import configured_models
from kvloom.engine import add_engine_arguments, engine_settings

from .http_client import KEY
from .https import https_arguments

if TYPE_CHECKING:
    from kvloom.serve.auth import Caps
    from kvloom.serve.server import ChatOptions, ModelOptions
    from kvloom.serve.worker import TenantConfig

__all__ = ["arguments", "run"]

TOOL_CALL_PARSERS = ("auto", "none", "hermes", "qwen", "llama3_json", "mistral", "pythonic", "qwen3_coder")
REASONING_PARSERS = ("deepseek_r1", "qwen3")
DEFAULT_MODEL = "kvloom-llama"
MAX_TTL_SECONDS = 86400.0
"""Default of --max-ttl if the server has API keys."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the server and of its engines to a parser."""
    _add_models(parser)
    _add_network(parser.add_argument_group("network and HTTPS"))
    _add_access(parser.add_argument_group("API keys and tenants"))
    _add_limits(parser.add_argument_group("limits of requests"))
    _add_chat(parser.add_argument_group("chats"))
    _add_process(parser.add_argument_group("life cycle of the processes"))
    _add_observability(parser.add_argument_group("observability"))
    add_engine_arguments(parser)
    parser.epilog = (
        "Metrics are at /metrics; the package contains a Grafana dashboard, kvloom/serve/grafana.json "
        "(docs/observability.md)."
    )


def _add_models(group: argparse.ArgumentParser) -> None:
    add = group.add_argument
    add("model", nargs="?", metavar="MODEL", help=f"{MODEL} (default: {DEFAULT_MODEL})")
    more = "further models of the same server; requests choose by name (needs --memory or --pool)"
    add("more_models", nargs="*", metavar="MODEL", help=more)
    name = "name of the model in requests; repeatable, in the order of models (default: its folder's name)"
    add("--name", action="append", default=[], metavar="NAME", help=name)
    alias = "another name of a model in requests, such as a name that a client requires; repeatable (default MODEL: the first)"
    add("--alias", action="append", default=[], metavar="NAME[=MODEL]", help=alias)
    memory = "memory that the pools of all models share; busy models use the memory of idle models"
    add("--memory", type=size, metavar="SIZE", help=memory)
    folder = "folder below which POST /admin/models may load models; repeatable (default: none)"
    add("--model-dir", action="append", default=[], metavar="DIR", help=folder)

    adapters = (
        "folder below which POST /v1/load_lora_adapter may load LoRA adapters; repeatable (default: none)"
    )
    add("--lora-dir", action="append", default=[], metavar="DIR", help=adapters)


def _add_network(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add(
        "--port",
        type=whole(0, 65535),
        default=8000,
        metavar="N",
        help="port (default: 8000; 0: any free port)",
    )
    origin = "origin of web pages that may use the server, such as https://example.org; repeatable"
    add("--cors-origin", action="append", default=[], metavar="ORIGIN", help=origin)
    https_arguments(group)


def _add_access(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    keys = (
        "file with API keys: JSON, or lines of `KEY tenant [quota [weight]] [slo_…=MS] [max_…=N] [public] [admin]`; "
        "`public` allows public prefixes; an admin key sees all tenants and the dashboard"
    )
    add("--api-keys", metavar="FILE", help=keys)
    key = f"an admin API key of tenant 'default'; repeatable (default: ${KEY}, which other users cannot see)"
    add("--api-key", action="append", default=[], metavar="KEY", help=key)
    add(
        "--no-auth",
        action="store_true",
        help="disable authentication (default when listening on loopback only)",
    )
    answers = "largest number of answers of one request: n or best_of, times prompts (default with API keys: --max-running)"
    add("--max-answers", type=whole(1), metavar="N", help=answers)
    open_answers = "largest number of open answers of one tenant (default: 4 times as many as the server can still accept)"
    add("--max-open", type=whole(1), metavar="N", help=open_answers)
    ttl = "largest ttl of a request, in seconds (default with API keys: 86400)"
    add("--max-ttl", type=number(0, above=True), metavar="S", help=ttl)
    add(
        "--max-priority",
        type=whole(-MAX_NUMBER),
        metavar="N",
        help="largest priority of a request (default: no limit)",
    )


def _add_limits(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--max-queue",
        type=whole(0),
        default=1024,
        metavar="N",
        help="largest number of waiting answers (default: 1024)",
    )
    connections = "largest number of open connections (default: 4096)"
    add("--max-connections", type=whole(1), default=4096, metavar="N", help=connections)
    add(
        "--max-body",
        type=size,
        default="8MiB",
        metavar="SIZE",
        help="limit of a request body (default: 8MiB)",
    )
    prompt = "largest number of prompt tokens of a request (default: what the model and the pool allow)"
    add("--max-prompt-tokens", type=whole(1), metavar="N", help=prompt)
    request = "seconds in which a client must send the headers of a request, and again its body (default: 30)"
    add("--request-seconds", type=number(0, above=True), default=30.0, metavar="S", help=request)
    slow = "seconds after which a client that reads nothing, or less than 1 KiB per second, is disconnected (default: 60)"
    add("--read-seconds", type=number(0, above=True), default=60.0, metavar="S", help=slow)
    folder = "folder whose images requests may name by file: URLs; repeatable (default: none)"
    add("--image-dir", action="append", default=[], metavar="DIR", help=folder)
    images = "largest number of images of one request (default: 16)"
    add("--max-images", type=whole(1), default=16, metavar="N", help=images)
    encoded = "largest number of encoded bytes of all images of one request (default: 16MiB)"
    add("--max-image-bytes", type=size, default="16MiB", metavar="SIZE", help=encoded)
    pixels = "largest number of pixels of all images of one request (default: 33554432)"
    add("--max-image-pixels", type=whole(1), default=1 << 25, metavar="N", help=pixels)
    clips = "largest number of audio clips of one request (default: 16)"
    add("--max-audio-clips", type=whole(1), default=16, metavar="N", help=clips)
    recorded = "largest number of encoded bytes of all audio clips of one request (default: 16MiB)"
    add("--max-audio-bytes", type=size, default="16MiB", metavar="SIZE", help=recorded)
    seconds = "longest duration of all audio clips of one request, in seconds (default: 600)"
    add("--max-audio-seconds", type=number(0, above=True), default=600.0, metavar="S", help=seconds)


def _add_chat(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    _add_chat_format(group)
    own = "accept chat_template in requests; such a template is code of the client and runs in a process with limits"
    add("--allow-chat-template", action="store_true", help=own)
    template = "limit of CPU seconds of the chat template per request (default: 2)"
    add("--template-seconds", type=number(0, above=True), default=2.0, metavar="S", help=template)


def _add_chat_format(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--chat-template", metavar="FILE", help="Jinja chat template to use instead of the model's")
    calls = "format of the model's tool calls (default: auto: detected from the chat template; none: calls stay text)"
    add("--tool-call-parser", choices=TOOL_CALL_PARSERS, default="auto", help=calls)
    reasoning = "format of the model's reasoning (default: none: reasoning stays text)"
    add("--reasoning-parser", choices=REASONING_PARSERS, help=reasoning)


def _add_process(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    drain = "seconds in which running requests may finish after SIGTERM (default: 30)"
    add("--drain-seconds", type=number(0), default=30.0, metavar="S", help=drain)
    silent = "restart the engine after this many seconds without a heartbeat (default: 30; 0: never)"
    add("--silent-seconds", type=number(0), default=30.0, metavar="S", help=silent)
    step = "restart the engine if one step, or loading, takes more than this many seconds (default: 600; 0: never)"
    add("--step-seconds", type=number(0), default=600.0, metavar="S", help=step)
    interval = "number of tokens per event of a stream, after its first token; more tokens need less CPU time (default: 1)"
    add("--stream-interval", type=whole(1), default=1, metavar="N", help=interval)


def _add_observability(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    record = "record block hashes, lengths and times of requests (never text) in this new file, for `kvloom replay`"
    add("--record", metavar="FILE", help=record)
    add("--otlp", metavar="URL", help="send traces to this OTLP/HTTP receiver, such as http://127.0.0.1:4318")
    metrics = "whether /metrics requires an API key (default: auto, which requires it if other machines can reach the server)"
    add("--metrics-auth", choices=("auto", "key", "open"), default="auto", help=metrics)
    add(
        "--no-metrics", action="store_true", help="disable metrics and request records, to measure their cost"
    )
    level = "least severe messages to log (default: info; debug also logs polls of /health and /metrics)"
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info", help=level)
    form = "format of the log on stderr: text (default), or json, one object per line"
    add("--log-format", choices=("text", "json"), default="text", help=form)
    quiet = "log warnings and errors only, and print no start-up message"
    add("-q", "--quiet", action="store_true", help=quiet)


def run(args: argparse.Namespace) -> int:
    from kvloom.engine import engine_config
    from kvloom.serve.auth import ApiKeys, Limits, permission_warning, read_keys
    from kvloom.serve.logs import configure_logging
    from kvloom.serve.server import ServerOptions, serve
    from kvloom.serve.worker import WatchdogLimits

    level = "warning" if args.quiet and args.log_level in ("debug", "info") else args.log_level
    configure_logging(level, args.log_format)
    for option in ("api_keys", "api_key"):
        if args.no_auth and getattr(args, option):
            raise ValueError(refused("no-auth, keys", option=option.replace("_", "-")))
    own = args.api_key
    if not own and not args.no_auth and args.api_keys is None and os.environ.get(KEY):
        own = [os.environ[KEY]]
        logging.getLogger("kvloom.serve").info("requests need the API key of $%s; --no-auth ignores it", KEY)
    has_keys = bool(own) or args.api_keys is not None
    engine_config(**engine_settings(args))
    caps = _default_caps(args, has_keys)
    keys = read_keys(args.api_keys, caps, own) if has_keys else ApiKeys({}, default=caps)
    if args.api_keys is not None and (warning := permission_warning(args.api_keys)) is not None:
        logging.getLogger("kvloom.serve").warning("%s", warning)
    models = _models(args, keys.tenants, level)
    limits = Limits(
        body_bytes=args.max_body,
        connections=args.max_connections,
        prompt_tokens=args.max_prompt_tokens,
        answers=args.max_running + args.max_queue,
        request_seconds=args.request_seconds,
        read_seconds=args.read_seconds,
        template_seconds=args.template_seconds,
        images=args.max_images,
        image_bytes=args.max_image_bytes,
        image_pixels=args.max_image_pixels,
        image_folders=tuple(_image_folder(folder) for folder in args.image_dir),
        clips=args.max_audio_clips,
        audio_bytes=args.max_audio_bytes,
        audio_seconds=args.max_audio_seconds,
    )
    if args.record is not None and args.no_metrics:
        raise ValueError(refused("record, no metrics"))
    return serve(
        ServerOptions(
            models,
            aliases=_aliases(args.alias, models[0].served_name),
            memory=args.memory,
            model_folders=tuple(Path(folder).resolve() for folder in args.model_dir),
            lora_folders=tuple(Path(folder).resolve() for folder in args.lora_dir),
            host=args.host,
            port=args.port,
            keys=keys,
            limits=limits,
            drain_seconds=args.drain_seconds,
            watchdog=WatchdogLimits(args.silent_seconds, args.step_seconds),
            chat=_chat_options(args),
            allow_chat_template=args.allow_chat_template,
            record=args.record,
            otlp=args.otlp,
            metrics_auth=args.metrics_auth,
            quiet=args.quiet,
            cors_origins=tuple(args.cors_origin),
            ssl_certfile=args.ssl_certfile,
            ssl_keyfile=args.ssl_keyfile,
            ssl_ca_certs=args.ssl_ca_certs,
        )
    )


def _aliases(given: list[str], first: str) -> dict[str, str]:
    """Return the aliases (alias → model) that the texts `given` define. A text is NAME=MODEL, or only NAME for an alias
    of the first model (`first`)."""
    found = {}
    for one in given:
        alias, _, model = one.partition("=")
        if not alias:
            raise ValueError(f"--alias {one!r} has no name: write NAME or NAME=MODEL")
        found[alias] = model or first
    return found


def _image_folder(given: str) -> Path:
    """Return the folder with its links resolved. Raises ValueError if the path is not a folder."""
    folder = Path(given).resolve()
    if not folder.is_dir():
        raise ValueError(f"--image-dir {given} is not a folder: give an existing one")
    return folder


def _chat_options(args: argparse.Namespace) -> ChatOptions:
    from kvloom.serve.server import ChatOptions

    template = args.chat_template
    text = None if template is None else Path(template).read_text(encoding="utf-8")
    return ChatOptions(text, args.tool_call_parser, args.reasoning_parser)


def _given_models(args: argparse.Namespace) -> list[tuple[str, str | None, argparse.Namespace]]:
    """Return path, name and arguments of each model to serve. The models of the command line come first, then the
    models of the configuration file.

    A table [models.NAME] of the configuration file may set the arguments of the model NAME of the command line.
    If the command line has no model NAME, the table adds a model. Raises ValueError if such a table has no
    field `model`.
    """
    from kvloom.models.specs import folder_of

    parser = Parser(prog="kvloom serve")
    parser.add_argument("--model", metavar="MODEL")
    _add_chat_format(parser.add_argument_group("chats"))
    add_engine_arguments(parser)
    own = configured_models(args.config, parser, args)
    given = [] if args.model is None else [args.model, *args.more_models]
    if len(args.name) > max(1, len(given)):
        raise ValueError(f"--name is given {len(args.name)} times for {len(given)} model(s)")
    if not given and not any(each.model for each in own.values()):
        given = [DEFAULT_MODEL]
    found: list[tuple[str, str | None, argparse.Namespace]] = []
    for model, name in zip_longest(given, args.name[: len(given)]):
        served = name or (Path(model).name if folder_of(model) == model else model)
        found.append((model, name, own.pop(served, args)))
    for name, each in own.items():
        if each.model is None:
            raise ValueError(
                f"[models.{name}] has no model: add model = …, or serve a model with --name {name}"
            )
        found.append((each.model, name, each))
    return found


def _models(
    args: argparse.Namespace, tenants: tuple[TenantConfig, ...], level: str
) -> tuple[ModelOptions, ...]:
    """Return the models to serve. Raises ValueError if options of memory or of LoRA adapters conflict or are missing.
    For example, if several models are given, --memory is required, or --pool for each of them.
    """
    from kvloom.models.specs import folder_of
    from kvloom.serve.server import ModelOptions, shared_start, with_own_events
    from kvloom.serve.worker import Start

    given, memory = _given_models(args), args.memory
    if len(given) > 1 and memory is None and any(own.pool_bytes is None for _, _, own in given):
        raise ValueError(
            f"{len(given)} models need --memory SIZE, which their pools share, or --pool SIZE for each pool"
        )
    if len(given) > 1 and args.lora:
        raise ValueError(
            f"--lora needs one base model, and {len(given)} models are given: set lora in [models.NAME] of a "
            "configuration file"
        )
    if args.lora_dir and not any(own.lora or own.max_loras for _, _, own in given):
        raise ValueError("--lora-dir needs slots for adapters: add --max-loras N")
    if memory is None and args.model_dir:
        raise ValueError("--model-dir needs --memory SIZE: the pools of loaded models share it")
    for option in ("pool", "max_pool"):
        if memory is not None and any(getattr(own, f"{option}_bytes") is not None for _, _, own in given):
            raise ValueError(refused("memory, pool", option=option.replace("_", "-")))
    if memory is not None and args.no_metrics:
        raise ValueError(refused("memory, no metrics"))
    models: list[ModelOptions] = []
    for model, name, own in given:
        folder = folder_of(model)
        named = name or (None if folder == model else model)
        served = named or Path(folder).name or folder
        start = Start(
            model=folder,
            dtype=own.dtype,
            cpu_dtype="auto" if folder == model else "float32",
            device=own.device,
            load_format=own.load_format,
            threads=own.threads,
            tenants=tenants,
            progress=sys.stderr.isatty() and not args.quiet and len(given) == 1,
            observe=not args.no_metrics,
            stream_interval=args.stream_interval,
            settings=with_own_events(engine_settings(own), len(models), served),
            log_level=level,
            log_format=args.log_format,
        )
        if memory is not None:
            start = shared_start(start, memory, memory // len(given))
        models.append(ModelOptions(start, named, completes_code=folder != model, chat=_chat_options(own)))
    return tuple(models)


def _default_caps(args: argparse.Namespace, has_keys: bool) -> Caps:
    """Return the caps that apply if a key sets none. They are the values of the server's options. Without the option
    for answers or for ttl, a server with keys uses a default value. A server without keys then has no limit."""
    from kvloom.serve.auth import PRESSURE, Caps

    answers, ttl = args.max_answers, args.max_ttl
    if has_keys:
        places = args.max_running + args.max_queue
        answers = answers or max(1, min(args.max_running, places * PRESSURE // (PRESSURE + 1)))
        ttl = ttl or MAX_TTL_SECONDS
    return Caps(answers, args.max_open, ttl, args.max_priority, public=not has_keys)
