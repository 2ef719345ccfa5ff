"""Which part of a model a worker of vLLM has, with tensor, pipeline and data parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

__all__ = ["Shard", "worker_count"]


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the KV cache that one worker (one process) has.

    - `rank` is the number of the worker in its data-parallel replica.
    - `process` is the number of the worker among the workers of all replicas. In the URLs of tiers, `process` replaces
      the text `{rank}`, so each worker can have its own disk folder.
    - `text` contains the worker's tensor-parallel rank, its pipeline-parallel rank, and the numbers of these ranks.
      Workers share stored pages only if they have the same `text`. Each data-parallel replica computes the same pages
      from the same prompt, so the number of the replica is not in `text`.
    """

    rank: int
    process: int
    text: str

    @classmethod
    def of(cls, parallel: ParallelConfig) -> Shard:
        """Return the shard of the worker with this config. In vLLM, the tensor-parallel workers of a pipeline stage
        have consecutive ranks.
        """
        tensor, pipeline = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        rank = parallel.rank % parallel.world_size
        return cls(
            rank,
            parallel.data_parallel_index * parallel.world_size + rank,
            f"tensor {rank % tensor} of {tensor}, pipeline {rank // tensor} of {pipeline}",
        )


def worker_count(parallel: ParallelConfig) -> int:
    """Return the number of workers in all data-parallel replicas. For models without experts, vLLM sets the number of
    replicas in the config to 1, so the real number is unknown. The result then counts only the replica of this config
    and those with smaller numbers.
    """
    replicas = max(parallel.data_parallel_size, parallel.data_parallel_index + 1)
    return int(parallel.world_size * replicas)
