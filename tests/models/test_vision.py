"""Images on our cache against generate(): chunks, hits, preemption, positions, spans; and what is refused."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from kvloom.cli import main
from kvloom.core import CacheControl, KVCache, Media, PoolLayout
from kvloom.engine import LLM, Engine, OffloadConfig, SamplingParams
from kvloom.models.paged import ATTENTION, BatchBuilder, ImageInputs, Work
from kvloom.models.specs import known_models, load_spec, model_spec
from kvloom.models.vision import Vision, with_embeddings
from tests.engine.made_tokenizers import byte_level
from tests.engines import make_engine
from tests.models.image_folder import image_folder, picture
from tests.models.image_prompts import (
    BEGIN,
    END,
    IMAGE,
    MAIN,
    TINY,
    WINDOW,
    expected,
    image_of,
    prompt_of,
    tokens_of,
    vision_model,
    words,
)
from tests.models.zoo import tiny

NEW = 10
GREEDY = SamplingParams(max_tokens=NEW, temperature=0)
Picture = dict[str, torch.Tensor]


def engine_of(model: Any, room: int = 8 << 20, **options: Any) -> Engine:
    """An engine whose pool is full of NaN: nothing unwritten may be read."""
    engine = make_engine(model, room, **options)
    engine.buffer.view(torch.float32).fill_(torch.nan)
    return engine


def mixed(family: str, rng: random.Random) -> tuple[list[int], list[Picture]]:
    """A random prompt of text and up to two of four images."""
    images = [image_of(family, rng.randrange(4)) for _ in range(rng.choice((0, 1, 1, 2)))]
    parts: list[Any] = [words(rng.randrange(3), rng.randrange(1, 20))]
    for image in images:
        parts += [image, words(rng.randrange(9), rng.randrange(1, 8))]
    return prompt_of(family, *parts), images


@pytest.mark.parametrize(
    ("family", "ahead"), [*((name, False) for name in TINY), *((name, True) for name in MAIN)]
)
@pytest.mark.few(1)
def test_images_and_text_in_a_pool_far_too_small_give_generates_tokens(family: str, ahead: bool) -> None:
    rng = random.Random(family)
    model = vision_model(family)
    asked = [mixed(family, rng) for _ in range(14)]
    wanted = [expected(family, model, prompt, images, NEW) for prompt, images in asked]
    layout = make_engine(model, 1 << 24).layout
    room = 3 * layout.slab_bytes_for(max(len(prompt) for prompt, _ in asked) + NEW)
    if family.startswith("qwen3_5"):
        room = max(room, 4 * layout.slab_bytes)  # requests also have states
    engine = engine_of(model, room, token_budget=19, max_running=6, ahead=ahead)
    engine.scheduler.admission = None  # admit every request for which pages are free, so that pages run out
    requests = [
        engine.add(prompt, GREEDY, priority=i % 3, images=images) for i, (prompt, images) in enumerate(asked)
    ]
    while engine.busy:
        engine.step()
        engine.cache.check()
    assert [request.tokens for request in requests] == wanted
    assert sum(request.preemptions for request in requests)
    assert sum(request.cached_tokens or 0 for request in requests) or family == "qwen3_5"  # few states fit
    engine.cache.take_copies()
    assert engine.cache.stats()["in_use_pages"] == 0


@pytest.mark.parametrize("family", MAIN)
@pytest.mark.few(2)
def test_equal_image_and_text_hit_and_another_image_misses(family: str) -> None:
    model, image, other = vision_model(family), image_of(family, 0), image_of(family, 3)
    assert tokens_of(family, image) == tokens_of(family, other)
    prompts = [prompt_of(family, words(1, 24), shown, words(2, 5)) for shown in (image, other)]
    assert prompts[0] == prompts[1]  # by their placeholders they are the same
    wanted = [expected(family, model, prompts[0], [shown], NEW) for shown in (image, other)]
    further = [*prompts[0], *words(7, 5)]
    wanted_further = expected(family, model, further, [image], NEW)
    assert wanted[0] != wanted[1]
    engine = engine_of(model)

    def ask(shown: Picture, prompt: list[int]) -> Any:
        request = engine.add(prompt, GREEDY, images=[shown])
        engine.run()
        return request

    first, second, again = (ask(shown, prompts[0]) for shown in (image, other, image))
    assert [first.tokens, second.tokens, again.tokens] == [*wanted, wanted[0]]
    assert first.cached_tokens == 0
    assert second.cached_tokens is not None
    assert second.cached_tokens <= 25  # the text before the image, and the token that opens it
    assert again.cached_tokens == len(prompts[0]) - 1
    longer = ask(image, further)
    assert longer.cached_tokens == len(prompts[0])
    assert longer.tokens == wanted_further


@pytest.mark.parametrize(
    "family", ["llava", "gemma3"]
)  # generate() goes on from the last patch's axes with the others
def test_a_prompt_that_ends_with_an_image_may_resume_inside_of_it(family: str) -> None:
    model, image = vision_model(family), image_of(family, 1)
    prompt = prompt_of(family, words(3, 9), image)[:-1]
    wanted = expected(family, model, prompt, [image], NEW)
    engine = engine_of(model)
    requests = []
    for _ in range(2):
        requests.append(engine.add(prompt, GREEDY, images=[image]))
        engine.run()
    assert [request.tokens for request in requests] == [wanted, wanted]
    assert requests[1].cached_tokens == len(prompt) - 1


def test_answers_and_beams_share_the_image() -> None:
    model, image = vision_model("qwen2_5_vl"), image_of("qwen2_5_vl", 0)
    prompt = prompt_of("qwen2_5_vl", words(1, 5), image, words(2, 6))
    wanted = expected("qwen2_5_vl", model, prompt, [image], NEW)
    engine = engine_of(model, token_budget=7)
    plain = engine.add(prompt, GREEDY, images=[image])
    drawn = SamplingParams(max_tokens=NEW, temperature=0.8, seed=5, n=2)
    pair = engine.add(prompt, drawn, images=[image])
    engine.run()
    assert plain.tokens == wanted
    lone = engine.add(prompt, SamplingParams(max_tokens=NEW, temperature=0.8, seed=6), images=[image])
    engine.run()
    assert pair.family[1].tokens == lone.tokens
    with torch.inference_mode():
        model.set_attn_implementation("eager")
        searched = model.generate(
            torch.tensor([prompt]), max_new_tokens=NEW, num_beams=3, do_sample=False, pad_token_id=0,
            mm_token_type_ids=(torch.tensor([prompt]) == IMAGE).int(), **image,
        )  # fmt: skip
    engine = engine_of(model)
    beams = engine.add(
        prompt, SamplingParams(max_tokens=NEW, temperature=0, beam_width=3, n=1), images=[image]
    )
    engine.run()
    assert beams.returned_samples[0].tokens == searched[0].tolist()


def watched(engine: Engine) -> list[int]:
    """Grow with each run of the vision tower."""
    ran: list[int] = []
    engine.model.model.vision_tower.register_forward_hook(lambda *_: ran.append(1))
    return ran


def test_the_tower_runs_once_for_each_content_whatever_stands_before_it() -> None:
    model = vision_model("llava")
    images = [image_of("llava", seed) for seed in range(3)]
    prompts = [prompt_of("llava", words(i, 3 + i), images[i % 3], words(i, 4)) for i in range(6)]
    wanted = [expected("llava", model, prompts[i], [images[i % 3]], NEW) for i in range(6)]
    engine = engine_of(model, token_budget=5)  # every image in several chunks
    ran = watched(engine)
    for i in range(6):
        request = engine.add(prompts[i], GREEDY, images=[images[i % 3]])
        engine.run()
        assert request.tokens == wanted[i]
        assert len(ran) == min(i + 1, 3)
    other = prompt_of("llava", words(7, 5), images[0], words(7, 4))
    engine.add(other, GREEDY, CacheControl(tenant="other"), images=[images[0]])
    ran.clear()
    engine.run()
    assert len(ran) == 1  # a tenant cannot detect images of another
    engine.cache.check()


def test_embedding_pages_are_evicted_like_others() -> None:
    model, image = vision_model("llava"), image_of("llava", 1)
    prompt = prompt_of("llava", words(1, 5), image, words(2, 4))
    wanted = expected("llava", model, prompt, [image], NEW)
    layout = make_engine(model, 1 << 24).layout
    assert [group.spec.kind for group in layout.groups] == ["full", "embeddings"]
    engine = engine_of(model, 8 * layout.slab_bytes, token_budget=12)
    runs = engine.cache.state.media_cache
    ran = watched(engine)
    first = engine.add(prompt, GREEDY, images=[image])
    while first.output_count < 2:
        engine.step()
    assert [run.users for run in runs.runs()] == [
        0
    ]  # its tokens are computed: no sequence uses them any more
    engine.run()
    assert (first.tokens, len(ran)) == (wanted, 1)
    for seed in range(4):
        engine.add(words(20 + seed, 60), GREEDY)
        engine.run()
    assert not len(runs)  # text needed their pages
    again = engine.add(prompt, GREEDY, images=[image])
    engine.run()
    assert (again.tokens, len(ran)) == (wanted, 2)
    engine.cache.check()


def test_text_after_an_image_is_loaded_from_a_tier_without_encoding() -> None:
    model, image = vision_model("llava"), image_of("llava", 1)
    prompt = prompt_of("llava", words(1, 15), image, words(2, 40))
    wanted = expected("llava", model, prompt, [image], NEW)
    slab = make_engine(model, 1 << 24).layout.slab_bytes
    engine = make_engine(
        model, 10 * slab, token_budget=12, tiers=["host:16MiB"], offload=OffloadConfig("always")
    )
    ran = watched(engine)
    for _ in range(2):
        request = engine.add(prompt, GREEDY, images=[image])
        engine.run()
        assert request.tokens == wanted
        for seed in range(6):
            engine.add(words(20 + seed, 80), GREEDY)
            engine.run()
        assert not engine.cache.state.media_cache
    assert (request.cached_tokens or 0) > 33  # image and text, from a tier
    assert len(ran) == 1
    engine.close()


@pytest.mark.parametrize("family", TINY)
@pytest.mark.few(1)
def test_images_give_generates_tokens_whole_in_chunks_and_from_disk(family: str, tmp_path: Path) -> None:
    model, image = vision_model(family), image_of(family, 1)
    prompt = prompt_of(family, words(1, 15), image, words(2, 30))
    wanted = expected(family, model, prompt, [image], NEW)

    def ask(engine: Engine) -> int:
        request = engine.add(prompt, GREEDY, images=[image])
        engine.run()
        assert request.tokens == wanted
        engine.close()
        return request.cached_tokens or 0

    assert ask(engine_of(model, token_budget=128)) == 0
    assert ask(engine_of(model, token_budget=19)) == 0
    kept = {"tiers": [f"disk:{tmp_path}:64MiB"], "offload": OffloadConfig("always")}
    assert ask(make_engine(model, 8 << 20, **kept)) == 0
    again = make_engine(model, 8 << 20, **kept)
    assert again.vision is not None
    assert ask(again) >= len(prompt) - 16  # found on disk
    assert again.vision.encoder_runs == 0


def test_a_layout_with_embeddings_keeps_every_other_group_as_it_is() -> None:
    for name in known_models():
        layers = load_spec(name).layers
        plain = PoolLayout.build(layers)
        more = with_embeddings(layers, plain)
        assert more.slab_bytes == plain.slab_bytes
        assert [(g.runs, g.pages_per_slab, g.page_stride) for g in more.groups[:-1]] == [
            (g.runs, g.pages_per_slab, g.page_stride) for g in plain.groups
        ]
        assert more.groups[-1].pages_per_slab == 1


def test_no_step_ends_inside_an_image_whose_tokens_see_each_other() -> None:
    model, image = vision_model("gemma3"), image_of("gemma3", 0)
    prompt = prompt_of("gemma3", words(1, 9), image, words(2, 3), image, words(3, 4))
    engine = engine_of(model, token_budget=17)
    request = engine.add(prompt, GREEDY, images=[image, image])
    ends = [0]
    while request.computed < len(prompt):
        engine.step()
        ends.append(request.computed)
    assert ends == [0, 10, 27, 31, 48, len(prompt)]  # images are [10, 26) and [31, 47)
    assert engine.scheduler.token_budget == 17
    assert max(b - a for a, b in pairwise(ends)) <= 17


def test_an_image_without_enough_pages_waits_whole() -> None:
    """Chunks are halved where pages are short; an image is never one of the halves."""
    sight = ImageInputs(
        (),
        (Media(3, 9, bytes(16)), Media(12, 15, bytes(16))),
        np.arange(0),
        np.zeros(1, np.int64),
        whole=True,
    )
    assert [sight.step_tokens(0, count) for count in range(1, 16)] == [
        1,
        2,
        3,
        3,
        3,
        3,
        3,
        3,
        9,
        10,
        11,
        12,
        12,
        12,
        15,
    ]
    assert [sight.step_tokens(5, count) for count in range(1, 6)] == [0, 0, 0, 4, 5]
    assert sight.min_step_tokens == 6
    free = ImageInputs((), sight.media, sight.places, sight.bounds)
    assert [free.step_tokens(0, count) for count in range(1, 16)] == list(range(1, 16))
    assert free.min_step_tokens == 1


def test_positions_that_are_sent_for_a_replay_are_shifted_by_row() -> None:
    layout = PoolLayout.build(model_spec(vision_model("qwen2_vl").config.to_dict(), kv_dtype="fp32").layers)
    cache = KVCache(layout, slabs=50)
    stage = BatchBuilder(cache, "cpu", 64, 8, mirrored=True, shifted=True)
    media = (Media(1, 2, bytes(16)),)
    sights = [ImageInputs((), media, np.arange(0), np.zeros(1, np.int64), None, shift) for shift in (-4, 7)]
    works = []
    for i, sight in enumerate([*sights, None]):
        prompt = np.arange(3, 23 + i, dtype=np.int32)[::-1]
        sequence = cache.open(cache.match(prompt))
        sequence.extend(21 + i)
        sequence.commit(prompt)
        works.append(Work(sequence, np.array([9]), images=sight))
    laid_out = stage.lay_out(works)
    assert laid_out.positions.tolist() == [20, 21, 22]
    assert laid_out.rotary is not None
    assert laid_out.rotary.tolist() == [16, 28, 22]
    stage.send_singles(works, 4)
    replayed = stage.replayed(4, torch.zeros(4, dtype=torch.int64))
    assert replayed.rotary is not None
    assert replayed.rotary.tolist() == [16, 28, 22, 0]
    assert replayed.positions.tolist() == [20, 21, 22, 0]


def test_tokens_between_the_rows_of_an_image_belong_to_its_name() -> None:
    model, image = vision_model("llava"), image_of("llava", 0)
    vision = Vision(model)
    rows = [[IMAGE] * 4 for _ in range(4)]
    broken = [token for row in rows for token in [*row, 50]]
    plain = vision.read_prompt([3, *[IMAGE] * 16, 4], [image]).media[0]
    cut, other = (vision.read_prompt([3, *broken[:-1], last], [image]).media[0] for last in (4, 5))
    assert (plain.start, plain.stop) == (1, 17)
    assert (cut.start, cut.stop) == (1, 20)
    assert plain.digest != cut.digest == other.digest
    wanted = expected("llava", model, [3, *broken, 4], [image], NEW)
    engine = engine_of(model, token_budget=7)
    request = engine.add([3, *broken, 4], GREEDY, images=[image])
    engine.run()
    assert request.tokens == wanted


def test_the_tower_keeps_its_own_attention() -> None:
    model = vision_model("llava")
    make_engine(model, 8 << 20)
    assert model.config.text_config._attn_implementation == ATTENTION
    assert model.config.vision_config._attn_implementation == "eager"


def test_pixels_alone_are_an_image_and_dtype_and_grid_are_content() -> None:
    vision = Vision(vision_model("llava"))
    pixels = image_of("llava", 0)["pixel_values"]

    def digest(given: Any) -> bytes:
        return vision.read_prompt([IMAGE] * 16, [given]).images[0].digest

    same = [digest(given) for given in ({"pixel_values": pixels}, pixels, pixels[0], pixels.numpy())]
    assert len(set(same)) == 1
    changed = pixels.clone()
    changed[0, 0, 0, 0] += 1e-3
    assert digest(changed) != same[0]
    assert digest(pixels.bfloat16()) != same[0]
    assert vision.read_prompt([IMAGE] * 16, [pixels], tenant="other").images[0].digest != same[0]
    qwen = Vision(vision_model("qwen2_vl"))
    patches = image_of("qwen2_vl", 0)["pixel_values"]
    wide, tall = (
        qwen.read_prompt([BEGIN, *[IMAGE] * 6, END], [{"pixel_values": patches, "image_grid_thw": torch.tensor([1, *size])}])
        for size in ((4, 6), (6, 4))
    )  # fmt: skip
    assert wide.media[0].digest != tall.media[0].digest
    assert wide.axes is not None
    assert wide.axes[:, 1:7].tolist() == [[1] * 6, [1, 1, 1, 2, 2, 2], [1, 2, 3, 1, 2, 3]]
    assert wide.shift == 3 - 6


@pytest.mark.parametrize(
    ("family", "prompt", "images", "why"),
    [
        ("llava", [3, 4], [0], "0 image tokens .id 60., but its 1 images need 16"),
        ("llava", [IMAGE] * 31, [0, 0], "31 image tokens .id 60., but its 2 images need 32"),
        ("llava", [IMAGE] * 16, [{"pixels": torch.zeros(1)}], "consists of pixel_values, not of pixels"),
        ("llava", [IMAGE] * 16, [torch.zeros(1, 3, 5)], "cannot take an image of pixel_values .1, 1, 3, 5."),
        ("llava", [IMAGE] * 16, ["a picture"], "must be the tensors of the model's processor, not str"),
        (
            "qwen2_vl",
            [IMAGE] * 6,
            [torch.zeros(24, 96)],
            "pixel_values and image_grid_thw, not of pixel_values",
        ),
        ("qwen2_vl", [IMAGE] * 12, [0, 0], "two images are adjacent at token 6: put a token between them"),
        ("qwen2_vl", [IMAGE, 3, *[IMAGE] * 5], [0], "6 tokens of the image at 0 must follow each other"),
        ("gemma3", [IMAGE] * 32, [0, 0], "two images are adjacent at token 16"),
    ],
)
def test_images_that_do_not_fit_are_refused(
    family: str, prompt: list[int], images: list[Any], why: str
) -> None:
    engine = make_engine(vision_model(family), 8 << 20)
    given = [image_of(family, image) if isinstance(image, int) else image for image in images]
    with pytest.raises(ValueError, match=why):
        engine.add(prompt, GREEDY, images=given)
    assert not engine.busy


def test_an_image_that_no_step_or_window_can_hold_is_refused() -> None:
    prompt, image = [BEGIN, *[IMAGE] * 16, END], image_of("gemma3", 0)
    engine = make_engine(vision_model("gemma3"), 8 << 20, token_budget=15)
    with pytest.raises(
        ValueError, match=r"image of 16 tokens does not fit one step of 15 tokens: raise token_budget"
    ):
        engine.add(prompt, GREEDY, images=[image])
    small = {**TINY["gemma3"]["text_config"], "sliding_window": 15}
    engine = make_engine(vision_model("gemma3", text_config=small), 8 << 20)
    with pytest.raises(
        ValueError, match=r"image of 16 tokens that see each other is larger than .* window of 15"
    ):
        engine.add(prompt, GREEDY, images=[image])
    assert WINDOW >= 16


@pytest.mark.parametrize("family", TINY)
@pytest.mark.few(4)
def test_a_sample_is_an_image_that_the_tower_takes(family: str) -> None:
    vision = Vision(vision_model(family))
    [sample] = vision.samples()
    made = vision.embed(sample)
    assert (made.shape[1], made.dtype) == vision.embedding_shape
    if "image_grid_thw" in sample.inputs:
        assert len(made) == 1024


@pytest.mark.parametrize("family", ["gemma3", "gemma4", "qwen3_5", "mistral3"])
@pytest.mark.few(2)
def test_the_text_part_of_a_model_runs_alone(family: str, tmp_path: Path) -> None:
    model, prompts = vision_model(family), [words(3, 19), words(5, 40)]
    wanted = [expected(family, model, prompt, [], NEW) for prompt in prompts]
    model.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), device="cpu", pool_bytes=8 << 20, text_only=True)
    assert [
        [*one.prompt_token_ids, *one.outputs[0].token_ids] for one in llm.generate(prompts, GREEDY)
    ] == wanted
    assert llm.engine.vision is None
    names = [name for name, _ in llm.engine.model.named_parameters()]
    assert not [name for name in names if "vision" in name or "visual" in name]
    with pytest.raises(ValueError, match="takes no images"):
        llm.generate({"prompt": words(3, 5), "images": [torch.zeros(3, 8, 8)]}, GREEDY)


def test_a_text_part_without_a_class_is_refused(tmp_path: Path) -> None:
    vision_model("qwen2_vl").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no class for the text part of model type 'qwen2_vl'"):
        LLM(str(tmp_path), device="cpu", text_only=True)


def test_text_models_refuse_images() -> None:
    engine = make_engine(tiny("llama"), 1 << 22)
    with pytest.raises(
        ValueError, match=r"LlamaForCausalLM .llama. takes no images here; the families that do: .*llava"
    ):
        engine.add([3, 4], GREEDY, images=[torch.zeros(3, 8, 8)])


def test_generate_takes_image_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("PIL.Image")
    folder, model, processor = image_folder(tmp_path)
    one, two = picture(1), picture(2, 17, 9)
    one.save(tmp_path / "one.png")
    two.save(tmp_path / "two.png")
    words = "Look: <image> and <image>. So"
    made = processor(text=words, images=[one, two], return_tensors="pt")
    with torch.inference_mode():
        wanted = model.generate(**made, max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0].tolist()
    files = ["--image", str(tmp_path / "one.png"), "--image", str(tmp_path / "two.png")]
    options = ["--max-tokens", str(NEW), "--json", "--pool", "8MiB", "--device", "cpu"]
    assert main(["generate", str(folder), words, *files, *options]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert [*found["prompt_token_ids"], *found["outputs"][0]["token_ids"]] == wanted
    for broken, why in ((str(tmp_path / "none.png"), "No such file"), (__file__, "cannot read an image")):
        assert main(["generate", str(folder), words, "--image", broken, *options]) == 2
        assert why in capsys.readouterr().err


def test_prompts_of_text_and_pictures_go_through_the_models_processor(tmp_path: Path) -> None:
    pil = pytest.importorskip("PIL.Image")
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    placeholder = tokenizer.convert_tokens_to_ids("<image>")
    text = {**TINY["llava"]["text_config"], "vocab_size": len(tokenizer)}
    model = vision_model("llava", text_config=text, image_token_index=placeholder)
    resize = transformers.CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    processor = transformers.LlavaProcessor(
        resize, tokenizer, patch_size=2, vision_feature_select_strategy="default", image_token="<image>",
        num_additional_image_tokens=1,
    )  # fmt: skip
    noise = np.random.default_rng(0).integers(0, 255, (2, 12, 10, 3), dtype=np.uint8)
    first, second = noise[0], pil.fromarray(noise[1])
    words, params = "Look: <image> and <image>. So", SamplingParams(max_tokens=NEW, temperature=0)
    made = processor(text=words, images=[first, second], return_tensors="pt")
    with torch.inference_mode():
        wanted = model.generate(**made, max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0].tolist()
    prompt = {"prompt": words, "images": [first, second]}
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    for llm in (
        LLM(str(tmp_path), pool_bytes=8 << 20, device="cpu"),
        LLM(model, pool_bytes=8 << 20, tokenizer=tokenizer, processor=processor),
    ):
        [result] = llm.generate(prompt, params)
        assert [*result.prompt_token_ids, *result.outputs[0].token_ids] == wanted
        assert result.prompt == words
        by_ids = {"prompt": result.prompt_token_ids, "images": [first, second]}
        again, plain = llm.generate([by_ids, "So"], params)
        assert again.outputs[0].token_ids == result.outputs[0].token_ids
        assert again.num_cached_tokens == len(result.prompt_token_ids) - 1
        assert plain.prompt == "So"
        pieces = list(llm.stream(prompt, params))
        assert "".join(piece.text for piece in pieces) == result.outputs[0].text
        with pytest.raises(ValueError, match="may have 'images', 'audio' and 'decoder_prompt'; got 'text'"):
            llm.generate([{"text": words}], params)
    bare = LLM(model, pool_bytes=8 << 20)
    with pytest.raises(ValueError, match="need the model's processor"):
        bare.generate(prompt, params)


@pytest.mark.parametrize("family", MAIN)
@pytest.mark.few(1)
def test_a_prompt_with_an_image_hits_a_disk_tier_after_a_restart(family: str, tmp_path: Path) -> None:
    model, image, other = vision_model(family), image_of(family, 1), image_of(family, 2)
    prompt, beside = (prompt_of(family, words(1, 15), one, words(2, 40)) for one in (image, other))
    wanted = [expected(family, model, ids, [one], NEW) for ids, one in ((prompt, image), (beside, other))]
    block = 16
    found: list[int] = []
    runs: list[int] = []
    for ids, given in ((prompt, image), (prompt, image), (beside, other)):
        tiers, rule = [f"disk:{tmp_path}:16MiB"], OffloadConfig("always")
        llm = LLM(model, pool_bytes=8 << 20, tiers=tiers, offload=rule)
        [result] = llm.generate({"prompt": ids, "images": [given]}, GREEDY)
        assert [*ids, *result.outputs[0].token_ids] == wanted[given is other]
        found.append(result.num_cached_tokens)
        assert llm.engine.vision is not None
        runs.append(llm.engine.vision.encoder_runs)
        assert llm.engine.offload is not None
        assert llm.engine.offload.stats.loaded_images == 1 - runs[-1]
        llm.close()
    assert runs == [1, 0, 1], "its embeddings are loaded, even to count the tokens of an unknown shape"
    before = beside.index(IMAGE)  # text that both prompts share
    assert found == [0, (len(prompt) - 1) // block * block, before // block * block]


@pytest.mark.parametrize("family", MAIN)
@pytest.mark.few(1)
def test_embeddings_are_loaded_for_another_prompt_and_damaged_ones_encoded_again(
    family: str, tmp_path: Path
) -> None:
    """The text before the image differs, so no page of the first prompt is found, only its embeddings."""
    model, image = vision_model(family), image_of(family, 1)
    prompts = [prompt_of(family, words(n, 15), image, words(2, 20)) for n in range(5)]
    wanted = [expected(family, model, ids, [image], NEW) for ids in prompts]

    def run(number: int, tenant: str = "", store: bool = True) -> tuple[int, int]:
        llm = LLM(
            model, pool_bytes=8 << 20, tiers=[f"disk:{tmp_path}:16MiB"], offload=OffloadConfig("always")
        )
        control = CacheControl(tenant=tenant, store=store)
        [result] = llm.generate({"prompt": prompts[number], "images": [image]}, GREEDY, control=control)
        assert [*prompts[number], *result.outputs[0].token_ids] == wanted[number]
        assert llm.engine.vision is not None
        assert llm.engine.offload is not None
        found = llm.engine.vision.encoder_runs, llm.engine.offload.stats.loaded_images
        llm.close()
        return found

    assert run(0, store=False) == (1, 0)
    assert run(1) == (1, 0), "a request that stores nothing stored no embeddings"
    assert run(2) == (0, 1)
    assert run(3, "another") == (1, 0), "tenants share nothing"
    for segment in tmp_path.glob("*.seg"):
        data = bytearray(segment.read_bytes())
        for at in range(4096, len(data)):
            if at % 4096 >= 2048:  # heads stay, bodies are damaged
                data[at] ^= 255
        segment.write_bytes(data)
    assert run(4) == (1, 0)
