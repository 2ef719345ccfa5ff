"""Encode workers and the workers that ask them, in one process: same embeddings, and every failure ends here."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvloom.core import CacheControl, Tenant
from kvloom.engine import LLM, Engine, EngineConfig, SamplingParams
from kvloom.engine.encoding import Encoder, RemoteEncoders, image_key, open_encoder
from kvloom.engine.encoding.image_pages import (
    EMBEDDINGS,
    PAGE_BYTES,
    PagesError,
    pack,
    page_objects,
    unpack,
)
from kvloom.models.loading import load, load_vision, vision_fingerprint
from kvloom.models.paged import Image
from kvloom.models.vision import Vision, vision_of
from tests.models.image_prompts import MAIN, expected, image_of, prompt_of, vision_model, words
from tests.models.test_cross_attention import crossing, picture as cross_picture

SECONDS = 60.0
NEW = 6


def model_of(family: str) -> Any:
    return crossing() if family == "mllama" else vision_model(family)


def inputs_of(family: str, seed: int) -> Any:
    return cross_picture(seed) if family == "mllama" else image_of(family, seed)


def vision(family: str = "llava") -> Vision:
    found = vision_of(model_of(family))
    assert found is not None
    return found


def open_one(family: str = "llava", size: str = "8MiB", **changes: Any) -> Encoder:
    model = vision_model(family, **changes) if changes else model_of(family)
    found = vision_of(model)
    assert found is not None
    return open_encoder(found, vision_fingerprint(model), [f"host:{size}?share=0"])


@contextmanager
def encoding(encoder: Encoder, runs: bool = True) -> Iterator[Encoder]:
    """Let an encoder work in a thread."""
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            encoder.poll()
            if encoder.waiting:
                encoder.encode_next()
            else:
                time.sleep(0.002)

    thread = threading.Thread(target=work)
    if runs:
        thread.start()
    try:
        yield encoder
    finally:
        ended.set()
        if runs:
            thread.join(SECONDS)
        encoder.close()


def url_of(encoder: Encoder) -> str:
    return "peer://{}:{}".format(*encoder.server.address)


@contextmanager
def asking(encoder: Encoder, family: str = "llava", seconds: float = SECONDS) -> Iterator[RemoteEncoders]:
    model = model_of(family)
    found = vision_of(model)
    assert found is not None
    client = RemoteEncoders([url_of(encoder)], vision_fingerprint(model), found.embedding_shape, seconds)
    try:
        yield client
    finally:
        client.close()


def got(client: RemoteEncoders, image: Image, address: str | None = None) -> torch.Tensor | None:
    return client.request(image, address).result(SECONDS)


@pytest.mark.parametrize("family", [*MAIN, "mllama"])
def test_embeddings_arrive_by_hash_and_the_image_is_sent_once(family: str) -> None:
    sight = vision(family)
    image = sight.read_image(inputs_of(family, 1), "someone's tenant")
    wanted = sight.embed(image)
    with encoding(open_one(family)) as encoder:
        with asking(encoder, family) as client:
            found = got(client, image)
            assert found is not None
            assert torch.equal(found, wanted)
            sent = client.stats.sent_bytes
            assert (client.stats.handed_over_images, client.stats.hits) == (1, 0)
            assert client.stats.handed_over_bytes == wanted.numel() * wanted.element_size()
            assert sent
        with asking(encoder, family) as other:  # as another worker would
            again = got(other, image)
            assert again is not None
            assert torch.equal(again, wanted)
            assert (other.stats.hits, other.stats.sent_bytes, other.stats.fallbacks) == (1, 0, 0)
        assert encoder.stats.encoded_images == 1


def test_an_image_of_several_requests_and_workers_is_encoded_once() -> None:
    sight = vision()
    image, other = (sight.read_image(image_of("llava", seed)) for seed in (1, 2))
    encoder = open_one()
    with asking(encoder) as one, asking(encoder) as two:
        first, second = one.request(image), one.request(image)
        assert first is second
        pending = [first, two.request(image), two.request(other)]
        with encoding(encoder):
            found = [each.result(SECONDS) for each in pending]
        assert encoder.stats.encoded_images == 2
    for each, wanted in zip(found, (image, image, other), strict=True):
        assert each is not None
        assert torch.equal(each, sight.embed(wanted))


def test_tenants_never_share_embeddings() -> None:
    sight = vision()
    mine, theirs = (sight.read_image(image_of("llava", 1), tenant) for tenant in ("a", "b"))
    with encoding(open_one()) as encoder, asking(encoder) as client:
        for image in (mine, theirs):
            found = got(client, image)
            assert found is not None
            assert torch.equal(found, sight.embed(image))
        assert client.stats.hits == 0
        assert encoder.stats.encoded_images == 2


def test_embeddings_are_bounded_in_bytes_and_by_tenant() -> None:
    sight, model = vision(), vision_model("llava")
    encoder = open_encoder(
        sight, vision_fingerprint(model), ["host:1MiB?share=0"], [Tenant("small", quota=4 * PAGE_BYTES)]
    )
    with encoding(encoder), asking(encoder) as client:
        for seed in range(24):
            image = sight.read_image(image_of("llava", seed), "small" if seed % 2 else "")
            found = got(client, image)
            assert found is not None
            assert torch.equal(found, sight.embed(image))
        stats = encoder.host.stats()
        assert stats.bytes <= encoder.host.capacity == 1 << 20
        assert stats.evicted
        assert encoder.host.used_by("small") <= 4 * PAGE_BYTES


def test_a_lost_encode_worker_is_logged_once_and_used_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvloom.engine.encoding.remote_encoders.PAUSE_SECONDS", 1.0)
    sight = vision()
    images = [sight.read_image(image_of("llava", seed)) for seed in range(4)]
    encoder = open_one()
    address = encoder.server.address
    with asking(encoder) as client, caplog.at_level(logging.INFO, "kvloom.encoding"):
        encoder.close()
        assert [got(client, image) for image in images[:2]] == [None, None]
        assert client.stats.fallbacks == 2
        assert len([one for one in caplog.records if one.levelno == logging.WARNING]) == 1
        model = vision_model("llava")
        back = open_encoder(sight, vision_fingerprint(model), [f"host:8MiB?share={address[1]}"])
        with encoding(back):
            end = time.monotonic() + SECONDS
            while (found := got(client, images[2])) is None:  # the pause after the failure
                assert time.monotonic() < end
                time.sleep(0.2)
            assert torch.equal(found, sight.embed(images[2]))
        assert "is used again" in caplog.text


def test_slow_unknown_and_wrong_encode_workers() -> None:
    sight = vision()
    image = sight.read_image(image_of("llava", 1))
    slow = open_one()
    with encoding(slow, runs=False), asking(slow, seconds=0.3) as client:
        assert got(client, image) is None
        assert client.stats.fallbacks == 1
    with encoding(open_one()) as encoder, asking(encoder) as client:
        assert got(client, image, "127.0.0.1:1") is None, (
            "a request cannot name an address that is not configured"
        )
        assert got(client, image, "{}:{}".format(*encoder.server.address)) is not None
    wrong = open_one("vipllava")
    began = time.monotonic()
    with encoding(wrong), asking(wrong) as client:
        assert got(client, image) is None, "it has another image encoder, and drops the image"
        assert wrong.stats.refused_images == 1
    assert time.monotonic() - began < SECONDS


def test_the_connection_needs_the_secret(tmp_path: Path) -> None:
    model, sight = vision_model("llava"), vision()
    files = [tmp_path / "secret", tmp_path / "other"]
    for number, file in enumerate(files):
        file.write_text(f"a secret of more than 16 bytes, number {number}")
        file.chmod(0o600)
    image, fingerprint = sight.read_image(image_of("llava", 1)), vision_fingerprint(model)
    with encoding(open_encoder(sight, fingerprint, [f"host:8MiB?share=0&secret={files[0]}"])) as encoder:
        for file in files:
            url = f"{url_of(encoder)}?by=connection&secret={file}"
            client = RemoteEncoders([url], fingerprint, sight.embedding_shape, SECONDS)
            found = got(client, image)
            if file is files[0]:
                assert found is not None
                assert torch.equal(found, sight.embed(image))
            else:
                assert found is None
                assert client.stats.fallbacks == 1
            client.close()


def test_damaged_and_partly_evicted_embeddings_are_encoded_again() -> None:
    family = "qwen2_vl"
    sight, model = vision(family), vision_model(family)
    gen = torch.Generator().manual_seed(0)
    grid = torch.tensor([[1, 48, 48]])
    large = {"pixel_values": torch.randn(int(grid.prod()), 96, generator=gen), "image_grid_thw": grid}
    image = sight.read_image(large)
    wanted = sight.embed(image)
    key = image_key(vision_fingerprint(model), "", image.digest)
    assert wanted.numel() * 4 > PAGE_BYTES, "several pages"
    with encoding(open_one(family)) as encoder, asking(encoder, family) as client:
        assert got(client, image) is not None
        rest = page_objects(key, EMBEDDINGS, "", 1, 2)
        lease = encoder.host.acquire(rest)
        encoder.host.arena[int(lease.offsets[0]) + 100] ^= 0xFF
        lease.release()
        found = got(client, image)
        assert found is None or torch.equal(found, wanted)
    with encoding(open_one(family)) as encoder, asking(encoder, family) as client:
        assert got(client, image) is not None
        assert encoder.host.drop(rest) == 1
        assert got(client, image) is None or encoder.stats.encoded_images == 2
    with encoding(open_one(family)) as encoder:
        with asking(encoder, family) as client:
            assert got(client, image) is not None
            encoder.host.drop(rest)
            got(client, image)
        with asking(encoder, family) as client:  # the encode worker has noticed, and encoded the image again
            healed = got(client, image)
            assert healed is not None
            assert torch.equal(healed, wanted)


def test_invalid_pages_are_refused() -> None:
    tensors = {"a": torch.arange(7), "b": torch.randn(2, 3).bfloat16(), "c": torch.tensor([True])}
    fields, found = unpack(pack({"tenant": "ü"}, tensors))
    assert fields == {"tenant": "ü"}
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    rng = np.random.default_rng(0)
    good = pack({}, tensors)
    for _ in range(300):
        bad = good.copy()
        at = rng.integers(0, 200, 3)
        bad[0, at] = rng.integers(0, 256, 3)
        try:
            unpack(bad)
        except PagesError:
            continue
    for size in (0, 5, 1 << 40):
        bad = good.copy()
        bad[0, :8] = np.frombuffer(size.to_bytes(8, "little"), np.uint8)
        with pytest.raises(PagesError):
            unpack(bad)


def engine_of(model: Any, pool: int = 1 << 20, **options: Any) -> Engine:
    return Engine(model, EngineConfig(pool_bytes=pool, **options))


def answer(engine: Engine, prompt: list[int], images: list[Any], **options: Any) -> list[int]:
    request = engine.add(
        prompt, SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True), images=images, **options
    )
    while engine.busy:
        engine.step()
    return list(request.tokens)


@pytest.mark.parametrize("family", MAIN)
def test_an_engine_uses_handed_over_embeddings_and_requests_only_what_it_lacks(family: str) -> None:
    model = vision_model(family)
    given = [image_of(family, seed) for seed in (1, 2)]
    prompt = prompt_of(family, words(1, 20), given[0], words(2, 5), given[1], words(3, 30))
    wanted = expected(family, vision_model(family), prompt, given, NEW)
    engine = engine_of(model)
    assert engine.vision is not None
    sight = vision(family)
    images = [sight.read_image(one) for one in given]
    control = CacheControl()
    assert engine.images_to_request(prompt, images, control) == [0, 1], "their token counts are not known"
    assert engine.images_to_request(prompt, images, CacheControl(read=False)) == []
    handed = [replace(image, embeddings=sight.embed(image)) for image in images]
    assert answer(engine, prompt, handed) == wanted
    assert engine.vision.encoder_runs == 0
    assert engine.images_to_request(prompt, images, control) == [], "a cached prefix covers both"
    other = prompt_of(family, words(7, 9), given[1], words(8, 3))
    assert engine.images_to_request(other, [images[1]], control) == [], "the pool has its embeddings"
    assert engine.images_to_request(other, [images[1]], CacheControl(tenant="b")) == [0]
    third = sight.read_image(image_of(family, 4))  # of the same shape as the first one
    more = prompt_of(family, words(7, 9), image_of(family, 4), words(8, 3))
    assert engine.images_to_request(more, [third], control) == [0]
    assert engine.images_to_request(more, [third], control, awaits_peer="127.0.0.1:1") == []
    with pytest.raises(ValueError, match="image tokens"):
        engine.images_to_request(more[:-9], [third], control)
    short = replace(third, embeddings=sight.embed(third)[:-1])
    assert answer(engine, more, [short]) == expected(
        family, vision_model(family), more, [image_of(family, 4)], NEW
    )
    assert engine.vision.encoder_runs == 1, "embeddings of another length are not used"
    engine.close()


def test_preempted_requests_keep_their_embeddings() -> None:
    """A pool that is too small for all answers at once: requests are preempted, and no image is encoded here."""
    model, sight = vision_model("llava"), vision()
    given = [image_of("llava", seed) for seed in range(6)]
    prompts = [prompt_of("llava", words(seed, 8), one, words(seed + 9, 20)) for seed, one in enumerate(given)]
    engine = engine_of(model, pool=160 << 10)
    requests = []
    for prompt, one in zip(prompts, given, strict=True):
        image = sight.read_image(one)
        params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
        requests.append(engine.add(prompt, params, images=[replace(image, embeddings=sight.embed(image))]))
    while engine.busy:
        engine.step()
    assert sum(request.preemptions for request in requests), "the pool was not too small"
    assert engine.vision is not None
    assert engine.vision.encoder_runs == 0
    for request, prompt, one in zip(requests, prompts, given, strict=True):
        assert list(request.tokens) == expected("llava", vision_model("llava"), prompt, [one], 60)
    engine.close()


@pytest.mark.parametrize("family", [*MAIN, "mistral3", "internvl", "mllama"])
def test_an_encode_worker_loads_only_the_image_part(family: str, tmp_path: Any) -> None:
    model_of(family).save_pretrained(tmp_path)
    model, _ = load(str(tmp_path), "float32", "cpu")
    part = load_vision(str(tmp_path), "float32", "cpu")
    assert vision_fingerprint(part) == vision_fingerprint(model)
    assert not any("layers" in name and "language_model" in name for name, _ in part.named_parameters())
    one, other = vision_of(model), vision_of(part)
    assert one is not None
    assert other is not None
    assert one.embedding_shape == other.embedding_shape
    given = inputs_of(family, 3)
    assert torch.equal(one.embed(one.read_image(given)), other.embed(other.read_image(given)))
    with torch.no_grad():
        next(p for n, p in part.named_parameters() if "language_model" not in n).mul_(1.5)
    assert vision_fingerprint(part) != vision_fingerprint(model)


@pytest.mark.parametrize("tiers", [[], ["host:1MiB"], ["host:1MiB?share=0", "disk:/nowhere:1MiB"]])
def test_an_encode_worker_needs_one_shared_host_tier(tiers: list[str]) -> None:
    with pytest.raises(ValueError, match=r"--tier host:SIZE\?share=PORT"):
        open_encoder(vision(), "", tiers)


def test_encoders_of_a_configuration_are_peers() -> None:
    with pytest.raises(ValueError, match="is not a peer"):
        EngineConfig(encoders=["redis://127.0.0.1:1?capacity=1MiB"])
    with pytest.raises(ValueError, match="role encode is a role of `kvloom serve`"):
        Engine(vision_model("llava"), EngineConfig(pool_bytes=1 << 20, role="encode"))


def test_the_offline_api_asks_encode_workers(tmp_path: Path) -> None:
    vision_model("llava").save_pretrained(tmp_path)
    image = image_of("llava", 1)
    prompt = prompt_of("llava", words(1, 20), image, words(2, 5))
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    given = {"prompt": prompt, "images": [image]}
    with encoding(open_one()) as encoder:
        llm = LLM(
            str(tmp_path), dtype="float32", device="cpu", pool_bytes=1 << 20, encoders=[url_of(encoder)],
            encode_seconds=SECONDS,
        )  # fmt: skip
        [found] = llm.generate(given, params)
        assert (
            found.outputs[0].token_ids
            == expected("llava", vision_model("llava"), prompt, [image], NEW)[-NEW:]
        )
        assert llm.generate(given, params)[0].outputs[0].token_ids == found.outputs[0].token_ids
        assert llm.engine.vision is not None
        assert llm.engine.vision.encoder_runs == 0
        assert llm.engine.encoders is not None
        assert llm.engine.encoders.stats.handed_over_images == encoder.stats.encoded_images == 1
        llm.close()
