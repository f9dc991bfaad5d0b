"""Isolation by namespaces: the program has a root, processes, a network and a user of its own. Needs no right; Linux 5.12 or newer.

Its root is a tmpfs of nothing but mounts, all read-only: the system's programs and libraries, what the caller names, /proc of its own
processes, five devices. Its directory is another tmpfs, with the limits of its files, and is gone with its last process.
"""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from streamrl.sandbox import kernel, seccomp
from streamrl.sandbox.isolation import DEVICES, forever_without_rights, readable, spare_id
from streamrl.sandbox.messages import Program

HOME = "/box"
_INSIDE = 1000
"""Number of its user, as it sees it. The superuser's is not mapped, so nothing in there has rights over more than its own."""
_STAGE = "/tmp"
"""Where the new root is mounted, until it is the root."""
_PAGE_BYTES = 4096
_NEW = (
    kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWNS
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWCGROUP
)


class Namespaces:
    """One program's (`Isolation`)."""

    def __init__(self) -> None:
        self._own_user = False
        self.missing = () if seccomp.supported() else ("system calls are not filtered on this machine's architecture",)

    def prepare(self, program: Program) -> None:
        user, group, supervisor = os.geteuid(), os.getegid(), os.getpid()
        spare = 0 if user else spare_id()
        theirs, ours = socket.socketpair()
        # A mapping to another user than one's own is written from outside.
        helper = os.fork() if spare else 0
        if spare and not helper:
            ours.recv(1)
            ours.send(b"y" if _map(supervisor, spare, spare) else b"n")
            os._exit(0)
        kernel.unshare(_NEW)
        if helper:
            theirs.send(b"?")
            self._own_user = theirs.recv(1) == b"y"
            os.waitpid(helper, 0)
        theirs.close()
        ours.close()
        if not self._own_user and not _map(supervisor, user, group, own=True):
            raise OSError("the user cannot be mapped into a user namespace (/proc/self/uid_map)")
        if not user and not self._own_user:
            self.missing += ("the number of processes is only looked at: the superuser's are not limited",)

    def enter(self, program: Program) -> str:
        kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
        sources = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in (*readable(program), *DEVICES)]
        links = {path: os.readlink(path) for path, _ in sources if os.path.islink(path) and path.count("/") == 1}
        if self._own_user:
            os.setgroups([])
        os.setresgid(_INSIDE, _INSIDE, _INSIDE)
        os.setresuid(_INSIDE, _INSIDE, _INSIDE)
        inside = f"uid={_INSIDE},gid={_INSIDE}"
        kernel.mount("tmpfs", _STAGE, "tmpfs", kernel.MS_NOSUID, f"size=1m,nr_inodes=4096,mode=0755,{inside}")
        for path, place in sources:
            if path in links:  # /bin -> usr/bin
                os.symlink(links[path], _STAGE + path)
            else:
                _bind(place, path)
            os.close(place)
        os.mkdir(f"{_STAGE}/proc")
        kernel.mount("proc", f"{_STAGE}/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            os.symlink(f"/proc/self/fd/{number}", f"{_STAGE}/dev/{name}")
        os.symlink("/proc/self/fd", f"{_STAGE}/dev/fd")
        os.symlink(HOME, f"{_STAGE}/dev/shm")
        if not os.path.exists(f"{_STAGE}/tmp"):  # it is there if something in it may be read
            os.symlink(HOME, f"{_STAGE}/tmp")
        os.mkdir(_STAGE + HOME)
        # Besides the files, an inode is the root's and one is what stdin is read from.
        limits = program.limits
        pages = -(-(limits.disk_bytes + len(program.stdin)) // _PAGE_BYTES) + 1
        options = f"size={pages * _PAGE_BYTES},nr_inodes={limits.files + 2},mode=0700,{inside}"
        kernel.mount("tmpfs", _STAGE + HOME, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
        os.chdir(_STAGE)
        kernel.pivot_root()
        kernel.restrict_mount("/", kernel.MOUNT_RDONLY, tree=False)
        socket.sethostname("sandbox")
        return HOME

    def become(self) -> None:
        """It has been it since `enter`."""

    def confine(self, program: Program) -> None:
        # The rights over its namespaces are lost by the exec, as by that of any user but the superuser.
        forever_without_rights()
        if seccomp.supported():
            seccomp.install(local_sockets=True)

    def processes(self) -> list[int]:
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]

    def num_beside(self) -> int:
        return 2  # supervisor and init

    def excess(self, program: Program) -> str:
        return ""  # its directory takes no more

    def clean(self) -> None:
        """The kernel has."""


def _map(process: int, user: int, group: int, *, own: bool = False) -> bool:
    place = Path(f"/proc/{process}")
    try:
        if own:  # who has no right to map others must not change groups either
            (place / "setgroups").write_text("deny", encoding="ascii")
        (place / "uid_map").write_text(f"{_INSIDE} {user} 1", encoding="ascii")
        (place / "gid_map").write_text(f"{_INSIDE} {group} 1", encoding="ascii")
    except OSError:
        return False
    return True


def _bind(place: int, path: str) -> None:
    """Put what `place` is open for at `path` in the new root, read-only but for devices."""
    target = _STAGE + path
    kind = os.fstat(place).st_mode
    if stat.S_ISDIR(kind):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    kernel.mount(f"/proc/self/fd/{place}", target, flags=kernel.MS_BIND | kernel.MS_REC)
    device = stat.S_ISCHR(kind)
    kernel.restrict_mount(target, kernel.MOUNT_NOSUID | (0 if device else kernel.MOUNT_RDONLY | kernel.MOUNT_NODEV), tree=True)
