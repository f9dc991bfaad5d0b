"""This machine: its processors, memory and processes, files that are there as a whole or not at all, and its addresses.

What Linux alone has comes with what is used in its place on other systems.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from urllib.parse import urlsplit

from streamrl.errors import ConfigError

WILDCARDS = ("", "0.0.0.0", "::")
"""Addresses that a server listens on to take connections on every address of its machine."""
_PR_SET_PDEATHSIG = 1
_ZEROS = bytes(1 << 20)


def cores() -> int:
    """Processors that this process may use; elsewhere all there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def reserve(descriptor: int, nbytes: int) -> None:
    """Give a new file its length with all of its pages, so that a full file system or memory is an error here and no SIGBUS later.

    Elsewhere than on Linux by writing zeros.

    Raises:
        OSError: there is no room.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)
        return
    for start in range(0, nbytes, len(_ZEROS)):
        os.pwrite(descriptor, _ZEROS[: nbytes - start], start)


def memory_file(name: str) -> tuple[int, str, Callable[[], None]]:
    """A file in memory without a name in any directory; elsewhere one with a name, among the temporary ones.

    Returns:
        Its descriptor, a path by which others of this user open it while this process lives, and what closes and frees it.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        return descriptor, f"/proc/{os.getpid()}/fd/{descriptor}", lambda: os.close(descriptor)
    descriptor, path = tempfile.mkstemp(prefix=f"{name}-")

    def free() -> None:
        os.close(descriptor)
        os.unlink(path)

    return descriptor, path, free


def death_signal(number: int) -> Callable[[], int] | None:
    """Return a function that asks the kernel for signal `number` when the caller's parent dies, however it dies; it gives errno, or 0.

    To be made before a fork and called after it. None elsewhere than on Linux.
    """
    prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
    if prctl is None:
        return None

    def ask() -> int:
        return ctypes.get_errno() if prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) else 0

    return ask


def dies_with_parent(number: int) -> Callable[[], None]:
    """For `preexec_fn`: the child gets signal `number` when this process dies (`death_signal`).

    Elsewhere than on Linux a child that cannot look after itself outlives a parent that is killed.
    """
    parent, ask = os.getpid(), death_signal(number)

    def tie() -> None:
        if ask is not None:
            ask()
        if os.getppid() != parent:  # it died between the fork and the call
            os._exit(1)

    return tie


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


def is_loopback(host: str) -> bool:
    """Return True if `host` is this machine and nobody else can see what is sent there. No name but localhost is looked up."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bracketed(host: str) -> str:
    """A host as it stands in a URL: IPv6 addresses in brackets."""
    return f"[{host}]" if ":" in host else host


def servers(url: str) -> list[tuple[str, str]]:
    """(scheme, host) of each server that a NATS URL names; several are separated by commas."""
    parts = [urlsplit(part.strip()) for part in url.split(",") if part.strip()]
    return [(part.scheme, part.hostname or "") for part in parts]


def address_towards(url: str) -> str:
    """This machine's address on the way to the first server of `url`; its name if there is no way, or no URL.

    Whoever reaches that server's network reaches this address too. Nothing is sent.
    """
    try:
        target = urlsplit(url.split(",")[0].strip())
        family, kind, _, _, place = socket.getaddrinfo(target.hostname or "", target.port or 4222, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        return socket.gethostname()
