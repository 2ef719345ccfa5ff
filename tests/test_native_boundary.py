"""The native code under arguments that do not fit: other types, sizes, strides, alignments, shared memory, extreme
numbers. Each call returns or raises. `tests/test_sanitizers.py` runs this file with sanitizers, too."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

core = pytest.importorskip("kvloom.core._native", reason="built without a C compiler")
tiers = pytest.importorskip("kvloom.tiers._native", reason="built without a C compiler")

REFUSALS = (TypeError, ValueError, IndexError, BufferError, OverflowError, OSError, MemoryError)
DTYPES = [np.int32, np.int32, np.int32, np.int64, np.float32, np.uint8, np.bool_, np.int16]
NUMBERS = st.sampled_from([0, 0, 1, 1, 2, 3, 5, -1, -(2**31), 2**31 - 1])
EDGES = st.sampled_from([0, 1, -1, 240, 241, 256, 1024, 2**31, 2**62, 2**63 - 1, -(2**63), 2**64])
OTHERS = st.sampled_from([None, b"", b"1234", "text", 7, [1, 2], bytearray(8), memoryview(b"12345678")])


def returns_or_raises(call: Callable[..., object], *given_: object) -> None:
    with contextlib.suppress(*REFUSALS):
        call(*given_)


@st.composite
def arrays(draw: st.DrawFn) -> Any:
    """An array of any dtype, small or empty, with gaps, backwards, unaligned or read-only."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    numbers = np.array(draw(st.lists(NUMBERS, max_size=12)), np.int64).astype(dtype)
    shape = draw(
        st.sampled_from(["plain", "plain", "plain", "gaps", "backwards", "unaligned", "read-only", "2-D"])
    )
    if shape == "gaps":
        return numbers.repeat(2)[::2]
    if shape == "backwards":
        return numbers[::-1]
    if shape == "unaligned":
        raw = bytearray(numbers.nbytes + 1)
        raw[1:] = numbers.tobytes()
        return np.frombuffer(raw, np.uint8)[1:].view(dtype)
    if shape == "read-only":
        numbers.flags.writeable = False
    return numbers.reshape(1, -1) if shape == "2-D" else numbers


@st.composite
def calls_with_shared_memory(draw: st.DrawFn) -> list[Any]:
    """Four arguments. Some of them may be the same array, or parts of it."""
    found = [draw(st.one_of(arrays(), arrays(), arrays(), OTHERS)) for _ in range(4)]
    if draw(st.booleans()):
        size = draw(st.integers(1, 8))
        whole = np.array(draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)), np.int32)
        found[:2] = whole.copy(), np.zeros(size, np.int32)
        found[2:] = [whole.copy(), np.zeros(size, np.int32)]
        to, source = draw(st.integers(0, 3)), draw(st.integers(0, 3))
        found[to] = found[source][draw(st.integers(0, 1)) :]
    return found


@given(calls_with_shared_memory())
@settings(max_examples=300)
def test_counts_of_pages_with_any_arguments(given_: list[Any]) -> None:
    for verb in ("lend", "retain", "keep"):
        returns_or_raises(getattr(core, verb), *given_[:3])
    for verb in ("release", "drop"):
        returns_or_raises(getattr(core, verb), *given_)


def test_counts_of_pages_refuse_shared_memory_and_full_counts() -> None:
    held, kept, out = (np.array([0, 1, 1, 1], np.int32) for _ in range(3))
    with pytest.raises(ValueError, match="share memory"):
        core.release(held, kept, held, out)
    with pytest.raises(ValueError, match="share memory"):
        core.drop(held, kept, np.array([1], np.int32), kept)
    rows = np.zeros(2, np.int64)
    with pytest.raises(ValueError, match="share memory"):
        core.wrong_row(rows, rows.view(np.uint8))
    full = np.array([0, 2**31 - 1], np.int32)
    with pytest.raises(ValueError, match="too often"):
        core.retain(full, np.zeros(2, np.int32), np.array([1], np.int32))
    with pytest.raises(ValueError, match="too often"):
        core.keep(np.zeros(2, np.int32), full, np.array([1], np.int32))
    assert full[1] == 2**31 - 1


@given(st.one_of(arrays(), OTHERS), st.one_of(arrays(), OTHERS), st.booleans())
@settings(max_examples=300)
def test_rows_with_any_arguments(rows: Any, is_open: Any, shared: bool) -> None:
    returns_or_raises(core.wrong_row, rows, is_open)
    if shared and isinstance(rows, np.ndarray) and rows.flags.c_contiguous:
        returns_or_raises(core.wrong_row, rows, rows.reshape(-1).view(np.uint8))


@given(
    st.lists(st.one_of(st.integers(-(2**70), 2**70), st.none(), st.text(max_size=2)), max_size=6),
    EDGES,
    EDGES,
)
def test_masks_and_ids_with_any_arguments(items: list[Any], places: int, scale: int) -> None:
    for some in (items, tuple(items), dict.fromkeys(map(str, items)), None):
        returns_or_raises(core.leading, some, places)
        returns_or_raises(core.leading_of, dict.fromkeys(items, 3), some, places, scale)
        returns_or_raises(core.leading_of, dict.fromkeys(items, "x"), some, 8, 1)
        returns_or_raises(core.plain_ids, some)


@given(st.binary(max_size=200), st.binary(max_size=17))
def test_hashes_with_any_arguments(data: bytes, parent: bytes) -> None:
    returns_or_raises(core.chain, parent, data)
    returns_or_raises(core.chain, parent[:16].ljust(16), memoryview(data)[::2])
    assert len(core.chain(bytes(16), data)) == len(data) // 64
    returns_or_raises(core.any_negative, data)


@given(st.integers(0, 3000), EDGES, EDGES, EDGES, st.integers(0, 600))
@settings(max_examples=300)
def test_checksums_with_any_sizes(size: int, run: int, step: int, offset: int, shift: int) -> None:
    data = bytearray(os.urandom(8)) * (size // 8 + 1)
    view = memoryview(data)
    with tempfile.TemporaryFile() as file:
        file.write(data[: size // 2])
        file.flush()
        for into in (view[:size], view[::2], memoryview(bytes(data)), view[:0]):
            returns_or_raises(tiers.checksum, into)
            returns_or_raises(tiers.checksums, into, run)
            returns_or_raises(tiers.copy, into, view[: len(into)], run, True)
            returns_or_raises(tiers.copy, into, view[shift : shift + len(into)], run, False)
            for fd in (file.fileno(), -1):
                returns_or_raises(tiers.read, fd, into, offset, run, step)
                returns_or_raises(tiers.read, fd, into, 0, run, run)


@pytest.mark.parametrize("shift", [0, 1, 100, 241, 300])
def test_a_copy_within_one_buffer_has_the_checksums_of_its_result(shift: int) -> None:
    whole = memoryview(bytearray(np.arange(2000, dtype=np.uint32).tobytes()))
    expected = bytes(whole[shift : shift + 723])
    sums = tiers.copy(whole[:723], whole[shift : shift + 723], 241, True)
    assert bytes(whole[:723]) == expected
    assert sums == tiers.checksums(whole[:723], 241)


@given(st.integers(0, 3000), EDGES, EDGES)
@settings(max_examples=100)
def test_sockets_with_any_sizes(size: int, run: int, step: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for one in (ours, theirs):
            one.settimeout(1.0)
        data = bytearray(size)
        for fd in (ours.fileno(), -1):
            returns_or_raises(tiers.send, fd, data, run, step, time.monotonic() + 1)
        theirs.sendall(bytes(size // 2))
        theirs.shutdown(socket.SHUT_WR)
        returns_or_raises(tiers.receive, ours.fileno(), data, run, step, time.monotonic() + 1)
        returns_or_raises(tiers.receive, ours.fileno(), bytes(data), run, run, time.monotonic() + 1)
