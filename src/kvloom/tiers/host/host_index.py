"""The index of the host tier. It finds pages by key, and chooses the pages to evict.

    key → slot → arena page     a slot belongs to one object; after an eviction, a new
                                object of the same size may get the slot
    account → slots by use      an account has the pages of a tenant with a share, or of all
                                other tenants; its least recently used page is evicted first,
                                and its guaranteed part is protected

This module is not thread-safe. The lock of the host tier guards it.
"""

from __future__ import annotations

from itertools import islice

import numpy as np

from kvloom.tiers.page_changes import PageChanges
from kvloom.tiers.shares import Account, Share, Shares

from .arena import Arena
from .slots import FIRST_TICK, Index, LruOrder, Slots

__all__ = ["MAX_TENANTS", "HostIndex"]

_MAX_TRIES = 4096  # number of pages examined to free one page, if many pages are in use
MAX_TENANTS = 256
"""Largest number of tenants whose share `set_account` can set."""


class _Account(Account):
    """The pages of one tenant, as slots ordered by last use. `index` is the position of the account in
    `HostIndex.accounts`."""

    __slots__ = ("index", "order")

    def __init__(self, share: Share, capacity: int, slots: Slots) -> None:
        super().__init__(share, capacity)
        self.order = LruOrder(slots)
        self.index = 0


class HostIndex:
    """Finds the slot of a page in host memory by the page's key. Also orders the pages of each tenant by last use."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._capacity = arena.slabs * arena.slab_bytes
        self.entries: dict[bytes, int] = {}
        """Slot of each key."""
        self.slots = Slots()
        self._default = _Account(Share(), self._capacity, self.slots)
        self._by_tenant: dict[str, _Account] = {}
        self.accounts = [self._default]
        self.clock = FIRST_TICK
        """Tick of the last use of any page."""
        self._demotions = FIRST_TICK
        self.loading = 0
        """Number of pages whose bytes are still being loaded."""
        self.evicted = 0
        self.changes: PageChanges | None = None
        """Records stored and removed pages, if the tier is watched."""

    def set_shares(self, shares: Shares) -> None:
        if self.entries or self._by_tenant:
            raise ValueError("shares must be set once, before the first page is stored")
        self._by_tenant = {
            tenant: _Account(share, self._capacity, self.slots) for tenant, share in shares.items()
        }
        self._default = self._by_tenant.get("", self._default)
        self.accounts = list({id(a): a for a in (self._default, *self._by_tenant.values())}.values())
        for index, account in enumerate(self.accounts):
            account.index = index

    def set_account(self, tenant: str, limit: int, guaranteed: int) -> bool:
        """Set the share of one tenant, at any time: its limit and its guaranteed part, in bytes. The guaranteed part
        is reduced if all guaranteed parts together would exceed the capacity. If too many tenants have a share,
        returns False. The tenant then still uses the common account of all tenants without a share."""
        account = self._by_tenant.get(tenant)
        if account is None:
            if len(self._by_tenant) >= MAX_TENANTS:
                unused = [
                    name for name, one in self._by_tenant.items() if not one.used and not one.guaranteed
                ]
                if not unused:
                    return False
                account = self._by_tenant.pop(unused[0])
            else:
                account = _Account(Share(), self._capacity, self.slots)
                account.index = len(self.accounts)
                self.accounts.append(account)
            self._by_tenant[tenant] = account
        others = sum(one.guaranteed for one in self.accounts if one is not account)
        account.limit = min(limit, self._capacity)
        account.guaranteed = max(0, min(guaranteed, self._capacity - others))
        return True

    def end_guarantee(self, tenant: str) -> None:
        if tenant in self._by_tenant:
            self._by_tenant[tenant].guaranteed = 0

    def used_by(self, tenant: str) -> int:
        return self._account_of(tenant).used

    def used_by_tenants(self) -> dict[str, int]:
        """Return the bytes of each tenant with a share."""
        return {tenant: account.used for tenant, account in self._by_tenant.items()}

    def limit_of(self, tenant: str) -> int:
        return self._account_of(tenant).limit

    def _account_of(self, tenant: str) -> _Account:
        return self._by_tenant.get(tenant, self._default)

    def find(self, keys: list[bytes]) -> Index:
        """Return the slots of keys, with -1 for a miss."""
        get = self.entries.get
        return np.array([get(key, -1) for key in keys], np.int64)

    def reserve(self, keys: list[bytes], size: int, tenant: str, limit: int | None = None) -> Index:
        """Allocate up to `limit` pages of `size` bytes for new keys, and evict pages if needed. Return, for each
        key, the slot to fill.

        The slot is -1 if the key is already stored, if the key occurs earlier in the batch, or if no page is left.
        """
        account, entries = self._account_of(tenant), self.entries
        fresh = keys if entries.keys().isdisjoint(keys) else [key for key in keys if key not in entries]
        if len(fresh) < len(keys):  # stored keys are marked as used, so that they are evicted last
            self.touch(np.array([entries[key] for key in keys if key in entries], np.int64))
        once = dict.fromkeys(fresh)
        given = self._allocate(size, account, len(once) if limit is None else min(limit, len(once)))
        return self._insert(keys, once, given, account)

    def touch(self, slots: Index) -> None:
        """Mark slots as most recently used."""
        if len(set(found := slots.tolist())) < len(found):
            slots = np.array(list(dict.fromkeys(found)), np.int64)
        if len(self.accounts) == 1:
            self.clock += 1
            self.accounts[0].order.touch(slots, self.clock)
            return
        owners = self.slots.account[slots]
        for index in dict.fromkeys(owners.tolist()):
            self.clock += 1
            self.accounts[index].order.touch(slots[owners == index], self.clock)

    def demote(self, slots: Index, since: int) -> None:
        """Let the pages of slots be evicted before all others. Skips pages that were used after the tick `since`, and
        demoted pages."""
        found = np.unique(slots)
        ticks = self.slots.tick[found]
        found = found[(ticks <= since) & (ticks >= FIRST_TICK)]
        owners = self.slots.account[found]
        for index in dict.fromkeys(owners.tolist()):
            self._demotions -= 1
            self.accounts[index].order.demote(found[owners == index], self._demotions)

    def _insert(
        self, keys: list[bytes], fresh: dict[bytes, None], given: list[int], account: _Account
    ) -> Index:
        """Assign the slots `given` to the first keys of `fresh`. `fresh` are the keys of the batch that are not
        stored yet. Return one slot per key of `keys`, like `reserve`."""
        entered = fresh if len(given) == len(fresh) else list(islice(fresh, len(given)))
        self.entries.update(zip(entered, given, strict=True))
        slots = np.array(given, np.int64)
        self.slots.assign(slots, entered, account.index)
        self.clock += 1
        account.order.touch(slots, self.clock)
        self.loading += len(given)
        if len(given) == len(keys):
            return slots
        left = dict(zip(entered, given, strict=True))
        return np.array([left.pop(key, -1) for key in keys], np.int64)

    def _allocate(self, size: int, account: _Account, count: int) -> list[int]:
        """Return up to `count` slots for pages of `account`. Uses free pages first, then evicts pages."""
        slots: list[int] = []
        while (lacking := count - len(slots)) > 0:
            within = max(0, account.limit - account.used) // size
            more = self.slots.allocate(self._arena.allocate(size, min(lacking, within)), size)
            more = more or self._reuse_victims(size, account, lacking) or self._evict_for(size, account)
            if not more:
                break
            account.used += size * len(more)
            slots += more
        return slots

    def _reuse_victims(self, size: int, account: _Account, limit: int) -> list[int]:
        """Evict up to `limit` pages of `size` bytes, least recently used first, and return their slots for reuse.
        This is the common case of eviction. Pages in use are not evicted, but marked as recently used."""
        source = self._victim(account, size)
        if source is None:
            return []
        turn = None
        if not self._evicts_only_own(
            account, size
        ):  # stop if another account has an older page, or at the limit
            firsts = [
                other.order.least_recent()
                for other in self._evictable_accounts(account)
                if other is not source
            ]
            turn = min((int(self.slots.tick[slot]) for slot in firsts if slot is not None), default=None)
            limit = min(limit, (account.limit - account.used) // size)
            if source is not account:
                limit = min(limit, -(-(source.used - source.guaranteed) // size))
        for reach in (
            limit,
            max(limit, _MAX_TRIES),
        ):  # examine more pages if all of the first pages are in use
            oldest = source.order.oldest(reach)
            other = self.slots.size[oldest] != size
            if turn is not None:
                other |= self.slots.tick[oldest] >= turn
            if other.any():
                oldest = oldest[: int(other.argmax())]
            idle = np.flatnonzero(self.slots.refs[oldest] == 0)[:limit]
            if idle.size:
                break
        if idle.size and idle[-1] >= idle.size:
            passed = oldest[: idle[-1]]
            self.touch(passed[self.slots.refs[passed] > 0])
        slots = oldest[idle]
        taken: list[int] = slots.tolist()
        entries, keys = self.entries, self.slots.keys
        if self.changes is not None:
            self.changes.removed([keys[slot] for slot in taken])
        for slot in taken:
            del entries[keys[slot]]
        self.slots.tick[slots] = -1
        source.used -= size * len(taken)
        self.evicted += len(taken)
        return taken

    def _evict_for(self, size: int, account: _Account) -> list[int]:
        """Evict pages until one page of `size` bytes can be allocated. Return a list with the slot of this page, or
        [] if no page can be allocated. Used if no page is free and the next page to evict is in use or has another
        size.

        If the next page to evict has another size, its whole slab is evicted. The slab can then be cut into pages
        of `size` bytes. An account at its limit evicts only its own pages.
        """
        tries = min(len(self.entries), _MAX_TRIES)
        accounts = [account] if self._evicts_only_own(account, size) else self._evictable_accounts(account)
        if not any(self._has_evictable(one, tries) for one in accounts):
            return []  # give up: not every page is examined
        for _ in range(tries):
            own = account.used + size > account.limit
            if not own and (taken := self._arena.allocate(size, 1)):
                return self.slots.allocate(taken, size)
            source = self._victim(account, size)
            if source is None:
                return []
            slot = source.order.least_recent()
            assert slot is not None
            offset = int(self.slots.offset[slot])
            alone = own or self.slots.size[slot] == size
            pages = {offset: self.slots.keys[slot]} if alone else self._pages_in_slab(offset)
            if not all(self._is_evictable(page, other, account) for page, other in pages.items()):
                self.touch(np.array([slot]))  # the page is in use, so it counts as recently used
                continue
            for other in pages.values():
                self.remove(other, self.entries[other])
                self.evicted += 1
        return self.slots.allocate(
            self._arena.allocate(size, int(account.used + size <= account.limit)), size
        )

    def _has_evictable(self, account: _Account, tries: int) -> bool:
        """Return whether an account has a page that is not in use. Examines `tries` pages at a time, the oldest
        first. If all of them are in use, marks them as recently used and examines the next pages."""
        for _ in range(0, len(self.entries), max(1, tries)):
            oldest = account.order.oldest(tries)
            if not self.slots.refs[oldest].all():
                return True
            if len(oldest) < tries:  # no more pages
                return False
            self.touch(oldest)
        return False

    def _pages_in_slab(self, offset: int) -> dict[int, bytes]:
        """Return the keys of the allocated pages in the slab of `offset`, by their offsets."""
        at, keys = self.slots.slot_at, self.slots.keys
        return {page: keys[at[page]] for page in self._arena.slab_pages(offset) if page in at}

    def _victim(self, account: _Account, size: int) -> _Account | None:
        """Return the account whose least recently used page is evicted next, so that `account` gets `size` bytes.
        Return None if no account has a page to evict. O(accounts).

        If `account` is at its limit, one of its own pages is evicted. Otherwise the page is the least recently used
        page of all accounts of `_evictable_accounts`.
        """
        if self._evicts_only_own(account, size):
            return account if size <= account.limit and account.order.least_recent() is not None else None
        best = None
        for one in self._evictable_accounts(account):
            slot = one.order.least_recent()
            if slot is not None:
                tick = int(self.slots.tick[slot])
                if best is None or tick < best[0]:
                    best = tick, one
        return best[1] if best else None

    def _evictable_accounts(self, account: _Account) -> list[_Account]:
        """Return the accounts whose pages may be evicted for `account`, which is below its limit. These are `account`
        itself and all accounts that use more than their guaranteed part. If `account` uses less than its guaranteed
        part, pages of accounts above their guaranteed part are evicted before its own pages."""
        others = [one for one in self.accounts if one is not account and one.is_above_guarantee]
        return others if others and account.used < account.guaranteed else [account, *others]

    def _evicts_only_own(self, account: _Account, size: int) -> bool:
        """Return whether `account` must evict one of its own pages for a new page of `size` bytes."""
        return len(self.accounts) == 1 or account.used + size > account.limit

    def _is_evictable(self, offset: int, key: bytes, account: _Account) -> bool:
        """Return whether the page at `offset` may be evicted for `account`. The page may be evicted if two conditions
        are met. First, the page is still stored under `key`, and no lease refers to it. Second, one of these is true:

        - The page belongs to `account`.
        - The page belongs to an account that uses more than its guaranteed part.
        - With one more page of this size, `account` stays within its guaranteed part.

        A page that was dropped while in use is no longer stored under its key.
        """
        slot = self.entries.get(key)
        if slot is None or self.slots.offset[slot] != offset or self.slots.refs[slot]:
            return False
        owner = self.accounts[self.slots.account[slot]]
        return (
            owner is account
            or owner.is_above_guarantee
            or account.used + int(self.slots.size[slot]) <= account.guaranteed
        )

    def remove(self, key: bytes, slot: int) -> None:
        """Remove a key from the index. The page of its slot is freed at once, or when the last lease of the page is
        released."""
        del self.entries[key]
        if self.changes is not None:
            self.changes.removed([key])
        self.slots.tick[slot] = -1
        if self.slots.refs[slot]:
            self.slots.dropped[slot] = True
        else:
            self.free(slot)

    def free(self, slot: int) -> None:
        """Free the page of a slot whose key was removed and whose last lease was released."""
        offset, size = int(self.slots.offset[slot]), int(self.slots.size[slot])
        self.accounts[self.slots.account[slot]].used -= size
        self._arena.free(size, offset)
        self.slots.free(slot)
