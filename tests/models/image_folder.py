"""A folder with a tiny vision model that has a tokenizer, a processor and a chat template."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from tests.engine.made_tokenizers import byte_level
from tests.models.image_prompts import TINY, vision_model

__all__ = ["TEMPLATE", "encoded", "image_folder", "picture"]

TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def image_folder(folder: Path, template: str = TEMPLATE) -> tuple[Path, Any, Any]:
    """Write a tiny LLaVA; return its folder, model and processor. An image of any size has 16 tokens."""
    path = folder / "tiny-llava"
    tokenizer = byte_level()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.chat_template = template
    text = {**TINY["llava"]["text_config"], "vocab_size": len(tokenizer)}
    model = vision_model(
        "llava", text_config=text, image_token_index=tokenizer.convert_tokens_to_ids("<image>")
    )
    resize = transformers.CLIPImageProcessor(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    processor = transformers.LlavaProcessor(
        resize, tokenizer, patch_size=2, vision_feature_select_strategy="default", image_token="<image>",
        num_additional_image_tokens=1, chat_template=template,
    )  # fmt: skip
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return path, model, processor


def picture(seed: int, wide: int = 10, high: int = 12) -> Any:
    """Return an image of noise."""
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 255, (high, wide, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def encoded(image: Any, form: str = "PNG") -> bytes:
    """Return an image as bytes of a format."""
    target = BytesIO()
    image.save(target, form)
    return target.getvalue()
