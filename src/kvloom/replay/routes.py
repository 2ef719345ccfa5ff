"""The names of the rules by which a simulated router chooses workers. Needs only the standard library."""

__all__ = ["ROUTES"]

ROUTES = ("kv", "round-robin")
