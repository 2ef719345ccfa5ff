"""What a disk tier's directory has when it is opened: its segments, and their records in the order of writing.

A process that was killed may have left pages half written: in a segment that was never sealed, and, where power went, in the one
before it. Those records are not `sure`: they give way to an older copy, and count as here only for who reads. Knows no owners' shares
and no index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .files import Files, NotOursError
from .segment import Record, Segment
from .transfer import Outcome

__all__ = ["Found", "recover"]


@dataclass(slots=True)
class Found:
    """`foreign` are files of other versions, or that cannot be read, and their sizes; of the segments `unread` nobody knows all
    that they have; `still` was dropped, and is on the disk all the same."""

    numbers: list[int]
    records: list[Record] = field(default_factory=list)
    foreign: dict[int, int] = field(default_factory=dict)
    unread: set[int] = field(default_factory=set)
    still: set[bytes] = field(default_factory=set)


def recover(
    files: Files,
    direct: bool,
    dead: Mapping[bytes, tuple[int, int]],
    segments: dict[int, Segment],
    notes: dict[str, None],
) -> Found:
    """Opens every segment, into `segments`, and reads its heads; `dead` are the places up to which keys were dropped. OSError: the
    directory cannot be read."""
    stems = [name[:-4] for name in files.names() if name.endswith(".seg")]
    numbers = sorted(
        int(s) for s in stems if s.isascii() and s.isdigit() and Segment.file_name(int(s)) == f"{s}.seg"
    )
    found = Found(numbers)
    last: dict[bytes, list[Record]] = {}  # an owner's newest segment so far
    for number in numbers:
        why = "segments of another version are there: not read, the first to leave"
        try:
            segment: Segment | Outcome = Segment.open(files, number, direct)
        except NotOursError as error:  # neither read nor removed
            notes[f"a segment is left alone: {error.strerror}"] = None
            continue
        except OSError as error:
            segment, why = Outcome.VERSION, f"segments cannot be read: {error.strerror}"
        if segment is Outcome.VERSION:
            notes[why] = None
            found.foreign[number] = files.size_of(Segment.file_name(number))
        elif isinstance(segment, Outcome):  # begun, and never finished; or damaged
            files.remove(Segment.file_name(number))
        else:
            segments[number] = segment
            records = _records(segment, dead, found, notes)
            if segment.end < segment.size:
                for record in (*last.get(segment.owner, ()), *records):
                    record.sure = False
            last[segment.owner] = records
            found.records += records
    return found


def _records(
    segment: Segment, dead: Mapping[bytes, tuple[int, int]], found: Found, notes: dict[str, None]
) -> list[Record]:
    """Those of one segment that were not dropped."""
    records = []
    try:
        for record in segment.records():
            key = record.head.key
            if (segment.number, record.offset) > dead.get(key, (-1, -1)):
                records.append(record)
            else:
                found.still.add(key)
    except OSError as error:  # a bad spot: what came before it is served, and nothing is cut off
        notes[f"a segment can be read in part only: {error.strerror}"] = None
        segment.end = segment.size
        found.unread.add(segment.number)
    return records
