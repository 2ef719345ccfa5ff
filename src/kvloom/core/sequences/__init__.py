"""Sequences: the handle of a request, and one file per operation. The first argument of every function is the
`CacheState`.

sequence     Sequence, the handle; checks that it is open
open         open on a cached prefix; close
fork         a second sequence that shares the pages
extend       reserve pages for the next tokens
commit       publish computed tokens
cold         keep the oldest blocks in host memory (`cache.cold`)
checkpoint   take checkpoints; publish tokens in the radix tree
rollback     discard the last tokens
"""

from .checkpoint import checkpoint
from .cold import ColdBlocks
from .commit import commit, commit_many
from .extend import exceeds_quota, extend, extend_many
from .fork import fork
from .open import close_sequence, open_sequence
from .rollback import rollback
from .sequence import ColdRun, Sequence

__all__ = [
    "ColdBlocks",
    "ColdRun",
    "Sequence",
    "checkpoint",
    "close_sequence",
    "commit",
    "commit_many",
    "exceeds_quota",
    "extend",
    "extend_many",
    "fork",
    "open_sequence",
    "rollback",
]
