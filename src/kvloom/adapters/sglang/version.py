"""The SGLang version that is tested with this adapter."""

from __future__ import annotations

from kvloom.adapters.common import EngineVersion

__all__ = ["VERSION"]

VERSION = EngineVersion("SGLang", "kvloom.adapters.sglang", ("sglang",), "0.5.23")
"""SGLang may change `HiCacheStorage` even between patch versions, so all numbers are compared."""
