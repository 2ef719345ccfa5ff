"""The LoRA adapters of an engine: which adapters are loaded, and which of them have a slot on the device.

    load(name, path) ──▶ weights in host memory ──▶ make_resident: a slot on the device, when a request starts
    unload(name)     ──▶ no new requests; requests that were added before keep the adapter until they finish

An adapter is identified by the digest of its config and weights. The digest salts block hashes in every tier. Requests
with a new version of an adapter therefore never hit pages of the old version, even under the same name. If the old
version is loaded again, its requests hit its pages again. If all slots are taken, the adapter that was used longest ago
loses its slot.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvloom.core import Media, activation_mark
from kvloom.models.lora import AdapterError, AdapterSlots, LoraAdapter, read_adapter

from .config import EngineConfig

__all__ = ["AdapterMirror", "AdapterTable", "LoadedAdapter", "open_adapters"]

DEFAULT_RANK = 16
"""Rank of the slots if no adapter is known when the engine starts."""


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """One version of an adapter under a name. `created` is a Unix time. `requests` counts all requests that were
    added with this version."""

    name: str
    adapter: LoraAdapter
    created: int = field(default_factory=lambda: int(time.time()))
    requests: int = 0

    @property
    def digest(self) -> str:
        """Identify config and weights of the adapter."""
        return self.adapter.digest

    @property
    def is_activated(self) -> bool:
        """Whether the adapter is an activated LoRA, which applies only after its invocation tokens."""
        return bool(self.adapter.invocation_tokens)

    def activation(self, prompt: npt.NDArray[np.integer]) -> Media | None:
        """Return a mark at the token from which an activated LoRA applies. Return None if the prompt does not contain
        the adapter's invocation tokens. See `activation_mark`."""
        return activation_mark(prompt, self.adapter.invocation_tokens, self.digest)


class AdapterMirror(Protocol):
    """Repeats loads of adapters on the other ranks."""

    def load_adapter(self, slot: int, adapter: LoraAdapter) -> None:
        """Let the other ranks load an adapter into a slot, before the next step. Does not wait."""


def open_adapters(
    model: Any, config: EngineConfig, mirror: AdapterMirror | None = None
) -> AdapterTable | None:
    """Read the configured adapters, and return their table. None if the engine has no adapters. See `AdapterTable`."""
    if not config.uses_lora:
        return None
    limits = config.max_loras, config.max_lora_rank, config.lora_targets
    return AdapterTable(model, config.adapters, *limits, mirror)


class AdapterTable:
    """The adapters of one engine, by name. Up to `slots` adapters run at the same time. Not thread-safe."""

    def __init__(
        self,
        model: Any,
        given: Mapping[str, str],
        slots: int,
        rank: int | None,
        targets: Sequence[str],
        mirror: AdapterMirror | None = None,
    ) -> None:
        """Read the `given` adapters (folders by name), and prepare slots. Raises AdapterError for an adapter that
        cannot be read.

        - `slots`: number of slots. 0 means one slot for each given adapter.
        - `rank`: largest rank of an adapter. None means the largest rank of the given adapters.
        - `targets`: names of linear layers, as in `AdapterSlots`.
        - `mirror`: the other ranks of a tensor-parallel group.

        Call `check_all` after the model's first step, because only this step shows which layers adapters can change.
        """
        read = {name: read_adapter(path) for name, path in given.items()}
        if rank is None:
            rank = max((one.rank for one in read.values()), default=DEFAULT_RANK)
        self.slots = AdapterSlots(model, slots or len(read), rank, targets)
        self._mirror = mirror
        self.names: dict[str, LoadedAdapter] = {}
        """The adapters that new requests may use."""
        self._resident: OrderedDict[str, int] = (
            OrderedDict()
        )  # slots by digest; the first was used longest ago
        for name, adapter in read.items():
            self.names[name] = LoadedAdapter(name, adapter)

    @property
    def resident(self) -> list[str]:
        """Names of the adapters that have a slot."""
        return [name for name, one in self.names.items() if one.digest in self._resident]

    def check_all(self) -> None:
        """Raise AdapterError if an adapter does not fit the model."""
        for one in self.names.values():
            self.slots.check(one.adapter)

    def load(self, name: str, path: str, replace: bool = False) -> LoadedAdapter:
        """Read an adapter and add it. Takes time in proportion to its bytes. See `add`."""
        return self.add(name, read_adapter(path), replace)

    def add(self, name: str, adapter: LoraAdapter, replace: bool = False) -> LoadedAdapter:
        """Add an adapter under `name`, and return it. New requests may then use the name. If the same version
        already has the name, nothing changes. If another version has the name, `replace` decides: if set, new
        requests use the new version.

        Raises AdapterError if the adapter does not fit, or if another version has the name and `replace` is not
        set."""
        if not name:
            raise AdapterError("an adapter needs a name: give one")
        self.slots.check(adapter)
        known = self.names.get(name)
        if known is not None and known.digest == adapter.digest:
            return known
        if known is not None and not replace:
            raise AdapterError(
                f"another version of adapter {name!r} is already loaded from {known.adapter.path}: unload it first, or "
                "replace it (load_inplace)"
            )
        found = self.names[name] = LoadedAdapter(name, adapter)
        return found

    def unload(self, name: str) -> None:
        """Remove an adapter, so that new requests cannot use it. Another adapter may take its slot when no running
        request uses the adapter. Raises AdapterError for an unknown name."""
        del self.names[self.find(name).name]

    def find(self, name: str) -> LoadedAdapter:
        """Return the adapter with this name. Raises AdapterError for an unknown name."""
        found = self.names.get(name)
        if found is None:
            known = ", ".join(self.names) or "none"
            raise AdapterError(f"there is no adapter {name!r}: loaded are {known}")
        return found

    def name_of(self, digest: str) -> str:
        """Return the name of the adapter with a digest, or the digest if no loaded adapter has it."""
        return next((name for name, one in list(self.names.items()) if one.digest == digest), digest)

    def has_slot(self, adapter: LoadedAdapter) -> bool:
        """Return whether an adapter has a slot, or can take a free slot."""
        return adapter.digest in self._resident or len(self._resident) < self.slots.count

    def may_evict(self, in_use: Collection[str]) -> bool:
        """Return whether any adapter may lose its slot. `in_use` has the digests of the adapters of running
        requests. These adapters keep their slots."""
        return any(digest not in in_use for digest in self._resident)

    def make_resident(self, adapter: LoadedAdapter, in_use: Callable[[], Collection[str]]) -> int:
        """Give an adapter a slot, and return the slot. If all slots are taken, another adapter loses its slot. Of the
        adapters that no running request uses, this is the one that was used longest ago. `in_use` returns the digests
        of the adapters of running requests. `has_slot` or `may_evict` must be true.
        """
        slot = self._resident.get(adapter.digest)
        if slot is None:
            slot = self._free_slot(in_use)
            if self._mirror is not None:
                self._mirror.load_adapter(slot, adapter.adapter)
            self.slots.load(slot, adapter.adapter)
            self._resident[adapter.digest] = slot
        self._resident.move_to_end(adapter.digest)
        return slot

    def _free_slot(self, in_use: Callable[[], Collection[str]]) -> int:
        if len(self._resident) < self.slots.count:
            return min(set(range(1, self.slots.count + 1)) - set(self._resident.values()))
        used = in_use()
        oldest = next(digest for digest in self._resident if digest not in used)
        return self._resident.pop(oldest)
