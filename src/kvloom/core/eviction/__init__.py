"""Eviction: the order in which cached entries are evicted, per tenant.

policies      Entry, the Policy protocol, the simple policies
registry      finds policies by name, also policies of other packages
adaptive      the learning policy
shadow        ShadowLRU: compares the learning policy with LRU, and switches it off if it loses hits
reuse_model   ReuseModel: predicts when an entry will be used again, for the learning policy
queue         EvictionQueue: entries of one account in order
tenants       Tenant, its account, quota and share; the account of public prefixes
"""

from .policies import Cost, Entry, LearningPolicy, Policy, ReuseHistory, SavablePolicy
from .registry import DEFAULT_POLICY, POLICIES, make_policy
from .tenants import Account, Tenant

__all__ = [
    "DEFAULT_POLICY",
    "POLICIES",
    "Account",
    "Cost",
    "Entry",
    "LearningPolicy",
    "Policy",
    "ReuseHistory",
    "SavablePolicy",
    "Tenant",
    "make_policy",
]
