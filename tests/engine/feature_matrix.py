"""The features that are tested in pairs, the pairs that kvloom refuses, and the cases that contain all others.

`test_matrix.py` runs the cases. `tools/combinations_table.py` writes the features to docs/combinations.md.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Sequence

from .covering import Case, Pair, all_pairs, pairs_of

__all__ = [
    "EXCLUDED",
    "FACTORS",
    "MEDIA",
    "PROCESS_CASES",
    "RECURRENT",
    "SEED",
    "WHAT",
    "pair_cases",
    "random_cases",
]

MEDIA = ("gemma3", "mllama", "qwen2_5_omni_thinker")
"""Families whose prompts contain images, and audio clips for the last one."""
RECURRENT = ("qwen3_next", "bamba")
FACTORS = {
    "family": [
        *("llama", "gemma3_text", "qwen3_next", "bamba", "deepseek_v3", "llama4_text", "gpt_oss", "gemma3n_text"),
        *MEDIA,
    ],
    "hit": ["none", "device", "host", "disk", "store", "peer"],
    "dtype": ["exact", "int8", "fp8"],
    "speculate": ["off", "ngram", "suffix", "draft", "head"],
    "samples": ["1", "3", "beams"],
    "pool": ["roomy", "tight"],
    "chunk": ["16", "400"],
    "tenant": ["none", "salted"],
    "lora": ["none", "adapter"],
    "ranks": ["1", "tensor", "context"],
    "role": ["whole", "split"],
    "documents": ["none", "reused"],
}  # fmt: skip
WHAT = {
    "family": "architecture. The prompts of the last three contain images, and those of the last one also audio",
    "hit": "where the pages of the prompt come from. The `store` is a Redis server, and the `peer` is another process's host memory",
    "dtype": "dtype of the KV cache. `exact` is float32",
    "speculate": "speculation: off, lookups, a draft model, or a draft head (MTP or EAGLE-3)",
    "samples": "samples of a request: one, three, or three beams",
    "pool": "size of the pool. In a `tight` pool, requests are preempted",
    "chunk": "token budget of a step. With 16, prompts are computed in chunks",
    "tenant": "tenant of the request",
    "lora": "LoRA adapter of the request",
    "ranks": "one rank, two tensor-parallel ranks, or two context-parallel ranks",
    "role": "one engine, or a prefill worker that hands its pages to a decode worker. Both have all other features",
    "documents": "whether a document of the prompt is copied from its own pages (`reuse_documents`). In a hand-over it is computed",
}
_REFUSED: Sequence[tuple[str, Sequence[str], str, Sequence[str], str]] = (
    ("family", MEDIA, "speculate", ("draft", "head"), "draft model, images"),
    ("family", MEDIA, "ranks", ("tensor",), "tensor parallel, images"),
    ("family", MEDIA, "ranks", ("context",), "context parallel, images"),
    ("family", MEDIA, "documents", ("reused",), "documents, images"),
    ("family", RECURRENT, "documents", ("reused",), "documents, states"),
    ("family", ("llama4_text",), "documents", ("reused",), "documents, window"),
    ("speculate", ("draft", "head"), "documents", ("reused",), "documents, draft"),
)


def _excluded() -> Iterator[tuple[Pair, str]]:
    for a, many, b, more, key in _REFUSED:
        for x, y in itertools.product(many, more):
            yield frozenset(((a, x), (b, y))), key


EXCLUDED: dict[Pair, str] = dict(_excluded())
"""Pairs that are refused, with the key of their reason in `kvloom.combinations.REFUSED`."""


SEED = int(os.environ.get("KVLOOM_MATRIX_SEED", "7"))
RANDOM_CASES = int(os.environ.get("KVLOOM_MATRIX_CASES", "12"))


def pair_cases() -> list[Case]:
    """Return cases that together contain every pair that is not refused."""
    return all_pairs(FACTORS, EXCLUDED, seed=1)


def random_cases(seed: int = SEED, count: int = RANDOM_CASES) -> list[Case]:
    """Return `count` random cases without refused pairs. They depend only on `seed`."""
    rng, found = random.Random(seed), list[Case]()
    while len(found) < count:
        case = {name: rng.choice(levels) for name, levels in FACTORS.items()}
        if not pairs_of(case) & EXCLUDED.keys():
            found.append(case)
    return found


def _case(*levels: str) -> Case:
    """Return the case with these levels, in the order of `FACTORS`."""
    return dict(zip(FACTORS, levels, strict=True))


PROCESS_CASES = [
    _case("llama", "store", "int8", "draft", "3", "roomy", "16", "salted", "adapter", "tensor", "split", "none"),
    _case("bamba", "disk", "exact", "ngram", "beams", "tight", "400", "none", "adapter", "context", "whole", "none"),
    _case("deepseek_v3", "host", "exact", "head", "1", "tight", "16", "salted", "none", "tensor", "whole", "none"),
    _case("gemma3_text", "disk", "fp8", "suffix", "1", "roomy", "16", "none", "none", "context", "whole", "reused"),
]  # fmt: skip
"""Cases whose ranks are processes. In all other cases, ranks are threads of the test's process."""
