"""Peers of `kvloom bench engine`: Hugging Face's generate() in this process, vLLM in a separate process.

The peers implement the Runner protocol (`engine_runners`). Hugging Face has the same weights as kvloom. vLLM
gets a copy of these weights if they have at most SAVED_WEIGHTS bytes. Otherwise it creates its own random
weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kvloom.models.specs import model_spec

from .engine_runners import Measurement, Options, Turns, release_memory, synchronize
from .shapes import SHAPES, build, hf_config
from .workloads import Conversation

__all__ = ["HuggingFace", "NotInstalledError", "UnbatchedHuggingFace", "Vllm"]

VLLM_KV_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "auto"}
SAVED_WEIGHTS = 1 << 30
"""Largest number of bytes of weights that are copied to vLLM. For a larger model, vLLM creates its own random weights.
"""


class HuggingFace:
    """Hugging Face's generate() with its faster cache: static on a GPU, dynamic on a CPU. Batches are padded on the
    left, and as large as memory allows. All conversations of a batch advance together, turn by turn."""

    name = "Hugging Face"
    CPU_BYTES = 4 << 30

    def __init__(self, shape: str, options: Options) -> None:
        import transformers

        self.device, self.compile = options.device, options.compile
        config = hf_config(shape)
        build(config, SHAPES[shape].dtype, "meta")  # import its modules before timing
        begin = time.perf_counter()
        self.model = build(config, SHAPES[shape].dtype, options.device, options.seed)
        synchronize(self.device)
        self.start_s = time.perf_counter() - begin
        self.version = str(transformers.__version__)
        self.static = options.device.startswith("cuda")
        self.notes = {
            "cache": "static" if self.static else "dynamic",
            "compiled": "yes" if options.compile else "no",
        }
        dtype = str(SHAPES[shape].dtype).removeprefix("torch.")
        self._layers = list(model_spec({**config.to_dict(), "dtype": dtype}).layers.values())
        # Prefill memory per token: gate and up, their product, and a few rows of the model's width.
        widths = 3 * config.intermediate_size + 8 * config.hidden_size
        self._work_bytes: int = widths * SHAPES[shape].dtype.itemsize
        # Measured once: later, torch's cached memory would count as used.
        on_gpu = options.device.startswith("cuda")
        self._free_bytes = int(torch.cuda.mem_get_info()[0] * 0.8) if on_gpu else self.CPU_BYTES
        self._most: dict[int, int] = {}
        """Largest batch size to try, by prompt length. When a batch does not fit into memory, half of its size is
        stored here, so later runs do not fail again.
        """

    def run(self, conversations: Sequence[Conversation], output: int) -> Measurement:
        all_answers: Turns = [[] for _ in conversations]
        prompts = [list(each.prompt) for each in conversations]
        sizes: list[int] = []
        release_memory(self.device)
        begin, processor = time.perf_counter(), time.process_time()
        for turn in range(1 + max(len(each.later) for each in conversations)):
            if turn:
                for each, prompt, answers in zip(conversations, prompts, all_answers, strict=True):
                    prompt += answers[-1] + each.later[turn - 1]
            longest = max(map(len, prompts))
            size = self._slice(longest, output)
            first = 0
            while first < len(prompts):
                batch = prompts[first : first + size]
                try:
                    answers = self._generate(batch, output)
                except torch.cuda.OutOfMemoryError:
                    if len(batch) == 1:
                        raise
                    size = self._most[longest] = (len(batch) + 1) // 2
                    release_memory(self.device)
                    continue
                for answer in answers:
                    all_answers[first].append(answer)
                    first += 1
                sizes.append(len(batch))
        seconds = time.perf_counter() - begin
        computed = None if self.device.startswith("cuda") else time.process_time() - processor
        return Measurement(seconds, all_answers, {"peak_running": max(sizes)}, computed)

    def _slice(self, prompt: int, output: int) -> int:
        """Return how many sequences fit into memory together. The estimate adds the sizes of their KV cache, of the
        tensors of the prefill, and of the attention mask.
        """
        length = prompt + output
        cache = sum(
            x.bytes * (x.visibility.visible_tokens(length) if x.unit == "token" else 1) for x in self._layers
        )
        each = cache + prompt * self._work_bytes + prompt * length
        return max(1, min(self._free_bytes // each, self._most.get(prompt, 1 << 30)))

    def _generate(self, prompts: list[list[int]], output: int) -> list[list[int]]:
        from transformers import GenerationConfig, StaticCache

        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        how = GenerationConfig(
            do_sample=False, max_new_tokens=output, min_new_tokens=output, pad_token_id=0, eos_token_id=None,
            disable_compile=not self.compile,
        )  # fmt: skip
        # generate()'s own static cache never shrinks.
        length = longest + output
        cache = StaticCache(config=self.model.config, max_cache_len=length) if self.static else None
        with torch.inference_mode():
            found = self.model.generate(
                torch.tensor(padded, device=self.device),
                attention_mask=torch.tensor(mask, device=self.device),
                generation_config=how,
                past_key_values=cache,
            )
        tokens: list[list[int]] = found[:, longest:].tolist()
        return tokens

    def close(self) -> None:
        del self.model
        release_memory(self.device)


class UnbatchedHuggingFace(HuggingFace):
    """generate() with one request at a time."""

    name = "Hugging Face, one by one"

    def _slice(self, prompt: int, output: int) -> int:
        return 1


def _cpu_environment() -> dict[str, str]:
    """Return environment variables that give vLLM as many threads as torch has in this process. By default, vLLM uses
    one core."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{torch.get_num_threads() - 1}",
    }


def _check_vllm(python: str) -> None:
    """Raise NotInstalledError if an interpreter has no vLLM. Does not import vLLM."""
    look = "import sys; from importlib.util import find_spec; sys.exit(find_spec('vllm') is None)"
    if subprocess.run([python, "-c", look], cwd="/", env=_plain_environment(), check=False).returncode:
        raise NotInstalledError(
            f"vLLM is not installed for {python}: use --vllm-python, or exclude it with --peers hf"
        )


def _plain_environment() -> dict[str, str]:
    """Return the environment variables without PYTHONPATH, whose paths could replace packages of the other
    interpreter."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


class NotInstalledError(RuntimeError):
    """Raised if a peer is not installed. The message states the remedy."""


class Vllm:
    """vLLM in a separate process, controlled by JSON lines."""

    name = "vLLM"

    def __init__(self, shape: str, options: Options) -> None:
        _check_vllm(options.vllm_python)
        self._folder = tempfile.TemporaryDirectory(prefix="kvloom-vllm-")
        cpu = not options.device.startswith("cuda")
        config, dtype = hf_config(shape), SHAPES[shape].dtype
        size = sum(p.numel() for p in build(config, dtype, "meta").parameters()) * dtype.itemsize
        given = size <= SAVED_WEIGHTS
        if given:
            build(config, dtype, options.device, options.seed).save_pretrained(self._folder.name)
        else:
            config.architectures = [type(build(config, dtype, "meta")).__name__]
            config.save_pretrained(self._folder.name)
        engine: dict[str, Any] = {
            "model": self._folder.name, "skip_tokenizer_init": True, "dtype": str(dtype).removeprefix("torch."),
            "max_model_len": min(options.max_length, config.max_position_embeddings), "enable_prefix_caching": True,
            "seed": options.seed, "load_format": "auto" if given else "dummy",
        }  # fmt: skip
        if cpu:
            engine |= {"enforce_eager": True, "block_size": 32}
        else:
            # With vLLM's default of 0.92, FlashAttention's MLA kernels find too little free memory.
            engine["gpu_memory_utilization"] = 0.85
        if options.kv_dtype:
            engine["kv_cache_dtype"] = VLLM_KV_NAMES.get(options.kv_dtype, options.kv_dtype)
        self.notes = {"weights": "the same" if given else "its own random ones"}
        self._process = subprocess.Popen(
            [options.vllm_python, str(Path(__file__).with_name("vllm_process.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**(_cpu_environment() if cpu else {}), "VLLM_LOGGING_LEVEL": "ERROR", **_plain_environment()},
        )  # fmt: skip
        try:
            ready = self._ask(engine)
        except BaseException:  # Ctrl-C, too: end the process
            self.close()
            raise
        self.start_s, self.version = float(ready["start_s"]), str(ready["version"])

    def run(self, conversations: Sequence[Conversation], output: int) -> Measurement:
        reply = self._ask({"conversations": [asdict(each) for each in conversations], "output": output})
        if "processor" in reply:
            time.sleep(0.5)  # its threads spin for a while and would disturb the next runner
        return Measurement(
            float(reply["seconds"]), reply["answers"], reply["figures"], reply.get("processor")
        )

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"vLLM's process ended with {self._process.wait()}; see its output above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(str(answer["error"]))
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()
