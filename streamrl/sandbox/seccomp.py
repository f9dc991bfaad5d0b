"""A filter of system calls (seccomp, BPF): no sockets to anywhere, no new namespaces, no looking into other processes.

It is the second wall behind namespaces and the first one where there are none. A list of what is refused, not of what is allowed: programs
of any kind run, and the rest of the kernel stays reachable.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from streamrl.sandbox import kernel

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""By machine: column of `_REFUSED`, and AUDIT_ARCH of linux/audit.h."""
_REFUSED = {
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "fanotify_init": (300, 262),
    "finit_module": (313, 273),
    "fsopen": (430, 430),
    "init_module": (175, 105),
    "io_uring_setup": (425, 425),
    "kcmp": (312, 272),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),  # memory that no limit counts
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "request_key": (249, 218),
    "semget": (64, 190),
    "setns": (308, 268),
    "shmget": (29, 194),  # memory that no limit counts
    "syslog": (103, 116),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}
_CLONE, _SOCKET, _CLONE3 = (56, 220), (41, 198), 435
_NAMESPACES = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWCGROUP
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
)
_AF_UNIX = 1
_X32 = 0x40000000

# linux/bpf_common.h, linux/seccomp.h: words at these places of struct seccomp_data, and what is answered.
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_MODE_FILTER, _PR_SET_SECCOMP = 2, 22


def supported() -> bool:
    """Whether the numbers of this machine's system calls are known."""
    return os.uname().machine in _ARCHITECTURES


def program(machine: str, *, local_sockets: bool) -> bytes:
    """The filter as BPF instructions of 8 bytes.

    Args:
        machine: `x86_64` or `aarch64`.
        local_sockets: sockets of the family AF_UNIX may be made; pairs of them always may.
    """
    column, architecture = _ARCHITECTURES[machine]
    steps: list[tuple[int, int, int, int]] = []

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> None:
        steps.append((code, if_true, if_false, value))

    step(_LOAD, _ARCHITECTURE)
    step(_EQUAL, architecture, 1, 0)
    step(_RETURN, _KILL)
    step(_LOAD, _NUMBER)
    if machine == "x86_64":
        step(_AT_LEAST, _X32, 0, 1)
        step(_RETURN, _FAIL | errno.ENOSYS)
    for numbers in _REFUSED.values():
        step(_EQUAL, numbers[column], 0, 1)
        step(_RETURN, _FAIL | errno.EPERM)
    # Its flags lie in memory, which a filter cannot read; the C library then takes `clone`.
    step(_EQUAL, _CLONE3, 0, 1)
    step(_RETURN, _FAIL | errno.ENOSYS)
    step(_EQUAL, _CLONE[column], 0, 4)
    step(_LOAD, _ARGUMENT)
    step(_ANY_BIT, _NAMESPACES, 0, 1)
    step(_RETURN, _FAIL | errno.EPERM)
    step(_RETURN, _ALLOW)
    step(_EQUAL, _SOCKET[column], 0, 3)
    step(_LOAD, _ARGUMENT)
    step(_EQUAL, _AF_UNIX if local_sockets else 0xFFFFFFFF, 1, 0)
    step(_RETURN, _FAIL | errno.EACCES)
    step(_RETURN, _ALLOW)
    return b"".join(struct.pack("<HBBI", *one) for one in steps)


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))


def install(*, local_sockets: bool) -> None:
    """For this process and all that come of it, for ever; needs PR_SET_NO_NEW_PRIVS."""
    code = program(os.uname().machine, local_sockets=local_sockets)
    steps = ctypes.create_string_buffer(code, len(code))
    given = _Filter(len(code) // 8, ctypes.cast(steps, ctypes.c_void_p))
    kernel.prctl("PR_SET_SECCOMP", _PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(given))
