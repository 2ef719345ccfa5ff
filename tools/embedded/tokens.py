"""The tokenizer of the embedded models, and the corpus as its tokens.

Byte-level BPE, one vocabulary for all models: 4,096 entries, since a draft of under a million weights spends most of them
on its embeddings. A document is `<|bos|>` text `<|eos|>`; a turn of a conversation is its role, its text and `<|eos|>`.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .corpus import KINDS, Document

__all__ = ["CONTEXT", "SPECIALS", "TEMPLATE", "encode", "load_tokenizer", "read", "train_tokenizer", "write"]

CONTEXT = 4096
SPECIALS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>")
PAD, BOS, EOS = range(3)
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
PIECES = r" ?\p{L}+| ?\p{N}{1,2}| ?[^\s\p{L}\p{N}]+|\n+ *(?= )|\s+(?!\S)|\s+"
"""What BPE may not merge across: words, short numbers, runs of signs, a line's end with the indentation that follows."""


def train_tokenizer(documents: Sequence[Document], vocabulary: int, folder: Path) -> Any:
    """Train on what is not held out and save to `folder`, ready for AutoTokenizer. Takes about a minute for 50 MB."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator((doc.text for doc in documents if doc.text and not doc.held_out), trainer)
    raw.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", BOS)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token=SPECIALS[PAD],
        bos_token=SPECIALS[BOS],
        eos_token=SPECIALS[EOS],
        additional_special_tokens=list(SPECIALS[EOS + 1 :]),
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def encode(documents: Sequence[Document], tokenizer: Any) -> list[np.ndarray]:
    """The tokens of each document, in their order."""
    raw = tokenizer.backend_tokenizer
    roles = {name: raw.token_to_id(name) for name in SPECIALS}
    texts = [text for doc in documents for text in ([turn.text for turn in doc.turns] or [doc.text])]
    parts = iter(raw.encode_batch(texts, add_special_tokens=False))
    found = []
    for doc in documents:
        ids = [BOS]
        for turn in doc.turns:
            ids += [roles[f"<|{turn.role}|>"], *next(parts).ids, EOS]
        if not doc.turns:
            ids += [*next(parts).ids, EOS]
        found.append(np.array(ids, dtype=np.uint16))
    return found


def write(
    documents: Sequence[Document], tokenizer: Any, folder: Path, sources: Sequence[str]
) -> dict[str, Any]:
    """Write `tokens.npz` (what is learned from, shuffled, and what is held out, by kind) and `corpus.json`, which says
    what is in it."""
    order = sorted(documents, key=lambda doc: doc.path)
    random.Random(0).shuffle(order)
    tokens = encode(order, tokenizer)
    arrays = {
        "train": np.concatenate([ids for doc, ids in zip(order, tokens, strict=True) if not doc.held_out])
    }
    held: dict[str, dict[str, int]] = {}
    for kind in KINDS:
        mine = [
            (doc, ids) for doc, ids in zip(order, tokens, strict=True) if doc.held_out and doc.kind == kind
        ]
        if mine:
            arrays[f"held_{kind}"] = np.concatenate([ids for _, ids in mine])
            held[kind] = {
                "files": len(mine),
                "bytes": sum(len(doc.text.encode()) for doc, _ in mine),
                "tokens": len(arrays[f"held_{kind}"]),
            }
    np.savez_compressed(folder / "tokens.npz", **arrays)  # type: ignore[arg-type]
    files: Counter[str] = Counter(doc.kind for doc in order if not doc.held_out)
    sizes: Counter[str] = Counter()
    for doc in order:
        if not doc.held_out:
            sizes[doc.kind] += len(doc.text.encode()) + sum(len(turn.text.encode()) for turn in doc.turns)
    about = {
        "sources": list(sources),
        "licence": "PSF-2.0 (the Python standard library and its documentation)",
        "train": {kind: {"documents": files[kind], "bytes": sizes[kind]} for kind in files},
        "train_tokens": len(arrays["train"]),
        "held_out": held,
        "vocabulary": len(tokenizer),
    }
    (folder / "corpus.json").write_text(json.dumps(about, indent=2) + "\n")
    return about


def read(folder: Path) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, Any]]:
    """Tokens to learn from, tokens held out by kind, and what `corpus.json` says."""
    about = json.loads((folder / "corpus.json").read_text())
    with np.load(folder / "tokens.npz", allow_pickle=False) as stored:
        held = {name.removeprefix("held_"): stored[name] for name in stored.files if name != "train"}
        return stored["train"], held, about
