"""kvloom.Cache in plain Hugging Face `generate()`: the second question about a long text computes only the question.

python examples/transformers_generate.py [MODEL]

MODEL is a folder with a Hugging Face model. The default is the model that kvloom contains.
"""

import sys
import tempfile
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvloom
from kvloom.models.specs import folder_of

TEXT = "".join(f"def step_{i}(x):\n    return x + {i}\n\n\n" for i in range(400))
TEXT_TOKENS, NEW_TOKENS = 2000, 8


def main() -> None:
    folder = folder_of(sys.argv[1] if len(sys.argv) > 1 else "kvloom-llama")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = tokenizer(TEXT).input_ids[:TEXT_TOKENS]

    def ask(question: str, cache: kvloom.Cache | None = None) -> list[int]:
        tokens = torch.tensor([text + tokenizer(question).input_ids])
        start, cpu = time.perf_counter(), time.process_time()
        output = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            past_key_values=cache,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
        )
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        cached = 0 if cache is None else cache.cached_tokens
        print(f"  {cached} of {tokens.shape[1]} prompt tokens cached, {wall:.2f} s, {cpu:.2f} s of CPU time")
        answer: list[int] = output[0].tolist()
        return answer

    questions = ["def first(x):", "def second(x, y):"]
    print("without kvloom.Cache")
    ask("def warm_up(x):")
    expected = [ask(question) for question in questions]
    with tempfile.TemporaryDirectory() as folder:
        for title in ("with kvloom.Cache", "after a restart, from the disk tier"):
            print(title)
            with kvloom.Cache(model, memory="256MiB", tiers=[f"disk:{folder}:1GiB"]) as cache:
                assert [ask(question, cache) for question in questions] == expected
    print("same tokens")


if __name__ == "__main__":
    main()
