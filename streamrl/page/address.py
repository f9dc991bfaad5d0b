"""Where the page of a run is served; for those who do not serve it, and need none of what that takes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from streamrl.runtime.rundir import RunDir


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where a page is served, and by which process."""

    pid: int
    address: str


def address_of(run: RunDir, *, pid: int | None = None) -> str:
    """Where the page is served, token included; empty if nobody says so, or (with `pid`) not that process."""
    try:
        found = msgspec.json.decode(address_path(run).read_bytes(), type=Address)
    except (OSError, msgspec.MsgspecError):
        return ""
    return found.address if pid in (None, found.pid) else ""


def address_path(run: RunDir) -> Path:
    """Where who serves it says so."""
    return page_folder(run) / "address.json"


def page_folder(run: RunDir) -> Path:
    """Where the page's own files are."""
    return run.path / "page"
