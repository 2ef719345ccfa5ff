"""The LMCache version that is tested with this adapter."""

from __future__ import annotations

from kvloom.adapters.common import EngineVersion

__all__ = ["VERSION"]

VERSION = EngineVersion("LMCache", "kvloom.adapters.lmcache", ("lmcache",), "0.5.6")
"""LMCache changes its L2 interface also between patch versions."""
