"""The server: OpenAI's HTTP API in one process, the engine in another. See docs/server.md.

    server.py             serve: bind, load, serve, drain, exit
    server_options.py     ServerOptions: options of a server and its models
    model_set.py          ModelSet: starts and unloads the models of a server
    model_routes.py       /admin/models
    application.py        routes and error responses
    errors.py             ApiError: error responses in OpenAI's format
    access_log.py         one log line per request
    logs.py               the format of the log
    https.py              certificates of servers, and of clients of workers
    startup_message.py    the lines printed when the server is ready
    words.py              explanations of miss reasons and tier outcomes
    images.py             reading and decoding of images
    serve_command.py      `kvloom serve`
    chat_command.py       `kvloom chat`
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
