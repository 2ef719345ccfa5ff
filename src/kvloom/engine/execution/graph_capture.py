"""Captures CUDA graphs. All graphs of one runner allocate in one memory pool."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["CaptureError", "CapturedGraph", "GraphMemory", "capturable", "capture_graph"]


class CaptureError(RuntimeError):
    """The model runs an operation that a CUDA graph cannot contain."""


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A graph, and the logits that each replay of the graph overwrites."""

    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


class GraphMemory:
    """The memory pool in which all CUDA graphs of a runner allocate. Graphs can share the memory, because they never
    run at the same time. The pool is created at first use."""

    def __init__(self) -> None:
        self._handle: Any = None

    @property
    def handle(self) -> Any:
        """The pool, as torch expects it."""
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle


def capture_graph(
    device: torch.device, compute: Callable[[], torch.Tensor], memory: GraphMemory
) -> CapturedGraph:
    """Return a graph of `compute()`, which returns logits. Calls `compute` twice: once to compile kernels and to let
    libraries allocate memory, and once for the capture. Raises CaptureError if `compute` cannot be captured."""
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        compute()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with capturable(device), torch.cuda.graph(graph, pool=memory.handle):
            logits = compute()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise CaptureError(str(error)) from error
    return CapturedGraph(graph, logits)


@contextmanager
def capturable(device: torch.device) -> Iterator[None]:
    """Return a context manager for the capture of a graph on `device`. The context manager turns garbage collection
    off. The collector could destroy an old graph, and the capture would fail. Scalar tensors that modeling code creates
    are created on the device, because a capture cannot copy them from the host (Gemma 3n).
    """
    before = gc.isenabled()
    gc.disable()
    try:
        with _ScalarsOn(device):
            yield
    finally:
        if before:
            gc.enable()


class _ScalarsOn(TorchFunctionMode):
    """Makes `torch.tensor(number)` create its tensor on a device, without a copy from the host."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.tensor and len(args) == 1 and isinstance(args[0], bool | int | float):
            return torch.full((), args[0], dtype=kwargs.get("dtype"), device=self._device)
        return function(*args, **kwargs)
