"""A branch leaves two files in its directory: `branch.json`, where it comes from, and `ledger.jsonl`. They are read here."""

from __future__ import annotations

from pathlib import Path

import msgspec

from streamrl.errors import SchemaError
from streamrl.runtime.rundir import BRANCH_FILE
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import RUN_ID

LEDGER_FILE = "ledger.jsonl"


class BranchFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of branch.json."""

    branch: str
    parent: str
    """Run that it branches from."""
    parent_version: str
    """Version that it branches at."""
    overrides: tuple[str, ...]
    same_batches: bool
    """True if its batches are the parent's."""
    created_s: float


def read_branch_file(directory: Path) -> BranchFile | None:
    """Read what a branch was trained from; None if the directory is no branch's. Raises SchemaError for a file that cannot be read."""
    path = directory / BRANCH_FILE
    try:
        found = msgspec.json.decode(path.read_bytes(), type=BranchFile)
        if not RUN_ID.fullmatch(found.parent):  # it leads to a directory
            raise msgspec.ValidationError(f"Expected the name of a run as its parent, got {found.parent[:100]!r}")
        return found
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise SchemaError(f"expected a branch's parent in {path}: {error}", hint="run the branch again") from error


def ledger_size(directory: Path) -> int:
    """Bytes of the ledger that a branch has written; 0 while it has none."""
    path = directory / LEDGER_FILE
    return path.stat().st_size if path.is_file() else 0


def read_branch_ledger(directory: Path) -> list[LedgerEntry]:
    """The entries of a branch, in order; raises SchemaError for a line that is none."""
    path = directory / LEDGER_FILE
    return [branch_entry(line, where=f"line {number} of {path}") for number, line in enumerate(path.read_bytes().splitlines(), start=1)]


def branch_entry(line: bytes, *, where: str) -> LedgerEntry:
    """The entry in a line of a branch's ledger; raises SchemaError."""
    try:
        return msgspec.json.decode(line, type=LedgerEntry)
    except msgspec.MsgspecError as error:
        raise SchemaError(f"expected a ledger entry in {where}: {error}", hint="run the branch again") from error
