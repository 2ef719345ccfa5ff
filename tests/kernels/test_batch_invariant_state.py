"""Steady rows: the same bits for a sequence at once, cut anywhere, token by token, alone and among others."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from kvloom.kernels.state import StateRows

pytest.importorskip("triton", reason="Triton is not installed")

from .test_state import (
    DEVICE,
    PACKED,
    RULES,
    Arguments,
    case_name,
    distance,
    move,
    pages,
    part_of,
    token_by_token,
)

GPU = DEVICE == "cuda"
LENGTHS = [700, 3, 11, 1] if GPU else [9, 3, 1]
CASES: list[tuple[str, Arguments]] = [
    ("conv", {}),
    ("conv", {"taps": 3, "bias": False, "silu": False, "channels": 37}),
    ("linear", {"channels": 33}),
    ("mamba1", {"channels": 40, "size": 16}),
    ("mamba1", {"groups": 2, "z": False}),
    ("mamba2", {"z": True, "limits": (0.5, 1.5), "heads": 2}),
    ("mamba2", {"dt": False, "heads": 2, "d": False, "width": 17, "size": 70}),
    ("delta", {"key_heads": 1, "heads": 2}),
    ("delta", {"gate": "channel", "heads": 2}),
    (
        "delta",
        {"beta": False, "normalise": False, "gate": None, "key_heads": 1, "heads": 1, "dk": 17, "dv": 40},
    ),
]
if GPU:  # shapes of published models
    CASES += [
        ("conv", {"channels": 8192}),
        ("mamba1", {"channels": 4096, "size": 16}),
        ("mamba2", {"heads": 64, "width": 64, "groups": 8, "size": 128}),
        ("delta", {"key_heads": 16, "heads": 32, "dk": 128, "dv": 128}),
        ("linear", {"channels": 2560}),
    ]
DTYPES = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16)]
if GPU:
    DTYPES += [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]


class Sequences:
    """Sequences whose tokens are computed a stretch at a time, as an engine would, in any company."""

    def __init__(
        self, name: str, options: Arguments, lengths: list[int], dtype: torch.dtype, kept: torch.dtype
    ) -> None:
        torch.manual_seed(5)
        self.rule, self.lengths = RULES[name], lengths
        self.each = [
            {k: move(v, dtype) for k, v in self.rule.arguments(length, **options).items()}
            for length in lengths
        ]
        for one in self.each:  # one layer: all sequences share the weights
            one.update({k: v for k, v in self.each[0].items() if k not in part_names(one)})
        self.states = move(pages(len(lengths) + 1, self.rule.shape(self.each[0]), kept))
        self.first = self.states.clone()
        self.done = [0] * len(lengths)
        self.out: list[list[torch.Tensor]] = [[] for _ in lengths]

    def begin(self) -> None:
        self.states.copy_(self.first)
        self.done = [0] * len(self.lengths)
        self.out = [[] for _ in self.lengths]

    def advance(self, counts: dict[int, int], padding: int = 0) -> None:
        """Compute the next tokens of each of these sequences in one call, in this order, with padding rows between. Those with an even
        number begin from zeros, the others from what is in their pages."""
        parts, read, fresh = [], [], []
        for index, count in counts.items():
            parts.append(part_of(self.each[index], slice(self.done[index], self.done[index] + count)))
            read.append(index + 1)
            fresh.append(index % 2 == 0 and self.done[index] == 0)
            self.done[index] += count
        for _ in range(padding):
            parts.append(part_of(self.each[0], slice(0, 1)))
            read.append(0)
            fresh.append(False)
        sizes = [*counts.values(), *[1] * padding]
        p = dict(self.each[0])
        for key in part_names(p):
            p[key] = torch.cat([part[key] for part in parts])
        starts = torch.tensor(
            [sum(sizes[:i]) for i in range(len(sizes) + 1)], dtype=torch.int32, device=DEVICE
        )
        slots = torch.tensor(read, device=DEVICE)
        new = torch.tensor(fresh, device=DEVICE) if any(fresh) else None
        rows = StateRows(starts, slots, slots, max(sizes), new, batch_invariant=True)
        found = self.rule.public(p, self.states, rows)
        for index, (a, b) in zip(counts, pairwise(starts.tolist()), strict=False):
            self.out[index].append(found[a:b])

    def outputs(self) -> list[torch.Tensor]:
        assert self.done == self.lengths
        return [torch.cat(parts) for parts in self.out]

    def exact(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """What the recurrence gives in float64."""
        outputs, after = [], self.first.cpu().double()
        for index, p in enumerate(self.each):
            slot = torch.tensor([index + 1])
            rows = StateRows(
                torch.tensor([0, self.lengths[index]]),
                slot,
                slot,
                self.lengths[index],
                torch.tensor([index % 2 == 0]),
            )
            found, states = token_by_token(self.rule, p, self.first, rows)
            outputs.append(found)
            after[index + 1] = states[index + 1]
        return outputs, after


def part_names(p: Arguments) -> list[str]:
    return [k for k in p if k in PACKED and p[k] is not None]


def as_whole(sequences: Sequences) -> None:
    for index, length in enumerate(sequences.lengths):
        sequences.advance({index: length})


def as_chunks(sequences: Sequences) -> None:
    """Cut at random places, some of them together, in any order."""
    dice = random.Random(1)
    while left := [i for i, length in enumerate(sequences.lengths) if sequences.done[i] < length]:
        chosen = dice.sample(left, dice.randint(1, len(left)))
        counts = {}
        for index in chosen:
            rest = sequences.lengths[index] - sequences.done[index]
            counts[index] = dice.choice([min(rest, 1), min(rest, dice.randint(1, 12)), dice.randint(1, rest)])
        sequences.advance(counts, padding=dice.choice([0, 0, 3]))


def token_after_token(sequences: Sequences) -> None:
    while left := [i for i, length in enumerate(sequences.lengths) if sequences.done[i] < length]:
        sequences.advance(dict.fromkeys(left, 1))


@pytest.mark.parametrize(("dtype", "kept"), DTYPES, ids=case_name)
@pytest.mark.parametrize(("name", "options"), CASES, ids=case_name)
@pytest.mark.few(1)
def test_a_sequence_has_the_same_bits_in_any_chunks_and_any_batch(
    name: str, options: Arguments, dtype: torch.dtype, kept: torch.dtype
) -> None:
    sequences = Sequences(name, options, LENGTHS, dtype, kept)
    as_whole(sequences)
    wanted, states = sequences.outputs(), sequences.states.clone()
    for way in (as_chunks, token_after_token):
        sequences.begin()
        way(sequences)
        for found, one in zip(sequences.outputs(), wanted, strict=True):
            assert torch.equal(found, one), way.__name__
        assert torch.equal(sequences.states[1:], states[1:]), way.__name__
    exact, after = sequences.exact()
    unit = max(torch.finfo(dtype).eps, torch.finfo(kept).eps)
    for found, one in zip(wanted, exact, strict=True):
        assert distance(found, one) < max(8 * unit, 1e-5)
    assert distance(states[1:], after[1:]) < max(8 * unit, 1e-5)


@pytest.mark.parametrize("name", RULES)
def test_arguments_that_lie_anywhere_give_the_same_bits(name: str) -> None:
    """Slices of wider rows, odd addresses, other integers: a compiled kernel must not take another way for them."""
    torch.manual_seed(0)
    rule = RULES[name]
    p = {k: move(v, torch.float32) for k, v in rule.arguments(5).items()}
    states = move(pages(4, rule.shape(p), torch.bfloat16))
    slots = torch.tensor([3, 1], device=DEVICE)
    rows = StateRows(
        torch.tensor([0, 4, 5], dtype=torch.int32, device=DEVICE), slots, slots, 4, batch_invariant=True
    )
    twin = states.clone()
    wanted = rule.public(p, states, rows)
    for key in part_names(p):
        wide = torch.cat([torch.full_like(p[key][..., :1], torch.nan), p[key]], -1)
        p[key] = wide[..., 1:]
    other = replace(rows, starts=rows.starts.long(), read=slots.int(), write=slots.int(), longest=900)
    found = rule.public(p, twin, other)
    assert torch.equal(found, wanted)
    assert torch.equal(twin[1:], states[1:])


def test_batch_invariant_rows_refuse_float64() -> None:
    rule = RULES["linear"]
    p: dict[str, Any] = rule.arguments(2)
    slot = torch.tensor([1])
    with pytest.raises(ValueError, match="float32 at most"):
        rule.public(
            p, torch.zeros(2, 5), StateRows(torch.tensor([0, 2]), slot, slot, 2, batch_invariant=True)
        )
