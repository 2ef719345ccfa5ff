"""Copies blocks between vLLM's layer tensors and the arena, which is kvloom's host memory.

    vLLM: one tensor per layer, with one row per block  <──>  arena: one page per block and group

A page contains the rows of its block from all layers of the group. A layer with a recurrent state has several tensors,
for example one for its convolution and one for its state.

On a CPU a copy is done when the call returns. On a GPU rows pass through one staging tensor, on a separate stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    KVCacheSpec,
    UniformTypeKVCacheSpecs,
    group_kernel_blocks,
)

from kvloom.tiers import Form
from kvloom.tiers.host import copy_pages

from .block_groups import BlockGroup

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["LayerPages"]

MIN_CHECKED_BYTES = 32 * 1024
"""A page has one checksum per layer if all its layers have the same size, and this size is at least MIN_CHECKED_BYTES.
Otherwise a page has a single checksum.
"""
Offsets = npt.NDArray[np.int64]
IsDone = Callable[[], bool]
LayerTensors = Mapping[str, torch.Tensor | Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class _Layer:
    """A tensor of one layer as a matrix of bytes. `rows[b]` are the bytes of block b. They begin at byte `base + b *
    stride` of the tensor's storage. On a CPU, `memory` is this storage. `text` describes the tensor in words. The
    description of the page layout (`Form.layout`) contains this text.
    """

    rows: torch.Tensor
    memory: npt.NDArray[np.uint8] | None
    base: int
    stride: int
    dtype: str
    text: str

    @property
    def bytes(self) -> int:
        return int(self.rows.shape[1])


class LayerPages:
    """The layer tensors of one worker. `shard` names the part of the model that the worker has. With `staged`, copies
    on a CPU also pass through a staging tensor, as on a GPU.
    """

    def __init__(
        self,
        groups: Sequence[BlockGroup],
        config: KVCacheConfig,
        kv_caches: LayerTensors,
        shard: str,
        staged: bool = False,
    ) -> None:
        self._layers = [_group_layers(group, config, kv_caches) for group in groups]
        self.device = self._layers[0][0].rows.device
        self.forms = [_form(group, layers, shard) for group, layers in zip(groups, self._layers, strict=True)]
        self._staged = staged or self.device.type != "cpu"
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def offload(
        self, group: int, block_ids: Sequence[int], arena: npt.NDArray[np.uint8], to: Offsets
    ) -> IsDone:
        """Copy blocks to the offsets `to` of the arena (kvloom's host memory). Return a function with which the caller
        can ask whether the copy is done.

        Later work on the current stream may overwrite the blocks without an effect on the copy.
        """
        if not self._staged:
            for layer, start in self._starts(group):
                assert layer.memory is not None
                at = layer.base + np.asarray(block_ids, np.int64) * layer.stride
                copy_pages(arena, to + start, layer.memory, at, layer.bytes)
            return _done
        rows = self._staging(group, len(block_ids))
        ids = torch.as_tensor(block_ids, dtype=torch.int64, device=self.device)
        for layer, start in self._starts(group):
            rows[:, start : start + layer.bytes] = layer.rows.index_select(0, ids)
        with self._copy_stream(rows):
            for row, offset in zip(rows, to.tolist(), strict=True):
                target = torch.from_numpy(arena[offset : offset + rows.shape[1]])
                target.copy_(row, non_blocking=True)
            return self._mark()

    def load(self, group: int, block_ids: Sequence[int], arena: npt.NDArray[np.uint8], at: Offsets) -> IsDone:
        """Copy pages at the offsets `at` of the arena (kvloom's host memory) into blocks. Return a function with which
        the caller can ask whether the copy is done."""
        if not self._staged:
            for layer, start in self._starts(group):
                assert layer.memory is not None
                to = layer.base + np.asarray(block_ids, np.int64) * layer.stride
                copy_pages(layer.memory, to, arena, at + start, layer.bytes)
            return _done
        rows = self._staging(group, len(block_ids))
        ids = torch.as_tensor(block_ids, dtype=torch.int64, device=self.device)
        with self._copy_stream(rows, ids):
            for row, offset in zip(rows, at.tolist(), strict=True):
                row.copy_(torch.from_numpy(arena[offset : offset + rows.shape[1]]), non_blocking=True)
            for layer, start in self._starts(group):
                layer.rows.index_copy_(0, ids, rows[:, start : start + layer.bytes].contiguous())
            return self._mark()

    def _starts(self, group: int) -> list[tuple[_Layer, int]]:
        found, start = [], 0
        for layer in self._layers[group]:
            found.append((layer, start))
            start += layer.bytes
        return found

    def _staging(self, group: int, count: int) -> torch.Tensor:
        return torch.empty((count, self.forms[group].page_bytes), dtype=torch.uint8, device=self.device)

    @contextmanager
    def _copy_stream(self, *tensors: torch.Tensor) -> Iterator[None]:
        """A context in which copies run on a separate CUDA stream, after earlier work on the current stream. PyTorch
        does not reuse the memory of `tensors` before the copies are done. On a CPU, the context has no effect.

        The current stream is not the default stream, because vLLM runs the model on a stream of its own.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        for tensor in tensors:
            tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def _mark(self) -> IsDone:
        if self._stream is None:
            return _done
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event.query


def _done() -> bool:
    return True


def _group_layers(group: BlockGroup, config: KVCacheConfig, kv_caches: LayerTensors) -> list[_Layer]:
    spec = config.kv_cache_groups[group.index].kv_cache_spec
    specs: Mapping[str, KVCacheSpec] = (
        spec.kv_cache_specs if isinstance(spec, UniformTypeKVCacheSpecs) else {}
    )
    layers: dict[int, _Layer] = {}
    for name in group.layers:
        found = kv_caches[name]
        for each in [found] if isinstance(found, torch.Tensor) else found:
            tensor = group_kernel_blocks(each, config.num_blocks)
            layer = _layer(name, tensor, specs.get(name, spec))
            layers.setdefault(tensor.data_ptr(), layer)  # layers that share their KV are stored once
    return list(layers.values())


def _layer(name: str, tensor: torch.Tensor, spec: KVCacheSpec) -> _Layer:
    """Return a tensor as a matrix with one row of bytes per block. Raises ValueError if the bytes of a block are not
    contiguous.
    """
    item = tensor.element_size()
    size = tensor[0].numel() * item
    if isinstance(spec, AttentionSpec):
        size = spec.unpadded_page_size_bytes
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    if span * item > size:
        raise ValueError(
            f"layer {name}: a block spans {span * item} bytes and has {size}: kvloom's connector needs a KV cache layout "
            "in which the bytes of a block are contiguous, such as VLLM_KV_CACHE_LAYOUT=LBHNC"
        )
    storage = tensor.untyped_storage()
    base, stride = int(tensor.storage_offset()) * item, tensor.stride(0) * item
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
    rows = memory.as_strided((tensor.shape[0], size), (stride, 1), base)
    text = f"{name} {tensor.dtype} {tuple(tensor.shape[1:])} {tuple(tensor.stride()[1:])}"
    on_cpu = memory.numpy() if tensor.device.type == "cpu" else None
    return _Layer(rows, on_cpu, base, stride, str(tensor.dtype).removeprefix("torch."), text)


def _form(group: BlockGroup, layers: Sequence[_Layer], shard: str) -> Form:
    """Return the form (byte layout) of a group's pages. Forms of two workers are equal only if every byte of a page
    has the same offset on both workers.
    """
    sizes = {layer.bytes for layer in layers}
    total = sum(layer.bytes for layer in layers)
    kind = "states" if group.is_state else f"window {group.window} chunk {group.chunk}"
    single = len(sizes) > 1 or min(sizes) < MIN_CHECKED_BYTES
    return Form(
        dtype=layers[0].dtype,
        order="vllm",
        page_bytes=total,
        run_bytes=total if single else min(sizes),
        shard=shard,
        layout=f"{kind}, blocks of {group.block_tokens}: " + "; ".join(layer.text for layer in layers),
    )
