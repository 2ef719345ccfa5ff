"""Audio clips on our cache against generate(): chunks, hits, preemption, positions; and what is refused."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvloom.cli import main
from kvloom.core import CacheControl
from kvloom.engine import LLM, Engine, OffloadConfig, SamplingParams
from kvloom.engine.encoding.image_pages import pack, unpack
from kvloom.models.loading import load, load_vision, refusal
from kvloom.models.vision import Vision, vision_of
from tests.engines import make_engine
from tests.models.audio_folder import audio_folder, recording, wav
from tests.models.audio_prompts import (
    TINY,
    Clip,
    audio_model,
    clip_of,
    expected,
    prompt_of,
    tokens_of,
)
from tests.models.image_prompts import image_of, vision_model, words
from tests.models.zoo import tiny

NEW = 10
GREEDY = SamplingParams(max_tokens=NEW, temperature=0)
OMNI = ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")


def engine_of(model: Any, room: int = 8 << 20, **options: Any) -> Engine:
    """Return an engine whose pool is full of NaN, so that reads of unwritten pages are noticed."""
    engine = make_engine(model, room, **options)
    engine.buffer.view(torch.float32).fill_(torch.nan)
    return engine


@pytest.mark.parametrize("family", TINY)
@pytest.mark.few(2)
def test_clips_give_generates_tokens_whole_in_chunks_and_from_disk(family: str, tmp_path: Path) -> None:
    model, clip = audio_model(family), clip_of(family, 1)
    prompt = prompt_of(family, words(1, 15), clip, words(2, 30))
    wanted = expected(family, model, prompt, [clip], NEW)

    def ask(engine: Engine) -> int:
        request = engine.add(prompt, GREEDY, audio=[clip])
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


def mixed(family: str, rng: random.Random) -> tuple[list[int], list[Clip]]:
    """Return a random prompt of text and up to two of four clips. Clips of one prompt have equal shapes, because
    generate() would pad them."""
    seed = rng.randrange(2)
    clips = [clip_of(family, rng.choice((seed, seed + 3))) for _ in range(rng.choice((0, 1, 1, 2)))]
    parts: list[Any] = [words(rng.randrange(3), rng.randrange(1, 20))]
    for clip in clips:
        parts += [clip, words(rng.randrange(9), rng.randrange(1, 8))]
    return prompt_of(family, *parts), clips


@pytest.mark.parametrize("family", TINY)
@pytest.mark.few(1)
def test_clips_and_text_in_a_pool_far_too_small_give_generates_tokens(family: str) -> None:
    rng = random.Random(family)
    model = audio_model(family)
    asked = [mixed(family, rng) for _ in range(12)]
    wanted = [expected(family, model, prompt, clips, NEW) for prompt, clips in asked]
    layout = make_engine(model, 1 << 24).layout
    room = 3 * layout.slab_bytes_for(max(len(prompt) for prompt, _ in asked) + NEW)
    engine = engine_of(model, room, token_budget=19, max_running=6)
    engine.scheduler.admission = None  # admit every request for which pages are free, so that pages run out
    requests = [
        engine.add(prompt, GREEDY, priority=i % 3, audio=clips) for i, (prompt, clips) in enumerate(asked)
    ]
    while engine.busy:
        engine.step()
        engine.cache.check()
    assert [request.tokens for request in requests] == wanted
    assert sum(request.preemptions for request in requests)
    assert sum(request.cached_tokens or 0 for request in requests)


@pytest.mark.parametrize("family", TINY)
@pytest.mark.few(2)
def test_equal_clip_and_text_hit_and_another_clip_misses(family: str) -> None:
    model, clip, other = audio_model(family), clip_of(family, 0), clip_of(family, 3)
    assert tokens_of(family, clip) == tokens_of(family, other)
    prompt = prompt_of(family, words(1, 24), clip, words(2, 5))
    wanted = [expected(family, model, prompt, [heard], NEW) for heard in (clip, other)]
    assert wanted[0] != wanted[1]
    engine = engine_of(model)
    requests = []
    for heard in (clip, other, clip):
        requests.append(engine.add(prompt, GREEDY, audio=[heard]))
        engine.run()
    assert [request.tokens for request in requests] == [*wanted, wanted[0]]
    first, second, again = (request.cached_tokens or 0 for request in requests)
    assert (first, again) == (0, len(prompt) - 1)
    assert second <= 25  # the text before the clip, and the token that opens it


def test_a_tower_runs_once_for_each_clip_whatever_stands_before_it() -> None:
    model, clips = audio_model("qwen2_audio"), [clip_of("qwen2_audio", seed) for seed in range(2)]
    prompts = [prompt_of("qwen2_audio", words(i, 3 + i), clips[i % 2], words(i, 4)) for i in range(4)]
    wanted = [expected("qwen2_audio", model, prompts[i], [clips[i % 2]], NEW) for i in range(4)]
    engine = engine_of(model, token_budget=5)  # every clip in several chunks
    assert engine.vision is not None
    for i in range(4):
        request = engine.add(prompts[i], GREEDY, audio=[clips[i % 2]])
        engine.run()
        assert request.tokens == wanted[i]
        assert engine.vision.encoder_runs == min(i + 1, 2)
    engine.add(prompts[3], GREEDY, CacheControl(tenant="other"), audio=[clips[1]])
    engine.run()
    assert engine.vision.encoder_runs == 3  # a tenant cannot detect clips of another


@pytest.mark.parametrize("family", OMNI)
@pytest.mark.few(1)
def test_images_and_clips_in_one_prompt_give_generates_tokens(family: str) -> None:
    model, clips = audio_model(family), [clip_of(family, 0), clip_of(family, 3)]
    image = image_of("qwen2_5_vl", 1)
    prompt = prompt_of(family, words(1, 9), clips[0], words(2, 3), image, words(3, 4), clips[1], words(4, 8))
    wanted = expected(family, model, prompt, [image, *clips], NEW)
    wanted_swapped = expected(family, model, prompt, [image, *clips[::-1]], NEW)
    engine = engine_of(model, token_budget=13)
    requests = []
    for _ in range(2):
        requests.append(engine.add(prompt, GREEDY, images=[image], audio=clips))
        engine.run()
    assert [request.tokens for request in requests] == [wanted, wanted]
    assert requests[1].cached_tokens == len(prompt) - 1
    swapped = engine.add(prompt, GREEDY, images=[image], audio=clips[::-1])
    engine.run()
    assert swapped.tokens == wanted_swapped
    assert (swapped.cached_tokens or 0) <= 10  # the text before the first clip, and the token that opens it
    cut = prompt_of(family, words(1, 9), image, words(2, 3), clips[0])[:-1]
    with pytest.raises(ValueError, match="put its tokens for begin and end around each image and audio clip"):
        engine.add(cut, GREEDY, images=[image], audio=clips[:1])


@pytest.mark.parametrize("family", TINY)
@pytest.mark.few(2)
def test_a_sample_is_a_clip_that_the_tower_takes(family: str) -> None:
    vision = Vision(audio_model(family))
    for sample in vision.samples():
        made = vision.embed(sample)
        assert len(made)
        assert (made.shape[1], made.dtype) == vision.embedding_shape


def test_clips_that_do_not_fit_are_refused_with_the_reason() -> None:
    model, clip = audio_model("qwen2_audio"), clip_of("qwen2_audio", 0)
    engine = make_engine(model, 1 << 22)
    prompt = prompt_of("qwen2_audio", words(1, 4), clip)
    with pytest.raises(ValueError, match=r"8 audio clip tokens \(id 63\), but its 1 audio clips need 9"):
        engine.add([token for i, token in enumerate(prompt) if i != 6], GREEDY, audio=[clip])
    with pytest.raises(
        ValueError, match="consists of input_features and feature_attention_mask, not of pixel"
    ):
        engine.add(prompt, GREEDY, images=[{"pixel_values": torch.zeros(1, 3, 8, 8)}])
    with pytest.raises(ValueError, match="cannot take an audio clip of input_features"):
        engine.add(prompt, GREEDY, audio=[{**clip, "input_features": clip["input_features"][..., :20]}])
    for model in (tiny("llama"), vision_model("llava")):
        with pytest.raises(
            ValueError, match=r"takes no audio here; the families that do: .*voxtral|consists of pixel"
        ):
            make_engine(model, 1 << 22).add([3, 4], GREEDY, audio=[clip])


def test_prompts_of_text_and_wav_files_go_through_the_models_processor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, model, processor = audio_folder(tmp_path)
    heard = [recording(1), recording(2, 0.5)]
    wanted = {}
    for text, clips in (("Hear <|AUDIO|>!", heard[:1]), ("Is <|AUDIO|> like <|AUDIO|>?", heard)):
        given = processor(text=text, audio=clips, return_tensors="pt")
        with torch.inference_mode():
            found = model.generate(**given, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
        wanted[text] = found[0].tolist()
    llm = LLM(str(folder), pool_bytes=8 << 20, dtype="float32", device="cpu")
    for text, clips in zip(wanted, (heard[:1], heard), strict=True):
        ids = processor(text=text, audio=clips)["input_ids"][0]
        for prompt in (text, ids):
            for form in ([(clip, 16_000) for clip in clips], [wav(clip, width=4) for clip in clips]):
                [result] = llm.generate({"prompt": prompt, "audio": form}, GREEDY)
                assert [*result.prompt_token_ids, *result.outputs[0].token_ids] == wanted[text]
    for number in (1, 2):
        with pytest.raises(
            ValueError, match=r"of 1\.5 seconds is longer than the 1\.0 seconds that the model takes"
        ):
            llm.generate(
                {"prompt": "<|AUDIO|>" * number, "audio": [(recording(1, 1.5), 16_000)] * number}, GREEDY
            )
    with pytest.raises(ValueError, match="takes no images here"):
        llm.generate({"prompt": "Look", "images": [torch.zeros(3, 8, 8)]}, GREEDY)
    llm.close()
    clip = tmp_path / "clip.wav"
    clip.write_bytes(wav(heard[0], width=4))
    asked = [
        "generate",
        str(folder),
        "Hear <|AUDIO|>!",
        "--dtype",
        "float32",
        "--pool",
        "8MiB",
        "--max-tokens",
        "10",
    ]
    assert main([*asked, "--audio", str(clip), "--json"]) == 0
    [shown] = json.loads(capsys.readouterr().out)
    assert [*shown["prompt_token_ids"], *shown["outputs"][0]["token_ids"]] == wanted["Hear <|AUDIO|>!"]
    clip.write_bytes(b"fLaC")
    assert main([*asked, "--audio", str(clip)]) != 0
    assert "not a WAV file that can be decoded" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("family", OMNI)
def test_the_text_part_of_a_whole_omni_checkpoint_is_loaded(family: str, tmp_path: Path) -> None:
    model = audio_model(family)
    model.save_pretrained(tmp_path / "thinker")
    weights = load_file(tmp_path / "thinker" / "model.safetensors")
    others = {"talker.weight": torch.zeros(2)}
    save_file(
        {f"thinker.{name}": part for name, part in weights.items()} | others, tmp_path / "model.safetensors"
    )
    inner = json.loads((tmp_path / "thinker" / "config.json").read_text())
    whole = {"model_type": family.removesuffix("_thinker"), "thinker_config": inner, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    loaded, _ = load(str(tmp_path), "float32", "cpu")
    found = dict(loaded.named_parameters())
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(part, found[name]) for name, part in model.named_parameters())
    encoder = vision_of(load_vision(str(tmp_path), "float32", "cpu"))
    assert encoder is not None
    clip, image = clip_of(family, 0), image_of("qwen2_5_vl", 1)
    for one in (clip, image):
        made = encoder.embed(encoder.read_image(one))
        assert torch.allclose(made, Vision(model).embed(encoder.read_image(one)), atol=1e-4)


def test_granite_speech_with_an_adapter_is_refused_with_the_way_to_serve_it() -> None:
    config = audio_model("granite_speech").config
    assert refusal(config) is None
    config.has_lora_adapter = True
    assert "a LoRA adapter that only prompts with audio use" in str(refusal(config))


def test_an_engine_uses_handed_over_embeddings_of_clips_and_images() -> None:
    family = OMNI[0]
    model, clip, image = audio_model(family), clip_of(family, 0), image_of("qwen2_5_vl", 1)
    prompt = prompt_of(family, words(1, 9), clip, words(2, 3), image, words(3, 20))
    wanted = expected(family, model, prompt, [image, clip], NEW)
    encoder, engine = Vision(audio_model(family)), engine_of(model)
    given = [encoder.read_image(one) for one in (image, clip)]  # not in the order of the prompt
    assert engine.vision is not None
    assert engine.images_to_request(prompt, given, CacheControl()) == [0, 1], "token counts are not known"
    sent = [unpack(pack({}, dict(one.inputs)))[1] for one in given]  # as an encode worker gets them
    handed = [
        replace(one, embeddings=encoder.embed(encoder.read_image(tensors)))
        for one, tensors in zip(given, sent, strict=True)
    ]
    request = engine.add(prompt, GREEDY, images=handed)
    engine.run()
    assert request.tokens == wanted
    assert engine.vision.encoder_runs == 0
    assert engine.images_to_request(prompt, given, CacheControl()) == [], "a cached prefix covers both"
    other = [encoder.read_image(image), encoder.read_image(clip_of(family, 3))]
    assert engine.images_to_request(prompt, other, CacheControl()) == [1], "the pool has the image"
