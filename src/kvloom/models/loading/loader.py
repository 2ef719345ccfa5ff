"""Loads models by name: a folder, hub id or GGUF file with weights, or a config with random weights.

    load("org/name" | "folder")                                    weights (safetensors) and tokenizer
    load("file.gguf")                                              weights and tokenizer of a GGUF file
    load("llama-3.1-8b" | "config.json" | "folder", load_format="random")    random weights, made on the device

Config, files and code are checked before any weight is read. `refusal` returns the reason why a config cannot run.
This module does not depend on pages or requests.
"""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from kvloom.combinations import refused
from kvloom.models.paged import prepare, refusal_reason, replace_up_projections, separation_reason
from kvloom.models.sharding import (
    Cuts,
    RankGroups,
    Ranks,
    Shard,
    WholeModel,
    check_pages,
    divide_experts,
    find_cuts,
    install_collectives,
    set_ranks,
    set_whole,
    shard_config,
    split_head,
)
from kvloom.models.specs import ENCODER_DECODERS, ModelError, is_gguf, known_models, load_config, model_spec
from kvloom.models.vision import AUDIO_FAMILIES, VISION_FAMILIES

from .probe import examine
from .quantisation import check_packages, prepare_quantisation, quantisation_method
from .weight_reader import RankWeights, reading_in_chunks

__all__ = [
    "BUILDING",
    "LoadFormat",
    "check_ranks",
    "choose_device",
    "divide_context",
    "language_model_class",
    "load",
    "load_vision",
    "progress_bars",
    "refusal",
    "shard_model",
    "sharding_refusal",
    "transformers_config",
]

LoadFormat = Literal["auto", "random"]
STD = 0.02
_CHUNK = 1 << 22
TEXT_NAMES = {
    r"^(model\.)?language_model\.(model\.)?(?!lm_head)": "model.",
    r"^(model\.)?language_model\.lm_head": "lm_head",
}
"""How weights of the text part of a larger model are renamed: its own class has other names."""
BUILDING = threading.RLock()
"""Transformers changes torch's default dtype while it builds a model, so only one thread builds at a time."""
_LANGUAGE = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def choose_device(named: torch.device | str | None) -> torch.device:
    """Return the device with the given name. Without a name, return a GPU if there is one, else the CPU. Raises
    ValueError if the device does not exist.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    try:
        device = torch.device(named or ("cuda" if gpus else "cpu"))
    except RuntimeError:
        raise ValueError(f"{named!r} is not a device; give cpu, cuda or cuda:N") from None
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise ValueError(
            f"there is no device {str(device)!r} here: torch sees {gpus} GPUs; give cpu, or leave it out"
        )
    return device


def load(
    model: str,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str | None = None,
    load_format: LoadFormat = "auto",
    progress: bool = False,
    seed: int = 0,
    ranks: RankGroups | None = None,
    whole_output: bool = False,
    text_only: bool = False,
    expert_parallel: bool = False,
) -> tuple[Any, Any | None]:
    """Return a model on `device`, ready to run, and its tokenizer or None. The default device is a GPU if there is one.
    With `dtype` "auto", weights have the dtype of the checkpoint. Random weights depend only on seed, device and dtype.
    `progress` shows bars on stderr. With `text_only`, a model of images or audio is loaded without its other parts.

    With `ranks`, return the part of the model that this rank computes. Every rank must call this function. If the ranks
    divide only the context, each of them gets the whole model. A rank computes the logits of only a part of the
    vocabulary. With `whole_output`, which a draft head needs, it computes all logits. With `expert_parallel`, a rank has
    some whole experts instead of a part of every expert.

    Raises ModelError if a file is missing or the model cannot run. These checks run before any weight is read.
    """
    where, config, kind = _checked_config(model, dtype, device, load_format, text_only)
    if ranks is not None and ranks.context is not None:
        _check_context(_meta_model(*language_model_class(config)))
    with progress_bars(progress):
        if ranks is not None and ranks.weights is not None:
            loaded = _shard(
                model, config, kind, where, load_format, seed, ranks.weights, whole_output, expert_parallel
            )
        elif load_format == "random":
            loaded = _random(config, kind, where, seed)
        else:
            loaded = _weights(model, config, kind, where)
    prepare(loaded)
    if ranks is not None:
        if ranks.context is not None:
            divide_context(loaded, ranks, whole_output)
        set_ranks(loaded, ranks)
    return loaded.eval().requires_grad_(False), _tokenizer(model)


def load_vision(
    model: str,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str | None = None,
    load_format: LoadFormat = "auto",
    progress: bool = False,
) -> Any:
    """Return a model on `device` that can only encode images and audio clips. The layers of its text part are not
    loaded. The arguments are those of `load`. Raises ModelError if the model takes neither.
    """
    where, config, kind = _checked_config(model, dtype, device, load_format)
    families = {*VISION_FAMILIES, *AUDIO_FAMILIES}
    if config.model_type not in families:
        raise ModelError(
            f"{model}: model type {config.model_type!r} takes no images and no audio; the families that do: "
            f"{', '.join(sorted(families))}"
        )
    with progress_bars(progress):
        if load_format == "random":  # with text layers, to get the same weights as `load`
            loaded = _random(config, kind, where, seed=0)
        else:
            loaded = _weights(model, _without_text_layers(config), kind, where)
    _drop_text(loaded)
    return loaded.eval().requires_grad_(False)


def _checked_config(
    model: str,
    dtype: torch.dtype | str,
    device: torch.device | str | None,
    load_format: LoadFormat,
    text_only: bool = False,
) -> tuple[torch.device, Any, torch.dtype]:
    """Return device, config and dtype of a model. Raises ModelError if a file is missing or the model cannot run."""
    if load_format not in ("auto", "random"):
        raise ModelError(f"unknown load format {load_format!r}; known: auto, random")
    where = choose_device(device)
    config = transformers_config(model, load_format)
    if load_format == "auto":
        _check_files(model)
        prepare_quantisation(config, model)
    if text_only:
        config = _text_part(config, model)
    reason = refusal(config)
    if reason is not None:
        raise ModelError(f"{model}: {reason}")
    own = config.dtype or config.get_text_config().dtype or torch.bfloat16
    return where, config, _dtype(own if dtype == "auto" else dtype)


def _text_part(config: Any, model: str) -> Any:
    """Return the config of the text part of a model. Raises ModelError if transformers has no class for this part."""
    from transformers import AutoModelForCausalLM

    text = config.get_text_config()
    if text is config:
        return config
    if type(text) not in AutoModelForCausalLM._model_mapping:
        raise ModelError(
            f"{model}: text_only: transformers has no class for the text part of model type {config.model_type!r}: "
            "turn it off"
        )
    text.dtype, text.tie_word_embeddings = config.dtype or text.dtype, config.tie_word_embeddings
    if quantisation_method(config) is not None:
        text.quantization_config = config.quantization_config
    return text


def check_ranks(
    model: str, tensor_parallel: int, load_format: LoadFormat = "auto", text_only: bool = False
) -> None:
    """Raise ModelError for a model of images or audio that several ranks cannot compute. Reads only its config, so that
    no rank starts in vain."""
    config = transformers_config(model, load_format)
    if text_only:
        config = _text_part(config, model)
    reads_images = config.model_type in VISION_FAMILIES
    if tensor_parallel > 1 and (reads_images or config.model_type in AUDIO_FAMILIES):
        raise ModelError(f"{model}: {refused('tensor parallel, images')}")
    if reads_images:
        raise ModelError(f"{model}: {refused('context parallel, images')}")


def _without_text_layers(config: Any) -> Any:
    """Return a copy of a config whose text part has no layers. Loading then skips their weights."""
    reduced = copy.deepcopy(config)
    text = reduced.get_text_config()
    text.num_hidden_layers = 0
    if getattr(text, "layer_types", None):
        text.layer_types = []
    return reduced


def _drop_text(model: Any) -> None:
    """Delete the weights that only text needs. Keep one row of the input embeddings, because other code reads their
    dtype and width."""
    text = model.base_model.language_model
    for name, module in text.named_modules():
        if isinstance(module, nn.ModuleList) and name.endswith("layers"):
            del module[:]
    weight = model.get_input_embeddings().weight
    model.set_input_embeddings(
        nn.Embedding(1, weight.shape[1], device=weight.device, dtype=weight.dtype).requires_grad_(False)
    )
    if hasattr(model, "lm_head"):
        del model.lm_head


def transformers_config(model: str, load_format: LoadFormat = "auto") -> Any:
    """Return the transformers config of a folder or hub id. For random weights, a config.json or the name of a known
    model is also accepted. For Qwen Omni, return only the config of the part that generates text. Code inside a
    checkpoint is never run.
    """
    config = _whole_config(model, load_format)
    return getattr(config, "thinker_config", config)


def _whole_config(model: str, load_format: LoadFormat) -> Any:
    from transformers import AutoConfig

    path = Path(model)
    if is_gguf(model):
        check_packages("gguf", model)
        try:
            return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        except Exception as error:  # transformers' reader of GGUF raises errors of many types
            raise ModelError(
                f"{model}: transformers cannot read this GGUF file: {_first_line(error)}"
            ) from error
    if path.is_file() or (model.lower() in known_models() and not path.is_dir()):
        if load_format != "random":
            raise ModelError(
                f"{model!r} is a config without weights: give the folder or hub id of a checkpoint, "
                'or load_format="random"'
            )
        return _from_fields(load_config(model), model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{model}: the folder has no config.json")
        return _from_fields(load_config(model), model)
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        load_config(model)  # raises with the list of known names
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except OSError as error:
        raise ModelError(
            f"{model!r} is not a folder, and the hub has no such model: {_first_line(error)}"
        ) from error
    except ValueError as error:
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{model}: the model has its own code, which is never run (there is no trust_remote_code): use a "
                "checkpoint of a model type that transformers has"
            ) from error
        raise ModelError(f"{model}: transformers cannot read its config: {_first_line(error)}") from error


def refusal(config: Any) -> str | None:
    """Return the reason why a model with this config cannot run, or None. Runs the model code on tensors without
    data, which needs no memory and about 10 ms per layer.
    """
    try:
        cls, own = language_model_class(config)
        reason = refusal_reason(own)
        if reason is not None:
            raise ModelError(f"{cls.__name__} cannot run here: {reason}")
        model = _meta_model(cls, own)
        prepare(model)
        examine(model, lambda: model_spec(own.to_dict()).layers)
    except ModelError as error:
        return str(error)
    return None


def _from_fields(fields: dict[str, Any], source: str) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = fields.get("model_type")
    if kind not in CONFIG_MAPPING:
        why = (
            "has its own code, which is never run (there is no trust_remote_code): use a checkpoint of a model type that "
            "transformers has"
            if fields.get("auto_map")
            else "is not known to transformers"
        )
        raise ModelError(f"{source}: model type {kind!r} {why}")
    try:
        if Path(source).exists():
            return AutoConfig.from_pretrained(source, trust_remote_code=False)
        given = {name: value for name, value in fields.items() if name != "model_type"}
        text = AutoConfig.for_model(kind, **given).get_text_config()
    except Exception as error:  # every family checks its fields differently
        raise ModelError(f"{source}: transformers cannot read this config: {_first_line(error)}") from error
    if "vocab_size" not in fields.get("text_config", fields):
        raise ModelError(
            f"{source}: the shipped config describes layers, not weights: give a whole config.json"
        )
    return text  # multimodal models, too: the specs describe only the text part


def language_model_class(config: Any) -> tuple[Any, Any]:
    """Return the transformers class that runs a config as a language model, and the part of the config that this
    class takes."""
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForMultimodalLM,
        AutoModelForSeq2SeqLM,
        AutoModelForSpeechSeq2Seq,
    )

    mapping = AutoModelForCausalLM._model_mapping
    if getattr(config, "is_encoder_decoder", False) and config.model_type in ENCODER_DECODERS:
        is_text = ENCODER_DECODERS[config.model_type] == "text"
        whole = (AutoModelForSeq2SeqLM if is_text else AutoModelForSpeechSeq2Seq)._model_mapping[type(config)]
        if type(config) not in mapping or whole.__name__ in (config.architectures or []):
            return whole, config
        config = copy.deepcopy(config)  # the decoder alone
        config.is_encoder_decoder = False
    if config.model_type in AUDIO_FAMILIES:
        mapping = AutoModelForMultimodalLM._model_mapping
        if type(config) not in mapping:
            mapping = AutoModelForSeq2SeqLM._model_mapping
    elif config.model_type in VISION_FAMILIES:
        mapping = AutoModelForImageTextToText._model_mapping
    if type(config) not in mapping:
        raise ModelError(f"model type {config.model_type!r} is not a causal language model to transformers")
    found = mapping[type(config)]
    cls = found[0] if isinstance(found, tuple) else found
    made_as = config.architectures or []
    if made_as and cls.__name__ not in made_as and not any(name.endswith(_LANGUAGE) for name in made_as):
        raise ModelError(f"the checkpoint is a {', '.join(made_as)}, not a causal language model")
    if getattr(config, "is_encoder_decoder", False) and made_as and cls.__name__ not in made_as:
        raise ModelError(
            f"the checkpoint is an encoder and a decoder ({', '.join(made_as)}), and only decoders run: "
            f"save its decoder as {cls.__name__}"
        )
    text_alone = cls.config_class == config.sub_configs.get("text_config")
    return cls, config.get_text_config() if text_alone else config


def _meta_model(cls: Any, config: Any) -> Any:
    """Return the model on the meta device, with its own copy of the config."""
    try:
        with BUILDING, torch.device("meta"):
            return cls._from_config(copy.deepcopy(config), dtype=torch.bfloat16).eval()
    except Exception as error:
        raise ModelError(f"{cls.__name__} cannot be built from its config: {_first_line(error)}") from error


def _check_files(model: str) -> None:
    """Raise ModelError unless a folder contains all weights of its model as readable safetensors. For hub ids,
    transformers checks this.
    """
    from safetensors import SafetensorError, safe_open

    folder = Path(model)
    if not folder.is_dir():
        return
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is not an index of shards: {error!r}") from error
    elif single.is_file():
        shards = [single.name]
    else:
        others = [
            name for name in ("pytorch_model.bin", "pytorch_model.bin.index.json") if (folder / name).exists()
        ]
        hint = f"; {others[0]} is a pickle, which is never read: convert it to safetensors" if others else ""
        raise ModelError(f"{model}: the folder has neither {single.name} nor {index.name}{hint}")
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise ModelError(f"{model}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing)}")
    for shard in shards:
        try:
            with safe_open(folder / shard, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{folder / shard} cannot be read: {error}") from error


def _weights(
    model: str, config: Any, dtype: torch.dtype, device: torch.device, rank: RankWeights | None = None
) -> Any:
    """Return a model with the weights of a checkpoint. With `rank`, `config` is that of the rank's model."""
    from transformers.utils import is_accelerate_available

    cls, own = language_model_class(config)
    if quantisation_method(config) is not None:
        own.quantization_config = config.quantization_config  # `own` may be the text part of `config`
    direct = is_accelerate_available() and device.type != "cpu"
    place: dict[str, Any] = {"device_map": {"": device}} if direct else {}
    if _has_other_parts(model, config):
        place["key_mapping"] = TEXT_NAMES
    try:
        with reading_in_chunks(rank):
            loaded, info = cls.from_pretrained(
                **_source(model), config=own, dtype=dtype, output_loading_info=True, **place
            )
    except (ImportError, OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{model}: the weights cannot be loaded: {_first_line(error)}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(
            f"{model}: the checkpoint lacks {len(missing)} weights of {type(loaded).__name__}, first {missing[0]}"
        )
    if quantisation_method(config) is not None:
        replace_up_projections(loaded, dtype)
    return loaded if direct else loaded.to(device)


def _has_other_parts(model: str, config: Any) -> bool:
    """Return whether `config` is only the text part of the model in the checkpoint."""
    return not is_gguf(model) and transformers_config(model).model_type != config.model_type


def _source(model: str) -> dict[str, Any]:
    """Return the arguments by which `from_pretrained` of transformers finds a checkpoint."""
    path = Path(model)
    if is_gguf(model):
        return {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    return {"pretrained_model_name_or_path": model, "use_safetensors": True}


def _shard(
    model: str,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    load_format: LoadFormat,
    seed: int,
    ranks: Ranks,
    whole_output: bool,
    expert_parallel: bool,
) -> Any:
    """Return the part of a model that a rank computes. Weights of a checkpoint are read and cut one at a time. Random
    weights are first generated for the whole model, so that all ranks have parts of the same model."""
    if is_gguf(model) or quantisation_method(config) is not None:
        raise ModelError(f"{model}: {refused('tensor parallel, quantised weights')}")
    if load_format == "random":
        return shard_model(_random(config, dtype, device, seed), ranks, whole_output, expert_parallel)
    cls, own = language_model_class(config)
    whole, part, cuts = _plan_shard(cls, own, ranks.shard, expert_parallel)
    known = WholeModel(whole.config)
    with _building_experts(cls, whole, ranks.shard) if expert_parallel else nullcontext():
        loaded = _weights(model, part.config, dtype, device, RankWeights(cuts, known))
    set_whole(loaded, known)
    install_collectives(loaded, whole, cuts, ranks, whole_output)
    return loaded


@torch.no_grad()
def shard_model(model: Any, ranks: Ranks, whole_output: bool = False, expert_parallel: bool = False) -> Any:
    """Return the part of a loaded model that a rank computes, as a new model. Each rank computes the logits of a part of
    the vocabulary, or all logits with `whole_output`. With `expert_parallel`, a rank has some whole experts. Every rank
    must call this function. Raises ModelError if the model cannot be divided."""
    whole, part, cuts = _plan_shard(type(model), model.config, ranks.shard, expert_parallel)
    for config in (part.config, part.config.get_text_config()):
        config.dtype = model.dtype  # the dtype of K and V
    part.to_empty(device=next(model.parameters()).device)
    part.tie_weights()
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    known = WholeModel(whole.config)
    for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
        known.record(name, tensors[name].data)
        tensor.data = cuts.cut(name, tensors[name].data).clone()
    set_whole(part, known)
    install_collectives(part, whole, cuts, ranks, whole_output)
    return part.eval().requires_grad_(False)


def _plan_shard(cls: Any, config: Any, shard: Shard, expert_parallel: bool = False) -> tuple[Any, Any, Cuts]:
    """Return the whole model and the part of a rank, both without data, and how weights are cut. Raises ModelError if
    the model cannot be divided."""
    whole = _meta_model(cls, config)
    reason = _reason_against_sharding(config, whole)
    if reason is not None:
        raise ModelError(f"{cls.__name__}: {reason}")
    part, probed = (_meta_model(cls, shard_config(config, shard.count)) for _ in range(2))
    if expert_parallel:
        for each in (part, probed):
            divide_experts(each, whole, shard)
    specs = [model_spec(each.config.to_dict()).layers for each in (whole, part)]
    check_pages(specs[0], specs[1], shard.count, config.model_type)
    cuts = find_cuts(whole, part, shard)
    prepare(probed)
    try:
        examine(probed, lambda: specs[1])
    except ModelError as error:
        raise ModelError(
            f"{cls.__name__} cannot be divided between {shard.count} ranks, because a layer computes with all heads at "
            f"once, or derives the size of a head from their number: {error}"
        ) from error
    return whole, part, cuts


@contextmanager
def _building_experts(cls: Any, whole: Any, shard: Shard) -> Iterator[None]:
    """In this context, each model of class `cls` that transformers builds has the experts of one rank. Not safe while
    another thread builds a model."""
    original = cls.__init__

    def build(self: Any, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        divide_experts(self, whole, shard)

    cls.__init__ = build
    try:
        yield
    finally:
        cls.__init__ = original


def sharding_refusal(config: Any, count: int, expert_parallel: bool = False) -> str | None:
    """Return the reason why a model cannot be divided between `count` ranks, or None. With `expert_parallel`, the ranks
    divide the experts by number. Runs the code of the model without weights."""
    cls, own = language_model_class(config)
    try:
        _plan_shard(cls, own, Shard(0, count), expert_parallel)
    except ModelError as error:
        return str(error)
    return None


def _reason_against_sharding(config: Any, model: Any) -> str | None:
    """Return a reason that does not depend on the number of ranks, or None. `model` may be without data."""
    if config.model_type in VISION_FAMILIES or config.model_type in AUDIO_FAMILIES:
        return refused("tensor parallel, images")
    if separation_reason(model) is not None:
        return refused("tensor parallel, own cache", model=type(model).__name__)
    if model.config.is_encoder_decoder:
        return refused("tensor parallel, encoder-decoder", model=type(model).__name__)
    return None


def divide_context(model: Any, ranks: RankGroups, whole_output: bool = False) -> None:
    """Divide the context of every sequence between the ranks. Raises ModelError if the attention of the model cannot be
    divided.

    If ranks do not also divide the weights, each rank computes the logits of a part of the vocabulary. With
    `whole_output`, which a draft head needs, each rank computes all logits.
    """
    _check_context(model)
    if ranks.weights is None and ranks.context is not None:
        set_whole(model, WholeModel(model.config))
        if not whole_output:
            split_head(model, ranks.context)


def _check_context(model: Any) -> None:
    """Raise ModelError if ranks cannot divide the context of a model. The model needs no weights."""
    reason = None
    if model.config.model_type in VISION_FAMILIES:
        reason = refused("context parallel, images")
    elif separation_reason(model) is not None:
        reason = refused("context parallel, own cache", model=type(model).__name__)
    elif model.config.is_encoder_decoder:
        reason = refused("context parallel, encoder-decoder", model=type(model).__name__)
    if reason is not None:
        raise ModelError(f"{type(model).__name__}: {reason}")


def _random(config: Any, dtype: torch.dtype, device: torch.device, seed: int) -> Any:
    """Return a model with random weights, which are generated directly on the device. Afterwards transformers
    initialises norms, biases, decay rates of recurrent layers, and rotary tables."""
    cls, own = language_model_class(config)
    with torch.device("meta"):
        model = cls._from_config(copy.deepcopy(own), dtype=dtype)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        _fill(parameter, generator)
    for buffer in model.buffers():
        buffer.zero_()
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            # Keep transformers from initialising the weight again.
            vars(module.weight)["_is_hf_initialized"] = True
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(seed)
        model.init_weights()
    return model


@torch.no_grad()
def _fill(weight: torch.Tensor, generator: torch.Generator) -> None:
    if weight.device.type != "cpu" or weight.dtype == torch.float32:
        weight.normal_(0, STD, generator=generator)
        return
    # Sampling in half precision is slow on a CPU, because it draws one number at a time.
    for chunk in torch.split(weight.view(-1), _CHUNK):
        chunk.copy_(torch.empty(chunk.shape).normal_(0, STD, generator=generator))


def _tokenizer(model: str) -> Any | None:
    from transformers import AutoTokenizer

    folder = Path(model)
    if is_gguf(model):
        try:
            return AutoTokenizer.from_pretrained(folder.parent, gguf_file=folder.name)
        except Exception as error:
            raise ModelError(f"{model}: its tokenizer cannot be read: {_first_line(error)}") from error
    if folder.is_file() or (not folder.is_dir() and model.lower() in known_models()):
        return None
    if folder.is_dir() and not any((folder / name).exists() for name in _TOKENIZERS):
        return None
    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except Exception as error:
        if not folder.is_dir() and isinstance(error, OSError):
            return None  # the hub has no tokenizer for it
        raise ModelError(f"{model}: its tokenizer cannot be read: {_first_line(error)}") from error


@contextmanager
def progress_bars(shown: bool) -> Iterator[None]:
    """Show transformers' loading progress as rich bars on stderr, or hide it."""
    from transformers.utils import logging

    with ExitStack() as stack:
        progress = None
        if shown:
            from rich.console import Console
            from rich.progress import Progress

            progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))

        def bar(_: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            return _Bar(progress, args[0] if args else keywords.get("iterable"), keywords)

        stack.callback(logging.set_tqdm_hook, logging.set_tqdm_hook(bar))
        yield


class _Bar:
    """The part of the tqdm interface that loading uses."""

    def __init__(self, progress: Any, items: Any, keywords: dict[str, Any]) -> None:
        self._progress, self._items = progress, items
        total = keywords.get("total") or (len(items) if hasattr(items, "__len__") else None)
        if progress is not None:
            self._task = progress.add_task(str(keywords.get("desc") or "loading"), total=total)

    def __iter__(self) -> Iterator[Any]:
        for item in self._items or ():
            yield item
            self.update()

    def update(self, count: int = 1) -> None:
        if self._progress is not None:
            self._progress.advance(self._task, count)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: None


def _dtype(given: torch.dtype | str) -> torch.dtype:
    found = given if isinstance(given, torch.dtype) else getattr(torch, str(given), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ModelError(f"dtype {given!r} is not known; give bfloat16, float16, float32 or auto")
    return found


def _first_line(error: Exception) -> str:
    """Return the first line of an error message, and the package that it asks to install."""
    text = str(error)
    line = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    command = re.search(r"pip install [\w.-]+", text)
    return line if command is None or command[0] in line else f"{line.rstrip(':')}: {command[0]}"
