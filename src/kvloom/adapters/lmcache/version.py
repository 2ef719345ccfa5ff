"""The LMCache version that is tested with this adapter."""

from __future__ import annotations

from kvloom.adapters.common import EngineVersion

__all__ = ["VERSION"]

VERSION = EngineVersion("LMCache", "kvloom.adapters.lmcache", ("lmcache",), "0.5.6")
"""LMCache may change its L2 interface even between patch versions, so all numbers are compared."""
