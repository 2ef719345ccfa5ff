"""The connection of one rank to its group: the number of the rank, and sums and gathers between all ranks. The group is
not torch's default process group, so one process may have several groups. Ranks on CPUs use gloo on the loopback
interface. Ranks on GPUs use nccl.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["RankError", "Ranks", "Shard"]

START_SECONDS = 1800.0
"""Time limit of a collective until `limit` is called. Ranks load their weights at different speeds."""


class RankError(RuntimeError):
    """A rank of the group has stopped, or has not answered in time. The group cannot continue."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` equal parts of a model. `rank` is its number, from 0."""

    rank: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.count:
            raise ValueError(f"rank {self.rank} must be from 0 to {self.count - 1}")

    def __str__(self) -> str:
        return f"{self.rank}/{self.count}"


class Ranks:
    """Sums and gathers between the ranks of a group. Every rank must make the same calls in the same order. A call
    raises RankError if another rank has stopped, or does not make the call within the time limit."""

    def __init__(self, shard: Shard, meeting: Path, device: torch.device) -> None:
        """Connect to the other ranks, and wait until every rank has connected. The ranks find each other through the
        file `meeting`. It must be a new file, and every rank must pass the same path."""
        self.shard, self.device = shard, device
        library: Any = dist  # untyped, because torch has no types for some of these names
        store = library.FileStore(str(meeting), shard.count)
        limit = timedelta(seconds=START_SECONDS)
        self._group: Any
        if device.type == "cuda":
            options = library.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = library.ProcessGroupNCCL(store, shard.rank, shard.count, options)
        else:
            options = library.ProcessGroupGloo._Options()
            options._timeout = limit
            options._devices = [library.ProcessGroupGloo.create_device(interface="lo")]
            self._group = library.ProcessGroupGloo(store, shard.rank, shard.count, options)
        self._seconds = START_SECONDS

    def limit(self, seconds: float) -> None:
        """Set the time limit of later calls."""
        self._seconds = seconds
        self._group._set_default_timeout(timedelta(seconds=seconds))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Add up the tensors `x` of all ranks, in place if `x` is contiguous. Return the sum. All ranks get the same
        bits."""
        x = x.contiguous()
        self._wait(self._group.allreduce([x]))
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, in the order of ranks: [ranks, *shape]."""
        out = x.new_empty((self.shard.count, *x.shape))
        self._wait(self._group.allgather([list(out.unbind(0))], [x.contiguous()]))
        return out

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """Send `x[i]` to rank i. Return the tensors that all ranks have sent to this rank, in the order of ranks:
        [ranks, …]."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._wait(self._group.alltoall_base(out, x.contiguous(), [], []))
        return out

    def share(self, x: torch.Tensor) -> None:
        """Overwrite a tensor by that of rank 0."""
        self._wait(self._group.broadcast([x]))

    def smallest(self, number: int) -> int:
        """Return the smallest of the numbers that the ranks give."""
        return int(self.gather(torch.tensor([number], dtype=torch.int64, device=self.device)).min())

    def abort(self) -> None:
        """End a call that waits for another rank. The call may wait in another thread. The group cannot be used
        afterwards."""
        self._group.abort()

    def _wait(self, call: Any) -> None:
        try:
            call.wait()
        except RuntimeError as error:
            raise RankError(
                f"rank {self.shard}: another rank of the group has stopped, or has not answered for "
                f"{self._seconds:g} s: restart the engine ({_first_line(error)})"
            ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
