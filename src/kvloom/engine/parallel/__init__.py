"""Tensor and context parallelism: one engine process with the scheduler (rank 0), and a process for each other rank.

    engine ── RankGroup ── step plan (shared memory) ──▶ rank 1 … N-1: ModelRunner
       └── ModelRunner ◀─── sums, gathers between ranks (gloo, nccl) ───┘

group.py         RankGroup: starts the ranks, sends them every step, notices a rank that stops
messages.py      the messages to a rank: a step, copies of pages
frames.py        messages on the socket between two ranks
host_copies.py   HostCopies, RankHost: copies of pages between the pools of all ranks and the host tier
rank_adapters.py LoRA adapters on ranks
rank_documents.py copies of documents on ranks
step_channel.py  StepChannel: messages in shared memory, from rank 0 to all others
rank_process.py  the process of a rank: loads its part of the model, then repeats the steps of rank 0

With tensor parallelism each rank computes a part of the model. With context parallelism each rank reads a part of the
context. The ranks then add up or gather their partial results. Each rank has its own pool, with its part of every page.
Page ids are the same on all ranks, so the block tables of rank 0 are valid everywhere. Only rank 0 samples tokens.
"""

from .group import RankGroup, load_ranks

__all__ = ["RankGroup", "load_ranks"]
