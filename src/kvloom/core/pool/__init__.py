"""Page pool: slabs, pages and their reference counts. Contains only page ids and counts, no tokens, hashes or page
contents.

    page_pool        PagePool: slabs cut into pages of several sizes; reference counts of each page
    block_pages      BlockPages: page ids of blocks, one line per block
    block_tables     BlockTables: page ids and lengths of all sequences
    compaction       moves pages so that a partly used slab becomes free
    pending_copies   page copies that the engine makes before its next step
    loops, counts    the hot loops: native, or numpy if the extension is not built
"""

from .block_tables import BlockTables, Rows
from .loops import plain_ids, unwatched
from .page_pool import Ids, PagePool, SizeClass
from .pending_copies import CopyBatch

__all__ = ["BlockTables", "CopyBatch", "Ids", "PagePool", "Rows", "SizeClass", "plain_ids", "unwatched"]
