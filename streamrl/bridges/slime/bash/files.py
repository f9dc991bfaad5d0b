"""Texts that are read from disk: scripts, and nothing that is not one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from streamrl.errors import ConfigError

_LARGEST = 1 << 18


def read_text(path: Path) -> str:
    """A script's text.

    Raises:
        ConfigError: no such file, no regular one (a device, a pipe), larger than 256 KiB, or not UTF-8 text.
    """
    try:
        # Not to wait for a writer where it is a named pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"expected a bash script, got {error.strerror}: {path}", hint="check the path", path=str(path)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ConfigError(f"expected a bash script, got no regular file: {path}", hint="check the path", path=str(path))
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise ConfigError(f"expected a bash script of at most {_LARGEST:,} bytes, got more: {path}", hint="check the path", path=str(path))
    if b"\0" in data:
        raise ConfigError(f"expected a bash script, got a binary file: {path}", hint="check the path", path=str(path))
    if b"\r\n" in data:
        hint = "bash does not take them either; dos2unix removes them"
        raise ConfigError(f"expected lines that end in a newline, got Windows line ends: {path}", hint=hint, path=str(path))
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        hint = "save it as UTF-8"
        raise ConfigError(
            f"expected UTF-8 text, got byte {data[error.start]:#x} at {error.start}: {path}", hint=hint, path=str(path)
        ) from error
