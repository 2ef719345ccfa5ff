"""TODO: map of this folder."""

__all__: list[str] = []
