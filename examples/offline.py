"""Generate text offline. The second prompt shares a prefix with the first, so most of its tokens are cached.

python examples/offline.py
"""

from kvloom import LLM, SamplingParams

PREFIX = "import os\nimport sys\n\n\ndef read(path):\n    with open(path) as file:\n        return file.read()\n\n\n"


def main() -> None:
    llm = LLM("kvloom-llama", pool_bytes=64 << 20)
    params = SamplingParams(temperature=0, max_tokens=24)
    for name in ("write", "append"):
        result = llm.generate(PREFIX + f"def {name}(path, text):", params)[0]
        print(f"{result.num_cached_tokens} of {len(result.prompt_token_ids)} prompt tokens cached")
        print(result.outputs[0].text, end="\n\n")
    llm.close()


if __name__ == "__main__":
    main()
