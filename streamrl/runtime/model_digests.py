"""Digests tell the folder of one model from that of another, wherever they lie."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from streamrl.config.tree import Config
from streamrl.errors import ConfigError
from streamrl.system import write_private

FILES = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py", ".safetensors", ".bin", ".pt", ".npz", ".npy")
"""Settings, tokenizer, templates and weights; what is for people (README.md, pictures) may change."""
READERS = 4
"""Files that are read at a time: hashing one is the work of one processor."""
SAID_BYTES = 4 << 30
"""From so many on it is said that files are read, which then takes seconds."""


class Known(msgspec.Struct, frozen=True, array_like=True):
    """A file's SHA-256 (hex), and what the file system says of it: after a change of any of these it is read again."""

    size: int
    modified_ns: int
    changed_ns: int
    inode: int
    device: int
    digest: str = ""


def model_digests(config: Config, policy: Path, cache: Path, note: Callable[[str], None] = lambda _: None) -> dict[str, str]:
    """Return by configuration key the SHA-256 (hex) of a model's folder: names and contents of its `FILES`, those of its sub-folders not.

    Args:
        config: names the reference, the critic and the teacher. A folder that is not there is left out.
        policy: the folder of the initial policy, whose key is `model.path` also where it was built for the run.
        cache: digests of files that were read before, by path; written again. One that cannot be read counts as empty.
        note: is told when much has to be read.

    Raises:
        ConfigError: a file cannot be read, or a folder not be listed.
    """
    loss = config.loss
    named = {
        "model.path": str(policy),
        "loss.kl.reference": loss.kl.reference,
        "loss.critic.path": loss.critic.path,
        "loss.distillation.teacher": loss.distillation.teacher,
    }
    folders = {key: paths for key, folder in named.items() if folder and (paths := _files(Path(folder))) is not None}
    before = _read(cache)
    now = {str(path): _looked_at(path) for paths in folders.values() for path in paths}
    known = {path: file for path, file in before.items() if msgspec.structs.replace(file, digest="") == now.get(path)}
    new = {path: file for path, file in now.items() if path not in known}
    if (size := sum(file.size for file in new.values())) >= SAID_BYTES:
        note(f"reading {size / 1e9:.0f} GB of model files once, to tell them from others at the next start")
    with ThreadPoolExecutor(READERS) as readers:
        for (path, file), digest in zip(new.items(), readers.map(_digest, new), strict=True):
            known[path] = msgspec.structs.replace(file, digest=digest)
    if known != before:
        write_private(cache, msgspec.json.encode(known))
    return {key: _together((path.name, known[str(path)]) for path in paths) for key, paths in folders.items()}


def _files(folder: Path) -> list[Path] | None:
    """None: there is no such folder."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix in FILES and path.is_file()) if folder.is_dir() else None
    except OSError as error:
        raise _unreadable(folder, error, what="folder") from error


def _read(cache: Path) -> dict[str, Known]:
    try:
        return msgspec.json.decode(cache.read_bytes(), type=dict[str, Known])
    except (OSError, msgspec.DecodeError):
        return {}


def _looked_at(path: Path) -> Known:
    try:
        stat = path.stat()
    except OSError as error:
        raise _unreadable(path, error) from error
    return Known(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev)


def _digest(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path | str, error: OSError, *, what: str = "file") -> ConfigError:
    return ConfigError(
        f"expected a {what} of a model that can be read: {path}: {error.strerror}",
        hint="give its modes back, or move it away",
        path=str(path),
    )


def _together(files: Iterable[tuple[str, Known]]) -> str:
    return hashlib.sha256("".join(f"{name} {file.size} {file.digest}\n" for name, file in files).encode()).hexdigest()
