"""Reads weights for transformers, so that little host memory is needed in addition to the model.

| transformers alone                               | in `reading_in_chunks`                                            |
|--------------------------------------------------|-------------------------------------------------------------------|
| maps whole files into memory                     | reads ranges of a file                                            |
| reads whole tensors, ahead of their conversion   | reads a tensor when it is converted, by chunks, in four threads   |
| converts the dtype of a whole tensor             | converts chunks into the memory that the model keeps              |
| reads all experts of a layer, then joins them    | reads one expert at a time, and copies it to its place in the     |
|                                                  | weights of all experts                                            |
| reads the whole weight of a rank's model         | also cuts experts one at a time (`RankWeights`)                   |

The functions of transformers that this module replaces have been the same since transformers 5.17.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from kvloom.models.sharding import Cuts, WholeModel

__all__ = ["RankWeights", "reading_in_chunks"]

CHUNK_BYTES, TRIM_BYTES = 1 << 20, 4 << 20
THREADS = 4
OWN_PAGES, HUGE_PAGES = 1 << 16, 4 << 20
"""Sizes in bytes from which a tensor on a CPU has memory pages of its own, and huge pages."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes of safetensors that are read in chunks. Tensors of other dtypes are read as a whole."""


class WeightFile:
    """A safetensors file, with the methods that transformers calls. `checked` is the same file, which safetensors has
    opened and checked. safetensors reads a whole tensor for each range of it, so this class reads ranges itself."""

    def __init__(self, path: str, checked: Any) -> None:
        self.checked = checked
        self._file = Path(path).open("rb", buffering=0)  # noqa: SIM115
        length = int.from_bytes(self._file.read(8), "little")
        self._start, self._header = 8 + length, json.loads(self._file.read(length))

    def keys(self) -> list[str]:
        return [name for name in self._header if name != "__metadata__"]

    def get_slice(self, name: str) -> FileTensor:
        return FileTensor(self, name, **self._header[name])

    def fill(self, memory: Any, offset: int) -> None:
        """Fill an array of bytes from `offset` of the file's data. Several threads may call this method."""
        while len(memory):
            count = os.preadv(self._file.fileno(), [memory], self._start + offset)
            if not count:
                raise OSError(f"{self._file.name} ends before its last weight")
            memory, offset = memory[count:], offset + count

    def __exit__(self, *_: object) -> None:
        self._file.close()


class FileTensor:
    """A tensor of a safetensors file. Nothing is read until `read` is called."""

    def __init__(
        self, file: WeightFile, name: str, dtype: str, shape: list[int], data_offsets: list[int]
    ) -> None:
        self._file, self._name, self._dtype, self._shape = file, name, dtype, shape
        self._begin, self._end = data_offsets

    def get_dtype(self) -> str:
        return self._dtype

    def get_shape(self) -> list[int]:
        return self._shape

    def read(
        self, dtype: torch.dtype | None, device: torch.device, threads: ThreadPoolExecutor
    ) -> torch.Tensor:
        """Return the tensor on a device. A new dtype, or a device other than a CPU, needs one buffer for each thread."""
        own = DTYPES.get(self._dtype)
        if own is None:
            whole: torch.Tensor = self._file.checked.get_tensor(self._name)
            return whole.to(device=device, dtype=dtype)
        found = _empty(self._shape, dtype or own, device)
        flat, step = found.view(-1), CHUNK_BYTES // own.itemsize
        is_direct = found.dtype == own and device.type == "cpu"

        def read_chunk(first: int) -> None:
            part = flat[first : first + step]
            target = part if is_direct else _buffer()[: part.numel() * own.itemsize].view(own)
            self._file.fill(target.view(torch.uint8).numpy(), self._begin + first * own.itemsize)
            if not is_direct:
                part.copy_(target)

        starts = range(0, flat.numel(), step)
        for _ in threads.map(read_chunk, starts) if len(starts) > 1 else map(read_chunk, starts):
            pass
        return found


_BUFFERS = threading.local()


def _buffer() -> torch.Tensor:
    """Return the buffer of this thread."""
    if not hasattr(_BUFFERS, "bytes"):
        _BUFFERS.bytes = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
    found: torch.Tensor = _BUFFERS.bytes
    return found


class RankWeights:
    """The weights that a rank keeps. Records each whole weight in `whole`, and cuts it."""

    def __init__(self, cuts: Cuts, whole: WholeModel) -> None:
        self._cuts, self._whole = cuts, whole
        self._is_cut: set[str] = set()

    def cut(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Return the rank's part of a weight. A weight whose experts were cut is returned as it is."""
        if name in self._is_cut:
            return weight
        self._whole.record(name, weight)
        return self._cuts.cut(name, weight)

    def cut_expert(self, name: str, weight: torch.Tensor, expert: int, count: int) -> torch.Tensor:
        """Return the rank's part of the weight [1, ...] of one of `count` experts. Experts must come in order. If
        ranks divide the experts among each other, return the whole weight."""
        if 0 in self._cuts.axes(name):
            return weight
        self._is_cut.add(name)
        self._whole.record_part(name, weight, expert, count)
        return self._cuts.cut(name, weight)


@contextmanager
def reading_in_chunks(rank: RankWeights | None = None) -> Iterator[None]:
    """In this context, transformers reads weights as the table above states. With `rank`, it keeps only the weights of
    a rank. Not safe while another thread loads a model."""
    from safetensors import safe_open
    from transformers import core_model_loading, modeling_utils

    convert, place = core_model_loading.WeightConverter.convert, core_model_loading.set_param_for_module

    def opened(file: str, framework: str, **options: Any) -> Any:
        checked = safe_open(file, framework=framework, **options)
        return WeightFile(file, checked) if options else checked  # no options: reads only dtypes

    def deferred(_: Any, source: Any, device: Any = None, dtype: Any = None, **__: Any) -> Callable[[], Any]:
        # Transformers calls what it gets here when it converts the tensor.
        where = torch.device(device or "cpu")
        if isinstance(source, FileTensor):
            return lambda: source.read(dtype, where, threads)
        return lambda: _read_mapped(source).to(device=where, dtype=dtype)

    def convert_experts(converter: Any, layer_name: str, **keywords: Any) -> dict[str, torch.Tensor]:
        count = _experts_of(converter)
        if count < 2:
            found = convert(converter, layer_name, **keywords)
            kept = {name: _kept(each[0] if isinstance(each, list) else each) for name, each in found.items()}
            trimmer.count(kept.values())
            return kept
        readers, joined = converter.collected_tensors, {}
        for expert in range(count):
            converter.collected_tensors = {pattern: [each[expert]] for pattern, each in readers.items()}
            for name, found in convert(converter, layer_name, **keywords).items():
                part = found if rank is None else rank.cut_expert(name, found, expert, count)
                if expert == 0:
                    joined[name] = _empty((count, *part.shape[1:]), part.dtype, part.device)
                joined[name][expert] = part[0]
                trimmer.count([found])
        return joined

    def place_cut(model: Any, name: str, weight: torch.Tensor, *rest: Any) -> Any:
        return place(model, name, weight if rank is None else rank.cut(name, weight), *rest)

    trimmer = _Trimmer()
    with ThreadPoolExecutor(THREADS) as threads, ExitStack() as stack:
        for owner, name, replacement in (
            (modeling_utils, "safe_open", opened),
            (core_model_loading, "spawn_materialize", deferred),
            (core_model_loading.WeightConverter, "convert", convert_experts),
            (core_model_loading, "set_param_for_module", place_cut),
        ):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, replacement)
        yield


def _experts_of(converter: Any) -> int:
    """Return the number of experts whose weights a converter joins. Return 0 if it does something else, or needs the
    weights of all experts at once."""
    from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose

    operations = list(converter.operations)
    while operations and hasattr(operations[0], "hf_quantizer"):  # dequantises each weight alone
        del operations[0]
    if not operations or not isinstance(operations[0], MergeModulelist) or operations[0].dim != 0:
        return 0
    for one in operations[1:]:
        axes = {one.dim} if isinstance(one, Concatenate) else {0}
        axes = {one.dim0, one.dim1} if isinstance(one, Transpose) else axes
        if 0 in axes:
            return 0
    counts = {len(readers) for readers in converter.collected_tensors.values()}
    return counts.pop() if len(counts) == 1 and converter.quantization_operation is None else 0


class _Trimmer:
    """Returns free memory of the heap to the operating system, each time that `TRIM_BYTES` of weights were converted.
    Otherwise the heap would keep the memory of temporary tensors, because small weights lie between them."""

    def __init__(self) -> None:
        self._trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)  # a function of glibc
        self._bytes = 0

    def count(self, weights: Iterable[torch.Tensor]) -> None:
        """Count converted weights."""
        self._bytes += sum(weight.nbytes for weight in weights)
        if self._bytes >= TRIM_BYTES:
            self._bytes = 0
            self._trim(0)


def _read_mapped(source: Any) -> torch.Tensor:
    """Return a tensor of a GGUF file, which transformers maps into memory. Afterwards the mapped pages are dropped."""
    found: torch.Tensor = source[...]
    mapped = getattr(getattr(source, "data", None), "_mmap", None)
    if mapped is not None:
        mapped.madvise(mmap.MADV_DONTNEED)
    return found


def _kept(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight that transformers has converted, on a CPU in memory of its own."""
    if weight.device.type != "cpu" or type(weight) is not torch.Tensor:
        return weight
    return _empty(weight.shape, weight.dtype, weight.device).copy_(weight)


def _empty(shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor without values. On a CPU, a large tensor gets memory pages of its own. Torch's allocator would round
    it up to whole huge pages, and a heap with weights in it would keep the memory of freed tensors."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < OWN_PAGES:
        return torch.empty(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE_PAGES and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
