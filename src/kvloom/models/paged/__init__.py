"""Hugging Face modeling code on the page pool: the batch of a step, and the writes and reads of layers.

| file              | content                                                                  |
|-------------------|--------------------------------------------------------------------------|
| batch             | a step's packed tokens, block tables and slots, in fixed buffers         |
| pages             | `Pages`, which modeling code finds in `past_key_values`                  |
| attention         | the attention function of every layer; `install` prepares a model for it |
| own_cache         | models that need transformers' own cache: one sequence after the other   |
| packed_decoder    | the decoder of encoder-decoder models, on packed tokens                  |
| sequence_cache    | the cache of one sequence of a model in `own_cache`                      |
| latents           | MLA attention of long prompts, with expanded keys and values             |
| divided_step      | a step whose tokens are divided between ranks (context parallelism)      |
| mixers, scans     | recurrent layers: their states in pages, their functions as kernels      |
| cross_attention   | layers that attend to images                                             |
| image_inputs      | a prompt's images as data                                                |
| hidden_states     | hidden states of the target in the pages of a draft head                 |
| token_mover       | moves accepted tokens of draft trees to the slots of their positions     |
| rotated_copy      | copies the K and V of tokens to another position of another sequence     |
| empty_cache       | the cache interface of an empty cache                                    |
| dense_linear      | whether a linear layer is quantised                                      |
| family_exceptions | changes for single families                                              |
| scales            | static scales of quantised K and V                                       |
"""

from .attention import ATTENTION, IGNORED, attend, install
from .batch import DRAFT_STEP_TOKENS, Batch, BatchBuilder, Work
from .dense_linear import is_dense, is_dense_weight, replace_up_projections
from .divided_step import DividedStep, divide_step
from .empty_cache import EmptyCache
from .family_exceptions import (
    REFUSED_FAMILIES,
    keeps_latents,
    prepare,
    refusal_reason,
    separation_reason,
    up_projection,
)
from .hidden_states import HiddenStates, hidden_states_field
from .image_inputs import EMBEDDINGS, Image, ImageGroup, ImageInputs, VisibleImages
from .latents import absorb
from .own_cache import runs_separately
from .pages import GraphSplitter, Pages
from .rotated_copy import AttentionSinks, RotatedCopier, RotatedCopy, RotationError
from .scales import (
    Scales,
    checkpoint_of,
    divide_scales,
    fingerprint,
    load_scales,
    read_scales,
    scale_sizes,
    write_scales,
)
from .scans import PackedStates, StatePart, current_states, run_scan
from .sequence_cache import (
    EncoderDecoderSequenceCache,
    SequenceCache,
    cache_argument,
    forward_arguments,
    new_cache,
)
from .token_mover import TokenMover

__all__ = [
    "ATTENTION",
    "DRAFT_STEP_TOKENS",
    "EMBEDDINGS",
    "IGNORED",
    "REFUSED_FAMILIES",
    "AttentionSinks",
    "Batch",
    "BatchBuilder",
    "DividedStep",
    "EmptyCache",
    "EncoderDecoderSequenceCache",
    "GraphSplitter",
    "HiddenStates",
    "Image",
    "ImageGroup",
    "ImageInputs",
    "PackedStates",
    "Pages",
    "RotatedCopier",
    "RotatedCopy",
    "RotationError",
    "Scales",
    "SequenceCache",
    "StatePart",
    "TokenMover",
    "VisibleImages",
    "Work",
    "absorb",
    "attend",
    "cache_argument",
    "checkpoint_of",
    "current_states",
    "divide_scales",
    "divide_step",
    "fingerprint",
    "forward_arguments",
    "hidden_states_field",
    "install",
    "is_dense",
    "is_dense_weight",
    "keeps_latents",
    "load_scales",
    "new_cache",
    "prepare",
    "read_scales",
    "refusal_reason",
    "replace_up_projections",
    "run_scan",
    "runs_separately",
    "scale_sizes",
    "separation_reason",
    "up_projection",
    "write_scales",
]
