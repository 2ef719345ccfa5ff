"""The memory planner: compares the KV memory of requests under three allocation schemes.

memory.py     Load, make_plan, render: the arithmetic and its tables
command.py    `kvloom plan`
"""

from .memory import Load, Plan, PlanError, Scheme, format_bytes, make_plan, render

__all__ = ["Load", "Plan", "PlanError", "Scheme", "format_bytes", "make_plan", "render"]
