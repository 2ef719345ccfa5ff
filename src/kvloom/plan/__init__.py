"""How much memory a load needs, and how much of it is wasted. `kvloom plan`."""

from .memory import Load, Plan, PlanError, Scheme, format_bytes, make_plan, render

__all__ = ["Load", "Plan", "PlanError", "Scheme", "format_bytes", "make_plan", "render"]
