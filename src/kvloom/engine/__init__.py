"""The engine: continuous batching of requests on one model, its page pool and its tiers.

    llm.py                LLM: the offline API
    engine.py             Engine: adds requests and runs steps
    config.py             EngineConfig, OffloadConfig: all settings
    options.py            the settings as command-line arguments
    request.py            Request: the state of one request
    scheduling/           which requests run, and which tokens each step computes
    execution/            a step on the device
    sampling/             from logits to tokens, text and beams
    speculation/          draft tokens: proposers, verification, the number of draft tokens
    offload/              pages between the pool and the tiers
    encoding/             encode workers: image embeddings by hash
    image_prompts.py      prompts of text, images and audio clips, by the model's processor
    transcription.py      Transcription: the requests that transcribe one clip with Whisper
    audio_clips.py        samples of WAV files, at the sampling rate of the model
    adapter_table.py      AdapterTable: LoRA adapters by name, and their slots on the device
    parallel/             tensor parallelism: a process for each rank
    target_runner.py      target_runner: the runner of the model, equal on all ranks
    preflight.py          check_engine: refuses settings before anything is loaded
    calibration.py        calibrate: static scales for int8 and fp8
    *_command.py          `kvloom generate`, `kvloom calibrate`

Names are imported on first use, because the API process uses some of them without loading torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .audio_clips import wav_seconds
    from .calibration import Calibration, calibrate
    from .config import EngineConfig, OffloadConfig, Role, engine_config
    from .encoding import Encoder, open_encoder
    from .engine import Engine
    from .execution import default_token_budget, use_threads
    from .image_prompts import clip_frames, encode_image_prompt, load_processor
    from .llm import LLM, Completion, Delta, Result
    from .measurements import MeasuredSetting, measured_settings
    from .offload import Action, OffloadManager, open_offload, opened_tiers
    from .options import add_engine_arguments, engine_settings
    from .parallel import RankGroup, load_ranks
    from .preflight import check_engine, check_model
    from .request import Request
    from .sampling import (
        Finish,
        GenerationDefaults,
        Grammar,
        GrammarBusyError,
        GrammarLimits,
        GrammarState,
        Logprob,
        SamplingParams,
        TokenLogprobs,
    )
    from .transcription import Segment, Transcript, Transcription

__all__ = [
    "LLM",
    "Action",
    "Calibration",
    "Completion",
    "Delta",
    "Encoder",
    "Engine",
    "EngineConfig",
    "Finish",
    "GenerationDefaults",
    "Grammar",
    "GrammarBusyError",
    "GrammarLimits",
    "GrammarState",
    "Logprob",
    "MeasuredSetting",
    "OffloadConfig",
    "OffloadManager",
    "RankGroup",
    "Request",
    "Result",
    "Role",
    "SamplingParams",
    "Segment",
    "TokenLogprobs",
    "Transcript",
    "Transcription",
    "add_engine_arguments",
    "calibrate",
    "check_engine",
    "check_model",
    "clip_frames",
    "default_token_budget",
    "encode_image_prompt",
    "engine_config",
    "engine_settings",
    "load_processor",
    "load_ranks",
    "measured_settings",
    "open_encoder",
    "open_offload",
    "opened_tiers",
    "use_threads",
    "wav_seconds",
]

_MODULES = {
    "audio_clips": ("wav_seconds",),
    "calibration": ("Calibration", "calibrate"),
    "config": ("EngineConfig", "OffloadConfig", "Role", "engine_config"),
    "encoding": ("Encoder", "open_encoder"),
    "engine": ("Engine",),
    "execution": ("default_token_budget", "use_threads"),
    "image_prompts": ("clip_frames", "encode_image_prompt", "load_processor"),
    "llm": ("LLM", "Completion", "Delta", "Result"),
    "measurements": ("MeasuredSetting", "measured_settings"),
    "offload": ("Action", "OffloadManager", "open_offload", "opened_tiers"),
    "options": ("add_engine_arguments", "engine_settings"),
    "parallel": ("RankGroup", "load_ranks"),
    "preflight": ("check_engine", "check_model"),
    "request": ("Request",),
    "sampling": (
        "Finish",
        "GenerationDefaults",
        "Grammar",
        "GrammarBusyError",
        "GrammarLimits",
        "GrammarState",
        "Logprob",
        "SamplingParams",
        "TokenLogprobs",
    ),
    "transcription": ("Segment", "Transcript", "Transcription"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
