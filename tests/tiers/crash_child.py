"""Writes pages to a disk tier until it is killed, and prints each number once it is acknowledged."""

from __future__ import annotations

import os
import sys

from kvloom.tiers import DiskConfig, DiskTier
from kvloom.tiers.testing.conformance import filled, memory, objects

SETTINGS = {"capacity": 48 << 20, "segment_bytes": 4 << 20, "evict": "oldest"}


def main(folder: str, first: int, compression: str, durable: str) -> None:
    tier = DiskTier(DiskConfig(folder, **SETTINGS, compression=compression, durable=durable))  # type: ignore[arg-type]
    os.write(1, b"ready\n")
    under_way = []
    number = first
    while True:
        batch = range(number, number + 1 + number % 5)
        number = batch.stop
        under_way.append((batch, tier.write(objects(batch), filled(batch))))
        if len(under_way) > 3:
            batch, transfer = under_way.pop(0)
            if transfer.wait(10) and transfer.ok.all():
                os.write(1, b"".join(b"%d\n" % n for n in batch))
            tier.read(objects([batch.start]), memory(1)).wait(10)  # used, so that eviction carries it over


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
