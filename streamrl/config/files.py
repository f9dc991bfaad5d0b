"""Files and directories that are there as a whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path

from streamrl.errors import ConfigError


def write_private(path: Path, data: bytes) -> None:
    """Replace `path` by `data` in one step, readable by the owner only and on disk when this returns; raises OSError.

    The file is written under a hidden name beside it. What a process that died left there is overwritten by the next of its id.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def check_new(path: Path) -> None:
    """Raise ConfigError where something is at `path`, a broken link too."""
    if path.exists() or path.is_symlink():
        raise ConfigError(f"expected a new directory, got {path}, which is there already", hint="name another", path=str(path))


@contextlib.contextmanager
def new_directory(path: Path) -> Generator[Path]:
    """An empty directory beside `path`, the owner's alone, which becomes `path` at the end and is removed after an error.

    Raises:
        FileExistsError: `path` is there.
        OSError: it cannot be made.
    """
    if path.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path.parent)) from error
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield scratch
        scratch.rename(path)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
