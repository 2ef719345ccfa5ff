"""The server: OpenAI's HTTP interface in one process, the engine in another. See docs/server.md."""

__all__: list[str] = []
