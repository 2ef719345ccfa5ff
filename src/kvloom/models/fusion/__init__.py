"""Optional: replaces modules of Hugging Face models by fewer, larger operations. Each replacement is first compared
with its module. If the results differ, the module is not changed.

| file              | replaces                                                        |
|-------------------|-----------------------------------------------------------------|
| modules           | norms, gated MLPs, projections, decoder layers; `fuse` runs all |
| fused_attention   | the forward of attention modules                                |
| latent_attention  | the forward of MLA modules on a GPU                             |
| delta_mixer       | the forward of mixers with a gated delta rule                   |
| cpu_decoder_layer | the forward of decoder layers on a CPU                          |
| small_model       | nothing: gives native code all weights of a small draft model    |
| rotary_cache      | rotary embeddings, by a table of cos and sin                    |
| moe               | mixtures of experts                                             |
| comparison        | nothing: compares a module with its fused form                  |
| product           | products of linear layers; LoRA may add a term to the result    |
"""

from .modules import fuse
from .product import Product, Term, product_of
from .small_model import small_model

__all__ = ["Product", "Term", "fuse", "product_of", "small_model"]
