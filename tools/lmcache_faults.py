"""An L2 adapter of LMCache with faults, for tools/compare_vllm.py: LMCache's own `fault_inject` adapter over its `fs`
adapter. The file that the environment variable LMCACHE_FAULTS names contains the fault: `failing`, `slow` or nothing.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from lmcache.v1.distributed.l2_adapters.fault_inject_l2_adapter import FaultInjectL2Adapter
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig

FaultyAdapterConfig = FSL2AdapterConfig  # LMCache finds the config class by this name


def fault() -> str:
    return Path(os.environ["LMCACHE_FAULTS"]).read_text()


class SlowFiles(FSL2Adapter):  # type: ignore[misc]
    """While the fault is `slow`, every load and store takes SLOW_SECONDS seconds longer."""

    async def _execute_load(self, *arguments: Any) -> None:
        await self._wait()
        await super()._execute_load(*arguments)

    async def _execute_store(self, *arguments: Any) -> None:
        await self._wait()
        await super()._execute_store(*arguments)

    async def _wait(self) -> None:
        if fault() == "slow":
            await asyncio.sleep(float(os.environ["SLOW_SECONDS"]))


class FaultyAdapter(FaultInjectL2Adapter):  # type: ignore[misc]
    """While the fault is `failing`, every load fails."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__(SlowFiles(config), rate=1.0, seed=0, gap_indices=())

    def _drop_positions(self, keys: Any) -> Any:
        return super()._drop_positions(keys) if fault() == "failing" else []
