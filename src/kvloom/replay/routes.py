"""How a simulated router chooses workers. Needs no package beyond the standard library."""

__all__ = ["ROUTES"]

ROUTES = ("kv", "round-robin")
