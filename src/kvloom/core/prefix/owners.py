"""Owners: the accounts to which the pages of a sequence are charged.

    block      0 … public_blocks - 1      public_blocks …
    charged    public account             account of the tenant

Pages do not record their account. The account follows from the number of the block, because a public prefix ends at a
block boundary. The tenant's account also counts the public pages that the tenant's sequences, pins and loads retain,
each page once (`Account.borrowed`). The tenant's quota and share limit these public pages like its own pages.
"""

from __future__ import annotations

from kvloom.core.eviction.tenants import Account, Owner
from kvloom.core.pool.block_pages import BlockPages
from kvloom.core.pool.page_pool import Ids

__all__ = ["BlockOwners"]


class BlockOwners:
    """The owners of the blocks of one sequence, pin or load: `public` for the first `public_blocks` blocks, and
    `private` for all later blocks."""

    __slots__ = ("account", "private", "public", "public_blocks")

    def __init__(self, private: Owner, public: Owner | None = None, public_blocks: int = 0) -> None:
        self.private = private
        self.account = private.account
        """The account of the tenant."""
        self.public = public or private
        self.public_blocks = public_blocks

    def at(self, block: int) -> Owner:
        """Return the owner of a block."""
        return self.public if block < self.public_blocks else self.private

    def public_rows(self, first: int, count: int) -> int:
        """Return how many of the blocks [first, first + count) are public."""
        return max(0, min(self.public_blocks - first, count))

    def charge(self, size: int, public: int = 0) -> None:
        """Count `size` bytes of pages that will be allocated. `public` is the part of them that belongs to public
        blocks. Call `borrow` after the allocation."""
        if public:
            self.public.account.charge(public)
        self.account.charge(size - public)

    def borrow(self, pages: BlockPages, rows: Ids, first: int = 0) -> None:
        """Count the public pages in `rows` (page ids by block, from block `first` on) as borrowed by the tenant."""
        for numbers, size in pages.numbers(rows[: self.public_rows(first, len(rows))]):
            self.account.borrow(numbers, size)

    def _give_back(self, pages: BlockPages, rows: Ids) -> None:
        for numbers, size in pages.numbers(rows):
            self.account.give_back(numbers, size)

    def retain(self, pages: BlockPages, rows: Ids, first: int = 0) -> None:
        """Add one reference to every page in `rows`, and update the accounts. The first row of `rows` is block
        `first`."""
        if first < self.public_blocks:
            cut = self.public_rows(first, len(rows))
            self.public.account.retain(pages.retain(rows[:cut]))
            self.borrow(pages, rows, first)
            rows = rows[cut:]
        self.account.retain(pages.retain(rows))

    def release(self, pages: BlockPages, rows: Ids, first: int = 0) -> None:
        """Remove one reference from every page in `rows`, and update the accounts. The first row of `rows` is block
        `first`."""
        if first < self.public_blocks:
            cut = self.public_rows(first, len(rows))
            self.public.account.release(*pages.release(rows[:cut]))
            self._give_back(pages, rows[:cut])
            rows = rows[cut:]
        self.account.release(*pages.release(rows))

    def give_up(self, pages: BlockPages, rows: Ids, block: int) -> Account:
        """Return the account to which the pages `rows` of one block are charged. If the block is public, the tenant
        no longer borrows the pages. Call this method when a pending copy takes over the references to the pages."""
        if block < self.public_blocks:
            self._give_back(pages, rows)
        return self.at(block).account
