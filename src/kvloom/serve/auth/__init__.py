"""Authentication and limits.

    keys.py       ApiKeys: API keys, their tenants and quotas
    limits.py     Limits of a server; RequestLimiter counts answers in progress

Imports worker's messages and the server's errors.
"""

from __future__ import annotations

from .keys import ApiKeys, permission_warning, read_keys
from .limits import Limits, RequestLimiter

__all__ = ["ApiKeys", "Limits", "RequestLimiter", "permission_warning", "read_keys"]
