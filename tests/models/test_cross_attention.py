"""Cross attention to images on our cache against generate(): Llama 3.2 Vision in small.

A token before the first image of its prompt sees none here, as in the original of this model; transformers lets it attend to
all of them, those to come and what fills them up included. `causal` makes its attention leave that out, so that prompts that
begin with text can be compared, too; prompts that begin with an image are compared with what it does by itself."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from kvloom.core import CacheControl
from kvloom.engine import LLM, Engine, OffloadConfig, Request, SamplingParams
from kvloom.models.loading import refusal
from kvloom.models.paged import ImageGroup
from kvloom.models.paged.cross_attention import attend_images
from tests.engine.made_tokenizers import byte_level
from tests.engines import make_engine
from tests.models.image_prompts import words

IMAGE, TILES, NEW = 65, 4, 8
GREEDY = SamplingParams(max_tokens=NEW, temperature=0)
Picture = dict[str, torch.Tensor]


def config(**changes: Any) -> Any:
    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 512, "cross_attention_layers": [1, 3], "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, **changes,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_global_layers": 1, "attention_heads": 2,
        "image_size": 8, "patch_size": 2, "max_num_tiles": TILES, "intermediate_layers_indices": [0, 2],
        "vision_output_dim": 48, "initializer_range": 0.3,
    }  # fmt: skip
    return transformers.MllamaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE)


def crossing(**changes: Any) -> Any:
    torch.manual_seed(0)
    made = config(**changes)
    model = transformers.MllamaForConditionalGeneration._from_config(made, dtype=torch.float32).eval()
    model.set_attn_implementation("eager")
    for name, weight in model.named_parameters():
        if name.endswith("gate"):  # they begin at zero: no image would be seen
            torch.nn.init.constant_(weight, 0.9)
        elif not weight.any() and weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    return model


def causal(model: Any) -> Any:
    """Have transformers' tokens before an image see none."""
    for layer in model.model.language_model.layers:
        if hasattr(layer, "cross_attn"):

            def note(_: Any, args: Any, named: Any, layer: Any = layer) -> None:
                layer.masked_out = named.get("full_text_row_masked_out_mask")

            def cut(_: Any, args: Any, found: Any, layer: Any = layer) -> Any:
                return (found[0] if layer.masked_out is None else found[0] * layer.masked_out[:, 0], None)

            layer.register_forward_pre_hook(note, with_kwargs=True)
            layer.cross_attn.register_forward_hook(cut)
    return model


def picture(seed: int) -> Picture:
    """What the processor would make of an image: a few tiles of it, and what fills them up."""
    gen = torch.Generator().manual_seed(seed)
    tiles = seed % TILES + 1
    pixels = torch.zeros(TILES, 3, 8, 8)
    pixels[:tiles] = torch.randn(tiles, 3, 8, 8, generator=gen) * 3
    mask = (torch.arange(TILES) < tiles).long()
    return {"pixel_values": pixels, "aspect_ratio_ids": torch.tensor([tiles]), "aspect_ratio_mask": mask}


def inputs_of(prompt: list[int], pictures: list[Picture]) -> dict[str, torch.Tensor]:
    """What a model takes beside its token ids, where those have images."""
    if not pictures:
        return {}
    sees = get_cross_attention_token_mask(prompt, IMAGE)
    tiles = [int(one["aspect_ratio_mask"].sum()) for one in pictures]
    dense = convert_sparse_cross_attention_mask_to_dense([sees], [tiles], TILES, len(prompt))
    return {
        "pixel_values": torch.stack([one["pixel_values"] for one in pictures])[None],
        "aspect_ratio_ids": torch.cat([one["aspect_ratio_ids"] for one in pictures])[None],
        "aspect_ratio_mask": torch.stack([one["aspect_ratio_mask"] for one in pictures])[None],
        "cross_attention_mask": torch.from_numpy(dense),
    }


def expected(model: Any, prompt: list[int], pictures: list[Picture], new: int = NEW) -> list[int]:
    """Greedy tokens of a prompt by itself, prompt included, from transformers' own loop."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
            pad_token_id=0, **inputs_of(prompt, pictures),
        )  # fmt: skip
    tokens: list[int] = found[0].tolist()
    return tokens


def engine_of(room: int = 8 << 20, **options: Any) -> Engine:
    """An engine whose pool is full of NaN: nothing unwritten may be read."""
    engine = make_engine(crossing(), room, **options)
    if options.get("kv_dtype") is None:
        engine.buffer.view(torch.float32).fill_(torch.nan)
    return engine


def ask(engine: Engine, prompt: list[int], pictures: list[Picture], **options: Any) -> Request:
    request = engine.add(prompt, GREEDY, images=pictures, **options)
    engine.run()
    return request


def test_prompts_that_begin_with_images_give_generates_tokens() -> None:
    model = crossing()
    asked: list[tuple[list[int], list[Picture]]] = [
        ([IMAGE, *words(1, 20)], [picture(1)]),
        ([IMAGE, IMAGE, *words(2, 9)], [picture(2), picture(0)]),
        (words(3, 30), []),
        ([IMAGE, *words(4, 7), IMAGE, *words(5, 12)], [picture(3), picture(5)]),
        (
            [IMAGE, *words(4, 7), IMAGE, IMAGE, *words(5, 3), IMAGE],
            [picture(3), picture(1), picture(3), picture(2)],
        ),
    ]
    wanted = [expected(model, *one) for one in asked]
    blind = expected(model, asked[0][0], [picture(5)])
    assert blind != wanted[0], "these models must see"
    engine = engine_of(token_budget=9)
    requests = [engine.add(prompt, GREEDY, images=pictures) for prompt, pictures in asked]
    engine.run()
    assert [request.tokens for request in requests] == wanted


@pytest.mark.parametrize("ahead", [False, True])
def test_drafts_of_prompts_with_images(ahead: bool) -> None:
    """Verified tokens attend to the images like computed ones. Some drafts are right, some are not."""
    model, rng = crossing(), random.Random(4)
    asked: list[tuple[list[int], list[Picture]]] = [
        ([IMAGE, *words(1, 20)], [picture(1)]),
        (words(3, 30), []),
        ([IMAGE, *words(4, 7), IMAGE, *words(5, 12)], [picture(3), picture(5)]),
    ]
    wanted = [expected(causal(model), *one) for one in asked]
    engine = engine_of(token_budget=9, ahead=ahead, speculate="ngram", draft_tokens=4)
    assert engine.speculation is not None
    engine.speculation.controller = None

    def propose(requests: Sequence[Any], counts: Sequence[int]) -> list[list[int]]:
        drafts = []
        for request, count in zip(requests, counts, strict=True):
            answer = wanted[requested.index(request)][len(request.tokens) :][:count]
            drafts.append([token if rng.random() < 0.8 else (token + 1) % 60 for token in answer])
        return drafts

    engine.speculation.proposers[0].propose = propose  # type: ignore[method-assign]
    requested = [engine.add(prompt, GREEDY, images=pictures) for prompt, pictures in asked]
    engine.run()
    assert [request.tokens for request in requested] == wanted
    assert all(request.accepted_tokens for request in requested)
    assert any(request.accepted_tokens < request.draft_tokens for request in requested)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.few(1)
def test_images_and_text_in_a_pool_far_too_small(ahead: bool) -> None:
    rng = random.Random(3)
    model = causal(crossing())
    asked: list[tuple[list[int], list[Picture]]] = []
    for _ in range(14):
        pictures = [picture(rng.randrange(4)) for _ in range(rng.choice((0, 1, 1, 2)))]
        prompt = words(rng.randrange(3), rng.randrange(1, 20))
        for _ in pictures:
            prompt += [IMAGE, *words(rng.randrange(9), rng.randrange(0, 8))]
        asked.append((prompt, pictures))
    wanted = [expected(model, *one) for one in asked]
    layout = engine_of().layout
    room = 2 * layout.slab_bytes_for(50 + NEW, [4 * 17, 4 * 17])
    engine = engine_of(room, token_budget=11, max_running=6, ahead=ahead)
    engine.scheduler.admission = None  # admit every request for which pages are free, so that pages run out
    requests = [
        engine.add(prompt, GREEDY, priority=i % 3, images=pictures)
        for i, (prompt, pictures) in enumerate(asked)
    ]
    while engine.busy:
        engine.step()
        engine.cache.check()
    assert [request.tokens for request in requests] == wanted
    assert sum(request.preemptions for request in requests)
    assert sum(request.cached_tokens or 0 for request in requests)
    engine.cache.take_copies()
    assert engine.cache.stats()["in_use_pages"] == 0


def test_an_image_is_written_once_for_each_content_whatever_stands_before_it() -> None:
    engine, model = engine_of(), causal(crossing())
    assert engine.vision is not None
    prompt = [*words(1, 24), IMAGE, *words(2, 9)]
    first, other, again = (ask(engine, prompt, [picture(seed)]) for seed in (1, 5, 1))
    assert [first.tokens, other.tokens] == [expected(model, prompt, [picture(seed)]) for seed in (1, 5)]
    assert first.tokens == again.tokens != other.tokens
    assert (first.cached_tokens, other.cached_tokens, again.cached_tokens) == (0, 24, len(prompt) - 1)
    assert engine.vision.encoder_runs == 2
    elsewhere = [*words(8, 5), IMAGE, *words(3, 4)]
    moved = ask(engine, elsewhere, [picture(1)])
    assert moved.tokens == expected(model, elsewhere, [picture(1)])
    assert engine.vision.encoder_runs == 2, "its pages are found by what it shows"
    ask(engine, prompt, [picture(1)], control=CacheControl(tenant="another"))
    assert engine.vision.encoder_runs == 3, "tenants share nothing"


def test_after_a_restart_the_states_of_an_image_are_loaded(tmp_path: Path) -> None:
    model, runs = causal(crossing()), []
    for seed in (1, 8):
        prompt = [*words(seed, 24), IMAGE, *words(2, 9)]
        engine = engine_of(tiers=[f"disk:{tmp_path}:16MiB"], offload=OffloadConfig("always"))
        assert ask(engine, prompt, [picture(1)]).tokens == expected(model, prompt, [picture(1)])
        assert engine.vision is not None
        runs.append(engine.vision.encoder_runs)
        engine.close()
    assert runs == [1, 0]


def test_answers_share_the_image() -> None:
    prompt, pictures = [IMAGE, *words(2, 20)], [picture(2)]
    params = SamplingParams(max_tokens=NEW, temperature=0.8, seed=5, n=3)
    engine = engine_of()
    found = engine.add(prompt, params, images=pictures)
    engine.run()
    for i, one in enumerate(found.family):
        alone = engine_of()
        single = alone.add(
            prompt, SamplingParams(max_tokens=NEW, temperature=0.8, seed=5 + i), images=pictures
        )
        alone.run()
        assert one.tokens == single.tokens
    assert engine.vision is not None
    assert engine.vision.encoder_runs == 1


@pytest.mark.parametrize(("kv_dtype", "error"), [("int8", 0.01), ("fp8", 0.05)])
@pytest.mark.few(1)
def test_quantised_pages_of_images_are_read_by_their_scales(kv_dtype: str, error: float) -> None:
    prompt, pictures = [IMAGE, *words(2, 20)], [picture(2)]
    plain, engine = engine_of(), engine_of(kv_dtype=kv_dtype)
    ask(plain, prompt, pictures)
    miss, hit = (ask(engine, prompt, pictures) for _ in range(2))
    assert miss.tokens == hit.tokens
    assert hit.cached_tokens == len(prompt) - 1
    query = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    found = []
    for one in (plain, engine):
        [run] = one.cache.state.media_cache.runs()
        part = ImageGroup(2, torch.from_numpy(run.rows.T.astype(np.int64)), torch.arange(3 * 17))
        view, column = one.runner.pages.cross_views[3]
        found.append(attend_images(view, column, query, [part], 0.35))
    assert torch.dist(*found) < error * found[0].norm()


def test_text_before_an_image_is_loaded_from_a_tier_and_the_image_is_visible() -> None:
    model = causal(crossing())
    slab = engine_of().layout.slab_bytes
    engine = engine_of(30 * slab, tiers=["host:16MiB"], offload=OffloadConfig("always"))
    prompt = [*words(1, 40), IMAGE, *words(2, 30)]
    wanted = expected(model, prompt, [picture(3)])
    seeds = iter(range(20, 60))
    for round_ in range(2):
        request = ask(engine, prompt, [picture(3)])
        assert request.tokens == wanted
        assert request.cached_tokens is not None
        assert round_ * 32 <= request.cached_tokens <= round_ * 40
        while list(engine.cache.state.media_cache.runs()):
            ask(engine, words(next(seeds), 60), [])
    engine.close()


def test_evicted_image_pages_and_the_text_after_them_are_recomputed() -> None:
    model = causal(crossing())
    engine = engine_of(30 * engine_of().layout.slab_bytes)
    assert engine.vision is not None
    prompt = [*words(1, 20), IMAGE, *words(2, 9)]
    ask(engine, prompt, [picture(3)])
    seeds = iter(range(20, 60))
    while list(engine.cache.state.media_cache.runs()):
        ask(engine, words(next(seeds), 60), [])
    again = ask(engine, prompt, [picture(3)])
    assert again.tokens == expected(model, prompt, [picture(3)])
    assert again.cached_tokens is not None
    assert again.cached_tokens <= 20
    assert engine.vision.encoder_runs == 2


def test_requests_that_could_never_hold_their_images_are_refused() -> None:
    engine = engine_of()
    layout = engine.layout
    room = 2 * layout.slab_bytes + layout.slab_bytes_for(30 + NEW, [4 * 17])
    small = engine_of(room)
    assert ask(small, [IMAGE, *words(1, 20)], [picture(3)]).finish_reason == "length"
    with pytest.raises(ValueError, match="bytes of pages, but the pool has"):
        small.add([IMAGE, IMAGE, IMAGE, *words(1, 20)], GREEDY, images=[picture(3), picture(7), picture(11)])
    ask(small, [IMAGE, IMAGE, IMAGE, *words(1, 20)], [picture(3)] * 3)  # the same content is held once
    with pytest.raises(ValueError, match=r"2 image tokens .* for 1 images: each needs one"):
        engine.add([IMAGE, IMAGE, 5], GREEDY, images=[picture(0)])
    for wrong, said in (
        ({"aspect_ratio_mask": torch.ones(3)}, "a mask of its 4 tiles"),
        ({"aspect_ratio_mask": torch.zeros(4)}, "one at least"),
        ({"aspect_ratio_mask": torch.tensor([3, 1, 0, 0])}, r"not .*\[3, 1, 0, 0\]"),
        ({"pixel_values": torch.zeros(4, 3, 8, 9)}, r"is pixels \[4, 3, 8, 8\].*, not \[4, 3, 8, 9\]"),
        ({"aspect_ratio_ids": torch.tensor([9])}, r"aspect_ratio_ids \[9\] is none of the model's: 1 to 8"),
        ({"aspect_ratio_ids": torch.tensor([0])}, "1 to 8"),
        ({"more": torch.zeros(1)}, "consists of pixel_values and aspect_ratio_ids and aspect_ratio_mask"),
    ):
        with pytest.raises(ValueError, match=said):
            engine.add([IMAGE, 5], GREEDY, images=[{**picture(0), **wrong}])


def test_what_a_processor_makes_is_taken_apart_and_the_family_is_not_refused() -> None:
    assert refusal(config()) is None
    vision = engine_of().vision
    assert vision is not None
    shown = [picture(1), picture(2)]
    made = {
        "pixel_values": np.stack([p["pixel_values"] for p in shown])[None],
        "aspect_ratio_ids": torch.tensor([[2, 3, 0]]),
        "aspect_ratio_mask": torch.stack(
            [*(p["aspect_ratio_mask"] for p in shown), torch.tensor([1, 0, 0, 0])]
        )[None],
    }
    apart = vision.split(made)
    assert len(apart) == 2
    for one, other in zip(apart, shown, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name].flatten(), other[name].flatten()) for name in one)
    assert len(vision.embed(vision.samples()[0])) == TILES * 17


def test_prompts_of_text_and_pictures_go_through_the_models_processor() -> None:
    pytest.importorskip("PIL.Image")
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image|>"], "bos_token": "<bos>"})
    placeholder = tokenizer.convert_tokens_to_ids("<|image|>")
    model = crossing(vocab_size=len(tokenizer))
    model.config.image_token_index = placeholder
    shrink = transformers.MllamaImageProcessor(size={"height": 8, "width": 8}, max_image_tiles=TILES)
    processor = transformers.MllamaProcessor(shrink, tokenizer)
    noise = np.random.default_rng(0).integers(0, 255, (12, 30, 3), dtype=np.uint8)
    text = "<|image|>So"
    made = processor(text=text, images=[noise], return_tensors="pt")
    with torch.inference_mode():
        wanted = model.generate(**made, max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0].tolist()
    llm = LLM(model, pool_bytes=8 << 20, tokenizer=tokenizer, processor=processor)
    [result] = llm.generate({"prompt": text, "images": [noise]}, GREEDY)
    assert [*result.prompt_token_ids, *result.outputs[0].token_ids] == wanted
