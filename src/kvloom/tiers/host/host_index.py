"""Who has which place of the host tier's arena: keys, slots and tenants' accounts, and who leaves for whom.

    key → slot → place       a slot is of one object until it leaves; whoever takes over its place takes over its slot
    account → slots by use   the least recently used leaves first, of those whose share allows it

Knows keys, sizes and tenants; no bytes. Not thread-safe: its tier holds a lock.
"""

from __future__ import annotations

from itertools import islice

import numpy as np

from kvloom.tiers.shares import Account, Share, Shares

from .arena import Arena
from .slots import Index, LruOrder, Slots

__all__ = ["HostIndex"]

_MAX_TRIES = 4096  # pages looked at to make room for one, when many are held


class _Account(Account):
    """A tenant's pages: their slots by their last use."""

    __slots__ = ("index", "order")

    def __init__(self, share: Share, capacity: int, slots: Slots) -> None:
        super().__init__(share, capacity)
        self.order = LruOrder(slots)
        self.index = 0


class HostIndex:
    """All that are in one arena."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._capacity = arena.slabs * arena.slab_bytes
        self.entries: dict[bytes, int] = {}
        """Key → slot."""
        self.slots = Slots()
        self._default = _Account(Share(), self._capacity, self.slots)
        self._by_tenant: dict[str, _Account] = {}
        self.accounts = [self._default]
        self._clock = 0
        self.loading = 0
        """Entries whose bytes have not come."""
        self.evicted = 0

    def set_shares(self, shares: Shares) -> None:
        if self.entries or self._by_tenant:
            raise ValueError("shares are given once, before anything is kept here")
        self._by_tenant = {
            tenant: _Account(share, self._capacity, self.slots) for tenant, share in shares.items()
        }
        self._default = self._by_tenant.get("", self._default)
        self.accounts = list({id(a): a for a in (self._default, *self._by_tenant.values())}.values())
        for index, account in enumerate(self.accounts):
            account.index = index

    def used_by(self, tenant: str) -> int:
        return self._account_of(tenant).used

    def _account_of(self, tenant: str) -> _Account:
        return self._by_tenant.get(tenant, self._default)

    def find(self, keys: list[bytes]) -> Index:
        """The slots of keys, -1 for those that are not there."""
        get = self.entries.get
        return np.array([get(key, -1) for key in keys], np.int64)

    def reserve(self, keys: list[bytes], size: int, tenant: str, limit: int | None = None) -> Index:
        """Places of `size` bytes for keys that have none, as many as there can be, and `most` at the most; others leave for
        them. The slot that each of `keys` is to be filled in: -1 for one that was there, has no place, or is in the batch a
        second time."""
        account, entries = self._account_of(tenant), self.entries
        fresh = keys if entries.keys().isdisjoint(keys) else [key for key in keys if key not in entries]
        if len(fresh) < len(keys):  # used now, so the last to leave for the others
            self.touch(np.array([entries[key] for key in keys if key in entries], np.int64))
        once = dict.fromkeys(fresh)
        given = self._allocate(size, account, len(once) if limit is None else min(limit, len(once)))
        return self._insert(keys, once, given, account)

    def touch(self, slots: Index) -> None:
        """These are the most recently used now."""
        if len(set(found := slots.tolist())) < len(found):
            slots = np.array(list(dict.fromkeys(found)), np.int64)
        if len(self.accounts) == 1:
            self._clock += 1
            self.accounts[0].order.touch(slots, self._clock)
            return
        owners = self.slots.account[slots]
        for index in dict.fromkeys(owners.tolist()):
            self._clock += 1
            self.accounts[index].order.used(slots[owners == index], self._clock)

    def _insert(
        self, keys: list[bytes], fresh: dict[bytes, None], given: list[int], account: _Account
    ) -> Index:
        """The first of the `fresh` keys have these slots from now on. The slot that each of `keys` is to be filled in:
        -1 for one that was there, has no place, or is in the batch a second time."""
        entered = fresh if len(given) == len(fresh) else list(islice(fresh, len(given)))
        self.entries.update(zip(entered, given, strict=True))
        slots = np.array(given, np.int64)
        self.slots.assign(slots, entered, account.index)
        self._clock += 1
        account.order.touch(slots, self._clock)
        self.loading += len(given)
        if len(given) == len(keys):
            return slots
        left = dict(zip(entered, given, strict=True))
        return np.array([left.pop(key, -1) for key in keys], np.int64)

    def _allocate(self, size: int, account: _Account, count: int) -> list[int]:
        """Slots for `count` pages of `account`, as many as there can be: free ones, then those of who leaves."""
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
        """Mostly a place simply changes hands: up to `most` of those that are next to leave, have this size and are not
        held. Those before them that are held are in use now, so not the least recently used."""
        source = self._victim(account, size)
        if source is None:
            return []
        turn = None
        if not self._evicts_only_own(
            account, size
        ):  # until it is another's turn, or one of the two is at its limit
            firsts = [
                other.order.least_recent()
                for other in self._evictable_accounts(account)
                if other is not source
            ]
            turn = min((int(self.slots.tick[slot]) for slot in firsts if slot is not None), default=None)
            limit = min(limit, (account.limit - account.used) // size)
            if source is not account:
                limit = min(limit, -(-(source.used - source.guaranteed) // size))
        for reach in (limit, max(limit, _MAX_TRIES)):  # further where all of the first are held
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
        for slot in taken:
            del entries[keys[slot]]
        self.slots.tick[slots] = -1
        source.used -= size * len(taken)
        self.evicted += len(taken)
        return taken

    def _evict_for(self, size: int, account: _Account) -> list[int]:
        """The slot of a page where none is free and the next to leave is held or of another size: then the whole slab
        that it lies in leaves. Whose share is full loses pages of its own. None where none may leave."""
        tries = min(len(self.entries), _MAX_TRIES)
        accounts = [account] if self._evicts_only_own(account, size) else self._evictable_accounts(account)
        if not any(self._has_evictable(one, tries) for one in accounts):
            return []  # without looking at one after the other
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
            places = {offset: self.slots.keys[slot]} if alone else self._pages_in_slab(offset)
            if not all(self._is_evictable(place, other, account) for place, other in places.items()):
                self.touch(np.array([slot]))  # in use now, so not the least recently used
                continue
            for other in places.values():
                self.remove(other, self.entries[other])
                self.evicted += 1
        return self.slots.allocate(
            self._arena.allocate(size, int(account.used + size <= account.limit)), size
        )

    def _has_evictable(self, account: _Account, tries: int) -> bool:
        """Pass over the oldest that are held, so many at a time: they are in use, so not the least recently used. Whether one
        is left that is not."""
        for _ in range(0, len(self.entries), max(1, tries)):
            oldest = account.order.oldest(tries)
            if not self.slots.refs[oldest].all():
                return True
            if len(oldest) < tries:  # these are all
                return False
            self.touch(oldest)
        return False

    def _pages_in_slab(self, offset: int) -> dict[int, bytes]:
        """Who has the places of the slab that this one is in."""
        at, keys = self.slots.slot_at, self.slots.keys
        return {place: keys[at[place]] for place in self._arena.slab_pages(offset) if place in at}

    def _victim(self, account: _Account, size: int) -> _Account | None:
        """Whose page leaves next for one of `size` bytes of `account`: its own where its share is full, else the least
        recently used of its own and of those above what is sure to be theirs. O(accounts)."""
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
        """Whose pages may leave for one of `account`, while that is within its share."""
        return [one for one in self.accounts if one is account or one.is_above_guarantee]

    def _evicts_only_own(self, account: _Account, size: int) -> bool:
        """Whether only pages of its own may leave for a page of `account`."""
        return len(self.accounts) == 1 or account.used + size > account.limit

    def _is_evictable(self, offset: int, key: bytes, account: _Account) -> bool:
        """Nobody holds this page, and its owner spares it or has to; one that was dropped while held is under no key, or
        its key is elsewhere now."""
        slot = self.entries.get(key)
        if slot is None or self.slots.offset[slot] != offset or self.slots.refs[slot]:
            return False
        owner = self.accounts[self.slots.account[slot]]
        return (
            owner is account
            or owner.spares
            or account.used + int(self.slots.size[slot]) <= account.guaranteed
        )

    def remove(self, key: bytes, slot: int) -> None:
        """Nobody finds this one any more; its place is free when the last has let go of it."""
        del self.entries[key]
        self.slots.tick[slot] = -1
        if self.slots.refs[slot]:
            self.slots.dropped[slot] = True
        else:
            self.free(slot)

    def free(self, slot: int) -> None:
        """The place of one that is forgotten and not held is nobody's."""
        offset, size = int(self.slots.offset[slot]), int(self.slots.size[slot])
        self.accounts[self.slots.account[slot]].used -= size
        self._arena.free(size, offset)
        self.slots.free(slot)
