"""Digests that identify weight files. Pages that were computed with other weights are never loaded.

A digest covers the name, the size, the first HEAD_BYTES bytes and SAMPLES further samples of every weight file. A
folder and a hub id with the same files have the same digest.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

__all__ = ["model_folder", "weights_digest"]

SAMPLES = 64
SAMPLE_BYTES = 64
HEAD_BYTES = 1 << 20
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def weights_digest(model: str, revision: str | None) -> str:
    """Return a digest of the weight files of a folder or hub id. Raises ValueError if there are none."""
    path = model_folder(model, revision)
    files = [path] if path.is_file() else sorted(f for kind in WEIGHTS for f in path.glob(kind))
    if not files:
        raise ValueError(
            f"{model}: no weight files ({', '.join(WEIGHTS)}) identify the weights, so stored pages of other weights "
            "could be loaded: use a folder with weight files"
        )
    digest = blake2b(digest_size=16)
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as data:
            digest.update(data.read(HEAD_BYTES))
            for number in range(SAMPLES):
                data.seek(size * number // SAMPLES)
                digest.update(data.read(SAMPLE_BYTES))
    return digest.hexdigest()


def model_folder(model: str, revision: str | None) -> Path:
    """Return `model` if it is a local path. Otherwise return the folder to which the engine has downloaded this hub id.
    Raises ValueError if the downloaded files are not found.
    """
    if Path(model).exists():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception as error:
        raise ValueError(
            f"{model}: the downloaded files are not found ({error}), so the weights have no identity: "
            "use the path of a local folder"
        ) from error
