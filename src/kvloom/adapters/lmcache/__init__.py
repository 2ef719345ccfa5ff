"""kvloom's tiers for LMCache. LMCache's server stores its chunks in host memory, on disk, in remote stores and in
peers.

    version.py        the LMCache version that is tested
    settings.py       Settings: `adapter_params`
    object_keys.py    keys of LMCache's objects, and names of its files
    l2_adapter.py     KvloomL2Adapter: LMCache's interface for L2 adapters
    fs_files.py       copies the files of LMCache's `fs` adapter into tiers
    __main__.py       the command that runs `fs_files`

`lmcache server --l2-adapter '{"type": "plugin", "module_path": "kvloom.adapters.lmcache", "class_name":
"KvloomL2Adapter", "adapter_params": {"tiers": ["disk:/nvme/kv:1TiB"]}}'` loads this module. See docs/lmcache.md.
"""

from .version import VERSION

VERSION.check()

from .fs_files import ImportedFiles, import_files  # noqa: E402  after the check of the version
from .l2_adapter import KvloomL2Adapter  # noqa: E402

__all__ = ["ImportedFiles", "KvloomL2Adapter", "import_files"]
