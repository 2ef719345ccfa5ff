"""The HTTP API in OpenAI's format.

    server_context.py     ServerContext: state and checks that all endpoints share
    served_model.py       ServedModel: one model, its engine process, encoder and observer
    generation.py         endpoints that generate: completions and chats
    openai_responses.py   /v1/responses, translated to a chat
    anthropic_messages.py /v1/messages, translated to a chat
    embeddings.py         /v1/embeddings, run as completions whose output token is dropped
    transcriptions.py     /v1/audio/transcriptions and /v1/audio/translations, for Whisper
    translation.py        functions with which the Responses API and the Messages API read requests
    tokenize.py           /tokenize and /detokenize
    admin.py              /admin/pool, /admin/role: size of the pool and role of the worker
    adapters.py           /v1/load_lora_adapter, /v1/unload_lora_adapter
    allowed_folders.py    folders of models and adapters that a request may name
    gateway_probes.py     /server_info and /v1/loads, for gateways
    request_fields.py     fields of a request, and their sampling parameters
    json_limits.py        limits of a request's JSON
    prompts.py            PromptEncoder: texts and chats to token ids
    images.py             RequestImages: the images of a request
    audio.py              RequestAudio: the audio clips of a request
    fair_thread.py        FairThread: a thread that works for one tenant after another
    templates.py          chat templates within limits
    template_process.py   chat templates of requests, in a process with limits
    control_tokens.py     control tokens in the texts of a request
    answers/              reasoning and tool calls in an answer; forced calls
    responses.py          responses, whole or as events
    openapi.py            /openapi.json and /docs, from the fields
    connection.py         HTTP connections with limits; GracefulServer, which answers open connections before it stops

Imports worker, auth and metrics. The routes are in serve/application.py.
"""

from __future__ import annotations

from .adapters import LoadAdapterEndpoint, UnloadAdapterEndpoint
from .admin import PoolEndpoint, RoleEndpoint
from .allowed_folders import allowed_folder
from .answers import AnswerFormats
from .anthropic_messages import CountTokensEndpoint, MessagesEndpoint
from .connection import (
    GracefulServer,
    limited_connection,
    limited_socket,
    raise_file_limit,
    watch_connections,
)
from .embeddings import EmbeddingsEndpoint
from .gateway_probes import probe_routes
from .generation import ChatEndpoint, CompletionEndpoint
from .json_limits import check_structure
from .openai_responses import ResponsesEndpoint
from .openapi import documentation_routes, openapi
from .prompts import PromptEncoder, load_tokenizer
from .request_fields import engine_error, read_fields
from .served_model import ServedModel
from .server_context import ServerContext, asked_time, is_loopback, parse_digits
from .tokenize import DetokenizeEndpoint, TokenizeEndpoint
from .transcriptions import TranscriptionsEndpoint, TranslationsEndpoint

__all__ = [
    "AnswerFormats",
    "ChatEndpoint",
    "CompletionEndpoint",
    "CountTokensEndpoint",
    "DetokenizeEndpoint",
    "EmbeddingsEndpoint",
    "GracefulServer",
    "LoadAdapterEndpoint",
    "MessagesEndpoint",
    "PoolEndpoint",
    "PromptEncoder",
    "ResponsesEndpoint",
    "RoleEndpoint",
    "ServedModel",
    "ServerContext",
    "TokenizeEndpoint",
    "TranscriptionsEndpoint",
    "TranslationsEndpoint",
    "UnloadAdapterEndpoint",
    "allowed_folder",
    "asked_time",
    "check_structure",
    "documentation_routes",
    "engine_error",
    "is_loopback",
    "limited_connection",
    "limited_socket",
    "load_tokenizer",
    "openapi",
    "parse_digits",
    "probe_routes",
    "raise_file_limit",
    "read_fields",
    "watch_connections",
]
