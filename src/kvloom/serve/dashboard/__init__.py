"""The dashboard: a live page about one server's cache, and the same in a terminal. See docs/dashboard.md."""

__all__: list[str] = []
