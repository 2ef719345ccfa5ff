"""Engine settings reach the engine of a real server: by a configuration file, with arguments on top."""

from __future__ import annotations

from pathlib import Path

from .running import running

FILE = """
[engine]
eviction-policy = "fifo"
block-tokens = 32
load = "never"
[serve]
pool = "1MiB"
"""


def test_policy_and_block_size_of_a_configuration_file_are_used(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "kvloom.toml"
    file.write_text(FILE)
    first = "a" * 600
    with running(folder, "--config", str(file), "--tier", f"disk:{tmp_path / 'disk'}:64MiB") as server:
        alone = server.complete(prompt=first, max_tokens=4, temperature=0)
        for letter in "bcdefghi":
            server.complete(prompt=letter * 900, max_tokens=4, temperature=0)
        again = server.complete(prompt=first, max_tokens=4, temperature=0)
        assert again["choices"] == alone["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # evicted, and never loaded
        _, _, records = server.send("GET", "/kvloom/requests?limit=1")
        assert "by policy fifo" in str(records)
        server.complete(prompt="z" * 60, max_tokens=4, temperature=0)
        hit = server.complete(prompt="z" * 60, max_tokens=4, temperature=0)
        assert hit["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32
