"""The façade a scheduler calls: match, open, extend, commit, rollback, fork, close.

One cache serves every kind of layer: nothing here asks which. It moves no bytes; copies that its
decisions need are collected by `take_copies` and must run before the next step writes.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence as Many
from itertools import count

import numpy as np
import numpy.typing as npt

from .audit import audit
from .clock import Clock, WallClock
from .events import EventBus
from .layout import PoolLayout
from .lookup import Lookup, Match, Stop
from .media import Media, MediaIds, MediaRun
from .names import TOKEN_BYTES, root_name, token_bytes
from .policies import Policy, make_policy
from .pool import Columns, Ids, PagePool
from .prefix import Checkpoint, Node, PrefixTree, Retention
from .resume import longest_resume
from .room import CopyBatch, Room
from .sequence import Control, Sequence, SequenceRows, Snapshots
from .tenants import Account, Accounts, Tenant

__all__ = ["KVCache", "Pin"]

Rows = npt.NDArray[np.integer]


class Pin:
    """Pages that stay until `expires`, whatever the pressure."""

    __slots__ = ("account", "expires", "length", "node", "rows", "states")

    def __init__(self, node: Node, length: int, rows: Ids, states: Ids | None, expires: float) -> None:
        self.node: Node | None = node
        self.account = node.root.account
        self.length = length
        self.rows = rows
        self.states = states
        self.expires = expires


class KVCache:
    """See the module. Not thread-safe: one scheduler calls it.

    Sequences are bounded by `max_sequences` open at once and `max_tokens` each; tables reserve
    address space for both, and memory only as it is used.
    """

    SESSIONS = 1 << 16

    def __init__(
        self,
        layout: PoolLayout,
        slabs: int,
        *,
        model: str = "",
        policy: str | Policy = "lru",
        max_sequences: int = 256,
        max_tokens: int = 131072,
        tenants: Iterable[Tenant] = (),
        snapshots: Snapshots | None = None,
        clock: Clock | None = None,
    ) -> None:
        if max_sequences < 1 or max_tokens < 1:
            raise ValueError(f"max_sequences {max_sequences} and max_tokens {max_tokens} must be positive")
        self.layout = layout
        self.block_tokens = layout.block_tokens
        self.model = model
        self.max_tokens = max_tokens
        self.snapshots = snapshots or Snapshots()
        self.clock: Clock = clock or WallClock()
        self.events = EventBus()
        self.pool = PagePool([g.pages_per_slab for g in layout.groups], slabs)
        self.pages, self.states, self.media = (self._columns(n) for n in ("token", "state", "media"))
        self.media_ids = MediaIds()
        self.tree = PrefixTree(layout, self.pages, self.states, self.events, self.media_ids.digest_of)
        self.accounts = Accounts(tenants, make_policy(policy), (slabs - 1) * layout.slab_bytes)
        self.room = Room(self.pool, self.tree, self.media, self.accounts, self.clock, layout.slab_bytes)
        self.room.renumber = self._renumber
        self.room.release_expired = self.release_expired
        self.lookup = Lookup(self.tree, self.room, self.clock)
        max_blocks = -(-max_tokens // self.block_tokens)
        self.rows = SequenceRows(
            max_sequences, max_blocks, self.block_tokens, self.pages.width, self.states.width, len(self.tree.windows)
        )
        self.has_states = bool(self.states.width)
        self.misses: Counter[str] = Counter()
        self.looked_up_tokens = 0
        self.hit_tokens = 0
        self._watch = np.zeros(max_sequences, np.bool_)
        self._pins: list[tuple[float, int, Pin]] = []
        self._pin_numbers = count()
        self._sessions: OrderedDict[str, Node] = OrderedDict()
        self._roots: dict[tuple[str, str], bytes] = {}

    def _columns(self, numbering: str) -> Columns:
        classes = [self.pool.class_of[g.index] for g in self.layout.of(numbering) for _ in range(g.runs)]
        return Columns(self.pool, classes, self.layout.slab_bytes)

    # -- looking up -----------------------------------------------------------------------------

    def root_name(self, control: Control) -> bytes:
        key = (control.tenant, control.adapter)
        name = self._roots.get(key)
        if name is None:
            if len(self._roots) > 4096:
                self._roots.clear()
            name = self._roots[key] = root_name(self.model, control.tenant, control.adapter)
        return name

    def match(self, tokens: npt.ArrayLike, control: Control | None = None, media: Many[Media] = ()) -> Match:
        """How far the cache can take a prompt (its last token is always left to compute). Changes nothing."""
        return self._match(tokens, control or Control(), media, spare_last=True)

    def _match(self, tokens: npt.ArrayLike, control: Control, media: Many[Media], spare_last: bool) -> Match:
        if media:
            placed = self.media_ids.place(np.array(np.asarray(tokens), np.int32), media)
            data = placed.tobytes()
        else:
            data = token_bytes(tokens)
        length = len(data) // TOKEN_BYTES
        if length > self.max_tokens:
            raise ValueError(f"a prompt of {length} tokens exceeds max_tokens {self.max_tokens}")
        limit = max(0, length - 1) if spare_last else length
        return self.lookup.find(self.root_name(control), data, control, media, limit)

    def explain(self, match: Match, across_tenants: bool = True) -> Stop:
        """Why a prompt hit no further. `across_tenants` also looks at others' prefixes: for operators."""
        return self.lookup.explain(match, across_tenants)

    def _fresh(self, match: Match) -> Match:
        if match.version == self.tree.version:
            return match
        return self.lookup.find(match.root_name, match.data, match.control, match.media, match.limit)

    # -- opening --------------------------------------------------------------------------------

    def open(self, match: Match) -> Sequence:
        """A sequence that starts with what `match` found (looked up again if the cache has changed)."""
        row = self.rows.take()
        match = self._fresh(match)
        now = self.clock.now()
        account = self.accounts[match.control.tenant]
        root = self.tree.root(match.root_name, account)
        node = self._stand(match, root, now)
        self.tree.lock(node)
        seq = Sequence(self, row, root, node, match.control)
        self.rows.handles[row] = seq
        point = match.resume
        seq.resumed = point
        seq.prompt = match.length
        seq.media = tuple(sorted(match.media, key=lambda m: m.start)) if self.media.width else ()
        self._seat(seq, point, self._in_view(match.rows, point), match.data)
        if match.checkpoint is not None:
            self._start_from(seq, match.checkpoint, now)
        elif point and self.snapshots.branch and self.tree.windows and not self.has_states:
            self.tree.checkpoint(self._node_at(node, match.data, point), point, None, now)
        for item in seq.media:
            if item.tokens and item.start < point:
                self._hold_run(seq, self.room.runs[seq.root.name + item.digest], now)
        seq.wanted = self._wanted(match)
        self._watch[row] = bool(seq.wanted)
        self.looked_up_tokens += match.length
        self.hit_tokens += point
        self.misses[match.stop.reason] += 1
        return seq

    def _stand(self, match: Match, root: Node, now: float) -> Node:
        """The node that ends at the resume point's block boundary; cut where it must be, counted as hit."""
        boundary = match.resume // self.block_tokens * self.block_tokens
        policy = self.accounts[match.control.tenant].queue.policy
        node = root
        for passed in match.path:
            if passed.start >= boundary:
                if passed.start < match.resume:
                    passed.last_used = now
                break
            node = passed if passed.end <= boundary else self.tree.split(passed, boundary)
            node.hits += 1
            node.last_used = now
            policy.on_hit(node, now)
            if passed is not node:
                passed.last_used = now if boundary < match.resume else passed.last_used
                break
        return node

    def _in_view(self, rows: Ids, point: int) -> Ids:
        """A copy of `rows` without the pages that a query at `point` sees no more."""
        rows = rows.copy()
        for span, columns in zip(self.tree.windows, self.tree.window_columns, strict=True):
            rows[: span.first_visible(point) // self.block_tokens, columns] = 0
        return rows

    def _seat(self, seq: Sequence, point: int, rows: Ids, data: bytes) -> None:
        """Give a row its first `point` tokens: holds, table, window edges, tail."""
        row = seq.row
        seq.root.account.held += self.pages.retain(rows)
        self.rows.tables[:, row, : len(rows)] = rows.T
        self.rows.blocks[row] = len(rows)
        self.rows.length[row] = point
        self._set_window_edges(row, point)
        tail = point - seq.published
        if tail:
            start = seq.published * TOKEN_BYTES
            self.rows.tail[row, :tail] = np.frombuffer(data, np.int32, tail, start)
        seq.shared_tail = bool(tail)
        self.rows.special[row] = seq.shared_tail or self.has_states or bool(seq.media)
        self.rows.changed[row] = True

    def _set_window_edges(self, row: int, point: int) -> None:
        for window, span in enumerate(self.tree.windows):
            self.rows.first[window, row] = span.first_visible(point) // self.block_tokens

    def _start_from(self, seq: Sequence, checkpoint: Checkpoint, now: float) -> None:
        assert checkpoint.states is not None
        seq.state_source = checkpoint.states.copy()
        seq.root.account.held += self.states.retain(seq.state_source)
        checkpoint.hits += 1
        checkpoint.last_used = now
        seq.root.account.queue.policy.on_hit(checkpoint, now)

    def _node_at(self, node: Node, data: bytes, point: int) -> Node:
        """The node that holds `point`, at or below `node` on the path of `data`."""
        ids = memoryview(data).cast("i")
        while node.end < point:
            node = node.children[ids[node.end]]
        return node

    def _wanted(self, match: Match) -> tuple[int, ...]:
        if not self.tree.keeps_checkpoints or not match.control.store:
            return ()
        wanted = set()
        if self.snapshots.prompt_end:
            wanted.add(match.length - self.snapshots.before_last)
        if self.snapshots.branch and self.has_states:
            # Others have come this way and could not resume here: leave a snapshot for the next.
            wanted.add(match.matched // self.block_tokens * self.block_tokens)
        return tuple(sorted(p for p in wanted if p > match.resume))

    # -- growing --------------------------------------------------------------------------------

    def extend(self, seq: Sequence, n: int) -> int:
        """Reserve pages for `n` more tokens. Returns how many pages are missing; 0 means it is done, and
        otherwise nothing has changed."""
        self._check(seq)
        if n < 0:
            raise ValueError(f"cannot extend by {n} tokens")
        length = int(self.rows.length[seq.row])
        if length + n > self.max_tokens:
            raise ValueError(f"{length} + {n} tokens exceed max_tokens {self.max_tokens}")
        account = seq.root.account
        now = self.clock.now()
        new_runs, held_runs = self._runs_for(seq, length + n, now)
        blocks, copy_tail, states = self._wants(seq, length, n)
        needs = self._needs(blocks + copy_tail, states, sum(-(-m.tokens // self.block_tokens) for m in new_runs))
        missing = self.room.make(account, needs)
        if missing:
            for run in held_runs:
                self._drop_run(seq, run, now)
            return missing
        size = self.room.bytes_of(needs)
        account.used += size
        account.held += size
        if copy_tail:
            self._copy_tail(seq, length // self.block_tokens)
        if blocks:
            self._reserve(seq, blocks)
        if states:
            self._give_states(seq)
        for item in new_runs:
            rows = self.media.allocate(-(-item.tokens // self.block_tokens))
            seq.runs[seq.root.name + item.digest] = rows
        if n:
            self.rows.special[seq.row] = any(
                item.tokens and seq.root.name + item.digest not in seq.runs for item in seq.media
            )
        return 0

    def _wants(self, seq: Sequence, length: int, n: int) -> tuple[int, int, int]:
        """Blocks to reserve, whether the tail must be copied, whether states are needed."""
        have = int(self.rows.blocks[seq.row])
        blocks = max(0, -(-(length + n) // self.block_tokens) - have)
        copy_tail = int(n > 0 and seq.shared_tail)
        states = int(n > 0 and self.has_states and not self.rows.states[0, seq.row])
        return blocks, copy_tail, states

    def _needs(self, rows: int, states: int, media: int) -> list[int]:
        needs = self.pages.needs(rows)
        if states:
            needs = [a + b for a, b in zip(needs, self.states.needs(states), strict=True)]
        if media:
            needs = [a + b for a, b in zip(needs, self.media.needs(media), strict=True)]
        return needs

    def _reserve(self, seq: Sequence, blocks: int) -> None:
        row, have = seq.row, int(self.rows.blocks[seq.row])
        near = self.rows.tables[:, row, have - 1] if have and self.pages.keepers else None
        fresh = self.pages.allocate(blocks, near)
        self.rows.tables[:, row, have : have + blocks] = fresh.T
        self.rows.blocks[row] = have + blocks
        self.rows.changed[row] = True

    def _copy_tail(self, seq: Sequence, block: int) -> None:
        """The partial block is someone else's page: write to a copy."""
        row = seq.row
        source = self.rows.tables[:, row, block][None].copy()
        target = self.pages.allocate(1, source[0] if self.pages.keepers else None)
        self.room.copies.add_rows(self.pages, source, target)
        self.room.copies.hold(self.pages, source, seq.root.account)
        self.rows.tables[:, row, block] = target[0]
        self.rows.changed[row] = True
        seq.shared_tail = False

    def _give_states(self, seq: Sequence) -> None:
        live = self.states.allocate(1)
        self.rows.states[:, seq.row] = live[0]
        self.rows.changed[seq.row] = True
        if seq.state_source is not None:
            self.room.copies.add_rows(self.states, seq.state_source, live)
            self.room.copies.hold(self.states, seq.state_source, seq.root.account)
            seq.state_source = None

    def extend_many(self, rows: Rows, n: int = 1) -> int:
        """`extend` for the sequences of many rows at once; costs by how many need a new block. Returns
        the pages missing for all of them together; then none was extended."""
        if n < 0:
            raise ValueError(f"cannot extend by {n} tokens")
        lengths = self.rows.length[rows]
        new = (lengths + (n + self.block_tokens - 1)) // self.block_tokens - self.rows.blocks[rows]
        special = self.rows.special[rows]
        if lengths.size and int(lengths.max()) + n > self.max_tokens:
            raise ValueError(f"{int(lengths.max())} + {n} tokens exceed max_tokens {self.max_tokens}")
        if special.any() or len(self.accounts.accounts) > 1 or n > self.block_tokens:
            return self._extend_each(rows[(new > 0) | special], n)
        grow = rows[new > 0]
        if not grow.size:
            return 0
        account = self._handle(int(grow[0])).root.account
        needs = self.pages.needs(grow.size)
        missing = self.room.make(account, needs)
        if missing:
            return missing
        size = self.room.bytes_of(needs)
        account.used += size
        account.held += size
        if self.pages.keepers:
            for row in grow.tolist():
                self._reserve(self._handle(row), 1)
            return 0
        self.rows.tables[:, grow, self.rows.blocks[grow]] = self.pages.allocate(grow.size).T
        self.rows.blocks[grow] += 1
        self.rows.changed[grow] = True
        return 0

    def _extend_each(self, rows: Rows, n: int) -> int:
        sequences = [self._handle(row) for row in rows.tolist()]
        total: dict[int, tuple[Account, list[int]]] = {}
        for seq in sequences:
            blocks, copy_tail, states = self._wants(seq, int(self.rows.length[seq.row]), n)
            account = seq.root.account
            _, sums = total.setdefault(id(account), (account, [0] * len(self.pool.classes)))
            for cls, pages in enumerate(self._needs(blocks + copy_tail, states, 0)):
                sums[cls] += pages
        together = [sum(pages) for pages in zip(*(sums for _, sums in total.values()), strict=True)]
        if together and self.pool.missing_slabs(together):
            account, _ = next(iter(total.values()))
            return self.room.make(account, together)
        for account, sums in total.values():
            beyond = account.beyond_quota(self.room.bytes_of(sums))
            if beyond:
                return self.room.make(account, sums)
        for seq in sequences:
            missing = self.extend(seq, n)
            if missing:
                return missing
        return 0

    # -- committing -----------------------------------------------------------------------------

    def commit(self, seq: Sequence, tokens: npt.ArrayLike) -> None:
        """The next tokens are computed: their pages are real, and full blocks become findable."""
        self._check(seq)
        data = token_bytes(tokens)
        row = seq.row
        length = int(self.rows.length[row])
        n = len(data) // TOKEN_BYTES
        if length + n > seq.reserve or (n and self.rows.special[row]):
            raise ValueError(f"commit of {n} tokens after {length}, but {seq.reserve} are reserved; extend first")
        data = self._with_media(seq, data, length)
        held_back = length - seq.published
        if held_back:
            data = self.rows.tail[row, :held_back].tobytes() + data
        whole = len(data) // TOKEN_BYTES // self.block_tokens * self.block_tokens
        self.rows.length[row] = length + n
        if whole:
            self._publish(seq, data[: whole * TOKEN_BYTES])
        rest = len(data) // TOKEN_BYTES - whole
        if rest:
            self.rows.tail[row, :rest] = np.frombuffer(data, np.int32, rest, whole * TOKEN_BYTES)
        self._commit_runs(seq, length + n)
        self._leave_points(seq, length)
        self._leave_windows(seq)

    def commit_many(self, rows: Rows, tokens: npt.ArrayLike) -> None:
        """One computed token for each of many rows (no row twice); costs by how many fill a block."""
        ids = np.asarray(tokens, np.int32)
        if ids.shape != rows.shape:
            raise ValueError(f"{ids.size} tokens for {rows.size} sequences")
        table = self.rows
        lengths = table.length[rows]
        if (lengths >= table.blocks[rows] * self.block_tokens).any() or table.special[rows].any():
            row = int(rows[(lengths >= table.blocks[rows] * self.block_tokens) | table.special[rows]][0])
            raise ValueError(f"row {row} has no page for its next token; extend first")
        table.tail[rows, lengths % self.block_tokens] = ids
        lengths += 1
        table.length[rows] = lengths
        filled = rows[lengths % self.block_tokens == 0]
        if filled.size:
            self._publish_many(filled)
        watched = rows[self._watch[rows]]
        for row in watched.tolist():
            self._leave_points(self._handle(row), int(table.length[row]) - 1)
        if self.snapshots.every_blocks and self.tree.keeps_checkpoints:
            for row in rows[lengths % (self.snapshots.every_blocks * self.block_tokens) == 0].tolist():
                self._leave_points(self._handle(row), int(table.length[row]) - 1)
        for window, span in enumerate(self.tree.windows):
            if span.kind == "sliding":
                first = np.maximum(lengths - (span.size - 1), 0) // self.block_tokens
            else:
                first = lengths // span.size * span.size // self.block_tokens
            moved = rows[first > table.first[window, rows]]
            if moved.size:
                self._leave_window_many(window, moved)

    def _publish_many(self, rows: Rows) -> None:
        """A full block each: those that only lengthen their own run go together."""
        table = self.rows
        plain, rest = [], []
        for row in rows.tolist():
            seq = self._handle(row)
            own = seq.control.store and not seq.control.retain and self.tree.may_append(seq.node)
            (plain if own else rest).append(seq)
        if plain:
            at = np.array([seq.row for seq in plain])
            pages = table.tables[:, at, table.length[at] // self.block_tokens - 1].T
            nodes = [seq.node for seq in plain]
            self.tree.append_blocks(nodes, table.tail[at].tobytes(), pages, self.clock.now())
            for seq in plain:
                seq.published += self.block_tokens
        for seq in rest:
            self._publish(seq, table.tail[seq.row].tobytes())

    def _leave_window_many(self, window: int, rows: Rows) -> None:
        """`_leave_windows` of one block each for many rows, unless some share the page or the account."""
        table, columns = self.rows, self.tree.window_columns[window]
        old = table.first[window, rows]
        pages = table.tables[columns, rows, old]
        if len(self.accounts.accounts) > 1 or np.unique(pages[0]).size < rows.size or not pages.all():
            for row in rows.tolist():
                self._leave_windows(self._handle(row))
            return
        gone = np.zeros((rows.size, self.pages.width), np.int32)
        gone[:, columns] = pages.T
        self._let_go(self._handle(int(rows[0])).root.account, self.pages, gone)
        table.tables[columns, rows, old] = 0
        table.first[window, rows] = old + 1
        table.changed[rows] = True
        for row, block in zip(rows.tolist(), old.tolist(), strict=True):
            self.tree.offer_range(self._handle(row).node, window, block, block)

    def _with_media(self, seq: Sequence, data: bytes, start: int) -> bytes:
        """Media placeholders as ids of their content, also in what is committed."""
        if not seq.media:
            return data
        ids = np.frombuffer(data, np.int32).copy()
        for item in seq.media:
            ids[max(0, item.start - start) : max(0, item.stop - start)] = self.media_ids.id_of(item.digest)
        return ids.tobytes()

    def _publish(self, seq: Sequence, data: bytes) -> None:
        """Full blocks after `published` enter the tree (or only count, for a request that stores nothing)."""
        tokens = len(data) // TOKEN_BYTES
        start = seq.published
        if not seq.control.store:
            seq.published += tokens
            return
        now = self.clock.now()
        node = seq.node
        cuts = [start, *self._retention_cuts(seq, start, start + tokens), start + tokens]
        for first, last in zip(cuts, cuts[1:], strict=False):
            part = data if len(cuts) == 2 else data[(first - start) * TOKEN_BYTES : (last - start) * TOKEN_BYTES]
            node = self._publish_part(seq, node, part, first, last, now)
        if node is not seq.node:
            self.tree.lock(node)
            self.tree.unlock(seq.node, now)
            seq.node = node
        seq.published = start + tokens

    def _publish_part(
        self, seq: Sequence, node: Node, data: bytes, first: int, last: int, now: float, closing: bool = False
    ) -> Node:
        table = self.rows.tables[:, seq.row, first // self.block_tokens : -(-last // self.block_tokens)]
        rows = table.T.copy()
        node, met = self.tree.publish(node, data, rows, now, self._retention(seq, first, now), closing)
        if met and last % self.block_tokens == 0:
            differs = rows != table.T
            if differs.any():
                account = seq.root.account
                account.held += self.pages.retain(np.where(differs, rows, 0))
                self._let_go(account, self.pages, np.where(differs, table.T, 0))
                table[:] = rows.T
                self.rows.changed[seq.row] = True
        return node

    def _retention_cuts(self, seq: Sequence, start: int, stop: int) -> list[int]:
        edges = {e // self.block_tokens * self.block_tokens for r in seq.control.retain for e in (r.start, r.stop or 0)}
        return sorted(e for e in edges if start < e < stop)

    def _retention(self, seq: Sequence, position: int, now: float) -> Retention:
        for item in seq.control.retain:
            start = item.start // self.block_tokens * self.block_tokens
            if start <= position and (item.stop is None or position < item.stop):
                return item.priority, None if item.ttl is None else now + item.ttl
        return 0, None

    def _leave_windows(self, seq: Sequence) -> None:
        """Pages that left a window go back: to the cache if published, else to the pool."""
        row, length = seq.row, int(self.rows.length[seq.row])
        for window, (span, columns) in enumerate(zip(self.tree.windows, self.tree.window_columns, strict=True)):
            old, new = int(self.rows.first[window, row]), span.first_visible(length) // self.block_tokens
            if new <= old:
                continue
            gone = np.zeros((new - old, self.pages.width), np.int32)
            part = self.rows.tables[columns, row, old:new]
            gone[:, columns] = part.T
            self._let_go(seq.root.account, self.pages, gone)
            part[:] = 0
            self.rows.first[window, row] = new
            self.rows.changed[row] = True
            self.tree.offer_range(seq.node, window, old, new - 1)

    # -- resume points --------------------------------------------------------------------------

    def _leave_points(self, seq: Sequence, before: int) -> None:
        """Checkpoints at the wanted positions that the last commit passed."""
        if not self.tree.keeps_checkpoints or not seq.control.store:
            return
        length = int(self.rows.length[seq.row])
        points = {p for p in seq.wanted if before < p <= length}
        every = self.snapshots.every_blocks * self.block_tokens
        if every:
            points.update(range((before // every + 1) * every, length + 1, every))
        if self.has_states:
            points &= {length}
        for point in sorted(points):
            self.snapshot(seq, point)
        if seq.wanted and seq.wanted[-1] <= length:
            seq.wanted = ()
            self._watch[seq.row] = False

    def snapshot(self, seq: Sequence, position: int | None = None) -> bool:
        """Leave a resume point where the sequence stands (or, without states, at an earlier `position`).
        False where there is no room for its states, or no use for one."""
        self._check(seq)
        length = int(self.rows.length[seq.row])
        point = length if position is None else position
        if not self.tree.keeps_checkpoints or not seq.control.store or not 0 < point <= length:
            return False
        now = self.clock.now()
        if not self.has_states:
            node = self._published_node(seq, point, now)
            return node is not None and self.tree.checkpoint(node, point, None, now) is not None
        if point != length:
            return False
        node = self._published_node(seq, point, now)
        if node is None or self.tree.checkpoint_at(node, point) is not None:
            return False
        needs = self.states.needs(1)
        self.tree.lock(node)
        missing = self.room.make(seq.root.account, needs)
        taken = None
        if not missing:
            account = seq.root.account
            account.used += self.room.bytes_of(needs)
            account.held += self.room.bytes_of(needs)
            copy = self.states.allocate(1)
            live = self.rows.states[:, seq.row][None].copy()
            taken = self.tree.checkpoint(node, point, copy.copy(), now)
            if taken is not None:
                self.room.copies.add_rows(self.states, live, copy)
                account.held += self.states.retain(live)
                self.room.copies.hold(self.states, live, account)
            self._let_go(account, self.states, copy)
        self.tree.unlock(node, now)
        return taken is not None

    def _published_node(self, seq: Sequence, point: int, now: float, closing: bool = False) -> Node | None:
        """The tree's node that holds `point` of a sequence; its partial tail is entered if need be."""
        if point <= seq.published:
            node: Node | None = seq.node
            while node is not None and node.start >= point:
                node = node.parent
            return node if node is not None and node.parent is not None else None
        if point != int(self.rows.length[seq.row]):
            return None
        data = self.rows.tail[seq.row, : point - seq.published].tobytes()
        return self._publish_part(seq, seq.node, data, seq.published, point, now, closing)

    # -- going back -----------------------------------------------------------------------------

    def rollback(self, seq: Sequence, n: int) -> int:
        """Forget the last `n` computed tokens and every reserved page. Returns the length reached: less
        than asked for where states or windows can only resume earlier; compute the rest again."""
        self._check(seq)
        length = int(self.rows.length[seq.row])
        if not 0 <= n <= length:
            raise ValueError(f"cannot roll back {n} of {length} tokens")
        now = self.clock.now()
        blocks = -(-length // self.block_tokens)
        path = self._path(seq.node)
        in_tree = self.tree.rows(path, min(seq.node.end, length))
        rows = self.rows.tables[:, seq.row, :blocks].T.copy()
        mine = rows.copy()
        known = min(len(in_tree), blocks)
        np.copyto(rows[:known], in_tree[:known], where=rows[:known] == 0)
        point, checkpoint = self._point_below(seq, path, rows, length - n, length)
        self._retreat(seq, point, rows, mine, path, now)
        if self.has_states and point < length:
            self._rewind_states(seq, checkpoint, now)
        return point

    @staticmethod
    def _path(node: Node) -> list[Node]:
        path = []
        current: Node | None = node
        while current is not None and current.parent is not None:
            path.append(current)
            current = current.parent
        return path[::-1]

    def _point_below(
        self, seq: Sequence, path: list[Node], rows: Ids, target: int, length: int
    ) -> tuple[int, Checkpoint | None]:
        if target == length or not self.tree.keeps_checkpoints:
            return target, None
        windows = [
            (span, rows[:, columns.start])
            for span, columns in zip(self.tree.windows, self.tree.window_columns, strict=True)
        ]
        if not self.has_states:
            return longest_resume(target, windows, self.block_tokens)[0], None
        candidates = list(path)
        if target > seq.published:  # a snapshot in its own partial tail
            ids = self.rows.tail[seq.row, : target - seq.published].tobytes()
            below, _ = self.tree.walk_below(seq.node, ids, target - seq.published)
            candidates += below
        found = {c.position: c for node in reversed(candidates) for c in reversed(node.checkpoints)}
        point, _ = longest_resume(target, windows, self.block_tokens, found)
        return point, found.get(point)

    def _retreat(self, seq: Sequence, point: int, rows: Ids, mine: Ids, path: list[Node], now: float) -> None:
        row, block = seq.row, self.block_tokens
        kept = self._in_view(rows[: -(-point // block)], point)
        account = seq.root.account
        reserved = int(self.rows.blocks[row])
        before = self.rows.tables[:, row, :reserved].T.copy()
        account.held += self.pages.retain(kept)
        self._let_go(account, self.pages, before)
        self.rows.tables[:, row, :reserved] = 0
        self.rows.tables[:, row, : len(kept)] = kept.T
        self.rows.blocks[row] = len(kept)
        self.rows.length[row] = point
        self.rows.changed[row] = True
        self._set_window_edges(row, point)
        boundary = point // block * block
        if boundary < seq.published:
            self._step_up(seq, path, boundary, point, now)
        if point % block == 0:
            seq.shared_tail = False
        self.rows.special[row] = self.rows.special[row] or seq.shared_tail

    def _step_up(self, seq: Sequence, path: list[Node], boundary: int, point: int, now: float) -> None:
        """Stand at an earlier block boundary; the tokens from there to `point` are the new tail."""
        tail = point - boundary
        seq.shared_tail = tail > 0
        if not seq.control.store and boundary >= seq.node.end:
            seq.published = boundary  # never entered the tree; the page is its own
            seq.shared_tail = False
            return
        text = b"".join(bytes(n.text) for n in path if n.end > boundary)
        start = next((n.start for n in path if n.end > boundary), boundary)
        if tail:
            self.rows.tail[seq.row, :tail] = np.frombuffer(text, np.int32, tail, (boundary - start) * TOKEN_BYTES)
        node: Node = seq.root
        for passed in path:
            if passed.start >= boundary:
                break
            node = passed if passed.end <= boundary else self.tree.split(passed, boundary)
        self.tree.lock(node)
        self.tree.unlock(seq.node, now)
        seq.node = node
        seq.published = boundary

    def _rewind_states(self, seq: Sequence, checkpoint: Checkpoint | None, now: float) -> None:
        account = seq.root.account
        live = self.rows.states[:, seq.row][None].copy()
        if live[0, 0]:
            self._let_go(account, self.states, live)
            self.rows.states[:, seq.row] = 0
        if seq.state_source is not None:
            self._let_go(account, self.states, seq.state_source)
            seq.state_source = None
        if checkpoint is not None:
            self._start_from(seq, checkpoint, now)
        self.rows.special[seq.row] = True

    # -- sharing and closing ----------------------------------------------------------------------

    def fork(self, seq: Sequence) -> Sequence | None:
        """A second sequence with the same past; pages are shared, a partial block is copied when written.
        None where there is no room for its states."""
        self._check(seq)
        account = seq.root.account
        live = bool(self.has_states and self.rows.states[0, seq.row])
        needs = self._needs(0, int(live), 0)
        if live and self.room.make(account, needs):
            return None
        row = self.rows.take()
        now = self.clock.now()
        child = Sequence(self, row, seq.root, seq.node, seq.control)
        self.rows.handles[row] = child
        self.tree.lock(seq.node)
        child.published, child.resumed, child.prompt = seq.published, seq.resumed, seq.prompt
        child.wanted, child.media = seq.wanted, seq.media
        table, length = self.rows, int(self.rows.length[seq.row])
        blocks = -(-length // self.block_tokens)
        rows = table.tables[:, seq.row, :blocks].T.copy()
        account.held += self.pages.retain(rows)
        table.tables[:, row, :blocks] = rows.T
        table.blocks[row], table.length[row] = blocks, length
        table.first[:, row] = table.first[:, seq.row]
        table.tail[row] = table.tail[seq.row]
        table.changed[row] = True
        self._watch[row] = self._watch[seq.row]
        child.shared_tail = length % self.block_tokens != 0
        table.special[row] = child.shared_tail or table.special[seq.row]
        if live:
            account.used += self.room.bytes_of(needs)
            account.held += self.room.bytes_of(needs)
            self._give_states(child)
            source = table.states[:, seq.row][None].copy()
            account.held += self.states.retain(source)
            self.room.copies.add_rows(self.states, source, table.states[:, row][None])
            self.room.copies.hold(self.states, source, account)
        elif seq.state_source is not None:
            child.state_source = seq.state_source.copy()
            account.held += self.states.retain(child.state_source)
        for key, run in seq.runs.items():
            if isinstance(run, MediaRun):
                self._hold_run(child, run, now)
            else:
                account.held += self.media.retain(run)
                child.runs[key] = run.copy()
        return child

    def close(self, seq: Sequence) -> None:
        """The sequence is done (or interrupted): what it published stays cached and can be evicted."""
        self._check(seq)
        now = self.clock.now()
        account, row = seq.root.account, seq.row
        length = int(self.rows.length[row])
        node = seq.node
        if seq.control.store and length > seq.resumed:
            node = self._leave_turn(seq, length, now)
        blocks = int(self.rows.blocks[row])
        self._let_go(account, self.pages, self.rows.tables[:, row, :blocks].T.copy())
        if self.has_states and self.rows.states[0, row]:
            self._let_go(account, self.states, self.rows.states[:, row][None].copy())
        if seq.state_source is not None:
            self._let_go(account, self.states, seq.state_source)
        for run in list(seq.runs.values()):
            if isinstance(run, MediaRun):
                self.room.let_run_go(run, now)
            else:
                self._let_go(account, self.media, run)
        self._watch[row] = False
        self.rows.give_back(row)
        passed: Node | None = node
        while passed is not None:
            passed.last_used = now
            passed = passed.parent
        for window in range(len(self.tree.windows)):
            self.tree.offer_range(node, window, max(0, length // self.block_tokens - 1), length // self.block_tokens)
        self.tree.unlock(seq.node, now)
        if seq.control.session is not None:
            self._remember(seq.control.session, node)

    def _leave_turn(self, seq: Sequence, length: int, now: float) -> Node:
        """Enter the partial tail and leave a resume point at the end; live states become its snapshot."""
        if self.tree.keeps_checkpoints and not self.snapshots.turn_end:
            return seq.node
        node = self._published_node(seq, length, now, closing=True) or seq.node
        if self.tree.keeps_checkpoints:
            states = self.rows.states[:, seq.row][None].copy() if self.has_states else None
            if states is None or states[0, 0]:
                self.tree.checkpoint(node, length, states, now)
        return node

    def _let_go(self, account: Account, columns: Columns, rows: Ids) -> None:
        idle, freed = columns.release(rows)
        account.held -= idle
        account.used -= freed

    # -- media runs -----------------------------------------------------------------------------

    def _runs_for(self, seq: Sequence, stop: int, now: float) -> tuple[list[Media], list[MediaRun]]:
        """Media runs that tokens up to `stop` need and the sequence lacks: to allocate, and now held."""
        new, held = [], []
        for item in seq.media:
            key = seq.root.name + item.digest
            if not item.tokens or item.start >= stop or key in seq.runs or any(m.digest == item.digest for m in new):
                continue
            run = self.room.runs.get(key) if seq.control.read else None
            if run is None:
                new.append(item)
            else:
                self._hold_run(seq, run, now)
                held.append(run)
        return new, held

    def _hold_run(self, seq: Sequence, run: MediaRun, now: float) -> None:
        if run.key not in seq.runs:
            self.room.hold_run(run, now)
            seq.runs[run.key] = run

    def _drop_run(self, seq: Sequence, run: MediaRun, now: float) -> None:
        del seq.runs[run.key]
        self.room.let_run_go(run, now)

    def _commit_runs(self, seq: Sequence, length: int) -> None:
        """Runs whose placeholder is computed are real: the cache keeps them for the next prompt."""
        if not seq.control.store:
            return
        for item in seq.media:
            key = seq.root.name + item.digest
            rows = seq.runs.get(key)
            if item.stop <= length and isinstance(rows, np.ndarray) and key not in self.room.runs:
                run = self.room.add_run(key, seq.root.account, rows, item.tokens, self.clock.now())
                seq.runs[key] = run

    # -- what users ask for -----------------------------------------------------------------------

    def pin(self, tokens: npt.ArrayLike, ttl: float, control: Control | None = None, media: Many[Media] = ()) -> Pin:
        """Keep what is cached of a prompt for `ttl` seconds, whatever the pressure. `Pin.length` says how
        many tokens that is."""
        if ttl <= 0:
            raise ValueError(f"ttl {ttl} is not positive")
        now = self.clock.now()
        match = self._match(tokens, control or Control(), media, spare_last=False)
        root = self.tree.root(match.root_name, self.accounts[match.control.tenant])
        node: Node = root
        for passed in match.path:
            if passed.start >= match.resume:
                break
            node = passed if passed.end <= match.resume else self.tree.split(passed, match.resume)
        rows = self._in_view(match.rows, match.resume)
        states = match.checkpoint.states if match.checkpoint is not None else None
        pin = Pin(node, match.resume, rows, None if states is None else states.copy(), now + ttl)
        self.tree.lock(node)
        pin.account.held += self.pages.retain(pin.rows)
        if pin.states is not None:
            pin.account.held += self.states.retain(pin.states)
        heapq.heappush(self._pins, (pin.expires, next(self._pin_numbers), pin))
        return pin

    def unpin(self, pin: Pin) -> None:
        """End a pin early. Ending it twice is harmless."""
        if pin.node is None:
            return
        node, pin.node = pin.node, None
        self._let_go(pin.account, self.pages, pin.rows)
        if pin.states is not None:
            self._let_go(pin.account, self.states, pin.states)
        for window in range(len(self.tree.windows)):
            self.tree.offer_range(node, window, 0, max(0, node.end - 1) // self.block_tokens)
        self.tree.unlock(node, self.clock.now())

    def release_expired(self) -> None:
        """End the pins whose time is over. Called whenever room is short."""
        now = self.clock.now()
        while self._pins and self._pins[0][0] <= now:
            self.unpin(heapq.heappop(self._pins)[2])

    def _remember(self, session: str, node: Node) -> None:
        self._sessions[session] = node
        self._sessions.move_to_end(session)
        if len(self._sessions) > self.SESSIONS:
            self._sessions.popitem(last=False)

    def end_session(self, session: str) -> int:
        """A hint that a session will not come back: what only it used leaves first. Returns the tokens
        that concerns."""
        node: Node | None = self._sessions.pop(session, None)
        now = self.clock.now()
        tokens = 0
        while node is not None and node.parent is not None and len(node.children) <= 1:
            node.ended = True
            tokens += node.tokens
            queue = node.root.account.queue
            for entry in node.checkpoints:
                entry.ended = True
                queue.push(entry, now)
            if node.leaf:
                queue.push(node, now)
            node = node.parent
        return tokens

    # -- the engine's side ------------------------------------------------------------------------

    def table(self, group: int) -> Ids:
        """The page tables of one token group over all rows: [runs, rows, blocks], a view that stays valid."""
        if not 0 <= group < len(self.layout.groups) or self.layout.groups[group] not in self.layout.of("token"):
            raise KeyError(f"{group} is not a token group; the layout has {[g.name for g in self.layout.groups]}")
        return self.rows.tables[self.layout.groups[group].columns]

    def take_copies(self) -> list[CopyBatch]:
        """Page copies to run, batch after batch, before the next step. Call it once a step."""
        return self.room.copies.take()

    def check(self) -> None:
        """Recount every page from scratch; raises AssertionError on the first lie. For tests and idle time."""
        audit(self, [pin for _, _, pin in self._pins if pin.node is not None])

    def stats(self) -> dict[str, float | int | dict[str, int]]:
        """Counters for people and dashboards. O(1)."""
        total = self.pool.slabs - 1
        pools = self.pool.classes
        return {
            "slabs": total,
            "free_slabs": self.pool.free_slabs,
            "held_pages": sum(c.held_pages for c in pools),
            "cached_pages": sum(c.cached_pages for c in pools),
            "free_pages_in_lent_slabs": sum(c.free_pages for c in pools),
            "nodes": self.tree.nodes,
            "looked_up_tokens": self.looked_up_tokens,
            "hit_tokens": self.hit_tokens,
            "evictions": self.room.evictions,
            "evicted_bytes": self.room.evicted_bytes,
            "moved_pages": self.room.moves,
            "stops": dict(self.misses),
        }

    def _renumber(self, cls: int, old: Ids, new: Ids) -> None:
        """Pages moved: every table that names them follows."""
        rows = self.rows
        arrays: list[tuple[Columns, Ids]] = []
        for row in rows.open_rows():
            seq = self._handle(row)
            blocks = int(rows.blocks[row])
            arrays.append((self.pages, rows.tables[:, row, :blocks].T))
            arrays.append((self.states, rows.states[:, row][None]))
            if seq.state_source is not None:
                arrays.append((self.states, seq.state_source))
            arrays += [(self.media, run) for run in seq.runs.values() if not isinstance(run, MediaRun)]
            rows.changed[row] = True
        for _, _, pin in self._pins:
            arrays.append((self.pages, pin.rows))
            if pin.states is not None:
                arrays.append((self.states, pin.states))
        arrays += self.room.copies.held_rows()
        order = np.argsort(old)
        old, new = old[order], new[order]
        for columns, array in arrays:
            if cls in columns.classes:
                at = columns.columns_of(cls)
                part = array[:, at]
                place = np.minimum(np.searchsorted(old, part), old.size - 1)
                array[:, at] = np.where(old[place] == part, new[place], part)

    def _handle(self, row: int) -> Sequence:
        seq = self.rows.handles[row]
        if seq is None:
            raise ValueError(f"row {row} has no open sequence")
        return seq

    def _check(self, seq: Sequence) -> None:
        if seq.cache is not self or not seq.open:
            raise ValueError(f"{seq!r} is not open in this cache")
