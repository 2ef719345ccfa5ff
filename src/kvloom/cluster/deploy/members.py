"""The list of a cluster's workers and routers. The Ray replica of each process announces the process every second. The
replica of a router reads the list and registers the workers with its router.

A Ray actor keeps the list in memory. If the actor is restarted, the list is complete again after a second.
"""

from __future__ import annotations

import time
from typing import Any

__all__ = ["Members", "members_of"]

FORGET_SECONDS = 15.0
NAMESPACE = "kvloom"


class Members:
    """The list of running processes of a deployed cluster. Each replica adds its process to this list. The list also
    stores the digest of each group's configuration, by which `kvloom deploy` finds changed groups."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[float, dict[str, Any]]] = {}
        self._digests: dict[str, str] = {}

    def announce(self, url: str, about: dict[str, Any]) -> None:
        """Record that a process serves at `url`. `about` describes the process."""
        self._seen[url] = time.monotonic(), about

    def withdraw(self, url: str) -> None:
        """Remove the process at `url` from the list, because it ends."""
        self._seen.pop(url, None)

    def living(self, command: str) -> dict[str, dict[str, Any]]:
        """Return the processes of a command (`serve` or `route`) that were announced in the last 15 s, by URL."""
        limit = time.monotonic() - FORGET_SECONDS
        self._seen = {url: one for url, one in self._seen.items() if one[0] > limit}
        return {url: about for url, (_, about) in self._seen.items() if about["command"] == command}

    def digests(self, new: dict[str, str] | None = None) -> dict[str, str]:
        """Return the digest of each deployed group, by name. If `new` is given, first replace the stored digests by
        `new`."""
        if new is not None:
            self._digests = new
        return self._digests


def members_of(cluster: str) -> Any:
    """Return the actor that has the member list of a cluster. Starts the actor if there is none."""
    import ray

    return (
        ray.remote(Members)
        .options(
            name=f"members of {cluster}",
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            num_cpus=0,
            get_if_exists=True,
        )
        .remote()
    )
