"""Benchmarks: `kvloom bench`.

command.py                selects a benchmark
index.py                  cache bookkeeping; index_work.py, peers.py
kernels.py                GPU kernels; attention_work.py, state_work.py, expert_work.py, gpu_timing.py, gpu_peers.py
engine.py                 whole workloads; workloads.py, shapes.py, roofline.py, pool_usage.py, engine_runners.py,
                          engine_peers.py, engine_report.py, vllm_process.py
serve.py, metrics.py      load on a server, and the cost of its metrics
quality.py                perplexity with quantised K and V
tiers.py                  throughput of tiers; tiers_work.py, tiers_media.py, lmcache_process.py
speculation.py            engines with and without speculation
offload.py                an engine with tiers; offload_cost.py, load_or_recompute.py, layerwise_copy.py,
                          page_placement.py
"""

__all__: list[str] = []
