"""Which part of a model a worker of vLLM has, with tensor, pipeline and data parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

__all__ = ["Shard", "worker_count"]


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the KV cache that one worker has.

    `text` is part of the form of a page. It differs between the workers of one engine, and between other numbers of
    workers. It is the same for replicas of data parallelism, because their pages are equal. `process` differs between
    all workers, also of other replicas. It replaces `{rank}` in the URLs of tiers.
    """

    rank: int
    process: int
    text: str

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Shard:
        """Return the shard of the worker with this config. vLLM numbers workers of tensor parallelism first."""
        tensor, pipeline = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        rank = parallel.rank % parallel.world_size
        return cls(
            rank,
            parallel.data_parallel_index * parallel.world_size + rank,
            f"tensor {rank % tensor} of {tensor}, pipeline {rank // tensor} of {pipeline}",
        )


def worker_count(parallel: ParallelConfig) -> int:
    """Return a number of workers that is larger than 1 if several workers run. vLLM sets the number of replicas to 1
    for models without experts. The index of the replica then remains.
    """
    replicas = max(parallel.data_parallel_size, parallel.data_parallel_index + 1)
    return int(parallel.world_size * replicas)
