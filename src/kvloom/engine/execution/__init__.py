"""Execution: a step on the device, from scheduled work to tokens on the host.

model_runner.py      ModelRunner: runs the model on a batch, with CUDA graphs
decode_graphs.py     DecodeGraphs: graphs of steps with one token per sequence; shared pages
draft_graphs.py      DraftGraphs: graphs of steps with drafts
head_runner.py       HeadRunner: runs a draft head on the target's hidden states
piecewise_graphs.py  PiecewiseGraphs: graphs of steps with prompts, without attention
graph_capture.py     capture_graph: captures one graph; GraphMemory: memory of all graphs
inflight_step.py     InflightStep: a launched step whose tokens have not arrived
pooling.py           pool_hidden_states: embeddings of prompts
output_processor.py  OutputProcessor: applies tokens to requests, finishes them
kv_memory.py         allocate_kv_memory: the pool of a model, and its cache
pool_size.py         PoolSize, PoolRule: grow and shrink an elastic pool
memory_budget.py     measure_budget: bytes of the pool; default step sizes
threads.py           use_threads: CPU threads of torch
"""

from .decode_graphs import DecodeGraphs, graph_sizes
from .draft_graphs import DraftGraphs
from .graph_capture import GraphMemory, capturable
from .head_runner import HeadRunner
from .inflight_step import InflightStep, PrefillChunks, PromptLogprobs, prompt_logprobs
from .kv_memory import KVMemory, allocate_kv_memory
from .memory_budget import MAX_RUNNING, TOKEN_BUDGET, MemoryBudget, default_token_budget, measure_budget
from .model_runner import ModelRunner
from .output_processor import MovedToken, OutputProcessor, eos_tokens
from .piecewise_graphs import PiecewiseGraphs, piece_sizes
from .pool_size import PoolRule, PoolSize, free_device_bytes
from .pooling import PooledPrompt, pool_hidden_states
from .threads import cores, use_threads

__all__ = [
    "MAX_RUNNING",
    "TOKEN_BUDGET",
    "DecodeGraphs",
    "DraftGraphs",
    "GraphMemory",
    "HeadRunner",
    "InflightStep",
    "KVMemory",
    "MemoryBudget",
    "ModelRunner",
    "MovedToken",
    "OutputProcessor",
    "PiecewiseGraphs",
    "PoolRule",
    "PoolSize",
    "PooledPrompt",
    "PrefillChunks",
    "PromptLogprobs",
    "allocate_kv_memory",
    "capturable",
    "cores",
    "default_token_budget",
    "eos_tokens",
    "free_device_bytes",
    "graph_sizes",
    "measure_budget",
    "piece_sizes",
    "pool_hidden_states",
    "prompt_logprobs",
    "use_threads",
]
