"""Authentication and limits.

    keys.py       ApiKeys: API keys, their tenants, quotas and caps
    limits.py     Limits of a server, Caps of a tenant; RequestLimiter counts answers in progress, BodyLimiter counts
                  bytes of request bodies

Imports worker's messages and the server's errors.
"""

from __future__ import annotations

from .keys import ApiKeys, permission_warning, read_keys
from .limits import PRESSURE, BodyLimiter, Caps, HeldBody, Limits, RequestLimiter

__all__ = [
    "PRESSURE",
    "ApiKeys",
    "BodyLimiter",
    "Caps",
    "HeldBody",
    "Limits",
    "RequestLimiter",
    "permission_warning",
    "read_keys",
]
