"""Who may read published device memory, and until when: files in a folder that trainer and engines of one host share.

For each version there is one lease file. A reader holds a shared lock on it while it reads; the publisher takes it exclusively and removes
it before the memory is rewritten. The kernel drops a dead process's locks, so a dead reader holds nothing up; one that is alive and
stuck is waited for within a bound, then the file goes all the same, and the reader sees that before it uses a byte. An owner file,
locked for as long as the publisher's process lives, tells readers whether the memory still exists.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import threading
import time
from pathlib import Path

from streamrl.errors import WeightSyncError
from streamrl.schemas.versions import Version
from streamrl.weights.shm import check_own

logger = logging.getLogger(__name__)

NAME = re.compile(r"^(?P<policy>[A-Za-z0-9_-]+)\.(?P<owner>[0-9a-f]{12})\.(?P<epoch>\d+)-(?P<number>\d+)\.[0-9a-f]{8}\.lease$")
_OURS = re.compile(r"^(?P<policy>[A-Za-z0-9_-]+)\.(?P<owner>[0-9a-f]{12})\.(owner|.*\.(lease|closing))$")
POLL_S = 0.0005
"""How often a publisher looks whether the last reader has finished."""


class Owner:
    """One publisher's mark that its memory exists; what dead publishers of the policy left is removed.

    Args:
        directory: made if it is not there.
    """

    def __init__(self, directory: Path, policy: str) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_own(directory)
        self._directory = directory
        self._policy = policy
        self._name = secrets.token_hex(6)
        _remove_dead(directory, policy)
        self._path = directory / f"{policy}.{self._name}.owner"
        # Locked under another name: a file that is seen unlocked is a dead publisher's.
        hidden = directory / f".{self._path.name}"
        self._descriptor = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        hidden.rename(self._path)

    def publish(self, version: Version) -> Lease:
        """A new lease of `version`; readers can take it from now on."""
        name = f"{self._policy}.{self._name}.{version.epoch}-{version.number}.{secrets.token_hex(4)}.lease"
        return Lease(self._directory / name, version)

    def close(self) -> None:
        """The memory is going: no reader begins any more."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


class Lease:
    """The publisher's end of one version's lease; implements `streamrl.weights.protocol.Guard`."""

    def __init__(self, path: Path, version: Version) -> None:
        self.path = path
        self.version = version
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._revoked = False
        self._lock = threading.Lock()

    @property
    def revoked(self) -> bool:
        """Whether the memory may be rewritten: readers have been sent away."""
        return self._revoked

    def revoke(self, patience_s: float) -> bool:
        """See `Guard.revoke`; with 0 and somebody reading nothing is revoked. Safe to call again."""
        with self._lock:
            if self._revoked:
                return True
            alone = self._alone()
            if not alone and patience_s == 0:
                return False
            # Under another name nobody finds it any more; those who hold it see no difference.
            closing = self.path.with_suffix(".closing")
            with contextlib.suppress(FileNotFoundError):  # the run's folder has been removed
                self.path.rename(closing)
            until = time.monotonic() + patience_s
            while not alone and time.monotonic() < until:
                time.sleep(POLL_S)
                alone = self._alone()
            if not alone:
                logger.warning("event=weights_reader_sent_away version=%s lease=%s waited_s=%.1f", self.version, self.path.name, patience_s)
            closing.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._revoked = True
            return alone

    def _alone(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


class ReadLease:
    """A reader's hold on a version's memory: until `release`, or until the publisher has lost patience.

    Raises:
        WeightSyncError: the version has been replaced, its publisher is dead, or the name is none of ours.
    """

    def __init__(self, directory: Path, name: str, *, where: str) -> None:
        self._where = where
        path = _checked(directory, name, where)
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise _gone(where) from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            taken = self._linked()
        except BlockingIOError:  # it is being revoked
            taken = False
        if not taken:
            os.close(self._descriptor)
            raise _gone(where)

    def check(self) -> None:
        """Raise WeightSyncError unless all that was read up to now is the version's."""
        if not self._linked():
            raise WeightSyncError(
                f"{self._where}: expected to read it to the end, its memory was taken back",
                hint="this engine reads more slowly than the trainer waits; raise weights.ring, or set weights.transport = 'shm'",
                taken_back=self._where,
            )

    def release(self) -> None:
        """Let go."""
        os.close(self._descriptor)

    def _linked(self) -> bool:
        return os.fstat(self._descriptor).st_nlink > 0


def owner_of(name: str) -> str:
    """Which publisher a lease is of; empty for a name that is none of ours."""
    match = NAME.match(name)
    return match["owner"] if match is not None else ""


def is_held(directory: Path, name: str) -> bool:
    """Whether a lease can be taken now, and the publisher of its memory lives."""
    match = NAME.match(name)
    return match is not None and (directory / name).exists() and _alive(directory / f"{match['policy']}.{match['owner']}.owner")


def _checked(directory: Path, name: str, where: str) -> Path:
    """The lease's path; refuses anything that is not a plain name of ours, and memory whose publisher is dead."""
    match = NAME.match(name)
    if match is None:
        raise WeightSyncError(f"{where}: expected the name of a lease, got {name!r}", lease=name)
    if not _alive(directory / f"{match['policy']}.{match['owner']}.owner"):
        raise _gone(where)
    return directory / name


def _gone(where: str) -> WeightSyncError:
    return WeightSyncError(
        f"{where}: its device memory holds a newer version, or its trainer has ended",
        hint="take a newer version; the trainer keeps the newest weights.ring of them",
        gone=where,
    )


def _alive(owner: Path) -> bool:
    """Whether the process that made the owner file still holds its lock."""
    try:
        descriptor = os.open(owner, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _remove_dead(directory: Path, policy: str) -> None:
    for path in sorted(directory.iterdir()):
        match = _OURS.match(path.name)
        if match is None or match["policy"] != policy:
            continue
        if not _alive(directory / f"{policy}.{match['owner']}.owner"):
            path.unlink(missing_ok=True)
            logger.info("event=weights_leftover_removed policy=%s file=%s", policy, path.name)
