"""Landlock: a process gives up the file system but for some paths, TCP, and signals to others. Needs no right; Linux 5.13 or newer.

What is refused grows with the version (ABI) of the kernel: 4 has TCP, 6 has signals and abstract sockets (docs.kernel.org, landlock).
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

from streamrl.sandbox import kernel

TCP_ABI, SIGNALS_ABI = 4, 6

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION, _PATH_BENEATH = 1, 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REFER, _TRUNCATE, _IOCTL_DEVICE = 1 << 13, 1 << 14, 1 << 15
_FIRST = (1 << 13) - 1
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
_READS = _EXECUTE | _READ_FILE | _READ_DIR


def abi() -> int:
    """Its version in this kernel; 0: there is none, or it is switched off."""
    try:
        return kernel.syscall("landlock_create_ruleset", _CREATE_RULESET, None, 0, _ASK_VERSION)
    except OSError:
        return 0


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """This process and all that come of it reach these paths and what is below them, and no others; needs PR_SET_NO_NEW_PRIVS."""
    version = abi()
    rights = _FIRST | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0) | (_IOCTL_DEVICE if version >= 5 else 0)
    size = 24 if version >= SIGNALS_ABI else 16 if version >= TCP_ABI else 8
    handled = ctypes.create_string_buffer(struct.pack("=QQQ", rights, 0b11, 0b11), 24)
    ruleset = kernel.syscall("landlock_create_ruleset", _CREATE_RULESET, handled, size, 0)
    for paths, allowed in ((readable, _READS), (writable, rights)):
        for path in paths:
            _allow(ruleset, path, allowed & rights)
    kernel.syscall("landlock_restrict_self", _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, allowed: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            allowed &= _OF_FILES
        rule = struct.pack("=Qi", allowed, place)
        kernel.syscall(f"landlock_add_rule {path}", _ADD_RULE, ruleset, _PATH_BENEATH, ctypes.create_string_buffer(rule, len(rule)), 0)
    finally:
        os.close(place)
