"""Pages kept smaller than they are: int8 or fp8 with a scale for every 64 values, in any tier, and never taken for exact.

    write   the page of either form              -> re-encoded, under the same name and a form of its own (exact=False)
    read    the form with `exact=False`          -> decoded to the page's own type; the caller has allowed it by asking so
            the exact form                       -> missing: these bytes never pass for those that were computed

    a run    values, 1 byte each | scales, float32, one for every 64 values        runs stay apart, so layers arrive in order

Knows element types (fp32, fp16, bf16), no layouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from kvloom.tiers.disk.files import aligned_bytes
from kvloom.tiers.shares import Shares, SupportsShares
from kvloom.tiers.tier import Form, Objects, Ranges, Tier, part_range
from kvloom.tiers.transfer import Outcome, TransferCounts, TierStats, Transfer, failed_transfer
from kvloom.tiers.workers import Workers

__all__ = ["Coding", "LossyTier", "decode", "encode", "lossy_form"]

Coding = Literal["int8", "fp8"]
BLOCK_VALUES = 64
_WIDTH = {"fp32": 4, "fp16": 2, "bf16": 2}
_FP8_MOST = 448.0
_WAIT_SECONDS, _CLOSE_SECONDS = 60.0, 10.0
Floats = npt.NDArray[np.float32]


def lossy_form(form: Form, coding: Coding) -> Form:
    """The form under which a page of `form` is kept. A ValueError where its values cannot be re-encoded."""
    if coding not in get_args(Coding):
        raise ValueError(f"coding={coding!r} is none of {get_args(Coding)}")
    width = _WIDTH.get(form.dtype)
    if width is None:
        raise ValueError(f"dtype={form.dtype!r} is none of {', '.join(_WIDTH)}: such pages stay as they are")
    if form.run_bytes % (width * BLOCK_VALUES):
        raise ValueError(
            f"runs of {form.run_bytes} bytes are not whole blocks of {BLOCK_VALUES} values of {form.dtype}"
        )
    values = form.run_bytes // width
    run = values + values // BLOCK_VALUES * 4
    layout = f"{coding}/{BLOCK_VALUES} of {form.dtype} {form.layout}"
    return Form(coding, form.order, run * form.runs, run, form.shard, layout, exact=False)


def encode(run: memoryview, dtype: str, coding: Coding, into: memoryview) -> None:
    """One run, or several, to values and scales. What is not finite becomes the largest value there is, or 0."""
    floats = _floats(np.frombuffer(run, np.uint8), dtype).reshape(-1, BLOCK_VALUES)
    most = _FP8_MOST if coding == "fp8" else 127.0
    floats = np.nan_to_num(floats, nan=0.0, posinf=3e38, neginf=-3e38)
    scales = np.abs(floats).max(axis=1) / np.float32(most)
    scales[scales == 0] = 1.0
    scaled = np.clip(floats / scales[:, None], -most, most)
    target = np.frombuffer(into, np.uint8)
    values = floats.size
    target[:values] = (
        _to_fp8(scaled).ravel() if coding == "fp8" else np.rint(scaled).astype(np.int8).view(np.uint8).ravel()
    )
    target[values : values + 4 * len(scales)] = scales.view(np.uint8)


def decode(data: memoryview, dtype: str, coding: Coding, into: memoryview) -> None:
    """The inverse, as near as the values allow; `into` gets the page's own type."""
    values = len(into) // _WIDTH[dtype]
    coded = np.frombuffer(data, np.uint8, values)
    scales = np.frombuffer(data, np.float32, values // BLOCK_VALUES, values)
    plain = _fp8_values()[coded] if coding == "fp8" else coded.view(np.int8).astype(np.float32)
    floats = (plain.reshape(-1, BLOCK_VALUES) * scales[:, None]).ravel()
    np.frombuffer(into, np.uint8)[:] = _bytes(floats, dtype)


def _floats(data: npt.NDArray[np.uint8], dtype: str) -> Floats:
    if dtype == "bf16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view(np.float32 if dtype == "fp32" else np.float16).astype(np.float32)


def _bytes(floats: Floats, dtype: str) -> npt.NDArray[np.uint8]:
    if dtype == "bf16":  # to the nearest, ties to even
        bits = floats.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.uint8)
    if dtype == "fp16":
        return np.clip(floats, -65504, 65504).astype(np.float16).view(np.uint8)
    return floats.view(np.uint8)


@cache
def _fp8_values() -> Floats:
    """What the 256 codes of e4m3 (without infinities) mean."""
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values = np.where(codes & 128, -size, size).astype(np.float32)
    values[[127, 255]] = 0.0  # not a number: never written
    return values


@cache
def _fp8_borders() -> Floats:
    """Halfway between neighbours among the 127 values from 0 up."""
    values = _fp8_values()[:127].astype(np.float64)
    return ((values[1:] + values[:-1]) / 2).astype(np.float32)


def _to_fp8(floats: Floats) -> npt.NDArray[np.uint8]:
    codes = np.searchsorted(_fp8_borders(), np.abs(floats), side="left").astype(np.uint8)
    codes[np.signbit(floats)] |= 128
    return codes


class LossyTier(Tier):
    """`inner`, with every page re-encoded on its way. Its threads do the work, so that a caller never waits for it."""

    def __init__(self, inner: Tier, coding: Coding, threads: int = 2) -> None:
        if coding not in get_args(Coding):
            raise ValueError(f"coding={coding!r} is none of {get_args(Coding)}")
        self._inner, self.coding = inner, coding
        self._tally = TransferCounts()
        self._closed = False
        self._workers: Workers[Callable[[], None]] = Workers(
            threads, "kvloom-lossy", lambda: lambda job: job()
        )

    @property
    def name(self) -> str:
        return f"{self.coding}:{self._inner.name}"

    @property
    def capacity(self) -> int:
        return self._inner.capacity

    def set_shares(self, shares: Shares) -> None:
        if isinstance(self._inner, SupportsShares):
            self._inner.set_shares(shares)

    def used_by(self, tenant: str) -> int:
        return self._inner.used_by(tenant) if isinstance(self._inner, SupportsShares) else 0

    def _kept(self, objects: Objects) -> Objects:
        """Their representation in the inner tier; the same for the exact form and the one that allows for loss."""
        exact = replace(objects.form, exact=True)
        return Objects(objects.block_hashes, objects.group, lossy_form(exact, self.coding), objects.tenant)

    def lookup(self, objects: Objects) -> npt.NDArray[np.bool_]:
        """An exact page is never here."""
        if objects.form.exact or self._closed:
            return np.zeros(len(objects), np.bool_)
        return self._inner.lookup(self._kept(objects))

    def read(self, objects: Objects, into: Ranges, part: tuple[int, int] | None = None) -> Transfer:
        into.check(objects, writable=True)
        start, stop = part_range(objects.form, part)
        transfer = Transfer(len(objects), self._tally, "read", stop - start)
        if self._closed:
            return failed_transfer(
                len(objects), self._tally, "read", Outcome.FAILED, f"{self.name} is closed"
            )
        if objects.form.exact:
            transfer.settle_pending(Outcome.MISSING)
            return transfer
        kept = self._kept(objects)
        run, small = objects.form.run_bytes, kept.form.run_bytes
        part_kept = (start // run * small, stop // run * small)

        def work() -> None:
            size = kept.form.page_bytes
            room = aligned_bytes(size * len(objects))
            came = self._inner.read(kept, Ranges(room, np.arange(len(objects)) * size), part_kept)
            came.wait(_WAIT_SECONDS)
            came.cancel()  # what has not come by now counts as late; what comes all the same is not decoded
            for index in np.flatnonzero(came.ok).tolist():
                at, page = int(into.starts[index]), room[index * size : (index + 1) * size]
                for number in range(start // run, stop // run):
                    coded = page[number * small : (number + 1) * small]
                    target = into.view[at + number * run : at + (number + 1) * run]
                    decode(coded, objects.form.dtype, self.coding, target)
            self._pass_on(came, transfer)

        return self._later(transfer, work)

    def write(self, objects: Objects, source: Ranges) -> Transfer:
        """Pages that were computed. What was read from here, and comes again, is there mostly; where it has left meanwhile it
        loses up to half a step more."""
        source.check(objects, writable=False)
        kept = self._kept(objects)
        transfer = Transfer(len(objects), self._tally, "write", objects.form.page_bytes)
        if self._closed:
            return failed_transfer(
                len(objects), self._tally, "write", Outcome.FAILED, f"{self.name} is closed"
            )
        form = objects.form

        def work() -> None:
            size, small = kept.form.page_bytes, kept.form.run_bytes
            room = aligned_bytes(size * len(objects))
            for index, at in enumerate(source.starts.tolist()):
                page = room[index * size : (index + 1) * size]
                for number in range(form.runs):
                    run = source.view[at + number * form.run_bytes : at + (number + 1) * form.run_bytes]
                    encode(run, form.dtype, self.coding, page[number * small : (number + 1) * small])
            kept_transfer = self._inner.write(kept, Ranges(room, np.arange(len(objects)) * size))
            kept_transfer.wait(_WAIT_SECONDS)
            kept_transfer.cancel()
            self._pass_on(kept_transfer, transfer)

        return self._later(transfer, work)

    def _later(self, transfer: Transfer, work: Callable[[], None]) -> Transfer:
        def job() -> None:
            if not transfer.begin_access():
                return
            try:
                work()
            except Exception as error:  # noqa: BLE001  whatever it is, the request goes on without these pages
                transfer.settle_pending(Outcome.FAILED, f"{self.name}: {error}")
            finally:
                transfer.end_access()

        self._workers.submit(job)
        return transfer

    @staticmethod
    def _pass_on(inner: Transfer, outer: Transfer) -> None:
        for outcome in np.unique(inner.results).tolist():
            outer.settle(np.flatnonzero(inner.results == outcome), Outcome(outcome), inner.reason)

    def drop(self, objects: Objects) -> int:
        return 0 if self._closed else self._inner.drop(self._kept(objects))

    def stats(self) -> TierStats:
        """The inner tier's contents; counts as its users saw them."""
        inner = self._inner.stats()
        return self._tally.stats(inner.objects, inner.bytes, inner.capacity, inner.evicted, inner.notes)

    def close(self) -> None:
        self._closed = True
        self._workers.close(_CLOSE_SECONDS)
        self._inner.close()  # who still waits for it hears of that
