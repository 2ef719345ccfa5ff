"""kvloom's tiers for vLLM. vLLM stores blocks of its KV cache in host memory, on disk, in remote stores and in peers.

    version.py           the vLLM versions that are tested
    settings.py          Settings: `kv_connector_extra_config`
    identity.py          texts that identify the weights of a model and of a LoRA adapter
    request_hashes.py    block hashes of a request, salted with model, adapter and cache salt
    block_groups.py      BlockGroup: block size, window and byte layout of a KV cache group
    shard.py             Shard: the part of the model that a worker has
    layer_pages.py       copies between vLLM's layer tensors and host memory
    compute_time.py      ComputeTime: how long vLLM takes to compute tokens
    tier_events.py       TierEvents: block events of tiers in vLLM's format
    messages.py          the messages between scheduler and worker in every step
    scheduler_side.py    which pages a request loads and stores
    worker_side.py       runs these loads and stores
    connector.py         KvloomConnector: vLLM's interface to both sides
    secondary_tier.py    KvloomTier: vLLM's interface for tiers behind its own CPU offloading

`vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvloomConnector", "kv_connector_module_path":
"kvloom.adapters.vllm", "kv_role": "kv_both", "kv_connector_extra_config": {"tiers": ["disk:/nvme/kv:1TiB"]}}'` loads
this module. `kvloom.adapters.common` opens the tiers. See docs/vllm.md.

The diagram shows the calls for a prompt whose pages a tier has. The scheduler and the workers are separate processes.
Only workers open tiers.

    scheduler                                    worker
    get_num_new_matched_tokens: None  ──lookup──>  look up in all tiers, load into host memory, lease the pages
    get_num_new_matched_tokens: n     <──answer──
    update_state_after_alloc(n)       ──load────>  copy from host memory into vLLM's blocks
    the request computes the rest     <──finished_recving──
"""

from .version import VERSION

VERSION.check()

from .connector import KvloomConnector  # noqa: E402  after the check of the version
from .secondary_tier import KvloomTier  # noqa: E402

__all__ = ["KvloomConnector", "KvloomTier"]
