"""kvloom's cache in Hugging Face `model.generate()`: `kvloom.Cache`.

| file         | content                                                                             |
|--------------|-------------------------------------------------------------------------------------|
| cache        | `Cache`: the cache interface of modeling code, and the batch of one `generate` call |
| model_layers | `read_layers`: runs a model once to find the data that each layer stores            |
| page_store   | `PageStore`: the pool of a model, its prefix cache and its tiers                    |
"""

from .cache import Cache

__all__ = ["Cache"]
