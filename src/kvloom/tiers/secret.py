"""The secret that peers share, and this user's private directories: where it lies when no file is given.

    $XDG_STATE_HOME/kvloom/peer-secret    or ~/.local/state/kvloom/peer-secret; mode 0600 in a directory of mode 0700

`kvloom share` creates the default secret once; all processes of this user on this host find it. Knows no protocols.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

__all__ = ["LEAST_SECRET", "default_secret", "open_private", "private_directories", "read_secret"]

LEAST_SECRET = 16
_MOST_SECRET = 4096
_NAME = "peer-secret"


def private_directories() -> list[Path]:
    """This user's directories for kvloom: the state directory first, then the runtime directory where there is one."""
    state = os.environ.get("XDG_STATE_HOME", "")
    found = []
    with contextlib.suppress(RuntimeError):  # a user without a home
        found.append((Path(state) if state.startswith("/") else Path.home() / ".local" / "state") / "kvloom")
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/"):
        found.append(Path(runtime) / "kvloom")
    return found


def open_private(path: Path, create: bool = False) -> int:
    """Opens a directory that this user alone may enter; returns its descriptor. OSError where there is none, or where another
    user owns it."""
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
    """The secret in a file. ValueError where it cannot be read, is too short, or where every user may read it."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            secret = file.read(_MOST_SECRET + 1).strip()
    except OSError as error:
        raise ValueError(f"the secret cannot be read: {path}: {error.strerror}") from error
    if stat.S_ISREG(found.st_mode):
        if found.st_uid not in (os.geteuid(), 0):
            raise ValueError(
                f"the secret {path} belongs to user {found.st_uid}: use a file of user {os.geteuid()}, or of root"
            )
        if found.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
            raise ValueError(
                f"the secret {path} has mode {stat.S_IMODE(found.st_mode):o}, so other users may know it: "
                "write a new one, and chmod 600 it"
            )
    if not LEAST_SECRET <= len(secret) <= _MOST_SECRET:
        raise ValueError(
            f"the secret {path} has {len(secret)} bytes: give {LEAST_SECRET} or more, {_MOST_SECRET} at most"
        )
    return secret


def default_secret(create: bool = False) -> bytes:
    """This user's own secret; `create` makes it where there is none. ValueError says what to do where that fails."""
    folders = private_directories()
    if not folders:
        raise ValueError(
            "this user has no home directory for a secret: give a secret file, or set XDG_STATE_HOME"
        )
    path = folders[0] / _NAME
    try:
        directory = open_private(folders[0], create)
    except OSError as error:
        if not create and isinstance(error, FileNotFoundError):
            raise ValueError(_absent(path)) from error
        raise ValueError(
            f"the directory {folders[0]} cannot hold a secret: {error.strerror}; give a secret file, or set XDG_STATE_HOME"
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
    return f"there is no secret {path}: start `kvloom share` as this user first, or give ?secret=FILE"


def _create(directory: int) -> None:
    """Writes a new secret unless there is one. Other processes see all of it or nothing."""
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
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.link(made, _NAME, src_dir_fd=directory, dst_dir_fd=directory)
    finally:
        os.unlink(made, dir_fd=directory)
