"""Making room: which pages leave, or move, so that others fit.

Everything cached competes under one policy: run tails, checkpoints, media runs; spare window pages
go before all of them. Where slabs hold several pages, live pages are moved together (`gather`). Deciding
happens here; the tree and the pool carry it out, and byte copies are left in `copies`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import count

from .clock import Clock
from .eviction.policies import Entry
from .eviction.tenants import Account, Accounts
from .histogram import Histogram
from .pool.block_pages import BlockPages
from .pool.page_pool import Ids, PagePool
from .pool.pending_copies import PendingCopies
from .prefix.block_hash import HASH_BYTES, TOKEN_BYTES
from .prefix.ghosts import Ghosts
from .prefix.multimodal import MediaRun
from .prefix.node import Checkpoint, Node
from .prefix.radix_tree import RadixTree

__all__ = ["Allocator"]

AHEAD = 32
"""The part of a pool that may be free because pages leave before they must: one in so many."""
PIECES = 32
"""Of that part, the rows that leave together: one in so many."""


class Allocator:
    def __init__(
        self,
        pool: PagePool,
        tree: RadixTree,
        media: BlockPages,
        accounts: Accounts,
        clock: Clock,
        slab_bytes: int,
        media_lasts: bool = True,
    ) -> None:
        self.pool = pool
        self.tree = tree
        self.media = media
        self.accounts = accounts
        self.clock = clock
        self.slab_bytes = slab_bytes
        self.copies = PendingCopies(pool, slab_bytes)
        self.ghosts = Ghosts()
        self.media_runs: dict[bytes, MediaRun] = {}
        self.media_outlives_prompt = media_lasts
        """Whether tokens behind an image need its run, too (cross attention)."""
        self.evicted: Counter[str] = Counter()
        """Evictions by what left: blocks, window (pages that left every window), snapshot, media."""
        self.idle_seconds = Histogram()
        """Seconds that evicted entries had not been used for."""
        self.evicted_bytes = 0
        self.moved_pages = 0
        self.compact: Callable[[bool], bool] | None = None  # where pages can move: see Moving
        self.open_nodes: Callable[[], Iterable[Node]] = lambda: ()
        self.release_expired: Callable[[], bool] = lambda: False
        self._serials = count(1)
        self._page_bytes = [slab_bytes // c.per_slab for c in pool.classes]

    def bytes_of(self, needs: Sequence[int]) -> int:
        size = 0
        for cls, page_bytes in enumerate(self._page_bytes):
            size += needs[cls] * page_bytes
        return size

    def make_room(self, account: Account, needs: Sequence[int]) -> int:
        """Make `needs[c]` pages of each class allocatable for `account`; returns how many pages are
        missing, and then nothing was evicted for it. (Shares are counted in bytes: where slabs hold several
        pages, a tenant's share may still stop it half way.)"""
        slabs = self.pool.slabs_short(needs)
        limited, several = account.tenant.quota is not None, len(self.accounts.accounts) > 1
        if not slabs and not limited:
            return 0
        if self.release_expired():
            slabs = self.pool.slabs_short(needs)
        want = self.bytes_of(needs) if limited or several else 0
        if limited:
            beyond = account.beyond_quota(want)
            if beyond:
                return self._pages(beyond, needs)
        tight = self.tree.nodes * self.tree.pages.width  # no more pages than these can be stuck
        if self.pool.missing_slabs(needs, tight):
            short = self.pool.missing_slabs(needs) or self.pool.missing_slabs(self._with_stuck(needs))
            if short:
                return self._pages(short * self.slab_bytes, needs)
        if several:
            protected = want - self.reachable(account)
            if protected > 0:
                return self._pages(protected, needs)
        now = self.clock.now()
        if limited:
            while over := account.over_quota(want):
                if not self._evict_from(account, -(-over // self.slab_bytes), now):
                    return self._pages(over, needs)
            slabs = self.pool.slabs_short(needs)
        if slabs:
            slabs = self._free_slabs(account, slabs, partial(self.pool.slabs_short, needs), now)
        return self._pages(slabs * self.slab_bytes, needs) if slabs else 0

    def evict_ahead(self) -> bool:
        """Let a few pages leave before they must, where copies are made of what leaves: else all leave in the step that needs the
        room, and it waits for their names, places and copies. Whether any left: no more do once a part of the pool is free.
        Nothing is moved for it: where pages that are free lie between others, of no use to a new row, they count as that part, too."""
        size, part = self.tree.pages.row_bytes, (self.pool.slabs - 1) * self.slab_bytes // AHEAD
        rows = part // size if size else 0
        needs, now = self.tree.pages.needs(rows), self.clock.now()
        before = self.evicted_bytes
        until = before + -(-rows // PIECES) * size
        while (slabs := self.pool.slabs_short(needs)) and (left := until - self.evicted_bytes) > 0:
            victim = self.accounts.victim(None, now) if self._free_bytes() < part else None
            if victim is None or victim.guaranteed >= victim.used > 0:
                break
            if victim.used <= victim.in_use:  # in use, or lent to who copies it: leaving would free nothing
                break
            few = min(slabs, -(-left // self.slab_bytes))
            if not self._evict_from(victim, self._fair(None, victim, few), now):
                break
        return self.evicted_bytes > before

    def shrink(self, n: int) -> Ids:
        """Take up to `n` slabs out of the pool: free ones, and by evicting and moving as for a request;
        returns those taken. Held pages stay, and so do slabs that pending copies touch."""
        if n < 0:
            raise ValueError(f"cannot shrink by {n} slabs")
        self.release_expired()
        total = self.pool.slabs - 1
        goal = min(n, total - self.pool.fewest_slabs([0] * len(self.pool.classes)))
        self.accounts.set_pool_bytes((total - goal) * self.slab_bytes)
        short = partial(self._short_of, goal)
        self._free_slabs(None, short(), short, self.clock.now())
        taken = self.pool.shrink(goal, self.copies.slabs())
        self.accounts.set_pool_bytes((self.pool.slabs - 1) * self.slab_bytes)
        return taken

    def _short_of(self, slabs: int) -> int:
        return max(0, slabs - self.pool.free_slabs)

    def _free_slabs(self, account: Account | None, slabs: int, lacking: Callable[[], int], now: float) -> int:
        """Evict and move for `account`, or for the pool itself, until no slab of `slabs` is lacking; returns how
        many still are when nothing more can leave."""
        alone = account if len(self.accounts.accounts) == 1 else None
        while slabs:
            if self.compact is None or not self.compact(True):
                victim = alone or self.accounts.victim(account, now)
                if victim is None or not self._evict_from(victim, self._fair(account, victim, slabs), now):
                    if self.compact is None or not self.compact(False):
                        break
            slabs = lacking()
        return slabs

    def _with_stuck(self, needs: Sequence[int]) -> list[int]:
        """`needs` and the cached pages that cannot leave: where a prompt that someone stands on parts from
        another inside a block, the part they share has a page of its own, and it leaves after them.
        Looked for only where the room is so tight that they could matter."""
        stuck: set[tuple[int, int]] = set()
        seen: set[int] = set()
        for standing in self.open_nodes():
            node = standing.parent
            while node is not None and node.serial not in seen:
                seen.add(node.serial)
                if node.end % self.tree.block and node.parent is not None:
                    row = node.pages[node.count - 1 : node.count].copy()
                    for columns in self.tree.window_columns:
                        row[:, columns] = 0  # pages of windows leave one by one
                    for cls, ids in self.tree.pages.by_class(row):
                        held = self.pool.classes[cls].in_use
                        stuck.update((cls, page) for page in ids.tolist() if page and not held[page])
                node = node.parent
        total = list(needs)
        for cls, _ in stuck:
            total[cls] += 1
        return total

    def reachable(self, account: Account) -> int:
        """Bytes that are free, or that `account` may evict: its own, and what others have above their shares."""
        others = (a for a in self.accounts.accounts.values() if a is not account)
        given = sum(self.accounts.gives(a, account) for a in others)
        return self._free_bytes() + account.used - account.in_use + given

    def _free_bytes(self) -> int:
        """Bytes of slabs and pages that are nobody's."""
        pages = [c.free_pages for c in self.pool.classes]
        return self.pool.free_slabs * self.slab_bytes + self.bytes_of(pages)

    def _fair(self, requester: Account | None, victim: Account, slabs: int) -> int:
        """How many of `slabs` another tenant can give without falling below its share."""
        if victim is requester or not victim.guaranteed:
            return slabs
        return max(1, min(slabs, int((victim.used - victim.guaranteed) // self.slab_bytes)))

    def _pages(self, size: int, needs: Sequence[int]) -> int:
        """Bytes as a number of pages of the size that is most asked for."""
        cls = max(range(len(needs)), key=lambda c: needs[c])
        return max(1, -(-size * self.pool.classes[cls].per_slab // self.slab_bytes))

    # -- evicting -------------------------------------------------------------------------------

    def _evict_from(self, account: Account, slabs: int, now: float) -> bool:
        """Let the next thing of `account` leave, about `slabs` slabs of it; False if there is none."""
        queue, before = account.queue, account.used
        size = self.tree.pages.row_bytes
        rows = -(-slabs * self.slab_bytes // size) if size else 1  # of pages, that fill so many slabs
        entry: Entry | None
        if queue.unneeded:
            entry, window = queue.unneeded.popleft()
            assert isinstance(entry, Node)
            kind = "window"
            self.tree.drop_unneeded(entry, window, rows, queue.policy.name)
            if account.used < before:
                self.tree.requeue(entry, now)
        else:
            entry = queue.next_victim(now)
            if entry is None:
                return False
            policy = queue.policy
            policy.on_evict(entry, now)
            if isinstance(entry, Node):
                kind = "blocks"
                if queue.learner is not None:
                    rows = min(rows, max(1, queue.learner.tokens_to_evict(entry) // self.tree.block))
                self._evict_tail(entry, rows, now, policy.name)
            else:
                kind = "snapshot" if isinstance(entry, Checkpoint) else "media"
                queue.remove(entry)
                self._evict_whole(entry, now, policy.name)
        account.evictions += 1
        self.evicted[kind] += 1
        self.idle_seconds.add(now - entry.last_used)
        self.evicted_bytes += before - account.used
        return True

    @property
    def evictions(self) -> int:
        """How many things left so far."""
        return sum(self.evicted.values())

    def _evict_tail(self, node: Node, rows: int, now: float, why: str) -> None:
        """Cut `rows` rows off the end of a leaf, or all that nobody can resume in; what becomes a leaf is queued."""
        tree, start, end = self.tree, node.start, node.end
        resume = tree.last_resume(node) if tree.keeps_checkpoints else end
        if resume == end:
            resume = ((end - 1) // tree.block - rows + 1) * tree.block
            if resume < start:
                resume = start
        while resume < end:
            parent = node.parent
            assert parent is not None
            left = resume - start
            text = node.text[left * TOKEN_BYTES : left * TOKEN_BYTES + Ghosts.SEEN]
            self.ghosts.add(node if left else parent, text, (now, why, node.history))
            tree.trim(node, resume, why)
            if not left:
                tree.requeue(parent, now)
                return
            end = resume
            if tree.keeps_checkpoints:  # what is left may complete no resume point any more
                resume = tree.last_resume(node)
        tree.requeue(node, now)

    def _evict_whole(self, entry: Entry, now: float, why: str) -> None:
        if isinstance(entry, Checkpoint) and not entry.locks:
            node = entry.node
            self.tree.drop_checkpoint(entry, why)
            if node.leaf:
                self._evict_tail(node, 0, now, why)
        elif isinstance(entry, MediaRun) and not entry.holds:
            del self.media_runs[entry.key]
            self.tree.version += 1
            if self.tree.events.listening:
                self.tree.publisher.media_dropped(entry.key[:HASH_BYTES], entry.key[HASH_BYTES:], why)
            entry.account.used -= self.media.drop_cached(entry.rows)

    # -- media runs -----------------------------------------------------------------------------

    def add_media(self, key: bytes, account: Account, rows: Ids, tokens: int, now: float) -> MediaRun:
        """The cache keeps the pages of one image; the caller holds them."""
        run = MediaRun(next(self._serials), now, key, account, rows, tokens, len(rows) * self.media.row_bytes)
        self.media_runs[key] = run
        self.media.add_cached(rows, run)
        account.queue.policy.on_insert(run, now)
        run.holds = 1
        if self.tree.events.listening:
            self.tree.publisher.media_stored(key[:HASH_BYTES], key[HASH_BYTES:])
        return run

    def retain_media(self, run: MediaRun, now: float) -> None:
        run.account.in_use += self.media.retain(run.rows)
        run.holds += 1
        run.hits += 1
        run.account.queue.policy.on_hit(run, now)
        run.last_used = now
        run.account.queue.remove(run)

    def release_media(self, run: MediaRun, now: float) -> None:
        run.account.release(*self.media.release(run.rows))
        run.holds -= 1
        run.last_used = now
        if not run.holds:
            run.account.queue.push(run, now)
