"""A stand-in for a model: its next token is a hash of everything that it reads through its pages.

    token group   each token stores two numbers: c (its token and the root hash) and v (a hash of all c up to it)
    state group   one state: a hash of all tokens so far, and their number

A page with wrong, old or missing bytes gives another number, and so another token. `Oracle` computes the same tokens
without pages. Numbers are 64-bit and wrap around.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvloom.core import Field, KVCache, LayerSpec, PageGroup, PoolLayout, Sequence, Visibility
from kvloom.models.paged import Work

__all__ = ["EOS", "LAYERS", "VOCABULARY", "Oracle", "StandInModel", "StandInRunner"]

VOCABULARY, EOS = 48, 0
Numbers = npt.NDArray[np.uint64]
_MASK = (1 << 64) - 1
_WINDOW, _SMALL_WINDOW, _CHUNK = 40, 20, 48
_PAIR = (Field("c", (1, 1), "fp64"), Field("v", (1, 1), "fp64"))
_STATE = (Field("hash", (2,), "fp64"), Field("length", (1,), "fp64"))


def _tokens(kind: str = "full", size: int | None = None) -> LayerSpec:
    return LayerSpec("token", _PAIR, Visibility(kind) if size is None else Visibility(kind, size))


LAYERS: dict[str, dict[str, LayerSpec]] = {
    "full": {"f0": _tokens(), "f1": _tokens()},
    "window": {"s0": _tokens("sliding", _WINDOW)},
    "full+window": {"f": _tokens(), "s0": _tokens("sliding", _WINDOW), "s1": _tokens("sliding", _WINDOW)},
    "full+chunks": {"f": _tokens(), "c": _tokens("chunked", _CHUNK)},
    "full+state": {"f": _tokens(), "m": LayerSpec("state", _STATE)},
    "state": {"m": LayerSpec("state", _STATE)},
    "full+window+state": {
        "f": _tokens(),
        "s": _tokens("sliding", _SMALL_WINDOW),
        "m": LayerSpec("state", _STATE),
    },
}
"""Layers of the stand-in models, by name."""


def mix(values: Numbers) -> Numbers:
    """Return a hash of each number (splitmix64)."""
    with np.errstate(over="ignore"):
        z = values + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def mix_one(value: int) -> int:
    """Return `mix` of one number."""
    z = (value + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


WEIGHTS = mix(np.arange(4096, dtype=np.uint64)) | np.uint64(1)
"""Factors by position, so that two pages that are swapped give another sum."""
_WEIGHTS = WEIGHTS.tolist()


def _contributions(tokens: Numbers, root: int) -> Numbers:
    with np.errstate(over="ignore"):
        return mix(tokens * np.uint64(0x1000003) + np.uint64(root))


def _sums(values: Numbers) -> Numbers:
    """Return the sums of the first 0, 1, 2, … values."""
    return np.concatenate((np.zeros(1, np.uint64), np.cumsum(values)))


def _root_of(root: bytes) -> int:
    return int.from_bytes(root[:8], "little")


def token_after(number: int) -> int:
    """Return the token that a model with this result chooses. Most tokens are 1, 2 or 3, so that texts repeat and
    drafts are often right."""
    drawn = mix_one(number)
    return (drawn >> 8) % VOCABULARY if drawn & 15 == 0 else 1 + (drawn >> 8) % 3


class StandInModel:
    """The attributes of a Hugging Face model that an engine reads."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.config = SimpleNamespace(is_encoder_decoder=False, model_type=kind)
        self.generation_config = SimpleNamespace(eos_token_id=EOS)
        self._weight = torch.zeros(VOCABULARY, 1)

    def eval(self) -> StandInModel:
        return self

    def parameters(self) -> Any:
        return iter([self._weight])

    def get_input_embeddings(self) -> Any:
        return SimpleNamespace(weight=self._weight)


class _Pages:
    is_invariant = False
    host: npt.NDArray[np.uint8] | None = None

    def set_host_memory(self, memory: torch.Tensor) -> None:
        self.host = memory.numpy()


class StandInRunner:
    """Computes steps of the stand-in model. Has the interface of `ModelRunner` that an engine uses.

    `on_run` is called at the start of a step with its number of tokens. `fails_after` returns after how many sequences
    of the step to raise RuntimeError, or None.
    """

    on_run: Any = staticmethod(lambda tokens: None)
    fails_after: Any = staticmethod(lambda works: None)

    def __init__(
        self,
        model: StandInModel,
        cache: KVCache,
        buffer: torch.Tensor,
        tokens: int,
        rows: int,
        *_: Any,
        **__: Any,
    ) -> None:
        self.pages, self.numerics, self.rows = _Pages(), nullcontext(), rows
        self.chosen = torch.zeros(rows, dtype=torch.int64)
        self.decoder: Any = None
        self.hidden_states: list[torch.Tensor] = []
        self._cache, self._buffer = cache, buffer.numpy()
        layout = cache.layout
        self._full = [g for g in layout.of("token") if not g.spec.visibility.windowed]
        self._windows = [g for g in layout.of("token") if g.spec.visibility.windowed]
        self._states = layout.of("state")
        self.steps = self.computed_tokens = 0

    def supports_trees(self, works: Many[Work]) -> bool:
        return False

    def find_adapter_layers(self) -> None:
        return

    def run(
        self,
        works: Many[Work],
        wanted: Many[int] | None = None,
        whole: Many[int] = (),
        pooled: Many[int] = (),
    ) -> torch.Tensor:
        """Compute a step. See `ModelRunner.run`."""
        self.steps += 1
        self.on_run(sum(len(work.tokens) for work in works))
        fails_after = self.fails_after(works)
        found: list[Numbers] = []
        for i, work in enumerate(works):
            if fails_after == i:
                raise RuntimeError("CUDA out of memory (injected)")
            found.append(self._compute(work))
        if fails_after is not None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered (injected)")
        asked = range(len(works)) if wanted is None else wanted
        rows = [int(n) for i in asked for n in found[i][len(found[i]) - 1 - works[i].drafts :]]
        rows += [int(n) for i in whole for n in found[i]]
        logits = torch.zeros(len(rows), VOCABULARY)
        for row, number in enumerate(rows):
            logits[row, token_after(number)] = 1.0
        return logits

    def _compute(self, work: Work) -> Numbers:
        """Write the pages of one sequence, and return the result after each of its tokens."""
        sequence = work.sequence
        tokens = work.tokens if work.source < 0 else self.chosen[work.source : work.source + 1].numpy()
        values = np.asarray(tokens).astype(np.uint64)
        start, root = sequence.length, _root_of(sequence.root.hash)
        new = _contributions(values[work.recomputed :], root)
        self.computed_tokens += len(new)
        states = self._run_states(work, values, root) if self._states else None
        with np.errstate(over="ignore"):
            result = np.zeros(len(new), np.uint64) if states is None else states[work.recomputed :].copy()
            prefix = None if states is None else states[work.recomputed :]
            for group in self._full:
                for run in range(group.runs):
                    c, v = self._read(sequence, group, run, 0, start)
                    weights = WEIGHTS[: start + len(new)]
                    all_c = np.cumsum(np.concatenate((c, new)) * weights)[len(c) :]
                    prefix = all_c
                    own = mix(all_c)
                    self._write(sequence, group, run, start, new, own)
                    result += all_c * np.uint64(3) + np.cumsum(np.concatenate((v, own)) * weights)[len(v) :]
            for group in self._windows:
                sees = [group.spec.visibility.first_visible(start + i) for i in range(len(new))]
                first = min(sees, default=start)
                for run in range(group.runs):
                    c, v = self._read(sequence, group, run, first, start)
                    weights = WEIGHTS[first : start + len(new)]
                    all_c = _sums(np.concatenate((c, new)) * weights)
                    at = np.arange(len(c) + 1, len(c) + 1 + len(new))
                    from_ = np.array(sees, np.int64) - first
                    seen_c = all_c[at] - all_c[from_]
                    own = mix(seen_c if prefix is None else prefix)
                    self._write(sequence, group, run, start, new, own)
                    all_v = _sums(np.concatenate((v, own)) * weights)
                    result += seen_c * np.uint64(5) + (all_v[at] - all_v[from_]) * np.uint64(7)
        return result

    def _run_states(self, work: Work, values: Numbers, root: int) -> Numbers:
        """Continue the recurrent states over the tokens of a work, and store them before its drafts. Return the state
        after each token."""
        sequence = work.sequence
        contributions = _contributions(values, root).tolist()
        result = np.zeros(len(values), np.uint64)
        for group in self._states:
            for run, page in enumerate(self._cache.state_pages[group.columns, sequence.row].tolist()):
                bytes_ = self._buffer[page * group.page_stride :][: group.page_stride].view(np.uint64)
                state, length = 0, 0
                if sequence.state_length:
                    state, length = int(bytes_[0]), int(bytes_[2])
                    if int(bytes_[1]) != mix_one(state ^ length):
                        state = mix_one(state)  # the state is torn: its parts are of different times
                for i, one in enumerate(contributions):
                    state, length = mix_one((state * 31 + one + length) & _MASK), length + 1
                    result[i] += np.uint64(state)
                    if i + 1 == len(values) - work.drafts:
                        bytes_[0], bytes_[1], bytes_[2] = state, mix_one(state ^ length), length
                assert run == 0
        return result

    def _page_numbers(self, group: PageGroup, memory: npt.NDArray[np.uint8], pages: Any) -> Numbers:
        """Return the numbers in some pages: [pages, layers, c and v, tokens]."""
        count = len(memory) // group.page_stride
        rows = memory[: count * group.page_stride].reshape(count, group.page_stride)
        size = group.run_layers * 2 * group.page_tokens
        found: Numbers = rows[pages][:, : 8 * size].copy().view(np.uint64)
        return found.reshape(len(found), group.run_layers, 2, group.page_tokens)

    def _read(
        self, sequence: Sequence, group: PageGroup, run: int, first: int, stop: int
    ) -> tuple[Numbers, Numbers]:
        """Return c and v of the tokens [first, stop), from the pool and from cold pages in host memory. The layers of
        a page are combined."""
        block, column = group.page_tokens, group.column + run
        begin, end = first // block, -(-stop // block)
        if begin >= end:
            none = np.zeros(0, np.uint64)
            return none, none
        pages = self._cache.page_tables[column, sequence.row, begin:end]
        numbers = self._page_numbers(group, self._buffer, pages)
        if sequence.cold_blocks and not group.spec.visibility.windowed:
            cold = np.concatenate([one.pages[:, column] for one in sequence.cold_runs])[begin:end]
            assert self.pages.host is not None
            numbers[: len(cold)] = self._page_numbers(group, self.pages.host, cold)
        wanted = slice(first - begin * block, stop - begin * block)
        every = numbers.transpose(1, 2, 0, 3).reshape(group.run_layers, 2, -1)[:, :, wanted]
        with np.errstate(
            over="ignore"
        ):  # layer i stores its numbers plus i, so that swapped layers are found
            shifted = every - np.arange(group.run_layers, dtype=np.uint64)[:, None, None]
            same = (shifted == shifted[0]).all(0)
        c, v = np.where(same, shifted[0], mix(shifted[0]))
        return c, v

    def _write(
        self, sequence: Sequence, group: PageGroup, run: int, start: int, c: Numbers, v: Numbers
    ) -> None:
        block, column = group.page_tokens, group.column + run
        positions = np.arange(start, start + len(c))
        pages = self._cache.page_tables[column, sequence.row, positions // block].astype(np.int64)
        assert pages.all(), "a token is written to page 0: no page is reserved for it"
        stride = group.page_stride
        slots = positions % block
        numbers = self._buffer[: len(self._buffer) // 8 * 8].view(np.uint64)
        with np.errstate(over="ignore"):
            for layer in range(group.run_layers):
                base = (pages * stride) // 8 + layer * 2 * block + slots
                numbers[base] = c + np.uint64(layer)
                numbers[base + block] = v + np.uint64(layer)


class Oracle:
    """The tokens of the stand-in model, without pages. Results are kept by layers, root hash and tokens."""

    def __init__(self, layout: PoolLayout) -> None:
        self._full = [g for g in layout.of("token") if not g.spec.visibility.windowed]
        self._windows = [g for g in layout.of("token") if g.spec.visibility.windowed]
        self._states = layout.of("state")
        self._known: dict[tuple[int, tuple[int, ...]], list[int]] = {}

    def continuation(self, root: bytes, prompt: tuple[int, ...], count: int, ignore_eos: bool) -> list[int]:
        """Return the next `count` tokens after a prompt. Ends after the end-of-sequence token, unless it is ignored."""
        key = _root_of(root), prompt
        known = self._known.setdefault(key, [])
        if len(known) < count:
            known += self._compute(key[0], [*prompt, *known], count - len(known), len(prompt) + len(known))
        found = known[:count]
        if not ignore_eos and EOS in found:
            return found[: found.index(EOS) + 1]
        return found

    def _compute(self, root: int, tokens: list[int], count: int, start: int) -> list[int]:
        sums, state, sum_v_full = [0], 0, 0
        sums_v: dict[tuple[int, int], list[int]] = {}
        found: list[int] = []
        at = 0
        while len(found) < count:
            token = tokens[at] if at < len(tokens) else found[at - len(tokens)]
            c = mix_one((token * 0x1000003 + root) & _MASK)
            weight = _WEIGHTS[at]
            sums.append((sums[-1] + c * weight) & _MASK)
            result = 0
            prefix: int | None = None
            if self._states:
                state = mix_one((state * 31 + c + at) & _MASK)
                prefix = state
                result += state * len(self._states)
            if self._full:
                prefix = sums[-1]
                sum_v_full = (sum_v_full + mix_one(prefix) * weight) & _MASK
                result += sum(g.runs for g in self._full) * (sums[-1] * 3 + sum_v_full)
            for group in self._windows:
                first = group.spec.visibility.first_visible(at)
                seen = (sums[-1] - sums[first]) & _MASK
                own = mix_one(seen if prefix is None else prefix)
                for run in range(group.runs):
                    every = sums_v.setdefault((group.index, run), [0])
                    every.append((every[-1] + own * weight) & _MASK)
                    result += seen * 5 + (every[-1] - every[first]) * 7
            at += 1
            if at >= start:
                found.append(token_after(result & _MASK))
        return found
