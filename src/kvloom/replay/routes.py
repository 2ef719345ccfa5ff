"""Names of the ways in which a simulated router chooses workers (ROUTES), and in which requests are refused
(ADMISSIONS). Needs no package beyond the standard library."""

__all__ = ["ADMISSIONS", "ROUTES"]

ROUTES = ("kv", "round-robin")
ADMISSIONS = ("none", "slo", "queue")
"""Which requests are refused. "none": no request. "slo": requests that would miss their objective. "queue":
requests that find a full queue."""
