"""Lengths from outside: no store, file or page makes this process allocate more than its limits."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvloom.tiers import DiskConfig, DiskTier, Form, Outcome, aligned_bytes
from kvloom.tiers.aligned_memory import BLOCK
from kvloom.tiers.disk import SystemFiles, segment, segment_writer
from kvloom.tiers.disk.tombstones import Tombstones
from kvloom.tiers.encoding import Head, make_codec, parse_head, seal
from kvloom.tiers.remote import s3
from kvloom.tiers.remote.redis_protocol import RespConnection
from kvloom.tiers.testing.conformance import FORM, RUN, get, objects, page, put

MIB = 1 << 20


@contextmanager
def server(answer: bytes) -> Iterator[int]:
    """Answer the first command with these bytes, and nothing more."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        over = threading.Event()

        def run() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)
                over.wait(20)

        thread = threading.Thread(target=run)
        thread.start()
        yield listening.getsockname()[1]
        over.set()
        thread.join(20)


@contextmanager
def peak_below(most: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"$3000000000\r\n", "a string of bytes: 3000000000, the limit is 66037"),
        (b"$100000\r\n", "a string of bytes: 100000"),
        (b"*3000000000\r\n", "an array of items: 3000000000, the limit is 1031"),
        (b"*1\r\n" * 200, "arrays in arrays: 5, the limit is 4"),
        (b"*1\r\n$3000000000\r\n", "a string of bytes: 3000000000"),
        (b"*9\r\n" + (b"$8000\r\n" + bytes(8000) + b"\r\n") * 9, "a string of bytes: 8000, the limit is"),
        (b"*900\r\n" + b"*900\r\n" * 900, "an array of items: 900, the limit is"),
        (b"*9\r\n" + (b"+" + bytes(60000) + b"\r\n") * 9, "a line of bytes: 60001, the limit is"),
    ],
)
def test_a_redis_length_is_checked_before_allocation(answer: bytes, said: str) -> None:
    with server(answer) as port, peak_below(8 * MIB):
        resp = RespConnection(("127.0.0.1", port), 2)
        with pytest.raises(ValueError, match=said):
            resp.call("PING")
        resp.close()


def test_a_value_above_the_redis_limit_ends_the_connection() -> None:
    with server(b"$3000000000\r\n") as port, peak_below(8 * MIB):
        resp = RespConnection(("127.0.0.1", port), 2)
        resp.send([("GET", "x")])
        with pytest.raises(ValueError, match="a value of bytes: 3000000000, the limit is 536870912"):
            resp.read_value_into(lambda length: None)
        resp.close()


def test_a_frame_with_an_excessive_head_length_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(DiskConfig(tmp_path, 64 * MIB, durable="process"))
    assert put(tier, range(3)).ok.all()
    tier.close()
    (path,) = tmp_path.glob("*.seg")
    with path.open("r+b") as file:
        header = file.read(BLOCK)
        end = file.seek(0, os.SEEK_END)
        file.write(segment._FRAME.pack(b"KVLF", 1, 0, header[8:24], end, 1 << 31, 512 * MIB, 0))
        file.truncate(end + 1024 * MIB)  # sparse
    asked: list[int] = []

    def counted(size: int) -> memoryview:
        asked.append(size)
        return aligned_bytes(size)

    monkeypatch.setattr(segment, "aligned_bytes", counted)
    tier = DiskTier(DiskConfig(tmp_path, 2048 * MIB, durable="process"))
    assert get(tier, range(3)).ok.all(), "the frames before it are served"
    tier.close()
    assert max(asked) <= 2 * MIB


def test_many_damaged_frames_do_not_read_a_file_again_and_again(tmp_path: Path) -> None:
    tier = DiskTier(DiskConfig(tmp_path, 64 * MIB, durable="process"))
    assert put(tier, range(3)).ok.all()
    tier.close()
    (path,) = tmp_path.glob("*.seg")
    with path.open("r+b") as file:
        header = file.read(BLOCK)
        end = file.seek(0, os.SEEK_END)
        for at in range(end, end + 64 * BLOCK, BLOCK):  # each states heads of 32 MiB
            file.seek(at)
            file.write(segment._FRAME.pack(b"KVLF", 1, 0, header[8:24], at, 1, 32 * MIB - BLOCK, 0))
        file.truncate(end + 33 * MIB)
    read: list[int] = []

    class Counted(SystemFiles):
        def read(self, fd: int, into: Sequence[memoryview], offset: int) -> int:
            read.append(sum(map(len, into)))
            return super().read(fd, into, offset)

    tier = DiskTier(DiskConfig(tmp_path, 64 * MIB, durable="process"), Counted)
    assert sum(read) < 400 * MIB
    assert get(tier, range(3)).ok.all()
    tier.close()


def test_frames_of_pages_with_many_runs_stay_within_the_head_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a small limit: 256 runs a page are 3 KB of head each."""
    for module in (segment_writer, segment):
        monkeypatch.setattr(module, "MAX_HEAD_BYTES", 64 << 10)
    form = Form("u8", "x", 4096, 16)
    tier = DiskTier(DiskConfig(tmp_path, 64 * MIB, durable="process"))
    assert put(tier, range(100), form).ok.all()
    tier.close()
    tier = DiskTier(DiskConfig(tmp_path, 64 * MIB, durable="process"))
    assert tier.lookup(objects(range(100), form)).all()
    assert get(tier, range(100), form).ok.all()
    tier.close()


def test_a_head_with_excessive_run_lengths_is_corrupt() -> None:
    codec = make_codec("zstd")
    head = seal(objects([1]).keys[0], FORM, memoryview(page(1)), codec)[0]
    assert head.stored_lengths is not None
    for length in (RUN + 1, (1 << 32) - 1):
        bad = head._replace(stored_lengths=(length, *head.stored_lengths[1:]))
        assert parse_head(memoryview(bad.pack())) == Outcome.CORRUPT
    whole = Head(head.key, 0, RUN, head.checksums)
    for runs, run_bytes in ((8, 0), (8, 1 << 30), (1, 1 << 31)):
        bad = whole._replace(checksums=head.checksums[: 8 * runs], run_bytes=run_bytes)
        assert parse_head(memoryview(bad.pack())) == Outcome.CORRUPT, (runs, run_bytes)


def test_decompression_allocates_no_more_than_the_run() -> None:
    zstd = pytest.importorskip("zstandard")
    lz4 = pytest.importorskip("lz4.block")
    codec, run = make_codec("none"), page(1, RUN).tobytes()
    into = memoryview(bytearray(RUN))
    assert codec.unpack(2, memoryview(zstd.ZstdCompressor().compress(run)), into)
    assert into == run
    wide = zstd.ZstdCompressionParameters(window_log=27, write_content_size=False)
    assert not codec.unpack(2, memoryview(zstd.ZstdCompressor(compression_params=wide).compress(run)), into)
    bomb = bytes(256 * MIB)
    packed = [zstd.ZstdCompressor().compress(bomb), lz4.compress(bomb, store_size=False)]
    del bomb
    with peak_below(8 * MIB):
        assert not codec.unpack(2, memoryview(packed[0]), into)
        assert not codec.unpack(1, memoryview(packed[1]), into)
    for size in (1, 100, 1024, 100_000, 3 * MIB):  # every window that our own writer chooses is taken
        data = page(2, size + size % 2).tobytes()[:size]
        out = memoryview(bytearray(size))
        assert codec.unpack(2, memoryview(zstd.ZstdCompressor(level=1).compress(data)), out)
        assert out == data


def test_tombstones_are_read_in_parts(tmp_path: Path) -> None:
    directory = os.open(tmp_path, os.O_RDONLY)
    dropped = Tombstones(SystemFiles(directory))
    gone = [(struct.pack("<Q28x", number), 1, number) for number in range(20_000)]
    dropped.add(gone)
    with (tmp_path / "dropped").open("r+b") as file:
        file.truncate(64 * MIB)  # sparse
    with peak_below(32 * MIB):
        assert dropped.read() == {key: (number, at) for key, number, at in gone}
    os.close(directory)


@pytest.mark.parametrize("framing", [b"", b"Transfer-Encoding: chunked\r\n"])
@pytest.mark.parametrize("body", [b"x" * 65536, b"10000\r\n" + b"x" * 65536 + b"\r\n"])
@pytest.mark.few(1)
def test_a_reply_of_s3_without_end_is_refused(
    framing: bytes, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("boto3", reason="no S3 client: pip install boto3")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    sent = [0]

    def run() -> None:
        connection, _ = listening.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n")
            while sent[0] < 256 * MIB:
                connection.sendall(body)
                sent[0] += len(body)

    with socket.create_server(("127.0.0.1", 0)) as listening, peak_below(48 * MIB):
        thread = threading.Thread(target=run)
        thread.start()
        endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"
        client, _ = s3._make_client(s3.S3Bucket("bucket", endpoint=endpoint), 5.0)
        with pytest.raises(Exception, match=r"exceeds 4194304 bytes|chunk|Connection|body"):
            client.delete_objects(Bucket="bucket", Delete={"Objects": [{"Key": "k"}], "Quiet": True})
        thread.join(30)
    assert sent[0] < 64 * MIB
