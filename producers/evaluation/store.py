"""What a set's problems gave at one version, on disk: a line for each problem once all its samples have ended.

A process that is killed leaves whole lines, and at most one that is not whole, which is cut off; whoever comes next asks for the problems
that have none. The kernel writes lines within seconds: a power cut may lose the last ones, which are asked for again.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Generator
from pathlib import Path

import msgspec

from streamrl.errors import LaunchError
from streamrl.system import write_private

logger = logging.getLogger(__name__)


class SampleRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sample of a problem."""

    reward: float | None = None
    """None: it has failed, and is neither right nor wrong."""
    status: str = "completed"
    """As `Sample.status`, or why it failed: `failed`, `timeout`, or a producer's own word."""
    tokens: int = 0
    """Sampled."""
    answer: str | None = None
    """What it votes for; None: for nothing."""
    text: str = ""
    """Of its last turn, shortened to `evaluation.text_chars`."""
    detail: str = ""
    """Why it failed, in words."""
    versions: tuple[str, ...] = ()
    """The oldest and the newest that its tokens were sampled by."""


class ProblemRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One problem, a line of the file."""

    row: int
    """Index among the set's problems."""
    samples: tuple[SampleRecord, ...]


class _Head(msgspec.Struct, frozen=True):
    """The first line."""

    format: int
    asked: str
    """Digest of what decides the answers: rows, sampling, producer, reward, seed, weights."""


_FORMAT = 1
_encoder = msgspec.json.Encoder()


class SetStore:
    """The records of one set at one version; made by `open_store`."""

    def __init__(self, path: Path, descriptor: int, found: dict[int, ProblemRecord]) -> None:
        self.path = path
        self.found = found
        """By row."""
        self._descriptor = descriptor

    def add(self, record: ProblemRecord) -> None:
        """Store one; a second of its row is left out. Raises OSError."""
        if record.row not in self.found:
            _write(self._descriptor, _encoder.encode(record) + b"\n")
            self.found[record.row] = record

    def sync(self) -> None:
        """Have all of them on disk."""
        os.fsync(self._descriptor)

    def write_result(self, detail: dict[str, object]) -> None:
        """Put the set's result beside them, as JSON."""
        write_private(self.path.with_suffix(".json"), msgspec.json.format(_encoder.encode(detail), indent=2) + b"\n")


@contextlib.contextmanager
def open_store(path: Path, asked: str) -> Generator[SetStore]:
    """Hold the records at `path`, with those that are there already, unless they were asked for otherwise: then they are set aside.

    Args:
        path: `<set>.jsonl`.
        asked: digest of what decides the answers.

    Raises:
        LaunchError: another process holds them.
        OSError: they cannot be read or written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LaunchError(
                f"expected nobody else to evaluate here, another process holds {path}",
                hint="wait for it, or for `streamrl eval` name another --out",
                path=str(path),
            ) from error
        yield SetStore(path, descriptor, _read(path, descriptor, asked))
    finally:
        os.close(descriptor)


def _read(path: Path, descriptor: int, asked: str) -> dict[int, ProblemRecord]:
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    first, *lines = whole.split(b"\n")[:-1] or [b""]
    try:
        same = msgspec.json.decode(first, type=_Head) == _Head(_FORMAT, asked)
    except msgspec.MsgspecError:
        same = False
    if not same:
        if lines:
            aside = path.with_suffix(f".{os.stat(path).st_mtime_ns}.jsonl")
            aside.write_bytes(whole)
            logger.warning("event=results_set_aside path=%s reason=asked_otherwise to=%s", path, aside.name)
        os.ftruncate(descriptor, 0)
        _write(descriptor, _encoder.encode(_Head(_FORMAT, asked)) + b"\n")
        return {}
    os.ftruncate(descriptor, len(whole))
    found: dict[int, ProblemRecord] = {}
    for number, line in enumerate(lines, start=2):
        try:
            record = msgspec.json.decode(line, type=ProblemRecord)
        except msgspec.MsgspecError as error:
            logger.warning("event=result_unreadable path=%s line=%d error=%s", path, number, error)
            continue
        found.setdefault(record.row, record)
    return found


def _write(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
