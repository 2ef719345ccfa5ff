"""Writes the tables of model families into docs/models.md: `python tools/families_table.py`.

The table has one line for each causal language model of the installed transformers. A line is computed from the tiny
config of the family in `tests/models`, on the meta device. This takes about a minute. `tests/models/test_families.py`
compares the tokens of each family with `generate()`. A second table has the encoder-decoder models, which
`tests/models/test_encoder_decoder.py` compares.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.models import tiny_encoder_decoders
from tests.models.tiny_families import config_of

from kvloom.models.loading import language_model_class, refusal, sharding_refusal
from kvloom.models.paged import REFUSED_FAMILIES, separation_reason
from kvloom.models.specs import ENCODER_DECODERS, model_spec

__all__ = ["FILE", "REFUSED", "encoder_decoder_table", "main", "table"]

FILE = Path(__file__).parent.parent / "docs" / "models.md"
REFUSED = {
    **REFUSED_FAMILIES,
    "gemma3n": "the image part needs the package timm (pip install timm); it then runs, with images and audio",
}
"""The families that do not run, and the reason."""
NOT_CAPTURED = {"gemma3n_text"}
"""Families whose modeling code copies a value from the host in every step, so that a capture fails."""
_KINDS = ("full", "sliding", "chunked", "cross", "state")


def table() -> tuple[str, str]:
    """Return two tables, of the families that run and of the others, and the sentence with their counts."""
    running = [
        "| family | layers | sequences of a step | exact on a CPU | CUDA graphs | int8, fp8 | tiers | drafts | 2 ranks |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    refused = ["| family | reason |", "|---|---|"]
    packed = separate = 0
    for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        if family in REFUSED:
            refused.append(f"| {family} | {REFUSED[family]} |")
            continue
        config = config_of(family)
        reason = refusal(config)
        if reason is not None:
            raise RuntimeError(f"{family} is refused: {reason}. Make it run, or add it to REFUSED.")
        cells, is_packed = _cells(config, family in NOT_CAPTURED)
        packed, separate = packed + is_packed, separate + (not is_packed)
        running.append(f"| {family} | {' | '.join(cells)} |")
    counts = (
        f"Transformers has {len(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)} causal model families. Of these, kvloom runs "
        f"{packed + separate} and refuses {len(refused) - 2}."
    )
    return "\n".join(running) + "\n\n" + "\n".join(refused) + "\n", counts


def encoder_decoder_table() -> str:
    """Return the table of encoder-decoder models. Takes a second."""
    rows = [
        "| family | encoder reads | layers | sequences of a step | exact on a CPU | CUDA graphs | int8, fp8 | tiers | drafts | 2 ranks |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for family, reads in sorted(ENCODER_DECODERS.items()):
        config = tiny_encoder_decoders.config_of(family)
        reason = refusal(config)
        if reason is not None:
            raise RuntimeError(f"{family} is refused: {reason}")
        rows.append(
            f"| {family} | {reads} | {' | '.join(_cells(config, True, is_encoder_decoder=True)[0])} |"
        )
    return "\n".join(rows) + "\n"


def _cells(config: Any, fails_capture: bool, is_encoder_decoder: bool = False) -> tuple[list[str], bool]:
    cls, own = language_model_class(config)
    with torch.device("meta"):
        model = cls._from_config(own, dtype=torch.bfloat16)
    specs = model_spec(own.to_dict()).layers.values()
    kinds = {spec.kind for spec in specs}
    layers = [kind for kind in _KINDS if kind in kinds]
    if any(field.name == "latent" for spec in specs for field in spec.fields):
        layers = [f"{kind} (latents)" if kind == "full" else kind for kind in layers]
    if any(field.name == "index" for spec in specs for field in spec.fields):
        layers.append("indexer keys")
    if getattr(own.get_text_config(), "num_kv_shared_layers", 0):
        layers.append("shared")
    is_packed, has_states = separation_reason(model) is None, "state" in kinds
    drafts = {(True, False): "chains, trees", (False, True): "no"}.get((is_packed, has_states), "chains")
    drafts = "chains" if is_encoder_decoder else drafts
    quantised = "yes" if kinds - {"state"} else "no K and V"
    runs = "packed" if is_packed else "one by one"
    graphs = "yes" if is_packed and not fails_capture else "no"
    ranks = "yes" if sharding_refusal(config, 2) is None else "no"
    return [", ".join(layers), runs, "yes", graphs, quantised, "yes", drafts, ranks], is_packed


def main() -> int:
    rows, counts = table()
    text = FILE.read_text(encoding="utf-8")
    place = re.compile(r"(?<=<!-- families -->\n).*?(?=<!-- /families -->)", re.DOTALL)
    text = place.sub(lambda _: rows, text)
    text = re.sub(r"Transformers has \d+ causal model families\.[^.]*\.", lambda _: counts, text)
    place = re.compile(r"(?<=<!-- encoder-decoders -->\n).*?(?=<!-- /encoder-decoders -->)", re.DOTALL)
    text = place.sub(lambda _: encoder_decoder_table(), text)
    FILE.write_text(text, encoding="utf-8")
    print(counts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
