"""What user code prints and logs: lines for the worker's log, with task and rollout in front, and not more than a log can bear."""

from __future__ import annotations

import io
import logging
import time
import traceback
from collections.abc import Callable, Iterator
from typing import BinaryIO

from streamrl.producers.children.frames import Line
from streamrl.telemetry.logs import mask_secrets

LONGEST = 2000
"""Characters of a line; the rest is cut."""
_AT_ONCE = 200
_PER_S = 10.0
_SAME_TRACEBACK_S = 60.0


class LineBudget:
    """Lets 200 lines pass at once and 10 a second after that; what is left out is counted and said."""

    def __init__(self) -> None:
        self._left = float(_AT_ONCE)
        self._at_s = time.monotonic()
        self._num_left_out = 0

    def take(self, line: str) -> Iterator[str]:
        """The line, if it may pass, and before it how many could not."""
        now_s = time.monotonic()
        self._left = min(_AT_ONCE, self._left + (now_s - self._at_s) * _PER_S)
        self._at_s = now_s
        if self._left < 1:
            self._num_left_out += 1
            return
        self._left -= 1
        if self._num_left_out:
            yield f"event=lines_left_out lines={self._num_left_out}"
            self._num_left_out = 0
        yield line if len(line) <= LONGEST else f"{line[:LONGEST]}... ({len(line)} characters)"


class Lines(io.TextIOBase):
    """Stands for sys.stdout and sys.stderr in a child: whole lines go to `put`. User code cannot close it."""

    encoding = "utf-8"

    def __init__(self, put: Callable[[str], None], raw: BinaryIO) -> None:
        self._put = put
        self._rest = ""
        self.buffer = raw
        """For code that writes bytes; they reach the log without a task."""

    def write(self, text: str) -> int:
        """Pass whole lines on, and keep what follows the last of them."""
        *lines, self._rest = (self._rest + str(text)).split("\n")
        if len(self._rest) > LONGEST:
            lines, self._rest = [*lines, self._rest], ""
        for line in lines:
            if line.strip():
                self._put(line)
        return len(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self.buffer.fileno()

    def close(self) -> None:
        """Not closed: others print too."""


class LogLines(logging.Handler):
    """Log records as frames. A traceback is given once a minute, else the message alone."""

    def __init__(self, put: Callable[[Line], None]) -> None:
        super().__init__(logging.INFO)
        self._put = put
        self._seen: dict[tuple[str, str], float] = {}

    def emit(self, record: logging.LogRecord) -> None:
        try:
            error = record.exc_info[1] if record.exc_info else None
            shown = "".join(traceback.format_exception(error))[-8 * LONGEST :] if error is not None and self._is_new(error) else ""
            self._put(Line(record.name, record.levelno, record.getMessage(), shown))
        except Exception:  # as logging itself does: a message that cannot be written is no reason to end
            self.handleError(record)

    def _is_new(self, error: BaseException) -> bool:
        last = traceback.extract_tb(error.__traceback__, limit=-1)
        key = (type(error).__name__, f"{last[0].filename}:{last[0].lineno}" if last else "")
        now_s = time.monotonic()
        if now_s - self._seen.get(key, -_SAME_TRACEBACK_S) < _SAME_TRACEBACK_S:
            return False
        if len(self._seen) > 1000:
            self._seen.clear()
        self._seen[key] = now_s
        return True


def pass_on(line: Line) -> None:
    """A child's line into the log of this process; the child has limited how many there are."""
    name = logging.getLogger(line.logger)
    if name.isEnabledFor(line.level):
        record = name.makeRecord(line.logger, line.level, "", 0, "%s", (line.text,), None)
        record.exc_text = mask_secrets(line.traceback.rstrip()) or None
        name.handle(record)
