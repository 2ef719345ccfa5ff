"""How a simulated router chooses workers, and which requests are refused. Needs no package beyond the standard library."""

__all__ = ["ADMISSIONS", "ROUTES"]

ROUTES = ("kv", "round-robin")
ADMISSIONS = ("none", "slo", "queue")
"""Which requests are refused. "none": no request. "slo": requests that would miss their objective. "queue":
requests that find a full queue."""
