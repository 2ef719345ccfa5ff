"""Reads the directory of a disk tier when the tier is opened. Returns its segments, and their records in the order of
writing.

A killed process may leave partly written pages in its last segment, which was not sealed. In files of an earlier
release, power loss may also leave partly written pages in the segment before the last one. Records of both segments
therefore have `is_verified=False`, until a read has verified their bytes:

- Such a record does not replace an older copy of the page whose bytes are intact.
- If the page is written again, the tier stores the new bytes.

This module does not use the tier's shares and index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvloom.tiers.aligned_memory import aligned_bytes
from kvloom.tiers.stored_page import verify_page
from kvloom.tiers.transfer import Outcome

from .files import Files, UntrustedFileError
from .segment import MAX_SEGMENT_NUMBER, Record, Segment

__all__ = ["RecoveredSegments", "recover", "replaces"]


@dataclass(slots=True)
class RecoveredSegments:
    """The result of recovery.

    - `numbers`: the segment numbers of all files of this user.
    - `records`: the records that were not dropped.
    - `foreign`: the sizes of files that are unreadable or of another version, by segment number.
    - `unread`: the numbers of segments that could be read only in part.
    - `still_stored`: the dropped keys whose bytes are still on disk.
    """

    numbers: list[int] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    foreign: dict[int, int] = field(default_factory=dict)
    unread: set[int] = field(default_factory=set)
    still_stored: set[bytes] = field(default_factory=set)


def recover(
    files: Files,
    direct: bool,
    dead: Mapping[bytes, tuple[int, int]],
    segments: dict[int, Segment],
    notes: dict[str, None],
) -> RecoveredSegments:
    """Open every segment, read its page headers, and add the segment to `segments`. `dead` maps each dropped key to
    a position: copies of the key up to this position are dropped. Messages for the operator are added to `notes`.
    Raises OSError if the directory cannot be read."""
    stems = [name[:-4] for name in files.list_names() if name.endswith(".seg")]
    numbers = sorted(
        int(s) for s in stems if s.isascii() and s.isdigit() and Segment.file_name(int(s)) == f"{s}.seg"
    )
    recovered = RecoveredSegments()
    last: dict[bytes, list[Record]] = {}  # records of the newest segment of each owner so far
    for number in numbers:
        if number >= MAX_SEGMENT_NUMBER:
            notes[f"a file was ignored: {number} is not the number of a segment"] = None
            continue
        why = "segments of another version exist: they are not read and are evicted first"
        try:
            segment: Segment | Outcome = Segment.open(files, number, direct)
        except UntrustedFileError as error:  # the file is neither read nor removed
            notes[f"a file was ignored: {error.strerror}"] = None
            continue
        except OSError as error:
            segment, why = Outcome.VERSION, f"segments cannot be read: {error.strerror}"
        recovered.numbers.append(number)
        if segment is Outcome.VERSION:
            notes[why] = None
            recovered.foreign[number] = files.size_of(Segment.file_name(number))
        elif isinstance(segment, Outcome):  # incomplete or damaged
            files.remove(Segment.file_name(number))
        else:
            segments[number] = segment
            records = _records(segment, dead, recovered, notes)
            segment.is_complete &= segment.end >= segment.size
            if not segment.is_complete:
                for record in (*last.get(segment.owner, ()), *records):
                    record.is_verified = False
            last[segment.owner] = records
            recovered.records += records
    return recovered


def _records(
    segment: Segment,
    dead: Mapping[bytes, tuple[int, int]],
    recovered: RecoveredSegments,
    notes: dict[str, None],
) -> list[Record]:
    """Return the records of one segment that were not dropped. Adds dropped keys and a partly read segment to
    `recovered`."""
    records = []
    try:
        for record in segment.records():
            key = record.head.key
            if (segment.number, record.offset) > dead.get(key, (-1, -1)):
                records.append(record)
            else:
                recovered.still_stored.add(key)
    except OSError as error:  # a bad sector: serve the records before it, and truncate nothing
        notes[f"a segment can be read in part only: {error.strerror}"] = None
        segment.end = segment.size
        recovered.unread.add(segment.number)
    return records


def replaces(files: Files, record: Record, before: Record | None) -> bool:
    """Return whether `record` replaces `before`, which is an earlier copy of the same page, or None. A verified record
    always replaces `before`. A record that is not verified replaces `before` only if the bytes of `before` are
    damaged. If `before` is not verified either, its bytes are read and checked. If they are intact, `before` is
    marked as verified."""
    if before is None or record.is_verified:
        return True
    if not before.is_verified:
        body = aligned_bytes(before.span)
        try:
            got = files.read(before.segment.fd, [body], before.offset)
        except OSError:
            return True
        before.is_verified = verify_page(before.head, body[:got]) == Outcome.OK
    return not before.is_verified
