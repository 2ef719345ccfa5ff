"""The allocator evicts cached entries and compacts slabs until enough pages are free.

An entry is a part of the cache that can be evicted alone. There are three kinds: the last blocks of a leaf, a
checkpoint, and a media run (the pages of one image). One policy orders the entries of a tenant. A window page that no checkpoint
needs is evicted before any entry. The allocator only chooses the entry to evict. The tree or the media cache then drops
the pages of the entry.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

from .clock import Clock
from .control import PUBLIC_TENANT
from .eviction.policies import Entry
from .eviction.tenants import Account, Accounts
from .histogram import Histogram
from .pool.compaction import Compaction
from .pool.page_pool import Ids, PagePool
from .pool.pending_copies import PendingCopies
from .prefix.block_hash import TOKEN_BYTES
from .prefix.ghosts import Ghosts
from .prefix.media_cache import MediaCache
from .prefix.multimodal import MediaRun
from .prefix.node import Checkpoint, Node
from .prefix.pins import Pins
from .prefix.radix_tree import RadixTree

__all__ = ["Allocator"]

AHEAD = 32
"""`evict_ahead` stops when 1 / AHEAD of the pool is free."""
PIECES = 32
"""One call of `evict_ahead` frees about 1 / (AHEAD * PIECES) of the pool."""


class Allocator:
    """Evicts and compacts, so that a tenant (an `Account`) can allocate pages of one pool."""

    def __init__(
        self,
        pool: PagePool,
        tree: RadixTree,
        media: MediaCache,
        accounts: Accounts,
        pins: Pins,
        compaction: Compaction,
        copies: PendingCopies,
        ghosts: Ghosts,
        clock: Clock,
        slab_bytes: int,
    ) -> None:
        self._pool = pool
        self._tree = tree
        self._media = media
        self._accounts = accounts
        self._pins = pins
        self._compaction = compaction
        self._copies = copies
        self._ghosts = ghosts
        self._clock = clock
        self._slab_bytes = slab_bytes
        self._block_bytes = tree.pages.row_bytes
        self.evicted: defaultdict[str, int] = defaultdict(int)
        """Number of evictions by kind: blocks, window (window pages that no checkpoint needs), snapshot, media. A
        Counter would take three times as long per eviction."""
        self.idle_seconds = Histogram()
        """Histogram of the seconds between the last use of an entry and its eviction."""
        self.evicted_bytes = 0
        self._page_bytes = [slab_bytes // c.per_slab for c in pool.classes]

    def bytes_of(self, needs: Sequence[int]) -> int:
        """Return the number of bytes of `needs[c]` pages of each size class c."""
        size = 0
        for cls, page_bytes in enumerate(self._page_bytes):
            size += needs[cls] * page_bytes
        return size

    def free_pages(self, account: Account, needs: Sequence[int]) -> int:
        """Evict and compact until `account` can allocate `needs[c]` pages of each size class c. Return the number of
        missing pages, or 0 on success.

        The allocator first checks whether eviction can free enough bytes. If the check fails, nothing is evicted. The
        check counts bytes, but the pool needs whole slabs. If slabs have several pages, the check may succeed although
        too few slabs can become free. In this case, some pages are evicted before the call fails. `Accounts.victim`
        decides from which tenants pages may be evicted.
        """
        slabs = self._pool.slabs_short(needs)
        limited, several = account.tenant.quota is not None, len(self._accounts.accounts) > 1
        if not slabs and not limited:
            return 0
        if self._pins.release_expired():
            slabs = self._pool.slabs_short(needs)
        want = self.bytes_of(needs) if limited or several else 0
        if limited:
            beyond = account.beyond_quota(want)
            if beyond:
                return self._pages(beyond, needs)
        # Upper bound of the number of cached pages that cannot be evicted.
        tight = self._tree.nodes * self._tree.pages.width
        if self._pool.missing_slabs(needs, tight):
            short = self._pool.missing_slabs(needs) or self._pool.missing_slabs(self._with_stuck(needs))
            if short:
                return self._pages(short * self._slab_bytes, needs)
        if several:
            protected = want - self.reachable(account)
            if protected > 0:
                return self._pages(protected, needs)
        now = self._clock.now()
        if limited:
            while over := account.over_quota(want):
                if not self._evict_from(account, -(-over // self._slab_bytes), now):
                    return self._pages(over, needs)
            slabs = self._pool.slabs_short(needs)
        if slabs:
            slabs = self._free_slabs(account, slabs, partial(self._pool.slabs_short, needs), now)
        return self._pages(slabs * self._slab_bytes, needs) if slabs else 0

    def limit_public(self, size: int) -> None:
        """Evict cached public pages until `size` more bytes fit into the limit of public prefixes. Pages in use are
        not evicted, so the limit may be exceeded."""
        account, limit, now = self._accounts[PUBLIC_TENANT], self._accounts.public_bytes, self._clock.now()
        while (over := account.used + size - limit) > 0 and account.used > account.in_use:
            slabs = -(-over // self._slab_bytes)
            if not self._evict_from(account, slabs, now) and not self._evict_below_public(slabs, now):
                return

    def evict_ahead(self) -> bool:
        """Evict a few pages ahead of time, so that offloading them does not delay a later step. Return whether a
        page was evicted.

        Stops when 1 / AHEAD of the pool is free. Does not compact. Free pages in partly used slabs count as free.
        """
        size, part = self._block_bytes, (self._pool.slabs - 1) * self._slab_bytes // AHEAD
        rows = part // size if size else 0
        needs, now = self._tree.pages.needs(rows), self._clock.now()
        before = self.evicted_bytes
        until = before + -(-rows // PIECES) * size
        while (slabs := self._pool.slabs_short(needs)) and (left := until - self.evicted_bytes) > 0:
            victim = self._accounts.victim(None, now) if self._free_bytes() < part else None
            if victim is None or victim.guaranteed >= victim.counted > 0:
                break
            if (
                victim.used <= victim.in_use
            ):  # an eviction would free no page: all pages of the account are in use or in transfer
                break
            few = min(slabs, -(-left // self._slab_bytes))
            if not self._evict_from(victim, self._fair(None, victim, few), now):
                break
        return self.evicted_bytes > before

    def shrink(self, n: int) -> Ids:
        """Remove up to `n` slabs from the pool and return their numbers. Evicts and compacts as needed. Slabs that
        still have pages in use or pending copies are not removed.
        """
        if n < 0:
            raise ValueError(f"cannot shrink by {n} slabs; give 0 or more")
        self._pins.release_expired()
        total = self._pool.slabs - 1
        goal = min(n, total - self._pool.fewest_slabs([0] * len(self._pool.classes)))
        self._accounts.set_pool_bytes((total - goal) * self._slab_bytes)
        short = partial(self._short_of, goal)
        self._free_slabs(None, short(), short, self._clock.now())
        taken = self._pool.shrink(goal, self._copies.slabs())
        self._accounts.set_pool_bytes((self._pool.slabs - 1) * self._slab_bytes)
        return taken

    def _short_of(self, slabs: int) -> int:
        return max(0, slabs - self._pool.free_slabs)

    def _free_slabs(self, account: Account | None, slabs: int, missing: Callable[[], int], now: float) -> int:
        """Evict and compact for `account` until `missing()` is 0 or nothing can be evicted. If `account` is None, the
        pool itself needs the slabs, for example to shrink. Return the number of slabs that are still missing."""
        only = account if len(self._accounts.accounts) == 1 else None
        can_compact = self._compaction.is_possible
        while slabs:
            if not can_compact or not self._compact(cheaply=True):
                victim, few = only, slabs
                if only is None:
                    victim = self._accounts.victim(account, now)
                    few = self._fair(account, victim, slabs) if victim is not None else 0
                done = victim is not None and self._evict_from(victim, few, now)
                if not done and not self._evict_below_public(slabs, now):
                    if not can_compact or not self._compact(cheaply=False):
                        break
            slabs = missing()
        return slabs

    def _compact(self, cheaply: bool) -> bool:
        if not self._compaction.compact_one_slab(cheaply):
            return False
        self._tree.invalidate_matches()
        return True

    def _with_stuck(self, needs: Sequence[int]) -> list[int]:
        """Return `needs` plus, for each size class, the number of cached pages that cannot be evicted now. Called only
        when the pool is nearly full.

        Such pages exist where a node ends inside a block. Each child of the node has its own copy of this block's
        pages, and sequences read the copy of the child. The node's pages of the block are therefore cached and not in
        use. They cannot be evicted while a child is in use, because the node then stays in the tree.
        """
        stuck: set[tuple[int, int]] = set()
        seen: set[int] = set()
        for locked in self._tree.locked:
            node = locked.parent
            while node is not None and node.serial not in seen:
                seen.add(node.serial)
                if node.end % self._tree.block and node.parent is not None:
                    row = node.pages[node.count - 1 : node.count].copy()
                    for columns in self._tree.window_columns:
                        row[:, columns] = 0  # window pages are evicted one by one
                    for cls, ids in self._tree.pages.by_class(row):
                        in_use = self._pool.classes[cls].in_use
                        stuck.update((cls, page) for page in ids.tolist() if page and not in_use[page])
                node = node.parent
        total = list(needs)
        for cls, _ in stuck:
            total[cls] += 1
        return total

    def reachable(self, account: Account) -> int:
        """Return the number of bytes that are free or that `account` may evict. An account may evict its own cached
        pages, and cached pages of other accounts as far as `Accounts.evictable` allows.
        """
        others = (a for a in self._accounts.accounts.values() if a is not account)
        evictable = sum(self._accounts.evictable(a, account) for a in others)
        return self._free_bytes() + account.used - account.in_use + evictable

    def _free_bytes(self) -> int:
        """Return the number of bytes in free slabs, and in free pages of partly used slabs."""
        pages = [c.free_pages for c in self._pool.classes]
        return self._pool.free_slabs * self._slab_bytes + self.bytes_of(pages)

    def _fair(self, requester: Account | None, victim: Account, slabs: int) -> int:
        """Return how many slabs to evict from `victim` for `requester`: at most `slabs`, and at least 1. If `victim` is
        another account, only its memory above its guaranteed share counts.
        """
        if victim is requester or not victim.guaranteed:
            return slabs
        return max(1, min(slabs, int((victim.counted - victim.guaranteed) // self._slab_bytes)))

    def _pages(self, size: int, needs: Sequence[int]) -> int:
        """Convert `size` bytes to a number of pages, rounded up and at least 1. Uses the page size of the size
        class with the most pages in `needs`."""
        cls = max(range(len(needs)), key=lambda c: needs[c])
        return max(1, -(-size * self._pool.classes[cls].per_slab // self._slab_bytes))

    # -- evicting -------------------------------------------------------------------------------

    def _evict_from(self, account: Account, slabs: int, now: float) -> bool:
        """Evict window pages that no checkpoint needs, from one node of `account`. If there are none, evict the next
        entry of the account's eviction queue. A node loses only as many blocks as fill about `slabs` slabs. Checkpoints
        and media runs are evicted whole. Return False if there is nothing to evict."""
        queue, before = account.queue, account.used
        size = self._block_bytes
        rows = -(-slabs * self._slab_bytes // size) if size else 1  # blocks whose pages fill `slabs` slabs
        entry: Entry | None
        if queue.unneeded:
            entry, window = queue.unneeded.popleft()
            assert isinstance(entry, Node)
            kind = "window"
            self._tree.drop_unneeded(entry, window, rows, queue.policy.name)
            if account.used < before:
                self._tree.requeue(entry, now)
        else:
            entry = queue.next_victim(now)
            if entry is None:
                return False
            policy = queue.policy
            policy.on_evict(entry, now)
            if isinstance(entry, Node):
                kind = "blocks"
                if queue.learner is not None:
                    rows = min(rows, max(1, queue.learner.tokens_to_evict(entry) // self._tree.block))
                self._evict_tail(entry, rows, now, policy.name)
            else:
                kind = "snapshot" if isinstance(entry, Checkpoint) else "media"
                queue.remove(entry)
                self._evict_whole(entry, now, policy.name)
        account.evictions += 1  # inlined, because this is the hottest loop
        self.evicted[kind] += 1
        self.idle_seconds.add(now - entry.last_used)
        self.evicted_bytes += before - account.used
        return True

    def _evict_below_public(self, slabs: int, now: float) -> bool:
        """Evict blocks of a leaf below a public prefix, because the leaf prevents the eviction of cached public pages.
        The blocks fill about `slabs` slabs. The search starts at the least recently used prefix. The share of the
        leaf's tenant does not protect the leaf. Return False if there is no such leaf, or no cached public page.
        O(children of nodes passed)."""
        account = self._accounts.accounts.get(PUBLIC_TENANT)
        if account is None or account.used <= account.in_use:
            return False
        roots = (root for root in self._tree.roots.values() if root.owner.tenant == PUBLIC_TENANT)
        todo: list[Node] = sorted((node for root in roots for node in root.children.values()), key=_newest)
        while todo:
            node = todo.pop()
            if node.leaf:
                owner, before = node.account, node.account.used
                rows = -(-slabs * self._slab_bytes // self._block_bytes) if self._block_bytes else 1
                owner.queue.policy.on_evict(node, now)
                self._evict_tail(node, rows, now, owner.queue.policy.name)
                owner.evictions += 1
                self.evicted["blocks"] += 1
                self.evicted_bytes += before - owner.used
                return True
            todo += sorted(node.children.values(), key=_newest)
        return False

    @property
    def evictions(self) -> int:
        """Number of evicted entries."""
        return sum(self.evicted.values())

    def _evict_tail(self, node: Node, rows: int, now: float, reason: str) -> None:
        """Evict the last `rows` blocks of a leaf. If no prompt can resume at the end of the leaf, evict all blocks
        after its last resumable position instead. If the parent becomes a leaf, queue the parent for eviction."""
        tree, start, end = self._tree, node.start, node.end
        resume = tree.last_resume(node) if tree.needs_checkpoints else end
        if resume == end:
            resume = ((end - 1) // tree.block - rows + 1) * tree.block
            if resume < start:
                resume = start
        while resume < end:
            parent = node.parent
            assert parent is not None
            left = resume - start
            text = node.text[left * TOKEN_BYTES : left * TOKEN_BYTES + Ghosts.SEEN]
            self._ghosts.add(node if left else parent, text, (now, reason, node.history))
            tree.trim(node, resume, reason)
            if not left:
                tree.requeue(parent, now)
                return
            end = resume
            if tree.needs_checkpoints:  # no prompt may be able to resume in the remaining part
                resume = tree.last_resume(node)
        tree.requeue(node, now)

    def _evict_whole(self, entry: Entry, now: float, reason: str) -> None:
        """Evict a checkpoint that no pin uses, or a media run (the pages of one image) that has no users."""
        if isinstance(entry, Checkpoint) and not entry.locks:
            node = entry.node
            self._tree.drop_checkpoint(entry, reason)
            if node.leaf:
                self._evict_tail(node, 0, now, reason)
        elif isinstance(entry, MediaRun) and not entry.users:
            self._media.drop(entry, reason)
            self._tree.invalidate_matches()


def _newest(node: Node) -> float:
    """Return a sort key. The most recently used node comes first."""
    return -node.last_used
