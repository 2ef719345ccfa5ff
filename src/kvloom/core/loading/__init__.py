"""Loading: which pages a prompt needs from tiers, and which pages are in transfer between pool and tiers.

load_plan   the pages of a prompt to query, and the position at which it could resume with them
reserve     allocates pages for a load job; publishes or cancels them
loading     Loading, the interface of the offload manager (`cache.loading`)
"""

from .load_plan import LoadPlan, MissingPages, TierQuery
from .loading import Loading

__all__ = ["LoadPlan", "Loading", "MissingPages", "TierQuery"]
