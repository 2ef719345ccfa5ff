"""Offload pages to a disk tier, restart, and load them instead of computing the prompt again.

python examples/tiers_and_restart.py [DIRECTORY]
"""

import sys
import tempfile

from kvloom import LLM, SamplingParams

PROMPT = "# A module with many small functions.\n" + "".join(
    f"def step_{i}(x):\n    return x + {i}\n\n\n" for i in range(40)
)


def ask(directory: str) -> tuple[str, int, int]:
    """One process life: open the tier, answer, close. Return the text, the cached tokens and the prompt tokens."""
    tiers = ["host:64MiB", f"disk:{directory}:256MiB"]
    # By default the engine loads or computes, whichever it has measured to be faster. A new process has measured nothing.
    llm = LLM("kvloom-llama", pool_bytes=64 << 20, tiers=tiers, load="always")
    result = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=16))[0]
    llm.close()  # stores what the tiers want
    return result.outputs[0].text, result.num_cached_tokens, len(result.prompt_token_ids)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        directory = sys.argv[1] if len(sys.argv) > 1 else temporary
        texts = []
        for life in ("first start", "after a restart"):
            text, cached, tokens = ask(directory)
            print(f"{life}: {cached} of {tokens} prompt tokens cached")
            texts.append(text)
    assert texts[0] == texts[1], "loaded pages give the same tokens as computed ones"


if __name__ == "__main__":
    main()
