"""Hot prefixes: the nodes of the radix tree with the most hits. The walk over the tree can be interrupted and
continued.

A hit of a node is also a hit of all nodes above it, so the hot nodes form a connected tree. Does not modify the cache.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from kvloom.core.prefix.node import Node, Root
from kvloom.core.state import CacheState

__all__ = ["HotPrefixes"]

Heat = tuple[int, float, int]
TURNS = 16
"""A report lists the pool map's cells of each node. At the latest after this many reports, the cells are computed
again, even if the node has not changed."""


class HotPrefixes:
    """The nodes of one tree with the most hits, at most `most` of them. A pass visits every node once. Reports
    show the result of the last complete pass.
    """

    def __init__(self, state: CacheState, most: int) -> None:
        self._state, self._most = state, most
        self._todo: list[Node] = []
        self._best: list[
            tuple[Heat, Node]
        ] = []  # hottest nodes of the current pass, as a heap with the fewest hits first
        self._hot: list[Node] = []
        self._places: dict[int, tuple[int, int, list[int]]] = {}
        self._looks = 0
        self._complete = 0.0  # time at which the last pass ended
        self._bytes: Counter[str] = Counter()  # bytes of nodes of the current pass, by adapter
        self._adapter_bytes: dict[str, int] = {}

    def walk(self, until: float) -> Iterator[Node]:
        """Continue the current pass over the tree, and yield the visited nodes. If the last pass is complete, begin a
        new pass. `until` limits the CPU time of this thread (`time.thread_time()`, in seconds). If this time is reached
        before the end of the pass, the next call continues the pass."""
        if not self._todo:
            self._todo, self._best, self._bytes = list(self._state.tree.roots.values()), [], Counter()
        while self._todo:
            node = self._todo.pop()
            if node.parent is not None:  # the node is not a root, and was not evicted since
                yield node
                self._bytes[node.root.adapter] += node.bytes + sum([c.bytes for c in node.checkpoints])
                one = (node.hits, node.last_used, node.serial), node
                if len(self._best) < self._most:
                    heapq.heappush(self._best, one)
                elif one[0] > self._best[0][0]:
                    heapq.heapreplace(self._best, one)
            self._todo += node.children.values()
            if time.thread_time() > until and self._todo:
                return
        self._hot, self._adapter_bytes = self._sorted(), dict(self._bytes)
        self._complete = self._state.clock.now()

    def report(
        self, where: Callable[[Node], list[int]], tenant: Callable[[str], int]
    ) -> dict[str, Any]:  # fmt: skip
        """Return the hot nodes as JSON data. "branches" has the nodes, each after its parent. "nodes" and "roots" are
        the numbers of nodes and roots in the tree. "age" is the number of seconds since the last complete pass.
        "adapter_bytes" has the cached bytes of each adapter in that pass. The adapter "" means no adapter.

        `where` maps a node to its pool cells. `tenant` maps the name of a tenant to its index in the map."""
        now = self._state.clock.now()
        self._looks += 1
        chosen: dict[int, Node] = {}
        for node in self._hot or self._sorted():
            path = []
            current: Node | None = node
            while current is not None and current.parent is not None and current.serial not in chosen:
                path.append(current)
                current = current.parent
            if isinstance(current, Root) or (current is not None and current.serial in chosen):
                if len(chosen) + len(path) <= self._most:
                    chosen.update((one.serial, one) for one in reversed(path))
        self._places = {serial: place for serial, place in self._places.items() if serial in chosen}
        return {
            "nodes": self._state.tree.nodes,
            "roots": len(self._state.tree.roots),
            "age": round(now - self._complete, 1) if self._complete else None,
            "adapter_bytes": self._adapter_bytes,
            "branches": [self._branch(node, now, where, tenant) for node in chosen.values()],
        }

    def _sorted(self) -> list[Node]:
        return [node for _, node in sorted(self._best, key=lambda one: one[0], reverse=True)]

    def _branch(
        self, node: Node, now: float, where: Callable[[Node], list[int]], tenant: Callable[[str], int]
    ) -> dict[str, Any]:
        assert node.parent is not None
        place = self._places.get(node.serial)
        if place is None or place[:2] != (node.start, node.count) or (node.serial + self._looks) % TURNS == 0:
            place = self._places[node.serial] = node.start, node.count, where(node)
        return {
            "id": f"{node.serial:06x}",
            "parent": None if isinstance(node.parent, Root) else f"{node.parent.serial:06x}",
            "tenant": tenant(node.owner.tenant),
            "depth": node.start,
            "tokens": node.tokens,
            "hits": node.hits,
            "age": round(now - node.created, 1),
            "idle": round(now - node.last_used, 1),
            "users": node.locks,
            "children": len(node.children),
            "snapshots": len(node.checkpoints),
            "bytes": node.bytes,
            "cells": place[2],
        }
