"""A branch on the page: where it comes from, and rows made from its own ledger, for it has neither metrics files nor a log."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import Any, BinaryIO

import msgspec

from streamrl.errors import NotFound
from streamrl.history.branch_file import LEDGER_FILE, BranchFile, branch_entry
from streamrl.monitor.decoded import LedgerLine
from streamrl.monitor.series import Row, Series
from streamrl.monitor.trained import drops_of
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import WARMUP_SOURCE

LONGEST_ENTRY = 256 << 20
"""Bytes; no line of a branch's ledger is longer."""


def open_ledger(run: RunDir) -> BinaryIO | None:
    """The ledger of a branch; None where there is no file of it, or a link or something else in its place. Raises OSError."""
    try:
        descriptor = os.open(run.path / LEDGER_FILE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    return os.fdopen(descriptor, "rb")


def entry_at(run: RunDir, place: int) -> LedgerEntry:
    """The entry that begins at a byte of a branch's ledger; raises NotFound, SchemaError."""
    file = open_ledger(run)
    if file is None:
        raise NotFound(f"expected the ledger of branch {run.name!r} in {run.path / LEDGER_FILE}, got none", hint="was it deleted?")
    with file:
        file.seek(place)
        return branch_entry(file.readline(LONGEST_ENTRY), where=f"byte {place} of {run.path / LEDGER_FILE}")


def rows_of(line: bytes, step: int, dropped: int) -> tuple[Row, Mapping[str, float]] | None:
    """Return the row of a batch that a line of a branch's ledger gives, and numbers of the entry; None: it is no entry.

    Before it came `step` batches of reinforcement learning, for which `dropped` rollouts were decided against.
    """
    try:
        entry = msgspec.json.decode(line, type=LedgerLine)
        digest = msgspec.json.decode(line, type=_Digest).digest
        bits = int(digest, 16) if digest else 0
    except (msgspec.MsgspecError, ValueError):
        return None
    series = Series()
    series.batch(entry, step=step + (entry.source != WARMUP_SOURCE), dropped=dropped + sum(drops_of(entry).values()), live=False)
    samples = sum(len(group.rollouts) for group in entry.used)
    numbers = {"version": entry.version.number, "epoch": entry.version.epoch, "time_s": entry.time_s, "samples": samples}
    numbers |= {"tokens": entry.num_tokens, "digest_high": bits >> 32 & 0xFFFFFFFF, "digest_low": bits & 0xFFFFFFFF}
    [row] = series.take()
    return row, {name: float(value) for name, value in numbers.items()}


def parent_of(run: RunDir, branch: BranchFile) -> RunDir:
    """The parent's directory, beside the branch's; it may not be there."""
    return RunDir(run.path.parent / branch.parent)


def told_of(run: RunDir, branch: BranchFile) -> dict[str, Any]:
    """Return what the page says of a branch: its parent, whether that lies beside it, and what is another."""
    here = parent_of(run, branch).config_path.is_file()
    return {**msgspec.to_builtins(branch), "here": here, "ended": run.summary_path.is_file()}


class _Digest(msgspec.Struct, frozen=True):
    digest: str = ""
