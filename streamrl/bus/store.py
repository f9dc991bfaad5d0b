"""The embedded server's store on disk, where each account has a folder of its own."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from streamrl.bus.accounts import FORMER, RUN
from streamrl.errors import LaunchError

logger = logging.getLogger(__name__)


def move_to_account(store: Path) -> bool:
    """Give the streams of a run that was made before roles had accounts to the account of today; returns whether there were any.

    One rename, so that a crash leaves all of them under the one name or under the other. Call it while no server runs on the store, which
    whoever holds the run's lock knows.

    Raises:
        LaunchError: streams are there under both names, because an earlier version of streamrl was started on a store that had been moved;
            or the folder cannot be renamed.
    """
    former, now = store / "jetstream" / FORMER, store / "jetstream" / RUN
    if not _streams(former):
        return False
    if _streams(now):
        raise LaunchError(
            f"expected one account with streams in {store}, got both {FORMER} and {RUN}",
            hint=f"an earlier version of streamrl was started on this run after it had been resumed by this one, and made empty streams in "
            f"{former}: move that folder away, and start the run again",
        )
    try:
        with contextlib.suppress(FileNotFoundError):
            (now / "streams").rmdir()
        former.rename(now)
        _sync(now.parent)
    except OSError as error:
        raise LaunchError(
            f"cannot rename {former} to {RUN}: {error.strerror}", hint="is the run's directory writable, and is its old server gone?"
        ) from error
    logger.info("event=bus_store_moved store=%s from=%s to=%s", store, FORMER, RUN)
    return True


def _streams(account: Path) -> bool:
    return any((account / "streams").glob("*"))


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
