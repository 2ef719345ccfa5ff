"""How a simulated router chooses workers, and which requests are refused. Needs no package beyond the standard library."""

__all__ = ["ADMISSIONS", "ROUTES"]

ROUTES = ("kv", "round-robin")
ADMISSIONS = ("none", "slo", "queue")
"""Which requests are refused: none, those that miss their objective, or those that find a full queue."""
