"""How readers follow a copy on another process's device: which buckets of a buffer are complete.

Whoever copies writes a mark behind each bucket, in the order of one stream: a mark that can be read stands for bytes that can be. Readers
look at the marks from their host and wait there: nothing on a device waits for a process that may have died.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from streamrl.errors import WeightSyncError
from streamrl.schemas.weights import Copying

MARK_BYTES = 8
MAX_BUCKETS = 4096
PATIENCE_S = 10.0
"""How long a copy may stand still: a bucket takes a millisecond, and the first is complete before anybody hears of the version."""
POLL_S = 0.0002


class Buckets:
    """What is complete of one buffer.

    Args:
        copying: what its owner says.
        look: reads the marks, int64.
        where: version and buffer, for errors.
    """

    def __init__(self, copying: Copying, look: Callable[[], Sequence[int]], *, where: str) -> None:
        self._copying = copying
        self._look = look
        self._where = where
        self._complete = 0
        """Buckets."""

    def wait(self, end: int) -> None:
        """Return when the buffer's bytes before `end` are complete.

        Raises:
            WeightSyncError: the memory holds a newer version, or its owner has stopped copying for `PATIENCE_S`.
        """
        until = time.monotonic() + PATIENCE_S
        while end > (self._copying.ends[self._complete - 1] if self._complete else 0):
            before, self._complete = self._complete, self._count()
            if self._complete == before:
                if time.monotonic() > until:
                    raise WeightSyncError(
                        f"{self._where}: expected {len(self._copying.ends)} buckets to be copied, got {before}, and no more in "
                        f"{PATIENCE_S:g} s",
                        hint="the trainer that copied them has ended, or its device hangs: see its log",
                        buckets=before,
                    )
                time.sleep(POLL_S)
            else:
                until = time.monotonic() + PATIENCE_S

    def _count(self) -> int:
        marks, stamp = self._look(), self._copying.stamp
        if any(mark > stamp for mark in marks):
            raise WeightSyncError(
                f"{self._where}: expected it to stay until it was read, its memory was taken back",
                hint="this engine reads more slowly than the trainer waits; raise weights.ring, or set weights.transport = 'shm'",
                taken_back=self._where,
            )
        return next((index for index, mark in enumerate(marks) if mark != stamp), len(marks))


def check_copying(copying: Copying, nbytes: int, *, where: str) -> None:
    """Raise WeightSyncError unless the buckets make up a buffer's `nbytes` bytes, with the marks behind them."""
    ends = copying.ends
    rising = all(one < other for one, other in zip((0, *ends), ends, strict=False))
    fits = 0 < len(ends) <= MAX_BUCKETS and rising and ends[-1] == nbytes
    if not fits or copying.stamp < 1 or copying.at < nbytes or copying.at % MARK_BYTES:
        raise WeightSyncError(
            f"{where}: expected buckets of {nbytes} bytes with their marks behind them, got {len(ends)} up to {ends[-1:]} and marks at "
            f"{copying.at} that hold {copying.stamp}",
            expected=nbytes,
            buckets=len(ends),
        )
