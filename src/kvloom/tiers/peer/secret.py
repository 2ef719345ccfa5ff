"""The secret that peers share, and the private directories of this user, where the default secret is stored.

    $XDG_STATE_HOME/kvloom/peer-secret    or ~/.local/state/kvloom/peer-secret; mode 0600 in a directory of mode 0700

`kvloom share` creates the default secret once. All processes of this user on this host use the default secret.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

__all__ = [
    "MIN_SECRET_BYTES",
    "default_secret",
    "open_private_directory",
    "private_directories",
    "read_secret",
]

MIN_SECRET_BYTES = 16
_MAX_SECRET_BYTES = 4096
_NAME = "peer-secret"


def private_directories() -> list[Path]:
    """Return this user's directories for kvloom: the state directory, then the runtime directory if it exists."""
    state = os.environ.get("XDG_STATE_HOME", "")
    found = []
    with contextlib.suppress(RuntimeError):  # the user has no home directory
        found.append((Path(state) if state.startswith("/") else Path.home() / ".local" / "state") / "kvloom")
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/"):
        found.append(Path(runtime) / "kvloom")
    return found


def open_private_directory(path: Path, create: bool = False) -> int:
    """Open a directory that only this user may enter, and return its descriptor. With `create`, creates the directory
    if it is missing. Raises OSError if the directory does not exist or another user owns it.
    """
    if create:
        for parent in (*reversed(path.parents), path):
            if not parent.exists():
                with contextlib.suppress(FileExistsError):
                    parent.mkdir(mode=0o700)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid():
            raise PermissionError(1, f"it belongs to user {found.st_uid}, not to user {os.geteuid()}")
        if found.st_mode & 0o077:
            os.fchmod(fd, 0o700)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_secret(path: Path | str) -> bytes:
    """Return the secret in a file. Raises ValueError if the file cannot be read, is too short or too long, or belongs
    to another user except root. Also raises ValueError if every user may access the file, or its group may write it."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            secret = file.read(_MAX_SECRET_BYTES + 1).strip()
    except OSError as error:
        raise ValueError(f"the secret file {path} cannot be read: {error.strerror}") from error
    if stat.S_ISREG(found.st_mode):
        if found.st_uid not in (os.geteuid(), 0):
            raise ValueError(
                f"the secret file {path} belongs to user {found.st_uid}: use a file of user {os.geteuid()}, or of root"
            )
        if found.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise ValueError(
                f"the secret file {path} has mode {stat.S_IMODE(found.st_mode):o}, so other users may have read it: "
                "write a new secret, and run chmod 600 on it"
            )
    if not MIN_SECRET_BYTES <= len(secret) <= _MAX_SECRET_BYTES:
        raise ValueError(
            f"the secret file {path} has {len(secret)} bytes: use {MIN_SECRET_BYTES} to {_MAX_SECRET_BYTES}"
        )
    return secret


def default_secret(create: bool = False) -> bytes:
    """Return the default secret of this user. With `create`, creates the secret if it is missing. Raises ValueError
    with the remedy if there is no secret."""
    folders = private_directories()
    if not folders:
        raise ValueError(
            "this user has no home directory for a secret: give a secret file, or set XDG_STATE_HOME"
        )
    path = folders[0] / _NAME
    try:
        directory = open_private_directory(folders[0], create)
    except OSError as error:
        if not create and isinstance(error, FileNotFoundError):
            raise ValueError(_absent(path)) from error
        raise ValueError(
            f"the directory {folders[0]} cannot store a secret: {error.strerror}; give a secret file, or set XDG_STATE_HOME"
        ) from error
    try:
        if create:
            _create(directory)
        elif not path.exists():
            raise ValueError(_absent(path))
    finally:
        os.close(directory)
    return read_secret(path)


def _absent(path: Path) -> str:
    return f"the secret file {path} does not exist: start `kvloom share` as this user first, or give ?secret=FILE"


def _create(directory: int) -> None:
    """Write a new secret unless one exists. Other processes see the complete file or no file."""
    try:
        os.stat(_NAME, dir_fd=directory)
        return
    except FileNotFoundError:
        pass
    made = f"{_NAME}.{os.getpid()}.{secrets.token_hex(4)}"
    fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(secrets.token_hex(32).encode() + b"\n")
        with contextlib.suppress(FileExistsError):  # another process created it
            os.link(made, _NAME, src_dir_fd=directory, dst_dir_fd=directory)
    finally:
        os.unlink(made, dir_fd=directory)
