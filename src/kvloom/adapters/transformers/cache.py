"""`Cache`: kvloom's pages as `past_key_values` of plain `model.generate()`.

    generate(**inputs, past_key_values=cache)
      open       match the prompt, load pages from tiers; get_seq_length() is the hit, so generate() skips those tokens
      forward    before: reserve pages     update(): write K and V, return all visible K and V     after: record tokens
      close      publish full blocks and checkpoints; pages stay cached

The tokens of a forward are committed when the next forward begins. Until then `crop` can discard these tokens without a
rollback. While the model runs, transformers' layers have the recurrent states. A commit copies the states to pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Many
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from threading import Lock
from typing import Any

import numpy as np
import torch
from transformers import Cache as TransformersCache, DynamicCache
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvloom.core import DEFAULT_POLICY, CacheControl, Sequence, Visibility, parse_size
from kvloom.kernels.memory import LayerView

from .model_layers import cache_argument, forward_arguments, read_layers
from .page_store import PageStore

__all__ = ["Cache"]

_TOKEN_ARGUMENTS = ("input_ids", "attention_mask", "position_ids", "cache_position")


@dataclass(slots=True)
class _Step:
    """One forward of the model. `tokens` has the new tokens of each sequence. They begin at position `start`, which is
    the same in all sequences. `pages` caches the results of `_page_ids`. Its keys are (`group`, `run`) of a layer,
    which select the layer's block table.
    """

    start: int
    tokens: list[list[int]]
    pages: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens[0])


class Cache(TransformersCache):  # type: ignore[misc]
    """A paged cache of one model, which keeps prompts and answers for later `generate` calls.

        cache = kvloom.Cache(model, memory="1GiB", tiers=["host:4GiB", "disk:/path:100GiB"])
        model.generate(**inputs, past_key_values=cache)

    Hooks on `model.generate` and on the model's forward stay until `close`. They act only on calls that pass this
    cache. Only one call at a time may use the cache.
    """

    is_compileable = False
    is_croppable = True

    def __init__(
        self,
        model: Any,
        memory: int | str = "1GiB",
        tiers: Many[str] = (),
        *,
        block_tokens: int = 16,
        eviction_policy: str = DEFAULT_POLICY,
        salt: str = "",
    ) -> None:
        """Allocate `memory` for pages on the model's device and open the tiers. Runs the model once with a few tokens.

        Pages in shared tiers are found only by caches with the same `salt`. Raises ValueError for a model that is not
        supported.
        """
        if len({parameter.device for parameter in model.parameters()}) > 1:
            raise ValueError("the model is on several devices; kvloom.Cache needs all weights on one device")
        self._layers_read = read_layers(model)
        super().__init__(layers=DynamicCache(config=model.config).layers)
        self._model, self._argument, self._salt = model, cache_argument(model), salt
        size = parse_size(memory) if isinstance(memory, str) else memory
        self._store = PageStore(model, self._layers_read, size, tiers, block_tokens, eviction_policy)
        self._attention: dict[int, tuple[LayerView, Visibility]] = {}
        self._states: dict[int, LayerView] = {}
        for name, view in self._store.views.items():
            spec = self._layers_read.specs[name]
            index = int(name.split(".")[1])
            if spec.unit == "state":
                self._states[index] = view
            else:
                self._attention[index] = view, spec.visibility
        self.cached_tokens = 0
        """Number of tokens of each prompt that the last call found in the cache."""
        self.computed_tokens = 0
        """Number of tokens of each sequence that the last call computed, in prompt and answer."""
        self._sequences: list[Sequence] = []
        self._tokens: list[list[int]] = []  # tokens of each sequence, computed or to be computed again
        self._padding: list[int] = []
        self._prompt_length = 0
        self._pending = 0  # number of tokens at the end of each sequence that are computed but not committed
        self._states_are_stale = False  # the layers must load their states from pages
        self._step: _Step | None = None
        self._lock = Lock()  # held while sequences are open
        self._hooks = [
            model.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            model.register_forward_hook(self._after_forward, with_kwargs=True),
        ]
        self._generate: Callable[..., Any] = model.generate
        self._had_generate: Any = vars(model).get("generate")
        self._wrapper = self._generate_with_cache  # stored, so that `close` can recognise the hook
        model.generate = self._wrapper

    # -- use ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove the hooks, store queued pages in the tiers, and close the tiers. A second call has no effect."""
        for hook in self._hooks:
            hook.remove()
        if vars(self._model).get("generate") is self._wrapper:
            if self._had_generate is None:
                del self._model.generate
            else:
                self._model.generate = self._had_generate
        self._close_rows()
        self._store.close()

    def __repr__(self) -> str:
        stats = self._store.kv.stats()
        return f"<kvloom.Cache of {type(self._model).__name__}: {stats['cached_pages']} cached pages>"

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def stats(self) -> dict[str, Any]:
        """Counters of the pool and the prefix cache, and of the tiers if there are any."""
        found: dict[str, Any] = dict(self._store.kv.stats())
        if self._store.offload is not None:
            found["offload"] = asdict(self._store.offload.stats)
        return found

    @contextmanager
    def open(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Iterator[int]:
        """Open the cached pages of a batch of prompts [prompts, tokens], for a generation loop without `generate`.

        Yields a number n: the first n tokens of each prompt are cached or already computed. Inside the `with` block,
        the caller runs the model on `input_ids[:, n:]` with this cache. `generate` calls this method itself.
        """
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("another call uses this kvloom.Cache; use one Cache for each thread")
        try:
            prompts = input_ids.tolist()
            self._padding = self._padding_of(input_ids, attention_mask)
            controls = [
                CacheControl(adapter=f"padding {pad}" if pad else "", salt=self._salt)
                for pad in self._padding
            ]
            self._sequences = self._store.open(prompts, controls)
            length = self.cached_tokens = self._sequences[0].length
            self.computed_tokens = 0
            self._prompt_length = len(prompts[0])
            self._tokens = [prompt[:length] for prompt in prompts]
            self._states_are_stale = True
            self._compute_to_checkpoints(input_ids)
            yield self.get_seq_length()
            self._commit()
        finally:
            self._close_rows()
            self._lock.release()

    def _generate_with_cache(self, *args: Any, **kwargs: Any) -> Any:
        """The function that replaces `model.generate`. If a call passes this cache, open the sequences of its prompts
        and close them when the original `generate` returns. All other calls are passed on unchanged."""
        if all(kwargs.get(name) is not self for name in ("past_key_values", "cache_params")):
            return self._generate(*args, **kwargs)
        tokens = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
        if kwargs.get("inputs_embeds") is not None or tokens is None:
            raise ValueError("kvloom.Cache finds cached pages by tokens: give input_ids, not inputs_embeds")
        kwargs = {name: value for name, value in kwargs.items() if value is not self} | {self._argument: self}
        mask = kwargs.get("attention_mask")
        if mask is None:
            config = kwargs.get("generation_config") or self._model.generation_config
            pad = kwargs.get("pad_token_id", config.pad_token_id)
            if pad is not None and bool((tokens == pad).any()):
                raise ValueError(f"the prompt has the padding token {pad}: give generate() an attention_mask")
        stateful = self._model._is_stateful
        with torch.no_grad(), self.open(tokens, mask):
            # transformers refuses assisted generation if it cannot crop states
            self._model._is_stateful = stateful and not self._layers_read.continues_states
            try:
                return self._generate(*args, **kwargs)
            finally:
                del self._model._is_stateful

    def _padding_of(self, input_ids: torch.Tensor, mask: torch.Tensor | None) -> list[int]:
        """Return the number of padding tokens at the start of each prompt."""
        if mask is None or bool(mask.all()):
            return [0] * len(input_ids)
        if mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask {tuple(mask.shape)} must have the shape {tuple(input_ids.shape)}"
            )
        padding = (mask == 0).sum(-1)
        if bool((mask.int().diff(dim=-1) < 0).any()):
            raise ValueError(
                "attention_mask has zeros after tokens; pad on the left: tokenizer.padding_side='left'"
            )
        if self._states or not all(visible.is_relative for _, visible in self._attention.values()):
            raise ValueError(
                "states contain padding, and chunks of attention begin after it: with this model, call generate() once "
                "for each prompt, or with prompts of one length"
            )
        return [int(count) for count in padding]

    # -- forwards -------------------------------------------------------------------------------

    def _before_forward(self, _: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Reserve pages for the tokens of a forward with this cache."""
        if kwargs.get(self._argument) is not self:
            return None
        tokens = kwargs.get("input_ids", args[0] if args else None)
        other = [
            name
            for name, value in kwargs.items()
            if isinstance(value, torch.Tensor) and name not in _TOKEN_ARGUMENTS and "logits" not in name
        ]
        if tokens is None or other:
            raise ValueError(
                f"kvloom.Cache finds cached pages by tokens only: {', '.join(other) or 'no input_ids'} cannot be used"
            )
        if not self._sequences:
            raise RuntimeError(
                "no prompt is open: call model.generate(), or use `with cache.open(input_ids)`"
            )
        start = self.get_seq_length()
        if (
            start and tokens.shape[1] >= self._prompt_length > start
        ):  # generate() has not removed the cached tokens
            kwargs = dict(kwargs)
            tokens = kwargs["input_ids"] = tokens[:, start:]
            names = (
                ("position_ids", "attention_mask") if self._argument == "cache_params" else ("position_ids",)
            )
            for name in names:
                if kwargs.get(name) is not None:
                    kwargs[name] = kwargs[name][..., start:]
        self._begin(tokens)
        return args, kwargs

    def _after_forward(self, _: Any, __: Any, kwargs: dict[str, Any], ___: Any) -> None:
        """Record the tokens that a forward with this cache has computed."""
        step = self._step
        if kwargs.get(self._argument) is not self or step is None:
            return
        for row, new in zip(self._tokens, step.tokens, strict=True):
            row += new
        self._pending = step.end - step.start
        self.computed_tokens += self._pending
        self._step = None

    def _begin(self, tokens: torch.Tensor) -> None:
        """Commit the tokens of the last forward, and prepare pages and states for a forward with `tokens`."""
        self._commit()
        if len(tokens) != len(self._sequences):
            repeats, rest = divmod(len(tokens), len(self._sequences))
            if rest:
                raise ValueError(f"a forward of {len(tokens)} rows with {len(self._sequences)} open rows")
            self.batch_repeat_interleave(repeats)
        start = self._sequences[0].length
        if start < self.get_seq_length():  # `crop` removed more tokens than asked
            missing = torch.tensor([row[start:] for row in self._tokens], device=tokens.device)
            for row in self._tokens:
                del row[start:]
            self._compute(missing)
            self._commit()
            start = self._sequences[0].length
        if start and tokens.shape[1] > 1 and not self._layers_read.continues_states:
            raise ValueError(
                f"{type(self._model).__name__} ignores its states in a forward of {tokens.shape[1]} tokens: "
                "generate without an assistant, prompt lookup and prefill chunks"
            )
        self._store.extend(self._sequences, tokens.shape[1])
        self._step = _Step(start, tokens.tolist())
        if self._states_are_stale:
            self._load_states()

    def _compute(self, tokens: torch.Tensor) -> None:
        """Run the model with `tokens` to fill their pages. The logits are not used."""
        size = tokens.shape[1] if self._layers_read.continues_states else 1
        if self.get_seq_length() == 0:
            size = tokens.shape[1]
        for part in torch.split(tokens, size, dim=1):
            start = self.get_seq_length()
            inputs = forward_arguments(self._model, part, self, start)
            if any(self._padding):
                padding = torch.tensor(self._padding, device=part.device)[:, None]
                places = torch.arange(start + part.shape[1], device=part.device)[None] - padding
                inputs["attention_mask"] = (places >= 0).long()
                inputs["position_ids"] = places[:, start:].clamp(min=0)
            with torch.no_grad():
                self._model(**inputs)

    def _compute_to_checkpoints(self, prompts: torch.Tensor) -> None:
        """For a model with states, compute all tokens of the prompts except the last. Each forward ends where the cache
        takes a state snapshot. The caller computes the last token. Does nothing for models without states.
        """
        end = prompts.shape[1]
        while True:
            self._commit()
            start = self.get_seq_length()
            ahead = [one.next_checkpoint or end for one in self._sequences]
            stop = min(*ahead, end - 1) if self._states else start
            if stop <= start:
                return
            self._compute(prompts[:, start:stop].to(self._model.device))

    def _commit(self) -> None:
        """Commit the tokens of the last forward. The prefix cache then has their full blocks and checkpoints."""
        if not self._pending:
            return
        self._store_states()
        for row, one in zip(self._tokens, self._sequences, strict=True):
            one.commit(row[one.length : one.length + self._pending])
        self._pending = 0

    def _close_rows(self) -> None:
        sequences, self._sequences = self._sequences, []
        self._tokens, self._pending, self._step = [], 0, None
        self._store.close_sequences(sequences)

    # -- K and V --------------------------------------------------------------------------------

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write K and V of the new tokens [sequences, heads, tokens, dim] to pages. Return K and V of all visible
        tokens."""
        step = self._step
        if step is None:
            raise RuntimeError(
                f"this kvloom.Cache belongs to a {type(self._model).__name__}; another model cannot use it, and "
                "after close() no model can"
            )
        view, visibility = self._attention[layer_idx]
        first = visibility.first_visible(step.start)
        block = self._store.layout.block_tokens
        table, places = self._page_ids(view, step)
        pages = table.gather(1, places // block)
        for name, new in (("k", key_states), ("v", value_states)):
            view.fields[name][pages, places % block] = new.transpose(1, 2)
        if first == step.start:
            return key_states, value_states
        blocks = table[:, first // block :]
        visible = slice(first % block, first % block + step.end - first)
        k, v = (
            view.fields[name].permute(2, 0, 1, 3)[:, blocks].flatten(2, 3)[:, :, visible].transpose(0, 1)
            for name in ("k", "v")
        )
        return k, v

    def _page_ids(self, view: LayerView, step: _Step) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the block tables of a layer [sequences, blocks], and the positions of the new tokens [sequences,
        tokens], on the device.
        """
        key = view.group, view.run
        if key not in step.pages:
            tables = np.stack([one.table(view.group)[view.run] for one in self._sequences])
            tables = tables[:, : -(-step.end // self._store.layout.block_tokens)]
            device = self._store.buffer.device
            places = torch.arange(step.start, step.end, device=device).expand(len(tables), -1)
            step.pages[key] = torch.from_numpy(tables).long().to(device), places
        return step.pages[key]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens before the current forward."""
        if self._step is not None:
            return self._step.start
        return len(self._tokens[0]) if self._tokens else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the length of the token range whose K and V `update` returns for a layer, and the position of the
        first token of this range.
        """
        if layer_idx not in self._attention:
            layer_idx = next(iter(self._attention))
        start = self.get_seq_length()
        first = self._attention[layer_idx][1].first_visible(start)
        return start + query_length - first, first

    # -- states ---------------------------------------------------------------------------------

    def _state_pages(self, view: LayerView) -> torch.Tensor:
        ids = [one.states(view.group)[view.run] for one in self._sequences]
        return torch.tensor(np.array(ids), device=self._store.buffer.device).long()

    def _store_states(self) -> None:
        """Copy the states from transformers' layers to pages."""
        for index, view in self._states.items():
            pages, layer = self._state_pages(view), self.layers[index]
            for name, of in view.fields.items():
                kind, number = name.rsplit("_", 1)
                of[pages] = getattr(layer, f"{kind}_states")[int(number)]

    def _load_states(self) -> None:
        """Copy the states from pages to transformers' layers. At position 0, reset the layers instead."""
        assert self._step is not None
        for index, view in self._states.items():
            layer: Any = self.layers[index]
            LinearAttentionCacheLayerMixin.__init__(layer, layer.number_of_states)
            if not self._step.start:
                continue
            pages = self._state_pages(view)
            for name, of in view.fields.items():
                kind, number = name.rsplit("_", 1)
                state, at = of[pages], int(number)
                getattr(layer, f"{kind}_states")[at] = state
                getattr(layer, f"is_{kind}_states_initialized")[at] = True
                layer.has_previous_state[at] = True
                if kind == "conv":
                    layer.conv_kernel_size[at] = state.shape[-1]
                    layer.dtype, layer.device = state.dtype, state.device
        self._states_are_stale = False

    # -- changes of the batch ---------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of each sequence. The argument is negative or 0, as in
        transformers.

        With recurrent states or windows, the sequences may have to go back further, to an earlier checkpoint. The next
        forward then first computes the tokens after this checkpoint again.
        """
        remove = -tokens_to_remove
        if not 0 <= remove <= self.get_seq_length():
            raise ValueError(f"crop({tokens_to_remove}) must be from {-self.get_seq_length()} to 0")
        if not remove:
            return
        for row in self._tokens:
            del row[len(row) - remove :]
        excess = self._sequences[0].length - len(self._tokens[0])
        self._pending = 0 if self._states else min(self._pending, max(0, -excess))
        self._states_are_stale = True
        if excess > 0:
            for one in self._sequences:
                one.rollback(excess)
            self._store.equalise(self._sequences)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make sequence i of the batch a copy of sequence `beam_idx[i]`. Copies share their pages."""
        self._commit()
        old, self._sequences = self._sequences, []
        used: set[int] = set()
        try:
            for index in beam_idx.tolist():
                one = old[index] if index not in used else old[index].fork()
                if one is None:
                    raise self._store.out_of_memory(sum(each.length for each in old) * len(beam_idx))
                used.add(index)
                self._sequences.append(one)
        finally:
            for index, one in enumerate(old):
                if index not in used:
                    one.close()
        self._tokens = [list(self._tokens[index]) for index in beam_idx.tolist()]
        self._padding = [self._padding[index] for index in beam_idx.tolist()]
        self._states_are_stale = True

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each open sequence `repeats` times. Copies share their pages."""
        self.reorder_cache(torch.arange(len(self._sequences)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the open sequences with the indices `indices`, and close the others."""
        self.reorder_cache(torch.arange(len(self._sequences))[indices.cpu()])

    def reset(self) -> None:
        """Close the open sequences. Their published pages stay cached."""
        self._close_rows()

    def activate_past_recording(self) -> None:
        """Do nothing, because pages and checkpoints already contain the past tokens."""

    @property
    def is_initialized(self) -> bool:
        """Always True, because the pool is allocated when the cache is created."""
        return True
