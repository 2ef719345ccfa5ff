"""The server: OpenAI's HTTP API in one process, the engine in another. See docs/server.md.

    server.py             ServerOptions, serve: bind, load, serve, drain, exit
    application.py        routes and error responses
    errors.py             ApiError: error responses in OpenAI's format
    startup_message.py    the lines printed when the server is ready
    serve_command.py      `kvloom serve`
    explain_command.py    `kvloom explain`
    http_client.py        requests to a running server
    worker/               the engine process and its client
    auth/                 API keys, tenants, limits
    metrics/              metrics, request records, traces, recordings
    api/                  endpoints, prompts, responses
    dashboard/            the live page and `kvloom top`
    grafana.json          a Grafana dashboard

Imports point one way: errors, http_client ← worker ← auth ← metrics ← api ← dashboard ← application ← server.
"""

__all__: list[str] = []
