"""vLLM controlled by JSON lines: the process that `kvloom bench engine` starts in the interpreter that has vLLM.

The first line of its input has the engine's options, and each later line has conversations. The process writes one
reply per line. It needs only vLLM, not kvloom. vLLM's own output goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

__all__ = ["main"]


def _serve(llm: Any, conversations: list[dict[str, Any]], output: int) -> dict[str, Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
    begin, before = time.perf_counter(), _processor()
    if any(each["later"] for each in conversations):
        answers, asked, cached = _turns(llm.llm_engine, params, conversations)
    else:
        prompts = [{"prompt_token_ids": each["prompt"]} for each in conversations]
        found = llm.generate(prompts, params, use_tqdm=False)
        answers = [[list(result.outputs[0].token_ids)] for result in found]
        asked = sum(len(each["prompt"]) for each in conversations)
        cached = sum(result.num_cached_tokens or 0 for result in found)
    seconds, after = time.perf_counter() - begin, _processor()
    reply = {"seconds": seconds, "answers": answers, "figures": {"hit_rate": cached / asked}}
    return reply if after is None or before is None else {**reply, "processor": after - before}


def _processor() -> float | None:
    """Return the CPU seconds of this process and its children. Return None on a GPU."""
    import torch

    if torch.cuda.is_available():
        return None
    psutil: Any = import_module("psutil")  # vLLM needs it, too
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def _turns(
    engine: Any, params: Any, conversations: list[dict[str, Any]]
) -> tuple[list[list[list[int]]], int, int]:
    """Run all conversations at the same time. The next turn of a conversation is submitted as soon as its previous turn
    ends. Return the answers, and the numbers of all prompt tokens and of cached prompt tokens."""
    answers: list[list[list[int]]] = [[] for _ in conversations]
    prompts = [list(each["prompt"]) for each in conversations]
    asked = cached = 0

    def submit(place: int) -> None:
        engine.add_request(
            f"{place}.{len(answers[place])}", {"prompt_token_ids": list(prompts[place])}, params
        )

    for place in range(len(conversations)):
        submit(place)
    while engine.has_unfinished_requests():
        for result in engine.step():
            if not result.finished:
                continue
            place = int(result.request_id.split(".")[0])
            answer = list(result.outputs[0].token_ids)
            asked += len(prompts[place])
            cached += result.num_cached_tokens or 0
            answers[place].append(answer)
            later = conversations[place]["later"]
            if len(answers[place]) <= len(later):
                prompts[place] += answer + later[len(answers[place]) - 1]
                submit(place)
    return answers, asked, cached


def _start(how: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    import vllm

    if find_spec("flashinfer") is None and "gdn_prefill_backend" in signature(vllm.EngineArgs).parameters:
        how = {"gdn_prefill_backend": "triton", **how}  # else models with a delta rule need FlashInfer
    begin = time.perf_counter()
    llm = vllm.LLM(**how)
    return llm, {"start_s": time.perf_counter() - begin, "version": vllm.__version__}


def _answered(out: Any, work: Callable[[], Any]) -> Any:
    """Return the result of `work` as a reply. If it raises, return the error as a reply."""
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other side must hear of it
        if not isinstance(error, ImportError):
            traceback.print_exc()
        print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=out, flush=True)
        return None


def main() -> int:
    """Reply to lines until the input ends."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [
        path for path in sys.path if Path(path).resolve() != here
    ]  # otherwise our `kernels` would hide their `kernels`
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM and its processes log to stdout
    how = json.loads(sys.stdin.readline())
    started = _answered(out, lambda: _start(how))
    if started is None:
        return 1
    llm, ready = started
    print(json.dumps(ready), file=out, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        reply = _answered(out, partial(_serve, llm, work["conversations"], work["output"]))
        if reply is not None:
            print(json.dumps(reply), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
