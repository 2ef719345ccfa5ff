"""Kernels over the page pool's bytes. Each operation has an oracle in plain torch, which is also the CPU path, and
a Triton version for GPUs.

| folder           | content                                                                                       |
|------------------|-----------------------------------------------------------------------------------------------|
| attention/       | attention over pages: plans for decode and prefill, cascade, masks, dense attention           |
| state/           | recurrent layers over states in pages: causal conv, linear scan, Mamba-1, Mamba-2, delta rule |
| write/           | writes new K and V to their slots, with rotary embedding and quantisation                     |
| copy/            | copies whole pages inside the pool, and between pool and host memory                          |
| moe/             | mixture of experts: routing and grouped products                                              |
| lora/            | low-rank terms of adapters, as grouped products                                               |
| fused/           | norms, gated activations, rotary embedding, argmax, single-token products, decode step inputs |
| batch_invariant/ | torch operations whose results do not depend on the batch                                     |
| memory/          | elastic pool memory, the CUDA driver, views of layers over the pool                           |

The oracle defines the correct result. Tests compare every kernel with its oracle. `cpu.py` calls the native loops
of `_cpu.c`. `device.py` and `dtypes.py` are shared helpers. Triton is imported only when a CUDA tensor needs it.
Kernels do not depend on the cache, models or requests.
"""
