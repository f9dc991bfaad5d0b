"""System calls that Python has no name for. Each raises OSError with the call's name."""

from __future__ import annotations

import ctypes
import os
from ctypes import c_char_p, c_int, c_long, c_ulong, c_void_p
from typing import Any

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
MNT_DETACH = 0x2

MOUNT_RDONLY = 0x1
MOUNT_NOSUID = 0x2
MOUNT_NODEV = 0x4
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_CAPBSET_DROP = 24
PR_SET_SECUREBITS = 28
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
SECBITS_NO_ROOT = 0b11
"""SECBIT_NOROOT and its lock: user 0 is given no rights by an exec."""

# By number where the C library may be older than the call; these have the same one on every architecture.
_MOUNT_SETATTR = 442

_libc = ctypes.CDLL(None, use_errno=True)


def check(name: str, given: int) -> int:
    """What a call of the C library gave; raises OSError for -1."""
    if given == -1:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return given


def syscall(name: str, number: int, *arguments: Any) -> int:
    """A call by its number; integers are handed on as longs."""
    given = [c_long(argument) if isinstance(argument, int) else argument for argument in arguments]
    return check(name, _libc.syscall(c_long(number), *given))


def prctl(name: str, option: int, value: int = 0, pointer: Any = None) -> None:
    """`prctl(option, value, pointer)`."""
    check(name, _libc.prctl(c_int(option), c_ulong(value), pointer or c_void_p(), c_ulong(0), c_ulong(0)))


def unshare(flags: int) -> None:
    """Leave the namespaces that `flags` names for new ones."""
    check("unshare", _libc.unshare(c_int(flags)))


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """`mount(2)`."""
    words = [c_char_p(word.encode() or None) for word in (source, target, kind)]
    check(f"mount {target}", _libc.mount(*words, c_ulong(flags), c_char_p(options.encode() or None)))


def restrict_mount(path: str, attributes: int, *, tree: bool) -> None:
    """Add attributes to a mount, with `tree` to those below it too; Linux 5.12 or newer."""
    wanted = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    flags = _AT_RECURSIVE if tree else 0
    syscall(f"mount_setattr {path}", _MOUNT_SETATTR, _AT_FDCWD, c_char_p(path.encode()), flags, ctypes.byref(wanted), ctypes.sizeof(wanted))


def pivot_root() -> None:
    """Make the working directory, which is a mount, the root, and let go of the old one."""
    # `pivot_root(".", ".")` puts the old root above the new one, from where it can be taken off (pivot_root(2)).
    check("pivot_root", _libc.pivot_root(c_char_p(b"."), c_char_p(b".")))
    check("umount2", _libc.umount2(c_char_p(b"."), c_int(MNT_DETACH)))
    os.chdir("/")


def drop_capabilities() -> None:
    """Give up every right of the superuser for good; what user 0 owns stays its own."""
    with open("/proc/sys/kernel/cap_last_cap", encoding="ascii") as file:
        last = int(file.read())
    for capability in range(last + 1):
        prctl("PR_CAPBSET_DROP", PR_CAPBSET_DROP, capability)
    prctl("PR_SET_SECUREBITS", PR_SET_SECUREBITS, SECBITS_NO_ROOT)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    check("capset", _libc.capset(header, (ctypes.c_uint32 * 6)()))
