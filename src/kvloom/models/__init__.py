"""Model architectures: the data that their layers store, Hugging Face code on pages, and the loading of
checkpoints.

| folder    | content                                                                                              |
|-----------|------------------------------------------------------------------------------------------------------|
| specs/    | config.json to layer specs: reading, the table of families, known models. No torch                   |
| paged/    | the places where Hugging Face code calls kvloom: attention, recurrent mixers, cross attention, pages |
| vision/   | images in prompts: encoder, embeddings in pages, cross attention                                     |
| fusion/   | replaces operations of modules by fewer, larger operations                                           |
| sharding/ | tensor parallelism: the part of a model that one rank computes, sums between ranks                   |
| loading/  | checkpoints and random weights, the check that a model can run, its fingerprint                      |
| heads/    | small modules that draft tokens from a target's hidden states                                        |
| lora/     | LoRA adapters: their files, and their weights as terms of linear layers                              |
| configs/  | config.json of models known by name                                                                  |
| embedded/ | small models that are installed with their weights                                                   |

A folder imports only from folders before it in this order: specs, paged, vision, fusion and
sharding, loading and lora, heads.
A new architecture is one row of `specs/families_table.py`.
"""
