"""Adapters: kvloom's cache and tiers inside other inference engines.

| folder          | engine                    | content                                                                                             |
|-----------------|---------------------------|-----------------------------------------------------------------------------------------------------|
| `transformers/` | Hugging Face transformers | `kvloom.Cache`, for `model.generate(past_key_values=…)`                                             |
| `vllm/`         | vLLM                      | a KV connector, and a secondary tier of vLLM's own offloading                                       |
| `sglang/`       | SGLang                    | a storage backend of HiCache                                                                        |
| `lmcache/`      | LMCache                   | an L2 adapter of its server, and an import of its files                                             |
| `common/`       | none                      | parts that several adapters use: tiers by URL, pages in tiers, identity of weights, tested versions |

An adapter imports its engine. Only `kvloom.Cache` is reachable from outside this folder.
"""
