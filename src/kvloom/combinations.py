"""Combinations of features that kvloom refuses, each with its reason.

Every check raises its error with `refused(KEY, ...)`, so this table lists all refused combinations. `python
tools/combinations_table.py` writes the table to docs/combinations.md. A test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["REFUSED", "Refused", "refused"]


@dataclass(frozen=True, slots=True)
class Refused:
    """Two features (`feature` and `other`) that exclude each other. `where` names what is refused: a request, an engine
    or a server. `text` is the error message, with placeholders in braces."""

    where: Literal["request", "engine", "server"]
    feature: str
    other: str
    text: str


REFUSED = {
    "draft model, states": Refused(
        "engine",
        "speculate draft=MODEL",
        "a draft model with recurrent layers",
        "draft model {name} has recurrent layers, whose states cannot follow rejected drafts: use a draft model with "
        "attention only",
    ),
    "draft model, images": Refused(
        "engine",
        "speculate draft=MODEL, mtp, eagle=FOLDER",
        "a vision or audio model",
        "draft models and heads read neither images nor audio: use speculate ngram or suffix with this model, or load its "
        "text part alone (text_only, --text-only)",
    ),
    "draft model, head": Refused(
        "engine",
        "speculate draft=MODEL, mtp, eagle=FOLDER",
        "another of them",
        "speculate has {kinds}, and the pool has pages for one of them: use one",
    ),
    "head, model": Refused(
        "engine",
        "speculate mtp, eagle=FOLDER",
        "a model without a separate decoder",
        "speculate {head}: {model} has no separate decoder, so its hidden states are not known",
    ),
    "tree, states": Refused(
        "engine",
        "speculate tree=NODES",
        "a model with recurrent layers",
        "speculate tree={nodes}: {model} has recurrent layers, which keep one state per sequence and not one per branch: "
        "remove tree",
    ),
    "tree, batch_invariant": Refused(
        "engine",
        "speculate tree=NODES",
        "batch_invariant, on a GPU",
        "speculate tree={nodes}: batch-invariant attention has no tree masks: remove tree",
    ),
    "lora, other type": Refused(
        "engine",
        "LoRA adapters",
        "PEFT adapters of another type",
        "its type is {kind}, and only LORA adds terms to linear layers: convert it, or merge it into the model",
    ),
    "lora, dora": Refused(
        "engine",
        "LoRA adapters",
        "DoRA (use_dora)",
        "DoRA scales the base weights, so one batch could not share them between adapters: merge it into the model",
    ),
    "lora, bias": Refused(
        "engine",
        "LoRA adapters",
        "trained biases (bias, lora_bias)",
        "it has trained biases, which are weights of the base model: train it with bias none",
    ),
    "lora, saved modules": Refused(
        "engine",
        "LoRA adapters",
        "replaced modules (modules_to_save, trainable_token_indices)",
        "{field} replaces whole modules of the base model, which all requests of a batch share: train it without {field}",
    ),
    "lora, variant": Refused(
        "engine",
        "LoRA adapters",
        "variants: layer_replication, Arrow, QALoRA, BD-LoRA",
        "{field} changes how the adapter is computed, and only plain low-rank terms are supported: train it without {field}",
    ),
    "lora, experts": Refused(
        "engine",
        "LoRA adapters",
        "experts of a mixture",
        "{layer} is a weight of experts, whose grouped products have no low-rank terms: target attention and shared layers",
    ),
    "lora, quantised weights": Refused(
        "engine",
        "LoRA adapters",
        "layers with quantised weights, or with hooks",
        "{layer} is not a dense linear layer, and low-rank terms are added only to the products of dense layers: use a "
        "checkpoint in bfloat16, or target other layers",
    ),
    "lora, embeddings": Refused(
        "engine",
        "LoRA adapters",
        "token embeddings and the output matrix",
        "{layer} is not inside a decoder layer, and is computed for other rows than the tokens of a step: target linear "
        "layers of the decoder",
    ),
    "lora, kv_b_proj": Refused(
        "engine",
        "LoRA adapters",
        "kv_b_proj of MLA attention",
        "{layer} is applied to cached latents of earlier tokens as a whole, not to the tokens of a step: target other layers",
    ),
    "lora, cross-attention": Refused(
        "engine",
        "LoRA adapters",
        "keys and values of cross attention",
        "{layer} reads images, whose pages requests with other adapters share: target other layers",
    ),
    "lora, cross-attention layer": Refused(
        "engine",
        "LoRA adapters",
        "other layers of cross attention",
        "{layer} computes only the tokens that see an image, and adapters are added to all tokens of a step: target other "
        "layers",
    ),
    "lora, vision": Refused(
        "engine",
        "LoRA adapters",
        "the image or audio part of a model",
        "{layer} is not part of the text model, and requests with other adapters share the embeddings of images: target "
        "layers of the text model",
    ),
    "lora, uncalled layer": Refused(
        "engine",
        "LoRA adapters",
        "layers whose weights the modeling code reads directly, such as dt_proj of Mamba",
        "{layer} is never called as a layer: the modeling code reads its weight, so an adapter would have no effect: "
        "target other layers",
    ),
    "lora, no linear layers": Refused(
        "engine",
        "LoRA adapters",
        "a model without linear layers in its decoder",
        "{model} has no linear layers that an adapter could target",
    ),
    "lora, own cache": Refused(
        "engine",
        "LoRA adapters",
        "a model that runs with transformers' own cache",
        "lora: {model} runs one sequence after the other, and adapters are added to a whole step: merge the adapter into the "
        "model",
    ),
    "lora, encoder-decoder": Refused(
        "engine",
        "LoRA adapters",
        "an encoder-decoder model",
        "lora: requests with other adapters share the encoder outputs of {model}: merge the adapter into the model",
    ),
    "head, own cache": Refused(
        "engine",
        "speculate mtp, eagle=FOLDER",
        "a model that runs with transformers' own cache",
        "speculate {head}: {model} runs one sequence after the other, and a head needs the hidden states of a whole step: "
        "use ngram or suffix",
    ),
    "speculation, own states": Refused(
        "engine",
        "speculate",
        "a model with recurrent layers that runs with transformers' own cache",
        "speculate: the recurrent layers of {model} run with transformers' own cache, which cannot take back drafts: "
        "turn it off",
    ),
    "beams, sampling": Refused(
        "request",
        "beam search",
        "temperature above 0",
        "beam_width {width} needs temperature 0, not {temperature}: beam search does not sample",
    ),
    "beams, changed logits": Refused(
        "request",
        "beam search",
        "best_of, penalties, logit_bias, allowed or bad tokens, time stamps, stop texts, structured output",
        "beam_width excludes best_of, penalties, logit_bias, allowed and bad tokens, time stamps, stop texts and structured "
        "output: remove them",
    ),
    "beams, stream": Refused(
        "request",
        "beam search",
        "stream",
        "beam search is not available with stream: beams change until the end",
    ),
    "samples, greedy": Refused(
        "request",
        "several samples",
        "temperature 0",
        "{samples} samples at temperature {temperature} are all the same: raise temperature, or use beam_width",
    ),
    "best_of, stream": Refused(
        "request",
        "best_of above n",
        "stream",
        "best_of above n is not available with stream: answers are ranked at the end",
    ),
    "best_of, LLM.stream": Refused(
        "request",
        "best_of, beam search",
        "LLM.stream",
        "best_of and beam_width select samples at the end and cannot be streamed: use generate",
    ),
    "prompt_logprobs, stream": Refused(
        "request",
        "prompt_logprobs",
        "stream",
        "prompt_logprobs are not available with stream: omit stream",
    ),
    "echo with logprobs, stream": Refused(
        "request",
        "echo with logprobs",
        "stream",
        "echo with logprobs is not available with stream: omit stream",
    ),
    "pooling, sampling": Refused(
        "request",
        "embeddings",
        "several tokens or samples, structured output",
        "pooling needs max_tokens 1 and one sample, without structured output",
    ),
    "pooling, model": Refused(
        "request",
        "embeddings",
        "a model without a separate decoder",
        "pooling: {model} has no separate decoder, so it gives no embeddings",
    ),
    "structures": Refused(
        "request",
        "JSON schema, regular expression, grammar",
        "another of them",
        "{names} exclude each other: give one",
    ),
    "forced call, structure": Refused(
        "request",
        "a forced tool call",
        "structured output",
        "tool_choice forces a call, so {name} cannot hold: remove one",
    ),
    "text, tokenizer": Refused(
        "request",
        "texts, stop texts, structured output",
        "an engine without tokenizer",
        "text, stop texts and structured output need a tokenizer: pass one to the engine",
    ),
    "public messages, images": Refused(
        "request",
        "cache.public_messages",
        "images, audio",
        "cache: the token positions of messages are unknown until images and audio are expanded: send public_tokens, or "
        "text only",
    ),
    "documents, images": Refused(
        "request",
        "cache.documents",
        "images, audio",
        "documents cannot be marked in a prompt with images or audio, whose positions are not those of plain text: omit "
        "documents",
    ),
    "documents, model": Refused(
        "engine",
        "reuse_documents",
        "a model whose K and V cannot move to another position",
        "reuse_documents: {model}: {reason}: turn it off",
    ),
    "documents, states": Refused(
        "engine",
        "reuse_documents",
        "a model with recurrent layers",
        "reuse_documents: {model} has recurrent layers, whose states depend on all earlier tokens and cannot be copied: turn "
        "it off",
    ),
    "documents, own cache": Refused(
        "engine",
        "reuse_documents",
        "a model that runs with transformers' own cache",
        "reuse_documents: {model} runs with transformers' own cache, which has no rotation of its own keys: turn it off",
    ),
    "documents, encoder-decoder": Refused(
        "engine",
        "reuse_documents",
        "an encoder-decoder model",
        "reuse_documents: the encoder of {model} reads the whole prompt at once, so K and V of a document depend on the "
        "rest of the prompt: turn it off",
    ),
    "documents, window": Refused(
        "engine",
        "reuse_documents",
        "chunked attention",
        "reuse_documents: what a layer of {model} sees depends on the position of a token in its chunk, so a document cannot "
        "move: turn it off",
    ),
    "documents, draft": Refused(
        "engine",
        "reuse_documents",
        "speculate draft=MODEL, mtp, eagle=FOLDER",
        "reuse_documents: speculate {name} also needs the draft's own K and V of a document: use ngram or suffix",
    ),
    "images, model": Refused(
        "request",
        "images",
        "a model without an image part",
        "{where}: model {model!r} accepts no images: {reason}; send text",
    ),
    "audio, model": Refused(
        "request",
        "audio",
        "a model without an audio part",
        "{where}: model {model!r} accepts no audio: {reason}; send text",
    ),
    "batch_invariant, dtype": Refused(
        "engine",
        "batch_invariant",
        "16-bit weights on a CPU",
        "batch_invariant on a CPU needs dtype float32, not {dtype}: give dtype float32 (--dtype float32)",
    ),
    "batch_invariant, cross-attention": Refused(
        "engine",
        "batch_invariant",
        "cross-attention to images or to an encoder, on a GPU",
        "batch_invariant is not supported for models with cross-attention to images or to an encoder: turn it off",
    ),
    "batch_invariant, heads": Refused(
        "engine",
        "batch_invariant",
        "attention heads without a kernel, on a GPU",
        "batch_invariant has no GPU kernel for this model's attention heads: turn it off",
    ),
    "batch_invariant, cold pages": Refused(
        "engine",
        "batch_invariant",
        "requests longer than the pool, on a GPU",
        "batch_invariant keeps all pages in the pool: sums over cold pages depend on other requests",
    ),
    "batch_invariant, own cache": Refused(
        "engine",
        "batch_invariant",
        "a model that runs with transformers' own cache, on a GPU",
        "batch_invariant has no kernels for {model}, which runs with transformers' own cache: turn it off",
    ),
    "own cache, cold pages": Refused(
        "engine",
        "a model that runs with transformers' own cache",
        "requests longer than the pool",
        "{model} runs with transformers' own cache, which reads pages only from the pool: give a larger pool",
    ),
    "encoder-decoder, cold pages": Refused(
        "engine",
        "an encoder-decoder model",
        "requests longer than the pool",
        "the decoder of {model} reads pages only from the pool: give a larger pool",
    ),
    "encoders, encoder-decoder": Refused(
        "engine",
        "encoders",
        "an encoder-decoder model",
        "encoders: {model} encodes the input of every request itself, and encode workers load only image and audio "
        "towers: remove encoders",
    ),
    "tensor parallel, images": Refused(
        "engine",
        "tensor_parallel",
        "a vision or audio model",
        "its image or audio part has no rule for several ranks: set tensor_parallel to 1, or load the text part alone "
        "(text_only, --text-only)",
    ),
    "tensor parallel, quantised weights": Refused(
        "engine",
        "tensor_parallel",
        "quantised weights, GGUF files",
        "quantised weights are stored in blocks that ranks cannot cut: use a checkpoint with unquantised safetensors",
    ),
    "tensor parallel, own cache": Refused(
        "engine",
        "tensor_parallel",
        "a model that runs with transformers' own cache",
        "{model} runs with transformers' own cache, which holds whole heads: set tensor_parallel to 1",
    ),
    "tensor parallel, encoder-decoder": Refused(
        "engine",
        "tensor_parallel",
        "an encoder-decoder model",
        "the encoder of {model} has no rule for several ranks: set tensor_parallel to 1",
    ),
    "tensor parallel, loaded model": Refused(
        "engine",
        "tensor_parallel",
        "a model that is already loaded",
        "tensor_parallel {count}: every rank loads its part of the weights itself: give the model's folder or name",
    ),
    "tensor parallel, cold pages": Refused(
        "engine",
        "tensor_parallel",
        "requests longer than the pool",
        "attention over cold pages reads whole pages of host memory, and ranks have parts of them: give a larger pool",
    ),
    "tensor parallel, elastic pool": Refused(
        "engine",
        "tensor_parallel",
        "an elastic pool (max_pool_bytes)",
        "tensor_parallel {count}: the pools of all ranks have one fixed size: remove max_pool_bytes (--max-pool)",
    ),
    "tensor parallel, batch_invariant": Refused(
        "engine",
        "tensor_parallel",
        "batch_invariant",
        "tensor_parallel {count}: the order of sums between ranks depends on the size of a batch: turn batch_invariant off",
    ),
    "pipeline parallel": Refused(
        "engine",
        "pipeline_parallel",
        "every model",
        "pipeline_parallel: kvloom does not divide a model by layers, because the ranks would compute one after the other: "
        "set tensor_parallel (--tensor-parallel), which divides every layer",
    ),
    "expert parallel, one rank": Refused(
        "engine",
        "expert_parallel",
        "one rank",
        "expert_parallel divides experts between the ranks of tensor_parallel, and there is one rank: set tensor_parallel "
        "(--tensor-parallel) to 2 or more",
    ),
    "expert parallel, experts": Refused(
        "engine",
        "expert_parallel",
        "a model without experts, or with experts that cannot skip tokens",
        "expert_parallel: {model} has no experts that can skip the tokens of other ranks: turn expert_parallel"
        " (--expert-parallel) off",
    ),
    "context parallel, small pages": Refused(
        "engine",
        "context_parallel",
        "pages of fewer than 16 tokens on a GPU",
        "context_parallel {count}: each rank would have pages of {tokens} tokens, and GPU kernels read 16 tokens or more: "
        "set block_tokens (--block-tokens) to 16 times context_parallel or more",
    ),
    "context parallel, images": Refused(
        "engine",
        "context_parallel",
        "a vision model",
        "tokens of one image see each other, and the merge of ranks has no such mask: set context_parallel to 1, or load "
        "the text part alone (text_only, --text-only)",
    ),
    "context parallel, own cache": Refused(
        "engine",
        "context_parallel",
        "a model that runs with transformers' own cache",
        "{model} runs with transformers' own cache, which reads whole blocks: set context_parallel to 1",
    ),
    "context parallel, encoder-decoder": Refused(
        "engine",
        "context_parallel",
        "an encoder-decoder model",
        "the decoder of {model} reads pages of the encoder's output, which ranks cannot divide: set context_parallel to 1",
    ),
    "context parallel, loaded model": Refused(
        "engine",
        "context_parallel",
        "a model that is already loaded",
        "context_parallel {count}: every rank loads the weights itself: give the model's folder or name",
    ),
    "context parallel, cold pages": Refused(
        "engine",
        "context_parallel",
        "requests longer than the pool",
        "attention over cold pages reads whole blocks of host memory, and ranks have parts of them: give a larger pool",
    ),
    "context parallel, tree": Refused(
        "engine",
        "context_parallel",
        "speculate tree=NODES on a GPU",
        "context_parallel {count}: the GPU kernels have no mask for draft trees in a part of each block: remove tree from "
        "speculate",
    ),
    "context parallel, elastic pool": Refused(
        "engine",
        "context_parallel",
        "an elastic pool (max_pool_bytes)",
        "context_parallel {count}: the pools of all ranks have one fixed size: remove max_pool_bytes (--max-pool)",
    ),
    "context parallel, batch_invariant": Refused(
        "engine",
        "context_parallel",
        "batch_invariant",
        "context_parallel {count}: the merge of ranks has no batch-invariant kernel: turn batch_invariant off",
    ),
    "fixed pool, resize": Refused(
        "engine",
        "a pool of fixed size",
        "resizing it",
        "the pool keeps its size: set max_pool_bytes (--max-pool) to make it elastic",
    ),
    "lossy tier, lossy tier": Refused(
        "engine",
        "a tier that re-encodes pages",
        "another one inside it",
        "tier {url!r} re-encodes pages twice; omit {coding}: or the other scheme",
    ),
    "memory, pool": Refused(
        "server",
        "--memory",
        "--pool, --max-pool",
        "--memory sizes the pools, and --{option} gives a size: use one of them",
    ),
    "memory, no metrics": Refused(
        "server",
        "--memory",
        "--no-metrics",
        "--memory needs metrics, and --no-metrics disables them: use one of them",
    ),
    "record, no metrics": Refused(
        "server",
        "--record",
        "--no-metrics",
        "--record needs metrics, and --no-metrics disables them: use one of them",
    ),
    "no-auth, keys": Refused(
        "server",
        "--no-auth",
        "--api-keys, --api-key",
        "--no-auth and --{option} exclude each other: use one of them",
    ),
    "public host, no keys": Refused(
        "server",
        "a host that other machines reach",
        "no API keys",
        "host {host!r} is reachable from other machines, and there are no API keys: use --api-keys FILE or --api-key KEY; "
        "--no-auth is for a loopback host such as 127.0.0.1",
    ),
    "any origin, no keys": Refused(
        "server",
        "--cors-origin '*'",
        "no API keys",
        "--cors-origin '*' lets every web page use the server, and there are no API keys: name the origins, or use "
        "--api-keys FILE or --api-key KEY",
    ),
}
"""Refused combinations by key."""


def refused(key: str, **values: object) -> str:
    """Return the error message of a refused combination, with its values filled in."""
    return REFUSED[key].text.format(**values)
