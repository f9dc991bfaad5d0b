"""Isolation where namespaces are not allowed, as in most containers: the program sees the host and may do little in it.

Landlock leaves it the system's files and a temporary directory, the filter of system calls takes its sockets, and where the caller is the
superuser it runs as a user that nobody else is.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from contextlib import suppress

from streamrl.sandbox import kernel, landlock, seccomp
from streamrl.sandbox.isolation import DEVICES, forever_without_rights, readable, spare_id
from streamrl.sandbox.messages import Program

_SILENT = [(os.POSIX_SPAWN_OPEN, descriptor, os.devnull, os.O_RDWR, 0) for descriptor in (0, 1, 2)]


class Confined:
    """One program's (`Isolation`).

    Args:
        by_landlock: else its limits, the filter of system calls and the rights of its user are all there is.
        own_user: it becomes a user of its own, which only the superuser may let it.
    """

    def __init__(self, *, by_landlock: bool, own_user: bool) -> None:
        self._by_landlock = by_landlock
        self._own_user = own_user
        self._home = ""
        self._user = os.geteuid()
        self.missing = tuple(self._missing())

    def _missing(self) -> list[str]:
        found = ["number and size of its files are only looked at, and files that it has deleted and holds open are not"]
        if not self._by_landlock:
            whose = "that everybody may read" if self._own_user else "of the run's user, its credentials among them"
            found.append(f"it can read files {whose}, and write where that user may")
        if not self._own_user and (not self._by_landlock or landlock.abi() < landlock.SIGNALS_ABI):
            found.append("it can end processes of the run's user")
        if not seccomp.supported():
            found.append("system calls are not filtered on this machine's architecture, so it can connect to servers")
        if not self._user and not self._own_user:
            found.append("the number of processes is only looked at: the superuser's are not limited")
        return found

    def prepare(self, program: Program) -> None:
        if self._by_landlock and not landlock.abi():
            raise OSError("Landlock is not in this kernel, or is switched off")
        if self._own_user:
            self._user = spare_id()
        self._home = tempfile.mkdtemp(prefix="streamrl-sandbox-")
        if self._own_user:
            os.chown(self._home, self._user, self._user)

    def enter(self, program: Program) -> str:
        kernel.prctl("PR_SET_CHILD_SUBREAPER", kernel.PR_SET_CHILD_SUBREAPER, 1)
        return self._home

    def become(self) -> None:
        if self._own_user:
            os.setgroups([])
            os.setresgid(self._user, self._user, self._user)
            os.setresuid(self._user, self._user, self._user)
        elif not self._user:
            kernel.drop_capabilities()

    def confine(self, program: Program) -> None:
        forever_without_rights()
        if self._by_landlock:
            landlock.restrict(readable(program), (self._home, *DEVICES))
        if seccomp.supported():
            seccomp.install(local_sockets=False)

    def num_beside(self) -> int:
        return 0 if self._own_user else _num_threads(self._user)

    def processes(self) -> list[int]:
        return descendants(os.getpid())

    def excess(self, program: Program) -> str:
        limits = program.limits
        files = size = 0
        folders = [self._home]
        while folders:
            try:
                with os.scandir(folders.pop()) as inside:
                    for entry in inside:
                        files += 1
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                        if files > limits.files:
                            return f"more than {limits.files} files"
            except (FileNotFoundError, PermissionError):  # gone meanwhile; or shut, which keeps nobody but its owner out
                continue
            except OSError as error:  # too deep for a path
                return f"files that cannot be counted: {error.strerror}"
        return f"more than {limits.disk_bytes} bytes of files" if size > limits.disk_bytes else ""

    def clean(self) -> None:
        kill_all()
        try:
            shutil.rmtree(self._home)
        except (OSError, RecursionError):
            # Shut by their owner, or deeper than a path of Python's reaches; these two walk trees by their descriptors.
            for command in (["chmod", "-R", "u+rwx", self._home], ["rm", "-rf", self._home]):
                os.waitpid(os.posix_spawnp(command[0], command, os.environ, file_actions=_SILENT), 0)


def descendants(of: int) -> list[int]:
    """Processes that have come of one and have not been waited for; those whose parent is gone are their next subreaper's."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (parent := _parent(name)):
            children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    ask = [of]
    while ask:
        new = children.get(ask.pop(), [])
        found += new
        ask += new
    return found


def _parent(process: str) -> int:
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def _num_threads(user: int) -> int:
    count = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # it has ended
            continue
    return count


def kill_all() -> None:
    """End every descendant of this process, which is their subreaper: stopped first, so that none forks while others are found."""
    if not _has_children():
        return
    for number in (signal.SIGSTOP, signal.SIGKILL):
        seen: set[int] = set()
        while new := set(descendants(os.getpid())) - seen:
            seen |= new
            for process in new:
                with suppress(ProcessLookupError):
                    os.kill(process, number)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def _has_children() -> bool:
    """Whether there are any; the orphans of a subreaper are its own."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
