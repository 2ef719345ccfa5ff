"""Media cache: the pages of images in media layers, found by root hash and content digest.

A media run consists of the pages of one image. Sequences and pins retain runs. A run without users is queued for
eviction.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import count

from kvloom.core.eviction.tenants import Account
from kvloom.core.pool.block_pages import BlockPages
from kvloom.core.pool.page_pool import Ids

from .block_hash import HASH_BYTES
from .multimodal import Media, MediaRun
from .publisher import EventPublisher

__all__ = ["MediaCache"]


class MediaCache:
    """The cached media runs, by key (root hash + digest). `outlives_prompt` is true if tokens after an image also read
    the image's run (cross attention)."""

    def __init__(self, pages: BlockPages, publisher: EventPublisher, outlives_prompt: bool) -> None:
        self.pages = pages
        self.outlives_prompt = outlives_prompt
        self._publisher = publisher
        self._runs: dict[bytes, MediaRun] = {}
        self._serials = count(1)

    def __len__(self) -> int:
        return len(self._runs)

    def __contains__(self, key: bytes) -> bool:
        return key in self._runs

    def __getitem__(self, key: bytes) -> MediaRun:
        return self._runs[key]

    def get(self, key: bytes) -> MediaRun | None:
        """Return the cached media run with this key, or None."""
        return self._runs.get(key)

    def runs(self) -> Collection[MediaRun]:
        """Return all cached media runs, as a live view."""
        return self._runs.values()

    def needs_run(self, item: Media, start: int, stop: int) -> bool:
        """Return whether computing tokens [start, stop) reads the media run (the pages) of `item`."""
        has = bool(item.tokens and self.pages.width)
        return has and item.start < stop and (self.outlives_prompt or item.stop > start)

    def add(self, key: bytes, account: Account, rows: Ids, tokens: int, now: float) -> MediaRun:
        """Cache the pages of one image and return its media run. The caller becomes the first user of the media
        run. The media run takes over the caller's reference to the pages."""
        run = MediaRun(next(self._serials), now, key, account, rows, tokens, len(rows) * self.pages.row_bytes)
        self._runs[key] = run
        self.pages.add_cached(rows, run)
        account.queue.policy.on_insert(run, now)
        run.users = 1
        if self._publisher.events.listening:
            self._publisher.media_stored(key[:HASH_BYTES], key[HASH_BYTES:])
        return run

    def retain(self, run: MediaRun, now: float) -> None:
        """Add one user of a media run. The run cannot be evicted until all its users have released it."""
        run.account.retain(self.pages.retain(run.rows))
        run.users += 1
        run.hits += 1
        run.account.queue.policy.on_hit(run, now)
        run.last_used = now
        run.account.queue.remove(run)

    def release(self, run: MediaRun, now: float) -> None:
        """Remove one user of a media run. A media run without users is queued for eviction."""
        run.account.release(*self.pages.release(run.rows))
        run.users -= 1
        run.last_used = now
        if not run.users:
            run.account.queue.push(run, now)

    def drop(self, run: MediaRun, reason: str) -> None:
        """Remove a media run that has no users, and free its pages."""
        del self._runs[run.key]
        if self._publisher.events.listening:
            self._publisher.media_dropped(run.key[:HASH_BYTES], run.key[HASH_BYTES:], reason)
        run.account.free(self.pages.drop_cached(run.rows))
