"""Images in requests: from URLs to tokens, and everything that is refused."""

from __future__ import annotations

import base64
import os
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvloom.engine import SamplingParams
from kvloom.serve.api.images import RequestImages
from kvloom.serve.auth import Limits
from kvloom.serve.errors import ApiError
from kvloom.serve.worker import Add, ImagePrompt
from kvloom.serve.worker.image_prompts import ImagePrompts, ImagesBusyError
from tests.serve.running import Running, running

pytest.importorskip("PIL")

from tests.models.image_folder import encoded, image_folder, picture

NEW = 6


def url(image: Any, form: str = "PNG") -> str:
    return f"data:image/{form.lower()};base64,{base64.b64encode(encoded(image, form)).decode()}"


def part(address: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    return image_folder(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def allowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("allowed")
    picture(1).save(folder / "one.png")
    return folder


@pytest.fixture(scope="module")
def sighted(made: tuple[Path, Any, Any], allowed: Path) -> Iterator[Running]:
    more = ("--pool", "16MiB", "--image-dir", str(allowed), "--max-images", "3", "--max-image-pixels", "5000")
    with running(made[0], "--name", "tiny-llava", *more) as found:
        yield found


def ask(server: Running, content: Any, **fields: Any) -> tuple[int, Any]:
    body = {
        "model": "tiny-llava", "messages": [{"role": "user", "content": content}], "temperature": 0,
        "return_token_ids": True, "max_tokens": NEW, **fields,
    }  # fmt: skip
    status, _, answer = server.send("POST", "/v1/chat/completions", body)
    return status, answer


def generated(made: tuple[Path, Any, Any], words: str, images: list[Any]) -> tuple[int, list[int]]:
    """Return the prompt tokens and the output tokens of Hugging Face's `generate()`."""
    _, model, processor = made
    given = processor(text=words, images=images, add_special_tokens=False, return_tensors="pt")
    with torch.inference_mode():
        found = model.generate(**given, max_new_tokens=NEW, do_sample=False, pad_token_id=0)[0].tolist()
    count = given["input_ids"].shape[1]
    return count, found[count:]


def test_images_of_data_urls_and_files_give_generates_tokens(
    sighted: Running, made: tuple[Path, Any, Any], allowed: Path
) -> None:
    one, two = picture(1), picture(2, 17, 9)
    words = "[user]Compare <image> with <image>.[assistant]"
    count, wanted = generated(made, words, [one, two])
    link = allowed / "link.png"
    if not link.exists():
        link.symlink_to("one.png")
    for address in (url(one), f"file://{allowed}/one.png", f"file://localhost{link}"):
        content = [text("Compare "), part(address), text(" with "), part(url(two)), text(".")]
        status, answer = ask(sighted, content)
        assert status == 200, answer
        assert answer["choices"][0]["token_ids"] == wanted
        assert answer["usage"]["prompt_tokens"] == count
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == count - 1
    other, _ = ask(
        sighted, [text("Compare "), part(url(picture(9))), text(" with "), part(url(two)), text(".")]
    )
    assert other == 200


def test_another_image_under_the_same_text_misses_the_cache(sighted: Running) -> None:
    for seed in (31, 32):
        status, answer = ask(sighted, [part(url(picture(seed))), text("?")])
        assert status == 200
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] <= len("[user]")
    status, answer = ask(sighted, [part(url(picture(31))), text("?")])
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 16


def test_an_answer_without_max_tokens_is_shortened_to_what_fits(sighted: Running) -> None:
    longest = 256
    status, answer = ask(sighted, [part(url(picture(3)))], max_tokens=None, ignore_eos=True)
    assert status == 200, answer
    assert answer["usage"]["total_tokens"] == longest
    status, answer = ask(sighted, [part(url(picture(3)))], max_tokens=longest - 20)
    assert status == 400
    assert "limit of 256 tokens" in answer["error"]["message"]


def test_streams_schemas_and_the_other_apis_take_images(sighted: Running) -> None:
    content = [text("Look: "), part(url(picture(4)))]
    _, whole = ask(sighted, content)
    messages: Any = [{"role": "user", "content": content}]
    pieces = list(
        sighted.client().chat.completions.create(
            model="tiny-llava", messages=messages, temperature=0, max_tokens=NEW, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    said = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert said == whole["choices"][0]["message"]["content"]
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.prompt_tokens == whole["usage"]["prompt_tokens"]
    status, answer = ask(sighted, content, regex="[ab]{3}")
    assert status == 200, answer
    assert set(answer["choices"][0]["message"]["content"]) <= {"a", "b"}
    items = [
        {"type": "input_text", "text": "Look: "},
        {"type": "input_image", "image_url": url(picture(4))},
    ]
    body = {
        "model": "tiny-llava",
        "input": [{"role": "user", "content": items}],
        "temperature": 0,
        "max_output_tokens": NEW,
    }
    status, _, found = sighted.send("POST", "/v1/responses", body)
    assert status == 200, found
    assert found["usage"]["input_tokens"] == whole["usage"]["prompt_tokens"]
    data = base64.b64encode(encoded(picture(4))).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    blocks = [
        {"type": "text", "text": "Look: ", "cache_control": {"type": "ephemeral"}},
        {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}},
    ]
    body = {
        "model": "tiny-llava",
        "messages": [{"role": "user", "content": blocks}],
        "temperature": 0,
        "max_tokens": NEW,
    }
    status, _, found = sighted.send("POST", "/v1/messages", body)
    assert status == 200, found
    assert found["content"][0]["text"] == whole["choices"][0]["message"]["content"]
    used = found["usage"]
    assert used["input_tokens"] + used["cache_read_input_tokens"] == whole["usage"]["prompt_tokens"]
    blocks[1] = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    for path, why in (("", "nothing is fetched"), ("/count_tokens", "not supported")):
        status, _, found = sighted.send("POST", f"/v1/messages{path}", body)
        assert status == 400
        assert why in found["error"]["message"]
    blocks[1] = {"type": "image", "source": {"type": "file", "file_id": "x"}}
    status, _, found = sighted.send("POST", "/v1/messages", body)
    assert status == 400
    assert "source must have the type base64" in found["error"]["message"]


def test_refused_images_get_400_and_the_server_goes_on(sighted: Running, allowed: Path) -> None:
    image = url(picture(5))
    outside = allowed.parent / "outside.png"
    picture(5).save(outside)
    escape = allowed / "escape.png"
    if not escape.exists():
        escape.symlink_to(outside)
    damaged = base64.b64encode(encoded(picture(5))[:-40]).decode()
    for content, why in (
        ([part("https://example.org/a.png")], "nothing is fetched from the network"),
        ([part("ftp://example.org/a.png")], "is not supported"),
        ([part(f"file://{outside}")], "not a readable file below a folder of --image-dir"),
        ([part(f"file://{escape}")], "not a readable file below a folder of --image-dir"),
        ([part(f"file://{allowed}/../outside.png")], "not a readable file below a folder of --image-dir"),
        ([part(f"file://{allowed}/none.png")], "not a readable file below a folder of --image-dir"),
        ([part(f"file://{allowed}")], "not a readable file below a folder of --image-dir"),
        ([part(f"file://elsewhere{allowed}/one.png")], "not a readable file below"),
        ([part("data:image/png;base64,@@@")], "not valid base64"),
        ([part("data:image/png,abc")], "needs base64"),
        ([part("data:image/png;base64,aGVsbG8=")], "not an image of the formats PNG"),
        ([part(f"data:image/png;base64,{damaged}")], "the image is damaged"),
        ([{"type": "image_url"}], "needs {"),
        ([part(url(picture(5, 90, 90)))], "the limit is 5,000"),
        ([part(image)] * 4, "more than 3 images"),
        ([part(image), text("<image>")], "control tokens"),
        ([part(image), {"type": "input_audio"}], "accepts no audio"),
    ):
        status, answer = ask(sighted, content)
        assert status == 400, (content, answer)
        assert why in answer["error"]["message"], answer
    assert ask(sighted, [part(image)], truncate_prompt_tokens=9)[0] == 400
    status, _, answer = sighted.send(
        "POST", "/tokenize", {"messages": [{"role": "user", "content": [part(image)]}]}
    )
    assert status == 400, answer
    assert ask(sighted, [part(image)])[0] == 200
    sighted.wait_for(sighted.idle)


def test_a_text_model_names_itself(server: Running) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": [part(url(picture(5)))]}]}
    status, _, answer = server.send("POST", "/v1/chat/completions", body)
    assert status == 400
    assert (
        "model 'tiny' accepts no images: LlamaForCausalLM (llama) takes no images"
        in answer["error"]["message"]
    )


def bomb(side: int) -> bytes:
    """Return a PNG whose header announces side x side pixels, without them."""
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    return (
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", len(header))
        + chunk
        + struct.pack(">I", zlib.crc32(chunk))
        + struct.pack(">I", 0)
        + b"IDAT"
        + struct.pack(">I", zlib.crc32(b"IDAT"))
    )


def test_bombs_are_refused_by_their_header_and_bytes_before_they_are_decoded() -> None:
    def refused(data: bytes, **limits: Any) -> str:
        images = RequestImages(Limits(**limits), "m", "")
        with pytest.raises(ApiError) as error:
            images.add(part("data:image/png;base64," + base64.b64encode(data).decode()), "here")
        return error.value.message

    assert "an image of 9000 x 9000 pixels" in refused(bomb(9000))
    assert "exceeds limit" in refused(bomb(60_000), image_pixels=1 << 40)
    assert "the limit is 100 (--max-image-bytes)" in refused(b"a" * 200, image_bytes=100)
    several = RequestImages(Limits(image_pixels=200), "m", "")
    several.add(part(url(picture(1))), "here")
    with pytest.raises(ApiError, match="to 240 pixels; the limit is 200"):
        several.add(part(url(picture(2))), "here")


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    images = RequestImages(Limits(image_folders=(tmp_path.resolve(),)), "m", "")
    with pytest.raises(ApiError, match="not a readable file"):
        images.add(part(f"file://{tmp_path}/pipe"), "here")
    with pytest.raises(ApiError, match="needs --image-dir"):
        RequestImages(Limits(), "m", "").add(part(f"file://{tmp_path}/pipe"), "here")


class _Sight:
    """Stands in for a model's vision: splits what the processor below returns."""

    needs_image = False

    def split(self, made: dict[str, Any]) -> list[Any]:
        return list(made["pixel_values"])

    def read_image(self, given: Any, *_: Any) -> Any:
        return given


def message(id_: int, tenant: str, data: bytes, most: int = 100) -> Add:
    prompt = ImagePrompt("<image>", [data], False, most)
    params = SamplingParams(max_tokens=1)
    return Add(id_, [1], params, tenant=tenant, image_prompt=prompt)


def taken(prompts: ImagePrompts, count: int) -> list[tuple[Add, Any]]:
    """Wait for some prepared requests."""
    found: list[tuple[Add, Any]] = []
    end = time.monotonic() + 30
    while len(found) < count and time.monotonic() < end:
        one = prompts.take()
        if one is None:
            time.sleep(0.005)
        else:
            found.append(one)
    return found


def test_tenants_take_turns_at_the_decoder_and_a_cancelled_request_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = threading.Event()

    def processor(**given: Any) -> dict[str, Any]:
        assert gate.wait(30)
        return {"input_ids": torch.tensor([[7, 7, 7]]), "pixel_values": torch.zeros(1, 3, 8, 8)}

    prompts = ImagePrompts("model", _Sight(), processor)  # type: ignore[arg-type]
    good = encoded(picture(1))
    for id_, tenant in enumerate(("a", "a", "a", "b", "a")):
        prompts.submit(message(id_, tenant, good))
    assert prompts.take() is None  # the caller does not wait for the thread
    prompts.cancel(0)  # in the thread
    prompts.cancel(2)  # waits
    monkeypatch.setattr("kvloom.serve.worker.image_prompts.MAX_WAITING_BYTES", len(good))
    with pytest.raises(ImagesBusyError, match="try again later"):
        prompts.submit(message(9, "b", good))
    gate.set()
    found = taken(prompts, 3)
    assert [one.id for one, _ in found] == [1, 3, 4]
    assert [one.prompt for one, _ in found] == [[7, 7, 7]] * 3
    assert not prompts
    prompts.submit(message(5, "a", good, most=2))
    [(refused, why)] = taken(prompts, 1)
    assert refused.id == 5
    assert "3 prompt tokens, with those of the images and audio clips, exceed the limit of 2" in str(why)


@pytest.mark.slow
def test_a_restarted_server_loads_embeddings_from_disk(made: tuple[Path, Any, Any], tmp_path: Path) -> None:
    """Other words stand before the image, so its pages are not found: only its embeddings are."""
    more = ("--pool", "16MiB", "--load", "always", "--tier", f"disk:{tmp_path}:64MiB")
    counts = []
    for words in ("First look at ", "Then look at "):
        content = [text(words), part(url(picture(1))), text(" and describe it")]
        with running(made[0], "--name", "tiny-llava", *more) as server:
            status, answer = ask(server, content)
            assert status == 200
            found = server.metrics()
            counts.append((found["kvloom_encoded_images_total"], found["kvloom_loaded_images_total"]))
    assert counts == [(1, 0), (0, 1)]
    with running(made[0], "--name", "tiny-llava", "--pool", "16MiB") as server:
        assert ask(server, content)[1]["choices"] == answer["choices"]
