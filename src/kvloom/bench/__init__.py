"""Benchmarks: `kvloom bench`. Each line names the file of one benchmark. Files in brackets are parts of the same
benchmark.

command.py                selects a benchmark
compare.py                kvloom and every installed peer on the same work (chart.py)
index.py                  cost of the cache bookkeeping (index_work.py, peers.py)
kernels.py                time of GPU kernels (attention_work.py, state_work.py, expert_work.py, gpu_timing.py,
                          gpu_peers.py)
engine.py                 time of whole workloads (workloads.py, shapes.py, roofline.py, pool_usage.py,
                          engine_runners.py, engine_peers.py, engine_report.py, vllm_process.py)
serve.py, metrics.py      load on a server, and the cost of its metrics
memory.py                 time until memory moves from an idle model to a busy model
admission.py              goodput under overload, with and without SLO admission
quality.py                perplexity with quantised K and V
tiers.py                  throughput of tiers (tiers_work.py, tiers_media.py, lmcache_process.py)
speculation.py            engines with and without speculation
lora.py                   engines with and without LoRA adapters
offload.py                an engine with and without tiers (offload_cost.py, load_or_recompute.py, layerwise_copy.py,
                          long_requests.py, page_placement.py)
router.py                 cost of the router itself (router_load.py)
routing.py                hit rates and times of several routers over real workers
disaggregation.py         prefill and decode workers, compared with workers that do both
kills.py                  wrong and lost answers while workers and routers are killed
"""

__all__: list[str] = []
