"""One rank's view of its groups: the number of the rank, and sums and gathers between the ranks of a group.

    | rank 0 | rank 1 |     a line: ranks that divide the weights, and have the same part of the context
    | rank 2 | rank 3 |     a column: ranks that divide the context, and have the same part of the weights

A group is not torch's default process group, so a process may have several groups, one after the other or
at the same time. On CPUs the ranks use gloo on the loopback interface. On GPUs they use nccl or gloo. With
gloo, tensors of GPUs pass through host memory, and several ranks may use one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["RankError", "RankGroups", "Ranks", "Shard"]

START_SECONDS = 1800.0
"""Time limit of a collective in seconds, until `limit` sets another one. The limit is long, because ranks load their
weights at different speeds."""


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

    def __init__(self, shard: Shard, meeting: Path, device: torch.device, use_gloo: bool = False) -> None:
        """Connect to the other ranks, and wait until every rank has connected. The ranks find each other through the
        file `meeting`. `meeting` must be a new file, and every rank must pass the same path. With `use_gloo`, ranks on
        GPUs use gloo instead of nccl."""
        self.shard, self.device = shard, device
        self.is_staged = device.type == "cuda" and use_gloo
        """Whether tensors pass through host memory. CUDA graphs cannot contain such calls."""
        library: Any = dist  # untyped, because torch has no types for some of these names
        store = library.FileStore(str(meeting), shard.count)
        limit = timedelta(seconds=START_SECONDS)
        self._group: Any
        if device.type == "cuda" and not self.is_staged:
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
        sent = self._staged(x)
        self._wait(self._group.allreduce([sent]))
        return x if sent is x else x.copy_(sent)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, in the order of ranks: [ranks, *shape]."""
        sent = self._staged(x.contiguous())
        out = sent.new_empty((self.shard.count, *x.shape))
        self._wait(self._group.allgather([list(out.unbind(0))], [sent]))
        return out.to(x.device)

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """Send `x[i]` to rank i. Return the tensors that all ranks have sent to this rank, in the order of ranks:
        [ranks, …]."""
        sent = self._staged(x.contiguous())
        out = torch.empty_like(sent)
        self._wait(self._group.alltoall_base(out, sent, [], []))
        return out.to(x.device)

    def share(self, x: torch.Tensor) -> None:
        """Overwrite a tensor by that of rank 0."""
        sent = self._staged(x)
        self._wait(self._group.broadcast([sent]))
        if sent is not x:
            x.copy_(sent)

    def smallest(self, number: int) -> int:
        """Return the smallest `number` of all ranks."""
        return int(self.gather(torch.tensor([number], dtype=torch.int64, device=self.device)).min())

    def abort(self) -> None:
        """End a call that waits for another rank. The call may wait in another thread. The group cannot be used
        afterwards."""
        self._group.abort()

    def _staged(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` where the collectives can read and write it: a copy in host memory, or `x` itself."""
        return x.cpu() if self.is_staged else x

    def _wait(self, call: Any) -> None:
        try:
            call.wait()
        except RuntimeError as error:
            raise RankError(
                f"rank {self.shard}: another rank of the group has stopped, or has not answered for "
                f"{self._seconds:g} s: restart the engine ({_first_line(error)})"
            ) from error


@dataclass(frozen=True, slots=True)
class RankGroups:
    """The groups of one rank of an engine.

    | field     | ranks of the group                                                                            |
    |-----------|-----------------------------------------------------------------------------------------------|
    | `every`   | all ranks                                                                                     |
    | `weights` | the ranks that divide the weights with this rank; None if every rank has all weights          |
    | `context` | the ranks that divide the context with this rank; None if every rank has the whole context    |
    """

    every: Ranks
    weights: Ranks | None
    context: Ranks | None

    @classmethod
    def connect(
        cls,
        rank: int,
        weight_parts: int,
        context_parts: int,
        meeting: Path,
        device: torch.device,
        use_gloo: bool = False,
    ) -> RankGroups:
        """Connect a rank to the others, and wait until every rank has connected. The weights have `weight_parts` parts,
        and the context has `context_parts` parts. `meeting` and `use_gloo` are as in `Ranks`."""
        every = Ranks(Shard(rank, weight_parts * context_parts), meeting, device, use_gloo)
        if context_parts == 1 or weight_parts == 1:
            return cls(every, every if context_parts == 1 else None, every if weight_parts == 1 else None)
        line, column = divmod(rank, weight_parts)
        files = (meeting.with_name(f"{meeting.name}-{name}") for name in (f"line-{line}", f"column-{column}"))
        shards = Shard(column, weight_parts), Shard(line, context_parts)
        found = (Ranks(shard, file, device, use_gloo) for shard, file in zip(shards, files, strict=True))
        return cls(every, *found)

    @property
    def weight_shard(self) -> Shard:
        """The part of the weights that this rank has."""
        return Shard(0, 1) if self.weights is None else self.weights.shard

    def limit(self, seconds: float) -> None:
        """Set the time limit of later calls in all groups."""
        for group in self._groups():
            group.limit(seconds)

    def abort(self) -> None:
        """End calls that wait for another rank, in all groups. The groups cannot be used afterwards."""
        for group in self._groups():
            group.abort()

    def _groups(self) -> list[Ranks]:
        found = {id(group): group for group in (self.every, self.weights, self.context) if group is not None}
        return list(found.values())


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
