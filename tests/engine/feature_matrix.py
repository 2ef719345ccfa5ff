"""The features that are tested in pairs, the pairs that kvloom refuses, and the cases that contain all others.

`test_matrix.py` runs the cases. `tools/combinations_table.py` writes the features to docs/combinations.md.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from .covering import Case, Pair, all_pairs, pairs_of

__all__ = ["EXCLUDED", "FACTORS", "MEDIA", "RECURRENT", "WHAT", "cases"]

MEDIA = ("gemma3", "mllama", "qwen2_5_omni_thinker")
"""Families whose prompts contain images, and audio clips for the last one."""
RECURRENT = ("qwen3_next", "bamba")
FACTORS = {
    "family": [
        *("llama", "gemma3_text", "qwen3_next", "bamba", "deepseek_v3", "llama4_text", "gpt_oss", "gemma3n_text"),
        *MEDIA,
    ],
    "hit": ["none", "device", "host", "disk", "peer"],
    "dtype": ["exact", "int8", "fp8"],
    "speculate": ["off", "ngram", "suffix", "draft", "head"],
    "samples": ["1", "3", "beams"],
    "pool": ["roomy", "tight"],
    "chunk": ["16", "400"],
    "tenant": ["none", "salted"],
    "lora": ["none", "adapter"],
    "ranks": ["1", "tensor", "context"],
    "documents": ["none", "reused"],
}  # fmt: skip
WHAT = {
    "family": "architecture. The prompts of the last three contain images, and those of the last one also audio",
    "hit": "where the pages of the prompt come from",
    "dtype": "dtype of the KV cache. `exact` is float32",
    "speculate": "speculation: off, lookups, a draft model, or a draft head (MTP or EAGLE-3)",
    "samples": "samples of a request: one, three, or three beams",
    "pool": "size of the pool. In a `tight` pool, requests are preempted",
    "chunk": "token budget of a step. With 16, prompts are computed in chunks",
    "tenant": "tenant of the request",
    "lora": "LoRA adapter of the request",
    "ranks": "one rank, two tensor-parallel ranks, or two context-parallel ranks",
    "documents": "whether a document of the prompt is copied from its own pages (`reuse_documents`)",
}
RANDOM_CASES = 12
_REFUSED: Sequence[tuple[str, Sequence[str], str, Sequence[str], str]] = (
    ("family", MEDIA, "speculate", ("draft", "head"), "draft model, images"),
    ("family", MEDIA, "ranks", ("tensor",), "tensor parallel, images"),
    ("family", MEDIA, "ranks", ("context",), "context parallel, images"),
    ("family", MEDIA, "documents", ("reused",), "documents, images"),
    ("family", RECURRENT, "documents", ("reused",), "documents, states"),
    ("family", ("llama4_text",), "documents", ("reused",), "documents, window"),
    ("speculate", ("draft", "head"), "documents", ("reused",), "documents, draft"),
    ("ranks", ("tensor",), "documents", ("reused",), "documents, tensor parallel"),
    ("ranks", ("context",), "documents", ("reused",), "documents, context parallel"),
)


def _excluded() -> Iterator[tuple[Pair, str]]:
    for a, many, b, more, key in _REFUSED:
        for x, y in itertools.product(many, more):
            yield frozenset(((a, x), (b, y))), key


EXCLUDED: dict[Pair, str] = dict(_excluded())
"""Pairs that are refused, with the key of their reason in `kvloom.combinations.REFUSED`."""


def cases() -> list[Case]:
    """Return cases that contain every pair that is not refused, and `RANDOM_CASES` random ones."""
    found = all_pairs(FACTORS, EXCLUDED)
    rng, count = random.Random(7), len(found) + RANDOM_CASES
    while len(found) < count:
        case = {name: rng.choice(levels) for name, levels in FACTORS.items()}
        if not pairs_of(case) & EXCLUDED.keys():
            found.append(case)
    return found
