"""Ask a running server, stream the answer, and show how many prompt tokens the cache had.

    kvloom serve &
    python examples/server_client.py [URL]

Uses the standard library alone; OpenAI's client works as well, with `base_url=URL + "/v1"`.
"""

import json
import sys
import urllib.request


def stream(url: str, prompt: str) -> None:
    """Print the answer as it arrives, then the usage."""
    body = {
        "prompt": prompt,
        "max_tokens": 32,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                continue
            event = json.loads(line[6:])
            for choice in event["choices"]:
                print(choice["text"], end="", flush=True)
            if event.get("usage"):
                usage = event["usage"]
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                print(f"\n[{cached} of {usage['prompt_tokens']} prompt tokens cached]")


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    for _ in range(2):  # the second request finds the prompt of the first
        stream(url, "def fibonacci(n):\n    if n < 2:\n        return n\n    return")


if __name__ == "__main__":
    main()
