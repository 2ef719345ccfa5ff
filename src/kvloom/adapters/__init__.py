"""Adapters: kvloom's cache and tiers inside other inference engines.

| folder | engine | content |
|---|---|---|
| `transformers/` | Hugging Face transformers | `kvloom.Cache`, for `model.generate(past_key_values=…)` |
| `vllm/` | vLLM | a KV connector, and a secondary tier of vLLM's own offloading |

An adapter imports its engine. Only `kvloom.Cache` is reachable from outside this folder.
"""
