"""Encodings of pages outside the pool. They do not depend on the medium.

codec.py          the stored format: header, checksums, compression
checksums.py      one xxh3 checksum per layer run, alone or during copies and I/O
encryption.py     keys of tenants: encrypt or authenticate
quantisation.py   re-encoding to int8 or fp8
page_values.py    the values of a page as float32, for any KV dtype
formats.py        conversion to formats of other systems and to other block sizes
"""

from .checksums import (
    checksum,
    copy_checked,
    read_checked,
    read_step,
    receive_checked,
    receive_step,
    run_checksums,
    send_checked,
    send_step,
)
from .codec import (
    FIXED_HEAD_BYTES,
    LEGACY_CIPHER,
    Codec,
    Compression,
    Head,
    make_codec,
    max_head_bytes,
    max_sealed_bytes,
    parse_head,
    plain_head_bytes,
    plain_heads,
    seal,
    stored_time,
    unseal,
)
from .encryption import Keyring, NoKeyError, Protect, check_protect, read_keys
from .formats import Format, PageFields, PageShape, from_format, join_units, split_units, to_format
from .page_values import PageValues
from .quantisation import CODINGS, Coding, decode, encode, lossy_form

__all__ = [
    "CODINGS",
    "FIXED_HEAD_BYTES",
    "LEGACY_CIPHER",
    "Codec",
    "Coding",
    "Compression",
    "Format",
    "Head",
    "Keyring",
    "NoKeyError",
    "PageFields",
    "PageShape",
    "PageValues",
    "Protect",
    "check_protect",
    "checksum",
    "copy_checked",
    "decode",
    "encode",
    "from_format",
    "join_units",
    "lossy_form",
    "make_codec",
    "max_head_bytes",
    "max_sealed_bytes",
    "parse_head",
    "plain_head_bytes",
    "plain_heads",
    "read_checked",
    "read_keys",
    "read_step",
    "receive_checked",
    "receive_step",
    "run_checksums",
    "seal",
    "send_checked",
    "send_step",
    "split_units",
    "stored_time",
    "to_format",
    "unseal",
]
