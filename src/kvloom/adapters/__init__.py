"""Adapters: kvloom's tiers inside other inference engines.

| folder | engine | content |
|---|---|---|
| `vllm/` | vLLM | a KV connector, and a secondary tier of vLLM's own offloading |

An adapter imports its engine. Nothing else in kvloom imports an adapter.
"""
