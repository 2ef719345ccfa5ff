"""Copies of documents on ranks 1 and higher."""

from __future__ import annotations

from kvloom.core import KVCache
from kvloom.engine.execution import ModelRunner
from kvloom.models.paged import AttentionSinks, RotatedCopier
from kvloom.models.sharding import RankGroups

from .messages import CopyDocument, SetSinks

__all__ = ["RankDocuments"]


class RankDocuments:
    """Runs the copies of documents that rank 0 plans, on the part of the pages that this rank has."""

    def __init__(self, cache: KVCache, runner: ModelRunner, ranks: RankGroups) -> None:
        self._sinks = AttentionSinks(runner.model)
        self._cache, self._runner, self._ranks = cache, runner, ranks
        self._copier: RotatedCopier | None = None

    def run(self, message: CopyDocument | SetSinks) -> None:
        """Run one message of rank 0."""
        if isinstance(message, SetSinks):
            self._sinks.set(message.is_on)
            return
        if self._copier is None:
            runner = self._runner
            self._copier = RotatedCopier(self._cache, runner.pages, runner.model, self._ranks.context)
        if self._copier.chosen != message.rotations:
            self._copier.use_rotations(message.rotations)
        self._copier.copy(message.read(self._cache.layout.width("token")))
