"""What is Linux's alone, each with what other systems have in its place."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable

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
    """What asks the kernel for signal `number` when the parent of the process that calls it dies, however it dies; gives errno, or 0.

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
