"""Images in requests: from URLs to tokens, and everything that is refused."""

from __future__ import annotations

import base64
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvloom.serve.api.images import RequestImages
from kvloom.serve.auth import Limits
from kvloom.serve.errors import ApiError
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


def test_streams_schemas_and_the_responses_api_take_images(sighted: Running) -> None:
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
        ([part(image), {"type": "input_audio"}], "'input_audio' are not supported"),
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
