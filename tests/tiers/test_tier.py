"""Forms, objects, ranges and transfers."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

from kvloom.tiers import Form, Objects, Outcome, Ranges, Transfer, TransferCounts
from kvloom.tiers.testing.conformance import FORM, block_hash


def test_every_field_of_a_form_is_in_its_fingerprint() -> None:
    others = [
        replace(FORM, dtype="f16"),
        replace(FORM, order="KL"),
        replace(FORM, page_bytes=2 * FORM.page_bytes),
        replace(FORM, run_bytes=2 * FORM.run_bytes),
        replace(FORM, shard="1"),
        replace(FORM, layout="1"),
        replace(FORM, exact=False),
        replace(FORM, dtype="bf16L", order="KTHD"),
    ]
    assert len({form.fingerprint for form in (FORM, *others)}) == 9
    assert replace(FORM).fingerprint == FORM.fingerprint


@pytest.mark.parametrize("sizes", [(100, 33), (0, 1), (100, 0), (-4, 2)])
def test_a_page_is_whole_runs(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="is not a multiple of run_bytes"):
        Form("f", "x", *sizes)


def test_objects_refuse_invalid_block_hashes() -> None:
    with pytest.raises(ValueError, match="has 3 bytes; block hashes have 16"):
        Objects([block_hash(1), b"abc"], 0, FORM)
    with pytest.raises(ValueError, match="group=-1"):
        Objects([block_hash(1)], -1, FORM)


def test_ranges_accept_any_contiguous_memory() -> None:
    assert len(Ranges(bytearray(8), [0]).bytes) == 8
    assert len(Ranges(np.zeros((2, 4), np.float32), [0]).bytes) == 32
    assert len(Ranges(memoryview(b"1234"), [0]).bytes) == 4
    with pytest.raises(ValueError, match="not contiguous"):
        Ranges(np.zeros((4, 4))[:, 1], [0])


def test_importing_tiers_imports_neither_torch_nor_optional_packages() -> None:
    code = "import sys, kvloom.tiers, kvloom.tiers.testing.fault_injection; print(sorted({'torch', 'xxhash', 'lz4'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


def test_a_transfer_is_done_when_every_object_has_its_outcome() -> None:
    tally = TransferCounts()
    transfer = Transfer(4, tally, "read", 10)
    assert not transfer.wait(0)
    transfer.settle([0, 2], Outcome.OK)
    assert not transfer.done
    transfer.settle([0, 1], Outcome.CORRUPT, "bad")
    threading.Timer(0.02, transfer.settle_pending, (Outcome.MISSING,)).start()
    assert transfer.wait(5)
    assert transfer.poll()
    assert transfer.failed
    assert transfer.reason == "bad"
    assert transfer.results.tolist() == [Outcome.OK, Outcome.CORRUPT, Outcome.OK, Outcome.MISSING]
    stats = tally.stats(0, 0, 0, 0)
    assert stats.reads == {"ok": 2, "corrupt": 1, "missing": 1}
    assert stats.bytes_read == 20
    assert "corrupt" in repr(transfer)


def test_a_settled_transfer_refuses_access() -> None:
    transfer = Transfer(2, TransferCounts(), "read", 100)
    assert transfer.begin_access()
    transfer.settle_pending(Outcome.FAILED, "closed")
    assert not transfer.begin_access()
    assert not transfer.released
    transfer.end_access()
    assert transfer.released


def test_a_cancelled_transfer_refuses_access() -> None:
    transfer = Transfer(2, TransferCounts(), "write", 1)
    assert transfer.begin_access()
    assert not transfer.cancel()
    assert transfer.done
    assert not transfer.begin_access()
    assert not transfer.wait_released(0)
    transfer.settle_pending(Outcome.OK)
    transfer.end_access()
    assert transfer.released
    assert (transfer.results == Outcome.LATE).all()
