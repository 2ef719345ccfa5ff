"""The engine: one Hugging Face model, its page pool, prefix cache and scheduler. It runs one step at a time.

    add(prompt) → Request      step() → requests with a new token or a finish      run() → until no request is left

On a GPU a step is launched before the tokens of the previous step have arrived on the host (`EngineConfig.ahead`). The
tokens stay on the device as input of the next step. If a request finishes in the previous step, the next step still
computes one more token for it, which is dropped. Prompts are token ids. Only one thread at a time may call the engine.
The model must be on its device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence as Many
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from kvloom.combinations import refused
from kvloom.core import CacheControl, CopyBatch, Media, Objective, Pin
from kvloom.kernels.copy import copy_pages
from kvloom.kernels.memory import ElasticBuffer
from kvloom.models.loading import vision_fingerprint
from kvloom.models.lora import LoraAdapter
from kvloom.models.paged import (
    AttentionSinks,
    Image,
    ImageInputs,
    RotatedCopier,
    RotationError,
    TokenMover,
    Work,
    runs_separately,
    separation_reason,
)
from kvloom.models.sharding import ranks_of
from kvloom.models.vision import EncoderDecoder, Vision

from .adapter_table import LoadedAdapter, open_adapters
from .config import EngineConfig, Role
from .encoding import RemoteEncoders
from .execution import (
    HeadRunner,
    InflightStep,
    ModelRunner,
    MovedToken,
    OutputProcessor,
    PoolRule,
    PoolSize,
    PrefillChunks,
    PromptLogprobs,
    allocate_kv_memory,
    eos_tokens,
    free_device_bytes,
    pool_hidden_states,
    prompt_logprobs,
)
from .offload import OffloadManager, SessionHistory, open_offload
from .parallel import RankGroup
from .request import Request, SloState, prompt_media, token_ids
from .sampling import (
    BeamSearch,
    GenerationDefaults,
    Grammar,
    Grammars,
    SampledTokens,
    Sampler,
    SamplingParams,
    SamplingRequest,
    TextStream,
    TimestampRule,
    bad_tokens,
    to_device,
)
from .scheduling import DocumentReuse, Scheduled, Scheduler
from .speculation import (
    NO_DRAFT,
    Draft,
    DraftModelProposer,
    HeadProposer,
    NGramProposer,
    Proposer,
    Speculation,
    SuffixProposer,
    draft_positions,
    load_draft,
    load_head,
    longest_draft,
)
from .target_runner import draft_rows, target_runner, with_step_sizes

if TYPE_CHECKING:
    from kvloom.events_wire import EventSettings, WirePublisher

__all__ = ["Engine"]

STRONG_MATCH = 6
"""Shortest match, in tokens, with which a lookup proposer (ngram, suffix) makes a draft if another proposer follows
it. After a shorter match, a draft model is more accurate."""
DECODE_PROMPT_TOKENS = 256
"""Largest number of prompt tokens in a step of a decode worker."""
HELD_SECONDS = 0.002
"""Seconds that a step without work sleeps while the SLO gate defers requests."""
MASK_WAIT_SECONDS = 0.01
"""Longest time, in seconds, that a step sleeps while all requests wait for grammar masks."""
ROTATION_TOKENS = 24
"""Number of tokens of the prompt that finds the rotations of layers, for `reuse_documents`."""
ROTATION_TOLERANCE = {4: 1e-3, 2: 0.03, 1: 0.1}
"""Largest relative error of rotated K. The key is the size of a number in pages, in bytes."""


class Engine:
    """Runs requests on one model. `tokenizer` is needed only for text, stop texts and structured output. Call `close`
    to finish all requests and close the tiers.
    """

    def __init__(
        self,
        model: Any,
        config: EngineConfig | None = None,
        tokenizer: Any = None,
        group: RankGroup | None = None,
    ) -> None:
        """Allocate the pool and open the tiers. With several ranks, `model` is the part of rank 0, and `group` has the
        other ranks. `close` also closes the group. Raises ValueError for settings that cannot be combined."""
        config = config or EngineConfig()
        _check_model(model, config, group)
        self.model, self.device, self.tokenizer = model.eval(), next(model.parameters()).device, tokenizer
        on_gpu = self.device.type == "cuda"
        self.config = config = with_step_sizes(config, on_gpu)
        """The settings, with `token_budget` and `max_running` filled in."""
        assert config.token_budget is not None
        assert config.max_running is not None
        draft = _draft_of(model, config)
        # Must run before the weights are fused.
        image_part = vision_fingerprint(model) if config.encoders and Vision.refusal(model) is None else ""
        self.adapters = open_adapters(model, config, group)
        """The LoRA adapters. None if they are not configured."""
        slots = None if self.adapters is None else self.adapters.slots
        memory = allocate_kv_memory(model, config, draft, slots)
        self.layout, self.buffer, self.cache = memory.layout, memory.buffer, memory.cache
        self.vision, self.limit = memory.vision, memory.limit
        self.memory_budget = memory.budget
        """The measurement from which the pool's size follows. None if the size was configured."""
        self.runner = target_runner(model, memory, config, slots)
        self.group = group
        """The other ranks. None on one rank."""
        if group is not None:
            group.attach(self.cache, self.runner)
        if self.adapters is not None:
            self.runner.find_adapter_layers()
            self.adapters.check_all()
        if config.tree_nodes:
            self._check_trees()
        self._draft_runner: ModelRunner | None = None
        self.offload = self._open_tiers(memory.batch_invariant) if config.tiers else None
        """Offloads and loads pages. None if the engine has no tiers."""
        self.encoders = self._open_encoders(image_part) if config.encoders else None
        """Encode workers. None if images are encoded here."""
        events = config.event_settings
        self.events = None if events is None else self._open_events(events)
        """Publishes block events to routers. None if events are not configured."""
        self.pool_size: PoolSize | None = None
        """Grows and shrinks an elastic pool. None if the pool keeps its size."""
        self.pool_rule: PoolRule | None = None
        """Chooses the size of an elastic pool. None if the size is fixed."""
        if memory.elastic is not None:
            self._make_elastic(memory.elastic)
        self.scheduler = Scheduler(
            self.cache,
            config.token_budget,
            config.max_running,
            self.offload,
            self.adapters,
            "chunk" in config.fixed,
        )
        if config.reuse_documents is not None:
            copier = self._rotated_copier()
            self.scheduler.documents = DocumentReuse(
                self.cache, partial(self._copy_document, copier), config.reuse_documents
            )
        self.role: Role = "both"
        """Role of this worker. See `set_role`."""
        self.set_role(config.role)
        self.eos = eos_tokens(model)
        is_used = config.sampling_defaults == "model"
        self.defaults = GenerationDefaults.of(model.generation_config if is_used else None)
        """Values of the model's generation config, for what requests do not set."""
        self.sampler = _sampler_of(model, self.eos)
        self.ahead = on_gpu if config.ahead is None else config.ahead
        self.speculation: Speculation | None = None
        """Proposes draft tokens. None if speculation is off."""
        if config.speculate != "off":
            self.speculation = Speculation(
                self._proposers(draft),
                config.draft_tokens,
                self.eos,
                draft_rows(config),
                config.tree_nodes,
                "drafts" in config.fixed,
            )
        ranks = ranks_of(model)
        self._token_mover = TokenMover(self.cache, self.buffer, None if ranks is None else ranks.context)
        self.output_processor = OutputProcessor(self.scheduler, self.eos, self._move_tokens)
        """Applies the tokens of a finished step to its requests."""
        self._inflight: InflightStep | None = None
        self.finished_prefill = PrefillChunks()
        """The prompt chunks of the step that the last call of `step` finished."""
        self._updated: list[Request] = []  # requests with a new token that `step` has not yet returned
        self._vocabulary = len(model.get_input_embeddings().weight)
        self._grammars: Grammars | None = None
        self._request_count = 0
        self._copies: list[CopyBatch] = []
        self._sessions = SessionHistory()

    def _open_tiers(self, batch_invariant: bool) -> OffloadManager:
        """Open the tiers and return the offload manager. Let the runner read cold pages in host memory, and let the
        vision model store embeddings in tiers. If the model or `batch_invariant` does not allow cold pages, turn
        cold pages off and record the reason."""
        offload = open_offload(
            self.config.tiers,
            self.cache,
            self.buffer,
            self.apply_copies,
            self.config.offload,
            None if self.group is None else self.group.host_copies,
        )
        self.runner.pages.set_host_memory(torch.from_numpy(offload.host.arena))
        if self.vision is not None:
            self.vision.store = offload.image_store(*self.vision.embedding_shape)
        if batch_invariant:
            offload.cold = None
            offload.cold_refusal = refused("batch_invariant, cold pages")
        elif self.group is not None:
            offload.cold = None
            divides_context = self.config.context_parallel > 1
            reasons = refused("tensor parallel, cold pages"), refused("context parallel, cold pages")
            offload.cold_refusal = reasons[divides_context]
        elif runs_separately(self.model):
            offload.cold = None
            offload.cold_refusal = refused("own cache, cold pages", model=type(self.model).__name__)
        elif self.model.config.is_encoder_decoder:
            offload.cold = None
            offload.cold_refusal = refused("encoder-decoder, cold pages", model=type(self.model).__name__)
        return offload

    def _open_encoders(self, image_part: str) -> RemoteEncoders | None:
        """Connect to the encode workers. `image_part` is the fingerprint of the weights that encode images. Return
        None for a model without images."""
        if self.vision is None:
            return None
        shape = self.vision.embedding_shape
        return RemoteEncoders(self.config.encoders, image_part, shape, self.config.encode_seconds)

    def _make_elastic(self, memory: ElasticBuffer) -> None:
        """Let the pool grow and shrink by the rule of the settings, until `resize_pool` is called."""
        config, pool = self.config, self.cache.usable_slabs * self.layout.slab_bytes
        least = pool // 8 if config.min_pool_bytes is None else config.min_pool_bytes
        self.pool_size = PoolSize(self.cache, memory, self.apply_copies, least)
        self.pool_rule = PoolRule(pool, config.keep_free, config.idle_seconds)

    def _open_events(self, settings: EventSettings) -> WirePublisher:
        """Publish the block events of the pool and of the tiers."""
        from kvloom.events_wire import TierBlocks, WirePublisher

        table = self.adapters
        named = {} if table is None else {"adapter_name": table.name_of}
        events = WirePublisher(self.cache, settings, **named)
        states = {group.index for group in self.layout.of("state")}
        for tier in self.offload.watch_tiers() if self.offload is not None else ():
            fingerprints = {
                group: [form.fingerprint for form in forms] for group, forms in tier.forms.items()
            }
            events.add_tier(TierBlocks(tier.medium, tier.changes.take, fingerprints, states))
        return events

    def _check_trees(self) -> None:
        """Raise ValueError if the model cannot compute draft trees."""
        nodes = self.config.tree_nodes
        if self.cache.has_states:
            raise ValueError(refused("tree, states", nodes=nodes, model=type(self.model).__name__))
        if self.runner.pages.is_invariant:
            raise ValueError(refused("tree, batch_invariant", nodes=nodes))

    def _rotated_copier(self) -> RotatedCopier:
        """Return the object that copies documents. Computes a short prompt to find how layers rotate K. Raises
        ValueError if the model does not support copies."""
        model, cache, pages = type(self.model).__name__, self.cache, self.runner.pages
        if runs_separately(self.model):
            raise ValueError(refused("documents, own cache", model=model))
        if self.model.config.is_encoder_decoder:
            raise ValueError(refused("documents, encoder-decoder", model=model))
        if cache.has_states:
            raise ValueError(refused("documents, states", model=model))
        if not all(group.spec.visibility.is_relative for group in self.layout.of("token")):
            raise ValueError(refused("documents, window", model=model))
        assert self.config.token_budget is not None
        count = min(ROTATION_TOKENS, max(2, self.config.token_budget))
        weight = self.model.get_input_embeddings().weight
        tokens = np.full(count, len(weight) // 2, np.int32)
        sequence = cache.open(cache.match(tokens, CacheControl(read=False, store=False)), is_counted=False)
        try:
            if sequence.extend(count):
                raise ValueError(f"reuse_documents: the pool has no pages for {count} tokens: enlarge it")
            with self._without_sinks():
                self.runner.run([Work(sequence, tokens.astype(np.int64))])
            ranks = ranks_of(self.model)
            copier = RotatedCopier(cache, pages, self.model, None if ranks is None else ranks.context)
            sizes = [
                field.element_size() for field in pages.token_view(pages.token_layers[0]).fields.values()
            ]
            tolerance = ROTATION_TOLERANCE[min(weight.element_size(), *sizes, 4)]
            copier.find_rotations(sequence.row, count, tolerance)
        except RotationError as error:
            raise ValueError(refused("documents, model", model=model, reason=str(error))) from None
        finally:
            sequence.close()
        return copier

    @contextmanager
    def _without_sinks(self) -> Iterator[None]:
        """Turn off the attention sinks of all ranks for a step."""
        sinks = AttentionSinks(self.model)
        targets = [sinks.set] if self.group is None else [self.group.set_sinks, sinks.set]
        for turn in targets:
            turn(False)
        try:
            yield
        finally:
            for turn in targets:
                turn(True)

    def _copy_document(
        self, copier: RotatedCopier, source: int, first: int, target: int, at: int, count: int
    ) -> None:
        """Copy tokens of a document on all ranks. The arguments are those of `RotatedCopier.plan`. Pending copies of
        pages run first."""
        self.apply_copies()
        plan = copier.plan(source, first, target, at, count)
        if self.group is not None:
            self.group.copy_document(copier.chosen, plan)
        copier.copy(plan)

    def _proposers(self, draft: Any) -> list[Proposer]:
        """Return the proposers that the settings name, in the order in which they are tried."""
        if runs_separately(self.model) and self.cache.has_states:
            raise ValueError(refused("speculation, own states", model=type(self.model).__name__))
        proposers: list[Proposer] = []
        names = self.config.proposers
        for place, name in enumerate(names):
            min_match = STRONG_MATCH if place + 1 < len(names) else 0
            if name.startswith("draft=") or name == self.config.head:
                proposers.append(self._draft_proposer(draft))
            else:
                proposers.append((SuffixProposer if name == "suffix" else NGramProposer)(min_match))
        return proposers

    def _draft_proposer(self, draft: Any) -> DraftModelProposer:
        """Return the proposer of a draft model or head. The draft shares the pool and the buffers of batches with the
        target model.
        """
        config, complete = self.config, self.offload is not None
        assert config.token_budget is not None
        assert config.max_running is not None
        sizes, beside = (config.token_budget, config.max_running), (Sampler(self.eos), self.apply_copies)
        sampled = self.runner.chosen
        draft_length = longest_draft(config.proposers, config.draft_tokens, config.tree_nodes)
        if config.head:
            if self.runner.decoder is None:
                raise ValueError(refused("head, model", head=config.head, model=type(self.model).__name__))
            head = self._draft_runner = HeadRunner(
                draft, self.cache, self.buffer, *sizes, config.cuda_graphs, self.runner, draft_length
            )
            if self.group is not None:
                self.group.attach_draft(head)
            name = config.head.partition("=")[0]
            depth = longest_draft([name], config.draft_tokens) if config.tree_nodes else 0
            return HeadProposer(name, head, *beside, sampled, complete, depth)
        runner = self._draft_runner = ModelRunner(
            draft.eval(),
            self.cache,
            self.buffer,
            *sizes,
            config.cuda_graphs,
            invariant=self.runner.pages.is_invariant,
            target=self.runner,
            draft_length=draft_length,
        )
        if self.group is not None:
            self.group.attach_draft(runner)
        return DraftModelProposer(runner, *beside, sampled, complete)

    def prepare(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compile kernels and capture graphs, so that no request waits for them. Does nothing on a CPU.

        Calls `progress(done, total)` after each graph. May take minutes.
        """
        tokens, seconds = self.runner.warm_up(self._warm_up_sampler)
        if self.offload is not None:
            self.offload.observe_prefill(tokens, seconds)
        self.runner.capture(progress)
        if self._draft_runner is not None:
            self._draft_runner.warm_up(lambda _: None)
            self._draft_runner.capture(progress)

    def add(
        self,
        prompt: Iterable[int],
        params: SamplingParams | None = None,
        control: CacheControl | None = None,
        priority: int = 0,
        text: bool = False,
        images: Many[Any] = (),
        audio: Many[Any] = (),
        grammar: Grammar | None = None,
        resume: Many[int] = (),
        offers_pages: bool = False,
        awaits_peer: str | None = None,
        slo: Objective | None = None,
        arrived: float | None = None,
        lora: str | None = None,
        decoder_prompt: Many[int] = (),
    ) -> Request:
        """Queue a request and return it. Raises ValueError for a request that can never run.

        | argument       | meaning                                                                                      |
        |----------------|----------------------------------------------------------------------------------------------|
        | `control`      | caching options: tenant, session, `store`, `read`, priorities of token ranges, public prefix |
        | `priority`     | a request with a larger value runs first and is preempted last                               |
        | `text`         | decode each token when it arrives (about 20 µs), so that the text can be streamed            |
        | `images`       | one entry per image, in the order of the placeholders: the output of the model's processor (a mapping of tensors), or pixels |
        | `audio`        | one entry per audio clip, in the order of the placeholders: the output of the model's processor for this clip |
        | `grammar`      | the compiled result of `begin_grammar`; if it is missing, this call waits for the compilation |
        | `resume`       | output tokens that another engine generated; the request continues after them                |
        | `offers_pages` | offload the pages of each computed chunk at once, so that another worker can load them       |
        | `awaits_peer`  | host:port of the worker that computes the prompt; the request waits for pages from its peer tier |
        | `slo`          | objective of the request; it overrides those of its tenant and of the engine                  |
        | `arrived`      | when the request arrived, on the monotonic clock; now if it is missing                        |
        | `lora`         | name of the LoRA adapter; None uses the base model                                            |
        | `decoder_prompt` | first tokens of the decoder, for an encoder-decoder model of text; the default is in its generation config |

        In an encoder-decoder model of text, `prompt` is the input of the encoder. With audio, `prompt` is that of the
        decoder, and may be empty.
        A request that cannot meet its objective gets the finish reason "slo", at once or after it was deferred.
        """
        if self.vision is None and (len(images) or len(audio)):
            raise ValueError(Vision.refusal(self.model, "images" if len(images) else "audio"))
        prompt, images = self._split_prompt(prompt, [*images, *audio], decoder_prompt)
        tokens, ids = token_ids(prompt)
        params = self.defaults.with_minimum(params or self.defaults.params(len(ids)), len(ids))
        self._validate(ids, params, text)
        if resume and (
            params.samples > 1 or params.logprobs is not None or params.prompt_logprobs is not None
        ):
            raise ValueError("resume_token_ids needs a request with one answer and without logprobs")
        request = self._create_request(tokens, ids, images, params, control or CacheControl(), priority, lora)
        request.offers_pages, request.awaits_peer = offers_pages or self.role == "prefill", awaits_peer
        if self.scheduler.documents is not None:  # a hand-over copies no documents
            for sample in request.family:
                sample.documents = self.scheduler.documents.documents_of(request)
        objective = self._objective(request, slo)
        if objective and not resume:
            now = self.cache.clock.now()
            request.slo = SloState(objective, now if arrived is None else min(arrived, now))
        self._prepare_samples(request, grammar, text)
        if params.beam_width > 1:
            self._start_beam_search(request)
        self.scheduler.add(request)
        self._add_documents(request)
        if resume:
            self.output_processor.resume(request, resume)
        self._request_count = request.order + params.samples
        if request.adapter is not None:
            request.adapter.requests += 1
        return request

    def _create_request(
        self,
        tokens: tuple[int, ...],
        ids: npt.NDArray[Any],
        images: Many[Any],
        params: SamplingParams,
        control: CacheControl,
        priority: int,
        lora: str | None,
    ) -> Request:
        """Return a request with all its samples. `tokens` and `ids` are the same prompt. Finds its adapter and
        images. Its cache control is `control`, as far as this engine supports it, with the digest of the adapter.
        Raises ValueError for an unknown adapter, and for images that do not match the prompt."""
        control = self._with_known_lossy(control)
        adapter, activation = self._adapter_of(lora, ids)
        control = _with_adapter(control, adapter, activation)
        image_inputs = self._prepare_images(tokens, images, control)
        if control.public_tokens:
            public = self.cache.public_length(control, len(ids), prompt_media(image_inputs, activation))
            control = replace(control, public_tokens=public)
        documents = self.scheduler.documents
        request = Request(
            # The requests that compute its documents get the numbers before it.
            self._request_count + (0 if documents is None else len(control.documents)),
            tokens,
            params,
            control,
            priority,
            images=image_inputs,
            prompt_array=ids.astype(np.int32, copy=False),
            adapter=adapter,
            activation=activation,
        )
        request.add_samples()
        return request

    def _add_documents(self, request: Request) -> None:
        """Queue a request for each document of a new request that is neither cached nor already being computed. The new
        request waits for these requests."""
        reuse = self.scheduler.documents
        if reuse is None or not request.documents or request.finish_reason is not None:
            return
        for place, (ids, control, key) in enumerate(reuse.missing(request)):
            document = reuse.computing(key)
            if document is None:
                params = SamplingParams(max_tokens=1, temperature=0)
                document = Request(
                    self._request_count + place, tuple(ids.tolist()), params, control, request.priority,
                    prompt_array=ids, adapter=request.adapter, is_document=True,
                )  # fmt: skip
                # A document that cannot run alone is computed as part of the prompt.
                with suppress(ValueError):
                    self.scheduler.add(document)
                    reuse.set_computing(key, document)
                    request.awaited.append(document)
            else:
                request.awaited.append(document)

    def _adapter_of(
        self, name: str | None, prompt: npt.NDArray[Any]
    ) -> tuple[LoadedAdapter | None, Media | None]:
        """Return the adapter with a name, and the mark at which an activated LoRA begins to apply (None for other
        adapters). If the prompt lacks the invocation tokens of an activated LoRA, the base model is used: returns
        (None, None). Raises ValueError for an unknown name."""
        if name is None:
            return None, None
        if self.adapters is None:
            raise ValueError(
                f"adapter {name!r} needs an engine with adapters: configure lora (--lora NAME=FOLDER) or max_loras"
            )
        adapter = self.adapters.find(name)
        if not adapter.is_activated:
            return adapter, None
        activation = adapter.activation(prompt)
        return (None, None) if activation is None else (adapter, activation)

    def pin(
        self,
        prompt: Iterable[int],
        seconds: float,
        control: CacheControl | None = None,
        lora: str | None = None,
    ) -> Pin:
        """Keep the cached prefix of a prompt in the pool for `seconds`. `lora` is the name of its LoRA adapter. See
        `KVCache.pin`."""
        _, ids = token_ids(prompt)
        adapter, activation = self._adapter_of(lora, ids)
        control = _with_adapter(control or CacheControl(), adapter, activation)
        return self.cache.pin(ids, seconds, control, () if activation is None else (activation,))

    def load_lora(self, name: str, path: str, replace: bool = False) -> LoadedAdapter:
        """Load a LoRA adapter, or replace it by another version. Requests that were added before keep their version.
        Raises ValueError if the adapter does not fit."""
        if self.adapters is None:
            raise ValueError(
                f"adapter {name!r} needs an engine with slots for adapters: configure max_loras (--max-loras)"
            )
        return self.adapters.load(name, path, replace)

    def add_lora(self, name: str, adapter: LoraAdapter, replace: bool = False) -> LoadedAdapter:
        """Add a LoRA adapter whose files were already read. See `load_lora`."""
        if self.adapters is None:
            raise ValueError(
                f"adapter {name!r} needs an engine with slots for adapters: configure max_loras (--max-loras)"
            )
        return self.adapters.add(name, adapter, replace)

    def unload_lora(self, name: str) -> None:
        """Remove a LoRA adapter. Requests that were added before still finish with this adapter. Raises ValueError
        for an unknown name."""
        if self.adapters is None:
            raise ValueError(f"adapter {name!r} cannot be unloaded: the engine has no adapters")
        self.adapters.unload(name)

    @property
    def encoder_tokens(self) -> int:
        """Largest number of prompt tokens, in a model whose encoder reads the prompt (T5, BART). 0 for other models."""
        if not isinstance(self.vision, EncoderDecoder) or not self.vision.reads_text:
            return 0
        return self.vision.max_prompt_tokens or self.cache.max_tokens

    @property
    def decoder_tokens(self) -> int:
        """The number of tokens with which the decoder of an encoder-decoder model begins. 0 for other models."""
        return len(self.vision.decoder_prompt) if isinstance(self.vision, EncoderDecoder) else 0

    def images_to_request(
        self, prompt: Many[int], images: Many[Image], control: CacheControl, awaits_peer: str | None = None
    ) -> list[int]:
        """Return the indexes of the images whose embeddings the prompt needs and this engine lacks. Does not modify
        the cache and encodes nothing. Raises ValueError if prompt and images do not match.

        An image is left out if a cached prefix covers it, or if its embeddings are in the pool or in host memory.
        The list is empty if the request may not read or store embeddings, or if another worker computes the prompt
        (`awaits_peer`). If the token count of an image is not known yet, the prompt cannot be looked up. All images
        whose embeddings are not in host memory are then returned, also with `awaits_peer`.
        """
        if self.vision is None or not (control.read and control.store):
            return []
        control = self._with_known_lossy(control)
        needed = list(range(len(images)))
        if all(map(self.vision.has_count, images)):
            if awaits_peer is not None:
                return []
            found = self.vision.read_prompt(prompt, images, control.tenant)
            match = self.cache.match(prompt, control, found.media)
            missing = [
                image
                for image, item in zip(found.images, found.media, strict=True)
                if item.stop > match.resume and not self.cache.has_media(match, item)
            ]
            needed = [i for i in needed if any(images[i] is image for image in missing)]
        store = self.vision.store
        return [i for i in needed if store is None or not store.has(images[i])]

    def _with_known_lossy(self, control: CacheControl) -> CacheControl:
        """Return `control`, with `lossy` set to False if no tier re-encodes pages. Requests with `lossy` have separate
        block hashes. Without such a tier, all requests can share pages."""
        if control.lossy and (self.offload is None or not self.offload.has_lossy_tier):
            return replace(control, lossy=False)
        return control

    def _prepare_samples(self, request: Request, grammar: Grammar | None, text: bool) -> None:
        """Set the grammar state and the text stream of each sample of a request. If the request needs a grammar and
        `grammar` is None, compile the grammar and wait for it.
        """
        params, structure = request.params, request.params.structure
        if structure is not None and grammar is None:
            grammar = self._open_grammars().compile(*structure)
        for sample in request.family:
            if structure is not None and grammar is not None:
                sample.structure = grammar.start()
            if text or params.stops:
                sample.text = TextStream(
                    self.tokenizer,
                    request.prompt,
                    params.stops,
                    params.include_stop_str_in_output,
                    params.skip_special_tokens,
                )

    def _objective(self, request: Request, given: Objective | None) -> Objective:
        """Return the objective of a request. A value is taken from the request if set, else from its tenant, else from
        the engine.

        A request that offers its pages has no objective, because another worker generates its answer. A request for
        an embedding has only the `given` objective.
        """
        if request.offers_pages:
            return Objective()
        own = given or Objective()
        if request.params.pooling is not None:
            return own
        tenant = self.cache.account(request.control.tenant).tenant.objective
        return own.over(tenant).over(self.config.objective)

    def begin_grammar(self, params: SamplingParams, tenant: str = "") -> Grammar | None:
        """Start to compile the grammar of `params` and return it. Return None if there is no grammar. Does not wait:
        call `poll_grammars` until the grammar is ready. Raises ValueError for a grammar that is refused at once.
        """
        structure = params.structure
        if structure is None or self.tokenizer is None:
            return None
        return self._open_grammars().begin(*structure, tenant)

    def poll_grammars(self) -> None:
        """Read the answers of the grammar processes, and update the grammars. Does not wait."""
        if self._grammars is not None:
            self._grammars.poll()

    def cancel(self, request: Request) -> None:
        """Finish a request and all its samples. Their pages are released at once."""
        for sample in request.family:
            self.scheduler.cancel(sample)

    @property
    def busy(self) -> bool:
        """Whether there is work for a step."""
        is_prefetching = self.offload is not None and self.offload.is_prefetching
        return self.scheduler.busy or self._inflight is not None or is_prefetching or bool(self._updated)

    def expect_session(self, session: str) -> bool:
        """Start to prefetch the pages of a session into host memory. The next steps continue the prefetch.

        Return whether a lookup started. Return False for an unknown session, or without tiers.
        """
        known = self._sessions.of(session)
        if known is None or self.offload is None:
            return False
        tokens, control = known
        likely = Request(-1, tuple(tokens.tolist()), SamplingParams(max_tokens=1), control)
        return self.offload.prefetch_session(likely, self.cache.match(tokens, control))

    def end_session(self, session: str) -> int:
        """Mark the blocks that only this session used, so that they are evicted first. Return the number of tokens in
        these blocks."""
        self._sessions.forget(session)
        return self.cache.end_session(session)

    def set_role(self, role: Role) -> None:
        """Change the role to "both", "prefill" or "decode".

        "prefill" offers the pages of every later request to other workers. "decode" limits prompt tokens per step, so
        that prompts delay decoding requests less. Raises ValueError for "prefill" without shared host memory.
        """
        if role == "encode":
            raise ValueError("role encode is a role of `kvloom serve`: an engine cannot have it")
        if role == "prefill" and self.peer_address is None:
            raise ValueError(
                "role prefill needs host memory that decode workers can read: add the tier host:SIZE?share=HOST:PORT"
            )
        self.role = role
        assert self.config.token_budget is not None
        budget = self.config.token_budget
        self.scheduler.token_budget = min(budget, DECODE_PROMPT_TOKENS) if role == "decode" else budget

    @property
    def peer_address(self) -> tuple[str, int] | None:
        """Host and port at which other workers read the pages in host memory. None means that the pages are not
        shared."""
        server = None if self.offload is None else self.offload.host_server
        return None if server is None else server.address

    def step(self) -> list[Request]:
        """Launch one step and process the tokens of the previous step. Return the requests that got a token or
        finished.

        If the call raises (device out of memory, interrupt), the step is discarded. Its requests return to the
        waiting queue and recompute their tokens. The next call returns the requests that got a token before the
        failure.
        """
        started, clock = time.perf_counter(), self.cache.clock
        began = clock.now()
        if self.group is not None:
            self.group.check()
        self.adjust_pool()
        if self.output_processor.awaiting_masks:
            self._updated += self.output_processor.settle_masks()
        previous = finished = self._inflight
        if previous is not None and self._needs_tokens(previous):
            self._inflight = None
            self._finish_step(previous, [])
            previous = None
        self._inflight = launched = self._launch(previous)
        if previous is not None:
            self._finish_step(previous, [] if launched is None else launched.work)
        elif launched is not None and not self.ahead:
            self._inflight, finished = None, launched
            self._finish_step(launched, [])
        if self.output_processor.awaiting_masks and finished is None and self._inflight is None:
            self.output_processor.wait_for_masks(MASK_WAIT_SECONDS)
        if self.offload is not None:
            is_waiting = self.scheduler.busy  # for pages of tiers, or for pages that copies retain
            self.offload.after_step(started, finished, self._inflight, is_waiting)
            self._sessions.record_requests(self._updated)
        self.finished_prefill = PrefillChunks() if finished is None else finished.prefill
        if finished is not None:
            self.scheduler.observe_step(finished.size, clock.now() - began)
            self._measure_snapshots()
        elif self._inflight is None and self.scheduler.slo.held:
            time.sleep(HELD_SECONDS)
        self.scheduler.slo.record_tokens()
        if finished is not None and self.speculation is not None:
            self.speculation.observe_step(finished.work, time.perf_counter() - started)
        if self.events is not None:
            self.events.flush()
        updated = [one for one in self._updated + self.scheduler.rejected if not one.is_document]
        self._updated, self.scheduler.rejected = [], []
        return updated

    def _measure_snapshots(self) -> None:
        """Pass the measured cost of a step, which a snapshot adds, to the interval between snapshots."""
        interval, times = self.cache.snapshot_interval, self.scheduler.slo.admission.times
        if interval is not None and not interval.is_fixed and times.is_known:
            step, token, *_ = times.coefficients
            interval.step_tokens = min(self.scheduler.token_budget, step / token) if token else 0.0

    def resize_pool(self, pool_bytes: int) -> int:
        """Set the target size of an elastic pool, and grow or shrink towards it. Return the current size in bytes. Call
        this method between steps.

        This ends automatic resizing: the pool then keeps `pool_bytes` until the next call. If pages in use delay
        shrinking, later steps continue it. Raises ValueError if the pool is not elastic.
        """
        if self.pool_size is None:
            raise ValueError(refused("fixed pool, resize"))
        self.pool_rule = None
        self.pool_size.set_target(pool_bytes)
        self.pool_size.approach()
        return self.pool_size.pool_bytes

    def adjust_pool(self) -> None:
        """Move the size of the pool towards its target. Every step calls this method. Also call it regularly while
        idle."""
        if self.pool_size is None:
            return
        if self.pool_rule is not None:
            slab = self.layout.slab_bytes
            decided = self.pool_rule.decide(
                time.monotonic(),
                self.pool_size.pool_bytes,
                self.cache.free_slabs * slab,
                self.cache.inspect.evicted.total(),
                self.scheduler.busy,
                lambda: free_device_bytes(self.device),
            )
            if decided is not None:
                self.pool_size.set_target(decided)
        self.pool_size.approach()

    def run(self) -> None:
        """Run steps until every request has finished."""
        while self.busy:
            self.step()

    def close(self, seconds: float = 10.0) -> None:
        """Cancel all requests, store queued pages in the tiers, and close the tiers. Takes at most `seconds`."""
        for request in list(self.scheduler.open):
            self.scheduler.cancel(request)
        self.scheduler.close_unsettled()
        self._inflight, self._updated = None, []
        if self._grammars is not None:
            self._grammars.close()
            self._grammars = None
        if self.encoders is not None:
            self.encoders.close()
            self.encoders = None
        if self.offload is not None:
            with suppress(RuntimeError):
                self._make_copies()
            self.offload.close(seconds, keep=not self._copies)
            self.offload = self.scheduler.offload = None
            self.cache.loading.remove_listener()
        if self.events is not None:
            self.events.close()
            self.events = None
        if self.group is not None:
            self.group.close()

    def _needs_tokens(self, previous: InflightStep) -> bool:
        """Return whether the host must have the tokens of the step `previous` before it can schedule the next step.
        The result is True while drafts are used. It is also True if the next token of a request depends on its last
        token, as with grammars, penalties or beams."""
        if self.speculation is not None and self.speculation.waits_for(previous.requests):
            return True
        return bool(previous.drafts) or any(request.needs_last_token for request in previous.requests)

    def _finish_step(self, step: InflightStep, launched_since: list[Scheduled]) -> None:
        """Wait for the tokens of `step` and apply them to its requests. `launched_since` is the work of the next
        step, if that step is already launched. If this call fails, the next step is discarded too, because the tokens
        of `step` are its input.
        """
        try:
            if self.offload is not None:
                self.offload.during_step(lambda: not step.is_ready)
            before = [len(request.tokens) for request in step.requests]
            self._updated += self.output_processor.process(step, launched_since)
            if self.speculation is not None:
                self.speculation.step_verified(step.requests, before, step.drafts)
        except BaseException:
            self._inflight = None
            self.scheduler.discard_step()
            raise

    def _launch(self, previous: InflightStep | None) -> InflightStep | None:
        """Schedule and launch a step. Return None if there is no work. If the step fails, it is discarded."""
        places = {} if previous is None else {id(request): i for i, request in enumerate(previous.requests)}
        try:
            return self._execute(places)
        except BaseException:
            self.scheduler.discard_step(places)
            raise

    def _execute(self, places: dict[int, int]) -> InflightStep | None:
        self.apply_copies()  # frees pages that finished forks retain until their copies have run
        proposed: dict[int, Draft] = {}
        if self.speculation is not None:
            proposed = self.speculation.propose(self.scheduler.running)
        work = self.scheduler.schedule(places, {key: draft.tokens for key, draft in proposed.items()})
        self.apply_copies()
        if not work:
            return None
        launched = time.monotonic()
        if any(draft.parents for draft in proposed.values()):
            supported = self.runner.supports_trees([part for _, part in work])
            work = Speculation.add_trees(work, proposed, supported)
        ready = [
            i
            for i, (request, part) in enumerate(work)
            if part.new_tokens
            and request.computed + part.new_tokens == len(request.tokens) + request.inflight_tokens
        ]
        with_prompt_logprobs = [
            i
            for i, (request, _) in enumerate(work)
            if request.params.prompt_logprobs is not None and request.computes_prompt_logprobs
        ]
        if self.offload is not None:
            self.offload.before_step()
        pooled = [
            i
            for i, (request, _) in enumerate(work)
            if request.params.pooling is not None and request.computed < len(request.prompt)
        ]
        logits = self._run_model([part for _, part in work], ready, with_prompt_logprobs, pooled)
        drafts = [proposed[id(work[i][0])] if work[i][1].drafts else NO_DRAFT for i in ready]
        rows_of = [0, *accumulate(1 + len(draft.tokens) for draft in drafts)]
        sampled_rows = rows_of[-1]
        if self.speculation is not None:
            self.speculation.step_computed(work)
        prompts: list[PromptLogprobs] = []
        if with_prompt_logprobs:
            with self.runner.numerics:
                prompts = prompt_logprobs([work[i] for i in with_prompt_logprobs], logits[sampled_rows:])
        embeddings = (
            pool_hidden_states([work[i] for i in pooled], self.runner.hidden_states) if pooled else []
        )
        if len(logits) > sampled_rows:
            logits = logits[:sampled_rows]
        self.scheduler.step_launched(work)
        requests = [work[i][0] for i in ready]
        if any(request.children and not request.branched for request in requests):
            requests, rows = self._fork_samples(requests)
            drafts += [NO_DRAFT] * (len(requests) - len(drafts))
            forked = [*range(sampled_rows), *(rows_of[row] for row in rows[len(ready) :])]
            logits = logits.index_select(0, to_device(np.array(forked), self.device))
        speculates = any(draft.tokens for draft in drafts)
        if not requests:
            sampled = SampledTokens(torch.empty(0, dtype=torch.int64, device=self.device))
        else:
            rows_to_sample: Many[SamplingRequest] = requests
            counts = [request.sampled_tokens - 1 for request in requests]
            if speculates:
                rows_to_sample, counts = draft_positions(requests, drafts)
            with self.runner.numerics:
                sampled = self.sampler.choose(logits, rows_to_sample, counts)
            if not speculates:  # with speculation, the next step waits for the tokens
                running = min(len(requests), self.runner.rows)  # only these can be part of the next step
                self.runner.chosen[:running] = sampled.tokens[:running]
        return InflightStep.create(
            work,
            requests,
            sampled,
            prompts,
            self.scheduler.decoding,
            embeddings,
            drafts if speculates else (),
            launched,
        )

    def _run_model(
        self, works: Many[Work], wanted: Many[int], whole: Many[int], pooled: Many[int]
    ) -> torch.Tensor:
        """Run the model on the work of a step. The arguments are those of `ModelRunner.run`. If the call fails, stop
        the group of ranks, because other ranks may still be inside the step."""
        try:
            return self.runner.run(works, wanted, whole, pooled)
        except BaseException as error:
            if self.group is not None:
                self.group.fail(f"a step failed on rank 0 ({type(error).__name__})")
            raise

    def _move_tokens(self, moved: list[MovedToken]) -> None:
        """Move the K and V of accepted tokens of draft trees to the slots of their positions. Pending copies of pages
        run first, because the block tables already contain the target pages of these copies."""
        self.apply_copies()
        rows, sources, targets = np.array(moved).T
        places = self._token_mover.places(rows, sources, targets)
        if self.group is not None:
            self.group.move_tokens(places)
        self._token_mover.move(places)

    def apply_copies(self) -> None:
        """Start queued offloads, then run the pending copies inside the pool. Every step calls this method. Also call
        it between steps if other code has changed the cache."""
        self._make_copies()  # first the copies that a failed step left
        if self.offload is not None:
            self.offload.flush()
        self._copies = self.cache.take_copies()
        self._make_copies()

    def _make_copies(self) -> None:
        """Run the pending copies inside the pool. A copy that fails stays pending, and the next call runs it again."""
        if not self._copies:
            return
        try:
            while self._copies:
                copies = self._copies[0]
                if self.group is not None:
                    self.group.copy(copies)
                copy_pages(self.buffer, copies.page_stride, copies.source, copies.target)
                del self._copies[0]
        finally:
            if self.offload is not None:
                self.offload.before_step(pages_moved=True)

    def _warm_up_sampler(self, logits: torch.Tensor) -> None:
        dummy = Request(-1, (0,), SamplingParams(max_tokens=1, temperature=0), CacheControl())
        with self.runner.numerics:
            self.sampler.choose(logits, [dummy] * len(logits), [0] * len(logits))

    def _fork_samples(self, requests: list[Request]) -> tuple[list[Request], list[int]]:
        """Start the other samples (`n` > 1) of the requests whose prompt this step has computed.

        Return the requests to sample, and for each request the index of its row of logits. The given requests come
        first, then their samples. A sample uses the logits of its request. Samples for which the pool has no pages
        come last. They get their first token in this step, then wait and are recomputed. With several tenants, only
        some samples start in this step. The others are queued.
        """
        children: list[tuple[Request, int]] = []
        for row, request in enumerate(requests):
            if request.children and not request.branched:
                request.branched = True
                unfinished = [child for child in request.children if child.finish_reason is None]
                count = self.scheduler.samples_to_start(request)
                for place, child in enumerate(unfinished):
                    if place >= count:
                        self.scheduler.queue_sample(child)
                    else:
                        self.scheduler.fork(request, child)
                        child.inflight_tokens += 1
                        children.append((child, row))
        children.sort(key=lambda fork: fork[0].sequence is None)
        rows = [*range(len(requests)), *(row for _, row in children)]
        return [*requests, *(child for child, _ in children)], rows

    def _start_beam_search(self, request: Request) -> None:
        """Start a beam search. The request and its children become the slots of the search. Each slot runs one
        beam."""
        params = request.params
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos)
        beams = BeamSearch(request.family, ends)
        for slot in beams.slots:
            slot.beams, slot.branched = beams, True
            slot.top_logprobs = max(
                BeamSearch.candidates_needed(params.beam_width, len(ends)), params.logprobs or 0
            )

    def _open_grammars(self) -> Grammars:
        if self._grammars is None:
            self._grammars = Grammars(self.tokenizer, self.eos, self.config.grammar_limits)
        return self._grammars

    def _split_prompt(
        self, prompt: Iterable[int], images: Many[Any], decoder_prompt: Many[int]
    ) -> tuple[Iterable[int], Many[Any]]:
        """Return the token ids of a request's sequence, and its images and clips. In an encoder-decoder model, the
        sequence is that of the decoder."""
        if self.vision is not None:
            return self.vision.split_prompt(prompt, images, decoder_prompt)
        if decoder_prompt:
            raise ValueError(f"{type(self.model).__name__} has no encoder: leave decoder_prompt out")
        return prompt, images

    def _prepare_images(
        self, tokens: tuple[int, ...], images: Many[Any], control: CacheControl
    ) -> ImageInputs | None:
        """Return the images and clips of a prompt, or None if it has neither. Raises ValueError if they do not match
        the prompt."""
        if self.vision is None or not (len(images) or self.vision.needs_image):
            return None
        return self.vision.read_prompt(tokens, images, control.tenant, control.read, control.store)

    def _validate(self, ids: npt.NDArray[Any], params: SamplingParams, text: bool) -> None:
        """Raise ValueError for a prompt or parameters that can never run."""
        if not len(ids):
            raise ValueError("the prompt is empty: give at least one token")
        limit = self.cache.max_tokens
        if len(ids) + params.max_tokens > limit:
            owner = "model's" if self.limit and self.config.max_context is None else "engine's"
            raise ValueError(
                f"{len(ids)} prompt tokens and max_tokens {params.max_tokens} exceed the {owner} limit of {limit} tokens: "
                "shorten the prompt or lower max_tokens"
            )
        for token in (ids.min(), ids.max()):
            if not 0 <= token < self._vocabulary:
                raise ValueError(
                    f"prompt token {token} is outside the vocabulary: give ids from 0 to {self._vocabulary - 1}"
                )
        if params.pooling is not None and self.runner.decoder is None:
            raise ValueError(refused("pooling, model", model=type(self.model).__name__))
        if self.tokenizer is None and (text or params.stops or params.structure is not None):
            raise ValueError(refused("text, tokenizer"))
        if params.timestamps and self.sampler.timestamps is None:
            raise ValueError(
                f"timestamps needs a Whisper model: the generation config of {type(self.model).__name__} has no "
                "no_timestamps_token_id"
            )


def _check_model(model: Any, config: EngineConfig, group: RankGroup | None) -> None:
    """Raise ValueError for settings that the model does not support, and for several ranks without a group."""
    name = type(model).__name__
    if config.tensor_parallel > 1 and group is None:
        raise ValueError(refused("tensor parallel, loaded model", count=config.tensor_parallel))
    if config.context_parallel > 1 and group is None:
        raise ValueError(refused("context parallel, loaded model", count=config.context_parallel))
    if config.head and separation_reason(model) is not None:
        raise ValueError(refused("head, own cache", head=config.head, model=name))
    if config.encoders and model.config.is_encoder_decoder:
        raise ValueError(refused("encoders, encoder-decoder", model=name))
    if config.uses_lora and model.config.is_encoder_decoder:
        raise ValueError(refused("lora, encoder-decoder", model=name))
    if config.uses_lora and separation_reason(model) is not None:
        raise ValueError(refused("lora, own cache", model=name))


def _draft_of(model: Any, config: EngineConfig) -> Any:
    """Load the draft head or the draft model of the settings. Return None if they name neither."""
    if config.head:
        return load_head(config.head, model)
    return load_draft(config.draft_model, model) if config.draft_model else None


def _sampler_of(model: Any, eos: frozenset[int]) -> Sampler:
    """Return a sampler that suppresses the tokens that the model's generation config lists, and applies its rule of time
    stamps."""
    settings = model.generation_config
    return Sampler(
        eos,
        [*(getattr(settings, "suppress_tokens", None) or ()), *bad_tokens(settings)],
        getattr(settings, "begin_suppress_tokens", None) or (),
        TimestampRule.of(settings) if settings is not None else None,
    )


def _with_adapter(
    control: CacheControl, adapter: LoadedAdapter | None, activation: Media | None
) -> CacheControl:
    """Return `control` with the digest of `adapter` added. The digest salts block hashes. Without an adapter,
    returns `control` unchanged. Also returns it unchanged with an activated LoRA (`activation` is set), because
    blocks before the activation have the hashes of the base model."""
    if adapter is None or activation is not None:
        return control
    return replace(control, adapter=" ".join(filter(None, (control.adapter, adapter.digest))))
