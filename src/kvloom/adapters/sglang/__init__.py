"""kvloom's tiers for SGLang. HiCache stores its pages in host memory, on disk, in remote stores and in peers.

    version.py       the SGLang version that is tested
    settings.py      Settings: `--hicache-storage-backend-extra-config`
    identity.py      the text that identifies the model in a key
    pool_pages.py    PoolPages: the bytes of pages in SGLang's host pools
    prefix_hits.py   which prefixes can be loaded from the pages of all pools
    storage.py       KvloomStorage: SGLang's interface for storage backends

`python -m sglang.launch_server --enable-hierarchical-cache --hicache-storage-backend dynamic
--hicache-storage-backend-extra-config '{"backend_name": "kvloom", "module_path": "kvloom.adapters.sglang",
"class_name": "KvloomStorage", "interface_v1": 1, "tiers": ["disk:/nvme/kv:1TiB"]}'` loads this module. See
docs/sglang.md.

SGLang's threads call the storage, and wait for it:

    prefetch thread    batch_exists, batch_exists_v2    lookup in all tiers
    I/O thread         batch_get_v1, batch_get_v2       load into kvloom's host memory, copy into SGLang's host pool
    backup thread      batch_set_v1, batch_set_v2       copy into kvloom's host memory, queue writes to the other tiers
"""

from .version import VERSION

VERSION.check()

from .storage import KvloomStorage  # noqa: E402  after the check of the version

__all__ = ["KvloomStorage"]
