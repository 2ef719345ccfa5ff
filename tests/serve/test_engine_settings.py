"""Engine settings reach the engine of a real server: by a configuration file, with arguments on top."""

from __future__ import annotations

from pathlib import Path

import pytest

from .running import DEVICE, running

MIB = (4 if DEVICE != "cpu" else 1) << 20  # a slab is 2 MiB on a GPU

FILE = """
[engine]
eviction-policy = "fifo"
block-tokens = 32
load = "never"
[serve]
pool = "1MiB"
"""


@pytest.mark.slow
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


def test_the_pool_is_resized_while_serving(folder: Path) -> None:
    with running(folder, "--pool", f"{2 * MIB}", "--max-pool", f"{8 * MIB}", "--keep-free", "1MiB") as server:
        _, _, first = server.send("GET", "/admin/pool")
        assert first["max_bytes"] <= 8 * MIB
        wanted = server.complete(prompt="a" * 600, max_tokens=4, temperature=0)
        status, _, grown = server.send("POST", "/admin/pool", {"bytes": 6 * MIB})
        assert status == 200, grown
        assert 5 * MIB < grown["bytes"] == grown["target_bytes"] <= 6 * MIB
        assert grown["max_tokens"] >= first["max_tokens"]
        hit = server.complete(prompt="a" * 600, max_tokens=4, temperature=0)
        assert hit["choices"] == wanted["choices"]
        assert hit["usage"]["prompt_tokens_details"]["cached_tokens"] > 500
        _, _, shrunk = server.send("POST", "/admin/pool", {"bytes": f"{MIB // 1024}KiB"})
        assert shrunk["bytes"] <= MIB
        again = server.complete(prompt="a" * 600, max_tokens=4, temperature=0)
        assert again["choices"] == wanted["choices"]
        for bad, said in (({"bytes": 12 * MIB}, "must lie in"), ({"bytes": "x"}, "bytes: "), ({}, "bytes")):
            status, _, error = server.send("POST", "/admin/pool", bad)
            assert status == 400
            assert said in error["error"]["message"]


@pytest.mark.slow
def test_a_fixed_pool_is_not_resized(folder: Path) -> None:
    with running(folder, "--pool", "2MiB") as server:
        status, _, error = server.send("POST", "/admin/pool", {"bytes": "1MiB"})
        assert status == 400
        assert "--max-pool" in error["error"]["message"]


@pytest.mark.slow
def test_retained_token_ranges_outlive_others(folder: Path) -> None:
    with running(folder, "--pool", "1MiB") as server:

        def cached(letter: str, **fields: object) -> int:
            found = server.complete(prompt=letter * 600, max_tokens=1, temperature=0, **fields)
            return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])

        keep = {"retain": [{"stop": 608, "priority": 5, "ttl": 600}]}
        assert cached("a", cache=keep) == 0
        assert cached("b") == 0
        for letter in "cdefghij":
            cached(letter)
        assert cached("a") > 500
        assert cached("b") == 0
        for bad, said in (
            ({"retain": [{"start": 5, "stop": 5}]}, "is empty or negative"),
            ({"retain": [{"priority": 1000}]}, "must lie in -100 to 100"),
            ({"retain": [{"ttl": -1}]}, "must be a positive number"),
            ({"retain": [{"from": 1}]}, "unknown field"),
            ({"retain": [{}] * 17}, "exceed the limit of 16"),
        ):
            status, _, error = server.send(
                "POST", "/v1/completions", {"model": "tiny", "prompt": "a", "cache": bad}
            )
            assert status == 400, bad
            assert said in error["error"]["message"]


@pytest.mark.slow
def test_pinned_prompts_stay_until_their_session_ends(folder: Path) -> None:
    with running(folder, "--pool", "1MiB") as server:

        def cached(letter: str, **fields: object) -> int:
            found = server.complete(prompt=letter * 600, max_tokens=1, temperature=0, **fields)
            return int(found["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert cached("a", cache={"pin": 600}, session_id="s") == 0
        for letter in "bcdefghij":
            cached(letter)
        assert cached("a", cache={"store": False}) > 500
        fields = {"model": "tiny", "prompt": "z" * 900, "max_tokens": 1, "cache": {"pin": 60}}
        status, _, error = server.send("POST", "/v1/completions", fields)
        assert status == 400
        assert "pins use" in error["error"]["message"]
        longest = server.send("GET", "/v1/models/tiny")[2]["max_model_len"]
        server.complete(prompt=[7] * (longest - 1), max_tokens=1)  # needs the pinned pages
        assert cached("a", cache={"pin": 600, "store": True}, session_id="s") == 0
        assert server.send("DELETE", "/v1/sessions/s")[0] == 200
        for letter in "bcdefghij":
            cached(letter)
        assert cached("a") == 0
        fields["cache"] = {"pin": -1}
        assert server.send("POST", "/v1/completions", fields)[0] == 400
