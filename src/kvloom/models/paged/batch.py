"""The batch of one step, which is the input of the model: the next tokens of several sequences, packed in one tensor,
and their pages.

    tokens   | sequence 0: a chunk of its prompt | sequence 1: one token | sequence 2: … |
    starts   0                                   7                       8               …

`BatchBuilder` fills fixed buffers. The device has a copy of the block tables. A step uploads only one small
array of numbers and the changed entries of the block tables. The device computes all other fields.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvloom.core import KVCache, Sequence
from kvloom.kernels.device import upload
from kvloom.kernels.fused import ROW_FIELDS, field_count, lay_out_step
from kvloom.kernels.lora import AdapterRows

from .image_inputs import ImageInputs, VisibleImages

__all__ = ["DRAFT_STEP_TOKENS", "Batch", "BatchBuilder", "ColdRows", "Work"]

Ints = npt.NDArray[np.int64]
Ids = npt.NDArray[np.int32]


class Work(NamedTuple):
    """The part of a sequence in a step: the next `tokens`, for which `extend` has reserved pages.

    - `source`: if the only token is not on the host yet, its index among the tokens that the previous step sampled,
      else -1.
    - `images`: the images of the prompt, if any.
    - `recomputed`: the number of tokens at the start of `tokens` that are already computed. The sequence's length
      includes them. Only recurrent layers compute these tokens again, because their states do not cover the tokens yet.
      With `rewrites`, the K and V of the tokens are also written again, because a draft model may lack them.
    - `drafts`: the number of tokens at the end of `tokens` that are a draft. Recurrent layers do not store a state for
      them.
    - `skipped`: the number of tokens between the sequence's length and the first of `tokens`. A draft model has already
      computed them as a draft.
    - `parents`: if the last tokens are a draft tree: for each of these tokens, the index of its parent among them.
      Parents precede their children. -1 means that the parent is the token before the tree. Empty without a tree.
    - `adapter`: the slot of the sequence's LoRA adapter. 0 means no adapter. Tokens before the position `active_from`
      use no adapter.
    """

    sequence: Sequence
    tokens: Ints
    source: int = -1
    images: ImageInputs | None = None
    recomputed: int = 0
    drafts: int = 0
    rewrites: bool = False
    skipped: int = 0
    parents: tuple[int, ...] = ()
    adapter: int = 0
    active_from: int = 0

    @property
    def new_tokens(self) -> int:
        """Number of tokens after the sequence's length, without drafts."""
        return len(self.tokens) - self.recomputed - self.drafts


@dataclass(frozen=True, slots=True)
class ColdRows:
    """The block tables of a step in which some sequences have cold blocks (blocks in host memory). Layers with full
    attention read the cold blocks from host memory, and all other blocks from the pool.

    | field         | meaning                                                                                      |
    |---------------|----------------------------------------------------------------------------------------------|
    | tables[group] | page ids in the pool [runs, sequences, blocks]; the first block is the sequence's first      |
    |               | block that is not cold                                                                       |
    | sizes         | number of tokens of each sequence that are not cold, on the host                             |
    | host_pages    | by sequence with cold blocks: page ids in host memory [columns, blocks], on the host         |

    `runs` is the number of pages that a block has in the group. `columns` is the sum of `runs` over all groups.
    """

    tables: dict[int, torch.Tensor]
    sizes: tuple[int, ...]
    host_pages: dict[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class StateInputs:
    """The sequences of one part of a replayed step with prompts, for recurrent layers (see `mixers.MixerSteps`). `starts`,
    `read` and `write` are inputs of `StateRows`, `read` and `write` by group [runs, sequences]. `longest` is an upper
    bound of the number of tokens of a sequence."""

    starts: torch.Tensor
    read: dict[int, torch.Tensor]
    write: dict[int, torch.Tensor]
    longest: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The inputs of one step. The new tokens of all sequences are packed in one tensor, one sequence after another.
    In the shapes, `rows` is the number of sequences, and `runs` the number of pages that a block has in the group.

    | field                | meaning                                                                                          |
    |----------------------|--------------------------------------------------------------------------------------------------|
    | tables[group]        | page ids [runs, rows, blocks]                                                                    |
    | slots[group]         | slot to which each token is written [runs, tokens]: `page * page_tokens + place`; -1 if another |
    |                      | rank stores the token (context parallelism)                                                      |
    | pages[group], places | page id of each token, and its place (offset) inside the page; slots are computed from both      |
    | last                 | index of each sequence's last token                                                              |
    | states[group], fresh | page ids of state groups [runs, rows]; `fresh` marks sequences that begin without a state        |
    | replayed             | whether one CUDA graph computes the step                                                         |
    | bounds, sizes        | starts and lengths on the host; invalid if `replayed`: only the device has them                  |
    | shares               | whether some sequences share pages (`Pages.set_shared_runs`)                                     |
    | embeds               | embeddings that replace `tokens`, if the step has images                                         |
    | spans                | image id of each token; tokens of one image see each other in both directions                    |
    | windows_join         | whether `spans` applies only to layers with windows                                              |
    | rotary               | rotary positions where they differ from `positions`: [tokens] or [3, tokens]                     |
    | seen                 | images that cross-attention layers read                                                          |
    | cold                 | sequences with cold blocks, which full-attention layers read from host memory                    |
    | drafts               | number of draft tokens at the end of each sequence; empty if there are no drafts                 |
    | longest              | if `replayed`: largest number of tokens of a sequence in this step                               |
    | stored               | if `longest` > 1: number of tokens of each sequence after which recurrent layers store the state |
    | trees                | draft trees: which tokens of its sequence each token sees (`kernels.attention.Mask`)             |
    | previous             | if `trees`: each token's predecessor, as an index in the sequence; -1 for the first token        |
    | adapters             | the LoRA adapters of the tokens; None if no token uses an adapter                                |
    | state_inputs         | in a replayed step with prompts: single tokens and prompts, for recurrent layers                 |

    The position of a tree token depends on its depth in the tree, so tokens of two branches may have the same
    position. Every token has its own slot.
    Padding tokens and padding sequences may follow the last bound.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    last: torch.Tensor
    tables: dict[int, torch.Tensor]
    slots: dict[int, torch.Tensor]
    pages: dict[int, torch.Tensor]
    places: torch.Tensor
    states: dict[int, torch.Tensor]
    fresh: tuple[bool, ...]
    bounds: tuple[int, ...]
    sizes: tuple[int, ...]
    replayed: bool = False
    shares: bool = False
    embeds: torch.Tensor | None = None
    spans: torch.Tensor | None = None
    windows_join: bool = False
    rotary: torch.Tensor | None = None
    seen: VisibleImages | None = None
    cold: ColdRows | None = None
    drafts: tuple[int, ...] = ()
    longest: int = 1
    stored: torch.Tensor | None = None
    recomputes: bool = False
    """Whether some tokens of the step are already computed. Only recurrent layers compute them again."""
    trees: torch.Tensor | None = None
    previous: torch.Tensor | None = None
    adapters: AdapterRows | None = None
    state_inputs: tuple[StateInputs, ...] = ()

    @property
    def queries(self) -> tuple[Ints, Ints] | None:
        """Two arrays with one value per token of the step: the index of the token's sequence, and the number of tokens
        that the token sees. The property is None if a sequence has several tokens that are not drafts, or tokens
        that are already computed."""
        lengths = np.array(self.sizes)
        if self.bounds[-1] == len(self.sizes):
            return np.arange(len(lengths)), lengths
        if not self.drafts or self.recomputes or self.bounds[-1] != len(self.sizes) + sum(self.drafts):
            return None
        counts = np.array(self.drafts) + 1
        rows = np.arange(len(counts)).repeat(counts)
        return rows, (lengths - counts)[rows] + np.arange(self.bounds[-1]) - np.array(self.bounds)[rows] + 1


PROMPT_ROWS = 32
"""Largest number of prompts in a replayed step, if the model has recurrent layers. Their kernels reserve memory for the
states of all chunks of these prompts."""
DRAFT_STEP_TOKENS = 256
"""Largest number of tokens in a replayed step with drafts."""
RECOMPUTED = -2
"""Source of a token that is already computed. Its K and V must not be written again, so they are written to page 0,
which no sequence uses."""


@dataclass(frozen=True, slots=True)
class _Trees:
    """The trees of a step, on the host. `seen` is `Batch.trees`, `positions` are the positions of all tokens, and
    `previous` is `Batch.previous`."""

    seen: npt.NDArray[np.uint8] | npt.NDArray[np.int32]
    positions: Ints
    previous: Ints


@dataclass(slots=True)
class _StepNumbers:
    """The integer inputs of a step, on the host. The fields have the order of the buffer that is uploaded to the
    device. `positions` are the indexes of tokens in their sequences, without the depths of draft trees. Slots are
    computed from these positions."""

    tokens: Ints
    positions: Ints
    source: Ints
    row_of: Ints
    rows: Ints
    lengths: Ints
    starts: Ints
    states: npt.NDArray[np.int32]
    shifts: Ints
    fresh: tuple[bool, ...] = field(default=())
    drafts: tuple[int, ...] = field(default=())
    trees: _Trees | None = None
    adapters: Ids | None = None
    """The adapter slot of each token. None if no token uses an adapter."""

    def append_rows(self, other: _StepNumbers) -> _StepNumbers:
        """Return an object with the sequences of this object, followed by the sequences of `other`."""
        rows, tokens = len(self.rows), len(self.tokens)
        return _StepNumbers(
            np.concatenate((self.tokens, other.tokens)),
            np.concatenate((self.positions, other.positions)),
            np.concatenate((self.source, other.source)),
            np.concatenate((self.row_of, other.row_of + rows)),
            np.concatenate((self.rows, other.rows)),
            np.concatenate((self.lengths, other.lengths)),
            np.concatenate((self.starts, other.starts[1:] + tokens)),
            np.concatenate((self.states, other.states), 1),
            np.concatenate((self.shifts, other.shifts)),
            adapters=self.adapters,
        )

    @property
    def parts(self) -> tuple[npt.NDArray[np.int64] | npt.NDArray[np.int32], ...]:
        return (
            *(self.tokens, self.positions, self.source, self.row_of),
            *(self.rows, self.lengths, self.starts, self.states.reshape(-1), self.shifts),
        )


class BatchBuilder:
    """Builds the `Batch` of each step in fixed buffers of one device. A step has at most `tokens` tokens and
    `rows` sequences. A step must be launched before the next step is built. Building waits if the device is two
    steps behind.

    - `mirrored`: the device has its own copy of the block tables, as on a GPU. Otherwise the tables of the
      cache are used.
    - `shifted`: images shift rotary positions.
    - `tree_columns`: the largest number of tokens of a sequence in steps with draft trees that replay a CUDA graph. A
      multiple of 4. 0 means that such steps have no trees.
    - `adapted`: sequences may use LoRA adapters.
    """

    def __init__(
        self,
        cache: KVCache,
        device: torch.device | str,
        tokens: int,
        rows: int,
        mirrored: bool | None = None,
        shifted: bool = False,
        tree_columns: int = 0,
        adapted: bool = False,
    ) -> None:
        self.cache, self.device = cache, torch.device(device)
        self.rows, self._block, self._shifted = rows, cache.layout.block_tokens, shifted
        cuda = self.device.type == "cuda"
        self._mirrored = cuda if mirrored is None else mirrored
        width, sequences, blocks = cache.page_tables.shape
        self._states = len(cache.state_pages)
        if self._mirrored:
            # The last line is all zeros: padding writes to page 0, which no sequence uses.
            self._tables = torch.zeros((width, sequences + 1, blocks), dtype=torch.int32, device=self.device)
        else:
            self._tables = torch.from_numpy(cache.page_tables)
        self._tree_columns = tree_columns
        self._token_fields = 6 if tree_columns else 4
        most = 4 * tokens + (5 + width + self._states + shifted) * max(rows + 1, DRAFT_STEP_TOKENS) + 1
        most += (2 + tree_columns // 4) * DRAFT_STEP_TOKENS if tree_columns else 0
        most = max(most, field_count(width, self._states, shifted) * rows)
        if self._states:
            most += sum(self._state_sizes)
        self._counting = torch.arange(rows + 1, dtype=torch.int32, device=self.device)
        self._last = torch.arange(rows, device=self.device)
        self._sent = torch.zeros(most, dtype=torch.int32, device=self.device)
        self._host = [torch.zeros(most, dtype=torch.int32, pin_memory=cuda) for _ in range(2)]
        self._read = [torch.cuda.Event() for _ in range(2)] if cuda else []  # type: ignore[no-untyped-call]
        self._turn = 0
        self._adapted = adapted
        slots = max(tokens, rows, DRAFT_STEP_TOKENS) if adapted and self._mirrored else 0
        self._slots = torch.zeros(slots, dtype=torch.int32, device=self.device)
        self._host_slots = [torch.zeros(slots, dtype=torch.int32, pin_memory=cuda) for _ in range(2)]
        # The uploaded numbers of a step with only padding, by its size in tokens.
        self._padding: dict[int, Ids] = {}

    @property
    def is_mirrored(self) -> bool:
        """Whether the device has its own copy of the block tables. Changed entries of the tables are uploaded to the
        copy."""
        return self._mirrored

    @property
    def supports_trees(self) -> bool:
        """Whether replayed steps with drafts may have trees."""
        return self._tree_columns > 0

    def lay_out(self, works: Many[Work], chosen: torch.Tensor | None = None) -> Batch:
        """Return the batch of `works`, in order. `chosen` are the tokens that the previous step sampled. Needed only
        if a `source` in `works` is not -1."""
        numbers = self._numbers(works)
        blocks = -(-int(numbers.lengths.max()) // self._block)
        if not self._mirrored:
            batch = self._host_batch(numbers, blocks, chosen)
        else:
            tokens = len(numbers.tokens)
            self._send(numbers, tokens if numbers.adapters is not None else 0)
            bounds, sizes = numbers.starts.tolist(), numbers.lengths.tolist()
            batch = self._batch(blocks, chosen, numbers.fresh, tuple(bounds), tuple(sizes))
            if numbers.adapters is not None:
                batch = replace(batch, adapters=AdapterRows.of(self._slots[:tokens]))
            if numbers.drafts:
                recomputes = bool((numbers.source == RECOMPUTED).any())
                batch = replace(batch, drafts=numbers.drafts, recomputes=recomputes)
        if numbers.trees is not None:
            trees = numbers.trees
            batch = _with_trees(
                batch, *(upload(part, self.device) for part in (trees.seen, trees.positions, trees.previous))
            )
        if any(work.sequence.cold_blocks for work in works):
            batch = replace(batch, cold=self._cold_rows(works, batch))
        return batch

    def _cold_rows(self, works: Many[Work], batch: Batch) -> ColdRows:
        cold = np.array([work.sequence.cold_blocks for work in works])
        sizes = np.array(batch.sizes) - cold * self._block
        blocks = np.arange(-(-int(sizes.max()) // self._block))
        last = next(iter(batch.tables.values())).shape[2] - 1
        at = upload(np.minimum(cold[:, None] + blocks, last), self.device)
        full = [group for group in self.cache.layout.of("token") if not group.spec.visibility.windowed]
        return ColdRows(
            {g.index: batch.tables[g.index].gather(2, at.expand(g.runs, -1, -1)) for g in full},
            tuple(sizes.tolist()),
            {
                row: torch.from_numpy(
                    np.concatenate([run.pages for run in work.sequence.cold_runs]).T.astype(np.int64)
                )
                for row, work in enumerate(works)
                if work.sequence.cold_blocks
            },
        )

    def fits_graph(self, works: Many[Work]) -> bool:
        """Return whether a graph of `packed` can compute the state layers of a step."""
        return not self._states or len(works) - leading_singles([len(w.tokens) for w in works]) <= PROMPT_ROWS

    def send(self, works: Many[Work], rows: int, tokens: int) -> None:
        """Upload the inputs of a step, for a replay of the graph that was captured with `packed(tokens)`. Padding
        sequences fill the batch up to `rows` sequences. The last padding sequence holds all padding tokens, so that
        the step has `tokens` tokens."""
        spare = rows - len(works)
        left = tokens - sum(len(work.tokens) for work in works)
        padding = _StepNumbers(
            np.zeros(left, np.int64), np.zeros(left, np.int64), np.full(left, -1), np.full(left, spare - 1),
            np.full(spare, self._tables.shape[1] - 1), np.zeros(spare, np.int64), np.append(np.zeros(spare, np.int64), left),
            np.zeros((self._states, spare), np.int32), np.zeros(spare if self._shifted else 0, np.int64),
        )  # fmt: skip
        numbers = self._numbers(works) if works else None
        every = padding if numbers is None else numbers.append_rows(padding)
        self._send(every, tokens, self._state_numbers(numbers) if self._states else ())

    @property
    def _state_sizes(self) -> list[int]:
        """The sizes of the arrays of `_state_numbers`."""
        counts = self.rows, PROMPT_ROWS
        return [size for n in counts for size in (n + 1, self._states * n, self._states * n)]

    def _state_numbers(self, numbers: _StepNumbers | None) -> list[Ids]:
        """Return three arrays for each of the two parts of a step, single tokens and prompts: starts, and the state
        pages to read and to write. Padding sequences have no tokens and no pages."""
        found: list[Ids] = []
        singles = 0 if numbers is None else leading_singles(np.diff(numbers.starts))
        for part, size in ((slice(singles), self.rows), (slice(singles, None), PROMPT_ROWS)):
            starts = np.zeros(size + 1, np.int32)
            pages = np.zeros((2, self._states, size), np.int32)
            if numbers is not None:
                own = numbers.states[:, part]
                pages[:, :, : own.shape[1]] = own * ~np.array(numbers.fresh[part], np.bool_), own
                bounds = numbers.starts[: singles + 1] if part.stop is not None else numbers.starts[singles:]
                starts[: len(bounds)], starts[len(bounds) :] = bounds, bounds[-1]
            found += [starts, pages[0].reshape(-1), pages[1].reshape(-1)]
        return found

    def send_drafted(self, works: Many[Work], size: int) -> None:
        """Upload a step of up to `size` tokens, for a replay of the graph that was captured with `drafted(size)`.
        The upload includes the changed entries of block tables. Padding sequences of one token each fill the step up
        to `size` tokens."""
        block = self._padding.get(size)
        if block is None:
            block = self._padding[size] = self._drafted_padding(size)
        slots = None
        if works:
            block = block.copy()
            numbers = self._numbers(works)
            slots = numbers.adapters
            used, count = len(numbers.tokens), len(works)
            of_tokens, of_rows, starts, seen = self._drafted_parts(block, size)
            of_tokens[:4, :used] = numbers.tokens, numbers.positions, numbers.source, numbers.row_of
            if self._tree_columns:
                trees = (
                    _trees(works, numbers.positions, numbers.starts)
                    if numbers.trees is None
                    else numbers.trees
                )
                of_tokens[4:, :used] = trees.positions, trees.previous
                seen[:used, : trees.seen.shape[1]] = trees.seen
            of_tokens[3, used:] = np.arange(count, count + size - used)
            starts[:count] = numbers.starts[:-1]
            starts[count:] = np.minimum(np.arange(used, used + size - count + 1), size)
            patched, pages = self._patches(numbers.rows)
            of_rows[:3, :count] = numbers.rows, numbers.lengths, patched
            at = 3 + len(pages)
            of_rows[3:at, :count] = pages
            if self._states:
                of_rows[at : at + self._states, :count] = numbers.states
                of_rows[at + self._states, :count] = [len(work.tokens) - work.drafts for work in works]
            if self._shifted:
                of_rows[-1, :count] = numbers.shifts
        self._copy(block, slots=slots, slot_count=size)

    def _drafted_parts(self, block: Ids, size: int) -> tuple[Ids, Ids, Ids, npt.NDArray[np.uint8]]:
        """Return four views of the array `block`: integers per token, integers per sequence, the starts of sequences,
        and the draft trees. `block` contains all integers that are copied to the device for a graph of `size` tokens
        (see `drafted`)."""
        at, end = self._token_fields * size, len(block) - size * self._tree_columns // 4
        starts = end - size - 1
        return (
            block[:at].reshape(-1, size),
            block[at:starts].reshape(-1, size),
            block[starts:end],
            block[end:].view(np.uint8).reshape(size, -1),
        )

    def _drafted_padding(self, size: int) -> Ids:
        """Return the integers of a graph of `size` tokens (see `drafted`), for a step that contains only padding."""
        width, states = len(self._tables), self._states
        fields = self._token_fields + 3 + width + (states + 1 if states else 0) + self._shifted
        block = np.zeros(fields * size + size + 1 + size * self._tree_columns // 4, np.int32)
        of_tokens, of_rows, starts, seen = self._drafted_parts(block, size)
        seen[:, :1] = 1
        of_tokens[2], of_tokens[3] = -1, np.arange(size)
        of_rows[0], of_rows[2] = self._tables.shape[1] - 1, -1
        if states:
            of_rows[3 + width + states] = 1
        starts[:] = np.arange(size + 1)
        return block

    def send_singles(self, works: Many[Work], rows: int) -> None:
        """Upload a step with one token per sequence, for a replay of the graph that was captured with
        `replayed(rows)`. The upload includes padding and the changed entries of block tables."""
        width, count = len(self._tables), len(works)
        block = np.zeros((field_count(width, self._states, self._shifted), rows), np.int32)
        block[2], block[3], block[5] = -1, self._tables.shape[1] - 1, -1
        slots = None
        if works:
            numbers = self._numbers(works)
            slots = numbers.adapters
            if len(numbers.tokens) != count:
                raise ValueError("a step of single tokens has a sequence with more than one")
            patched, pages = self._patches(numbers.rows)
            of_all = numbers.tokens, numbers.positions, numbers.source, numbers.rows, numbers.lengths, patched
            block[:ROW_FIELDS, :count] = of_all
            at = ROW_FIELDS
            block[at : at + width, :count] = pages
            block[at + width : at + width + self._states, :count] = numbers.states
            if self._shifted:
                block[-1, :count] = numbers.shifts
        self._copy(block.reshape(-1), slots=slots, slot_count=rows)

    def replayed(self, rows: int, chosen: torch.Tensor, shares: bool = False, adapted: bool = False) -> Batch:
        """Return the batch for the capture of a CUDA graph that computes `rows` sequences of one token each. The graph
        computes the tensors of this batch from the numbers that `send_singles` uploads, so every replay uses the last
        upload. With `adapted`, the sequences may use adapters.
        """
        found = lay_out_step(self._sent, self._tables, chosen, rows, self._block, self._states, self._shifted)
        layout = self.cache.layout
        return Batch(
            tokens=found.tokens,
            positions=found.positions,
            starts=self._counting[: rows + 1],
            lengths=found.lengths,
            last=self._last[:rows],
            tables={group.index: found.tables[group.columns] for group in layout.of("token")},
            slots={group.index: found.slots[group.columns] for group in layout.of("token")},
            pages={group.index: found.pages[group.columns] for group in layout.of("token")},
            places=found.places,
            states={group.index: found.states[group.columns] for group in layout.of("state")},
            fresh=(False,) * rows,
            bounds=tuple(range(rows + 1)),
            sizes=(1,) * rows,
            replayed=True,
            shares=shares,
            rotary=found.positions + found.shifts[0] if self._shifted else None,
            adapters=AdapterRows.of(self._slots[:rows]) if adapted else None,
        )

    def packed(self, tokens: int, chosen: torch.Tensor) -> Batch:
        """Return the batch for the capture of a CUDA graph with space for `tokens` tokens. The graph computes the
        tensors of this batch from the numbers that `send` uploads, so every replay uses the last upload. `bounds` and
        `sizes` of the batch are placeholders.
        """
        rows = self.rows + 1
        bounds = (*(0,) * rows, tokens)
        batch = self._batch(self._tables.shape[2], chosen, (False,) * rows, bounds, (0,) * rows)
        if self._states:
            begin, sizes = sum(self._part_sizes(tokens, rows)), self._state_sizes
            parts = torch.split(self._sent[begin : begin + sum(sizes)], sizes)
            batch = replace(
                batch,
                state_inputs=(self._state_inputs(parts[:3], 1), self._state_inputs(parts[3:], tokens)),
            )
        return self._with_adapters(batch, tokens)

    def _state_inputs(self, arrays: Many[torch.Tensor], longest: int) -> StateInputs:
        """Return the inputs of one part of a step from its three arrays of `_state_numbers`."""
        starts, read, write = arrays
        groups = self.cache.layout.of("state")
        pages = [{g.index: ids.view(self._states, -1)[g.columns] for g in groups} for ids in (read, write)]
        return StateInputs(starts, pages[0], pages[1], longest)

    def _with_adapters(self, batch: Batch, tokens: int) -> Batch:
        """Return the batch of a graph, with the adapter slots of its first `tokens` tokens. The slots are those of the
        last upload. If sequences cannot use adapters, return the batch unchanged."""
        if not self._adapted:
            return batch
        return replace(batch, adapters=AdapterRows.of(self._slots[:tokens]))

    def drafted(self, tokens: int, longest: int, chosen: torch.Tensor) -> Batch:
        """Return the batch for the capture of steps with drafts. The graph has space for `tokens` tokens, and for as many
        sequences, because a sequence may have a single token. A sequence has at most `longest` tokens. Every replay reads
        the integers that `send_drafted` sent last."""
        width, sequences, blocks = self._tables.shape
        states, sent = self._states, self._sent
        fields = 3 + width + (states + 1 if states else 0) + self._shifted
        sizes = [self._token_fields * tokens, fields * tokens, tokens + 1, tokens * self._tree_columns // 4]
        of_tokens, of_rows, starts, seen = torch.split(sent[: sum(sizes)], sizes)
        ids, positions, source, row_of, *of_trees = of_tokens.view(-1, tokens)
        of_rows = of_rows.view(fields, tokens)
        of, lengths, patched = of_rows[:3]
        at = 3 + width
        if width:  # for a sequence without a new block, page 0 is written to the padding line of the table
            is_new = patched >= 0
            place = torch.where(is_new, of * blocks + patched, (sequences - 1) * blocks)
            self._tables.view(width, -1).index_copy_(1, place.long(), of_rows[3:at] * is_new)
        stored = of_rows[at + states] if states else None
        shifts = of_rows[-1] if self._shifted else of_rows[:0]
        pages_of_states = of_rows[at : at + states]
        numbers = (ids, positions, source, row_of, of, lengths, starts, pages_of_states, shifts)
        bounds = tuple(range(tokens + 1))
        batch = self._gather(numbers, blocks, chosen, (False,) * tokens, bounds, (0,) * tokens)
        if self._tree_columns:
            batch = _with_trees(
                batch, seen.view(torch.uint8).view(tokens, -1), *(part.long() for part in of_trees)
            )
        return self._with_adapters(replace(batch, replayed=True, longest=longest, stored=stored), tokens)

    def _numbers(self, works: Many[Work]) -> _StepNumbers:
        if not works:
            raise ValueError("a step needs at least one sequence with tokens to compute")
        counts = np.array([len(work.tokens) for work in works])
        if (counts == 0).any():
            raise ValueError(f"sequence {int(np.flatnonzero(counts == 0)[0])} of the step has no tokens")
        block_tables = self.cache.block_tables
        rows = np.array([work.sequence.row for work in works])
        before = block_tables.length[rows] + [work.skipped - work.recomputed for work in works]
        kept = [0 if work.rewrites else work.recomputed for work in works]
        starts = np.concatenate(([0], counts.cumsum()))
        lengths = before + counts
        if (lengths > block_tables.blocks[rows] * self._block).any() or (
            self._states and not block_tables.states[:, rows].all()
        ):
            raise ValueError("some tokens of the step have no page; extend the sequence first")
        row_of = np.arange(len(works)).repeat(counts)
        source = np.full(len(row_of), -1)
        source[starts[:-1]] = [work.source for work in works]
        positions = before[row_of] + np.arange(starts[-1]) - starts[row_of]
        if any(kept):
            source[positions < (before + kept)[row_of]] = RECOMPUTED
        drafts = tuple(work.drafts for work in works)
        return _StepNumbers(
            np.concatenate([work.tokens for work in works]),
            positions,
            source,
            row_of,
            rows,
            lengths,
            starts,
            block_tables.states[:, rows],
            self._shifts(works),
            tuple((block_tables.state_length[rows] == 0).tolist()),
            drafts if any(drafts) else (),
            _trees(works, positions, starts) if any(work.parents for work in works) else None,
            _adapter_slots(works, positions, starts) if self._adapted else None,
        )

    def _shifts(self, works: Many[Work]) -> Ints:
        images = [work.images for work in works] if self._shifted else []
        return np.array([0 if inputs is None else inputs.shift for inputs in images], dtype=np.int64)

    def _send(self, numbers: _StepNumbers, slot_count: int = 0, more: Many[Ids] = ()) -> None:
        self._copy(*numbers.parts, *more, slots=numbers.adapters, slot_count=slot_count)
        if self._mirrored:
            rows = numbers.rows[numbers.rows < self.cache.page_tables.shape[1]]
            self._send_tables(rows, self.cache.take_changed(rows))

    def _copy(
        self,
        *parts: npt.NDArray[np.int64] | npt.NDArray[np.int32],
        slots: Ids | None = None,
        slot_count: int = 0,
    ) -> None:
        """Upload the arrays `parts`, one after the other. If sequences may use adapters, also upload `slot_count`
        adapter slots, one per token: first the given `slots`, then 0, which means no adapter."""
        turn, self._turn = self._turn, self._turn ^ 1  # the other buffer may still be in transfer
        host, size = self._host[turn], 0
        if self._read:
            self._read[turn].synchronize()
        view = host.numpy()
        for part in parts:
            view[size : size + len(part)] = part
            size += len(part)
        self._sent[:size].copy_(host[:size], non_blocking=True)
        if self._adapted and slot_count:
            used = 0 if slots is None else len(slots)
            given = self._host_slots[turn][:slot_count].numpy()
            given[used:] = 0
            if slots is not None:
                given[:used] = slots
            self._slots[:slot_count].copy_(self._host_slots[turn][:slot_count], non_blocking=True)
        if self._read:
            self._read[turn].record()

    def _patches(self, rows: Ints) -> tuple[Ints, npt.NDArray[np.int32]]:
        """Return, for each sequence, the number of its one changed block and the page ids of this block. The number is
        -1 if no block has changed. If several blocks of a sequence have changed, upload their page ids here, and return
        -1. `rows` are the row numbers of the sequences in the block tables.
        """
        block_tables = self.cache.block_tables
        first = block_tables.take_changed(rows)
        unseen = block_tables.blocks[rows] - first
        some = unseen > 1
        if some.any():
            self._send_tables(rows[some], first[some])
        patched = np.where(unseen == 1, first, -1)
        return patched, block_tables.tables[:, rows, np.maximum(patched, 0)]

    def _send_tables(self, rows: Ints, first: npt.NDArray[Any]) -> None:
        """Upload the block tables of some sequences. `rows` are their row numbers in the block tables. `first` is the
        number of the first block to upload for each sequence.
        """
        block_tables = self.cache.block_tables
        until = block_tables.blocks[rows]
        changed = np.flatnonzero(until > first)
        if not len(changed) or not len(
            block_tables.tables
        ):  # a model with only recurrent layers has no tables
            return
        width, sequences, blocks = self._tables.shape
        parts = zip(rows[changed], first[changed], until[changed], strict=True)
        at = np.concatenate([row * blocks + np.arange(begin, end) for row, begin, end in parts])
        pages = block_tables.tables.reshape(width, -1)[:, at]
        places = at + np.arange(width)[:, None] * sequences * blocks
        sent = upload(np.stack((places, pages)).reshape(2, -1), self.device)
        self._tables.view(-1).index_copy_(0, sent[0], sent[1].int())

    def _host_batch(self, numbers: _StepNumbers, blocks: int, chosen: torch.Tensor | None) -> Batch:
        """Return the batch for a device that uses the cache's own block tables (a CPU). Computed in numpy, because a
        numpy call takes a third of the time of a torch call."""
        ids, positions = torch.from_numpy(numbers.tokens), torch.from_numpy(numbers.positions)
        if chosen is not None and (numbers.source >= 0).any():
            source = torch.from_numpy(numbers.source)
            ids = torch.where(source < 0, ids, chosen[source.clamp(min=0)])
        row_tables = np.ascontiguousarray(self.cache.page_tables[:, numbers.rows, :blocks])
        block, places = np.divmod(numbers.positions, self._block)
        at = np.ascontiguousarray(row_tables[:, numbers.row_of, block], dtype=np.int64)
        at[:, numbers.source == RECOMPUTED] = 0
        tables, pages = torch.from_numpy(row_tables), torch.from_numpy(at)
        slots = torch.from_numpy(at * self._block + places)
        states = torch.from_numpy(numbers.states.astype(np.int64))
        tokens, kept = self.cache.layout.of("token"), self.cache.layout.of("state")
        shifts = numbers.positions + numbers.shifts[numbers.row_of] if self._shifted else None
        return Batch(
            tokens=ids,
            positions=positions,
            starts=torch.from_numpy(numbers.starts.astype(np.int32)),
            lengths=torch.from_numpy(numbers.lengths.astype(np.int32)),
            last=torch.from_numpy(numbers.starts[1:] - 1),
            tables={group.index: tables[group.columns] for group in tokens},
            slots={
                group.index: self._own_slots(pages[group.columns], positions, group.page_tokens)
                if group.parts > 1
                else slots[group.columns]
                for group in tokens
            },
            pages={group.index: pages[group.columns] for group in tokens},
            places=torch.from_numpy(places),
            states={group.index: states[group.columns] for group in kept},
            fresh=numbers.fresh,
            bounds=tuple(numbers.starts.tolist()),
            sizes=tuple(numbers.lengths.tolist()),
            rotary=None if shifts is None else torch.from_numpy(shifts),
            drafts=numbers.drafts,
            recomputes=bool((numbers.source == RECOMPUTED).any()),
            adapters=None if numbers.adapters is None else AdapterRows.on_host(numbers.adapters),
        )

    def _own_slots(self, pages: torch.Tensor, positions: torch.Tensor, page_tokens: int) -> torch.Tensor:
        """Return the slots of a group whose blocks are divided between ranks. `pages` has the page of each token. A
        token that another rank stores has slot -1."""
        places = positions % self._block - self.cache.layout.part.rank * page_tokens
        is_own = (places >= 0) & (places < page_tokens)
        return torch.where(is_own, pages * page_tokens + places, -1)

    def _batch(
        self,
        blocks: int,
        chosen: torch.Tensor | None,
        fresh: tuple[bool, ...],
        bounds: tuple[int, ...],
        sizes: tuple[int, ...],
    ) -> Batch:
        """Return the batch. The device computes it from the numbers that were uploaded for this step."""
        parts = self._part_sizes(bounds[-1], len(sizes))
        numbers = torch.split(self._sent[: sum(parts)], parts)
        return self._gather(numbers, blocks, chosen, fresh, bounds, sizes)

    def _part_sizes(self, tokens: int, rows: int) -> list[int]:
        """Return the sizes of `_StepNumbers.parts`."""
        shifts = rows if self._shifted else 0
        return [tokens, tokens, tokens, tokens, rows, rows, rows + 1, self._states * rows, shifts]

    def _gather(
        self,
        numbers: Many[torch.Tensor],
        blocks: int,
        chosen: torch.Tensor | None,
        fresh: tuple[bool, ...],
        bounds: tuple[int, ...],
        sizes: tuple[int, ...],
    ) -> Batch:
        """Return the batch that `numbers` describe. `numbers` has the order of `_StepNumbers.parts`. Block tables
        and slots are gathered on the device."""
        rows = len(sizes)
        ids, positions, source, row_of, of, lengths, starts, states, shifts = numbers
        ids, positions = ids.long(), positions.long()
        if chosen is not None:
            ids = torch.where(source < 0, ids, chosen[source.clamp(min=0)])
        tables = self._tables[:, :, :blocks].index_select(1, of)
        pages = tables[:, row_of, positions // self._block].long().masked_fill_(source == RECOMPUTED, 0)
        places = positions % self._block
        slots = pages * self._block + places
        states = states.view(self._states, rows).long()
        layout = self.cache.layout
        return Batch(
            tokens=ids,
            positions=positions,
            starts=starts,
            lengths=lengths,
            last=starts[1:].long() - 1,
            tables={group.index: tables[group.columns] for group in layout.of("token")},
            slots={
                group.index: self._own_slots(pages[group.columns], positions, group.page_tokens)
                if group.parts > 1
                else slots[group.columns]
                for group in layout.of("token")
            },
            pages={group.index: pages[group.columns] for group in layout.of("token")},
            places=places,
            states={group.index: states[group.columns] for group in layout.of("state")},
            fresh=fresh,
            bounds=bounds,
            sizes=sizes,
            rotary=positions + shifts[row_of] if self._shifted else None,
        )


def leading_singles(counts: Many[int] | Ints) -> int:
    """Return how many sequences at the start of a step have one token. `counts` has the number of tokens of each
    sequence."""
    return next((i for i, count in enumerate(counts) if count != 1), len(counts))


def _adapter_slots(works: Many[Work], positions: Ints, starts: Ints) -> Ids | None:
    """Return the adapter slot of each token. None if no token uses an adapter."""
    if not any(work.adapter for work in works):
        return None
    slots = np.zeros(len(positions), np.int32)
    for work, start, end in zip(works, starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        if work.adapter:
            slots[start:end] = np.where(positions[start:end] >= work.active_from, work.adapter, 0)
    return slots if slots.any() else None


def _with_trees(batch: Batch, seen: torch.Tensor, positions: torch.Tensor, previous: torch.Tensor) -> Batch:
    """Return a copy of `batch` with draft trees. The tokens keep their slots."""
    rotary = None if batch.rotary is None else batch.rotary + (positions - batch.positions)
    return replace(batch, positions=positions, rotary=rotary, trees=seen, previous=previous)


def _trees(works: Many[Work], slots: Ints, starts: Ints) -> _Trees:
    """Return the trees of a step. `slots` has the index of each token in its sequence, counting the tokens of all
    branches of its tree. `starts` has the index of each sequence's first token in the step."""
    counts = np.diff(starts)
    longest = int(counts.max())
    dtype = np.uint8 if longest < 256 else np.int32  # on a CPU, a prompt in the same step can be long
    columns = max(4, 1 << (longest - 1).bit_length())  # few widths, because each needs its own attention plan
    seen = np.zeros((len(slots), columns), dtype)
    positions, previous = slots.copy(), slots - 1
    for work, start, count in zip(works, starts[:-1].tolist(), counts.tolist(), strict=True):
        own = seen[start : start + count]
        chain = count - len(work.parents)
        own[:chain, :chain] = np.tri(chain, dtype=dtype) * np.arange(1, chain + 1, dtype=dtype)
        for node, parent in enumerate(work.parents, chain):
            before = chain + parent
            if before >= 0:
                own[node] = own[before]
            own[node, node] = own[before, before] + 1 if before >= 0 else 1
            positions[start + node] = slots[start] + int(own[node, node]) - 1
            previous[start + node] = slots[start] + before
    return _Trees(seen, positions, previous)
