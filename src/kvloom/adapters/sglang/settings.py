"""Settings of the storage backend: the extra config of SGLang's HiCacheStorageConfig."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvloom.adapters.common import check_tier_urls, number, tier_list
from kvloom.tiers import scheme_of

__all__ = ["Settings"]

NAME = "hicache-storage-backend-extra-config"
SGLANG_FIELDS = ("backend_name", "module_path", "class_name", "interface_v1")


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of one storage backend. Raises ValueError for a wrong value."""

    tiers: tuple[str, ...]
    """URLs of tiers, the fastest first. `{rank}` in a URL is replaced by the number of the process."""
    load_seconds: float = 5.0
    """Longest time of one load, in seconds. SGLang loads 128 pages at once. Pages that arrive later are misses."""
    model: str | None = None
    """Folder or hub id of the weights. None means the model that SGLang serves."""

    @classmethod
    def parse(cls, extra: Mapping[str, Any], world_size: int = 1, is_replicated: bool = False) -> Settings:
        """Return the settings in an extra config, which `world_size` processes use. With `is_replicated`, only the
        first process of a tensor-parallel group writes pages, but all its processes read them. The processes therefore
        need a tier that all of them share. Raises ValueError for a wrong value. Opens no tier.
        """
        known = [field.name for field in fields(cls)]
        if unknown := sorted(set(extra) - {*known, *SGLANG_FIELDS}):
            raise ValueError(f"unknown setting {unknown[0]!r} in {NAME}: use {', '.join(known)}")
        tiers = tier_list(extra, NAME)
        check_tier_urls(tiers, "SGLang", world_size)
        if is_replicated and all(scheme_of(url) in ("host", "disk") for url in tiers):
            raise ValueError(
                f"SGLang writes the pages of this model by one of {world_size} workers only, and the tiers "
                f"{', '.join(tiers)} belong to one worker each: use a shared tier, such as redis or peer"
            )
        model = extra.get("model")
        if model is not None and not isinstance(model, str):
            raise ValueError(f"model {model!r} must be the folder or hub id of the weights")
        return cls(tiers, number(extra, "load_seconds", 5.0), model)
