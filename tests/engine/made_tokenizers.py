"""Small tokenizers of the kinds that models use, built here: no files, no network."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

__all__ = ["byte_fallback", "byte_level", "words"]


def byte_level(*merged: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte (ids 3 to 258), then `merged` words; ids 0 to 2 are special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i + 3 for i, letter in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in merged:
        letters = word.replace(" ", "Ġ")
        for end in range(2, len(letters) + 1):
            if letters[:end] not in vocabulary:
                vocabulary[letters[:end]] = len(vocabulary) + 3
                merges.append((letters[: end - 1], letters[end - 1]))
    special = ["<pad>", "<s>", "</s>"]
    vocabulary |= {name: i for i, name in enumerate(special)}
    made = Tokenizer(models.BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def byte_fallback() -> PreTrainedTokenizerFast:
    """Return a tokenizer like SentencePiece's: words begin with ▁, and text without a piece is encoded as bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *map(chr, range(97, 123))]
    pieces += ["he", "▁he", "▁w", "ll", "▁hell"]
    merges = [("h", "e"), ("▁", "he"), ("▁", "w"), ("l", "l"), ("▁he", "ll")]
    made = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def words(count: int = 64) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word: w0, w1, …"""
    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0")
