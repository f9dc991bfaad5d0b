"""Logging of a process: one line per event, `time level worker logger: event=... key=value ...`, secrets masked."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable
from functools import partial
from logging.handlers import RotatingFileHandler
from pathlib import Path
from types import TracebackType

LOG_BYTES = 16 << 20
"""Largest log of a process; what was before it is in a second file of this size."""
SAME_TRACEBACKS = 5
"""Written a minute; more are counted."""
_MOST_KEYS = 256

_FORMAT = "%(asctime)s %(levelname)-7s {worker} %(name)s: %(message)s"
_URL_PASSWORD = re.compile(r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)[^/@\s]+@")
_NAMED_SECRET = re.compile(
    r"(?P<name>\b(?:password|passwd|token|secret|credentials)\b['\"]?\s*[=:]\s*)(?P<quote>['\"]?)[^\s'\",}]+", re.IGNORECASE
)


def mask_secrets(text: str) -> str:
    """`text` without the user part of URLs and without values named password, passwd, token, secret or credentials."""
    text = _URL_PASSWORD.sub(r"\g<scheme>***@", text)
    return _NAMED_SECRET.sub(r"\g<name>\g<quote>***", text)


class LineFormatter(logging.Formatter):
    """UTC times, secrets masked, and line breaks of messages folded so that one event is one line; a traceback keeps its lines."""

    converter = time.gmtime

    def __init__(self, worker: str) -> None:
        super().__init__(_FORMAT.format(worker=worker))
        self.default_msec_format = "%s.%03dZ"

    def formatMessage(self, record: logging.LogRecord) -> str:
        """One line for the record itself."""
        record.message = " | ".join(record.message.splitlines())
        if left_out := getattr(record, "left_out", 0):
            record.message += f" ({left_out} more like it were not written)"
        return mask_secrets(super().formatMessage(record))

    def formatException(self, ei: object) -> str:
        """The traceback with its secrets masked."""
        return mask_secrets(super().formatException(ei))  # type: ignore[arg-type]


class RepeatedTracebacks(logging.Filter):
    """Lets the same traceback through `most` times in `window_s`; the next one after that says how many were left out.

    Two are the same when logger, type of error and the line that raised it are. A record without a traceback always passes.

    Args:
        most: tracebacks.
        window_s: seconds, on the records' own clock.
    """

    def __init__(self, *, most: int = SAME_TRACEBACKS, window_s: float = 60.0) -> None:
        super().__init__()
        self._most = most
        self._window_s = window_s
        self._seen: dict[tuple[object, ...], tuple[float, int]] = {}
        """When the window began, and how many came in it."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it is written; where others were left out before it, their number becomes the record's `left_out`."""
        if not record.exc_info or record.exc_info[0] is None:
            return True
        key = (record.name, record.msg, record.exc_info[0], _place(record.exc_info[2]))
        began_s, count = self._seen.get(key, (record.created, 0))
        if record.created < began_s + self._window_s:
            self._remember(key, began_s, count + 1)
            return count < self._most
        self._remember(key, record.created, 1)
        if count <= self._most:
            return True
        record.left_out = count - self._most
        return True

    def _remember(self, key: tuple[object, ...], began_s: float, count: int) -> None:
        self._seen.pop(key, None)
        self._seen[key] = (began_s, count)
        if len(self._seen) > _MOST_KEYS:
            del self._seen[next(iter(self._seen))]


def _place(trace: TracebackType | None) -> tuple[str, int]:
    """File and line that raised."""
    if trace is None:
        return "", 0
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename, trace.tb_lineno


def bound_logs(paths: Iterable[Path], *, most_bytes: int = LOG_BYTES) -> None:
    """Move what files above `most_bytes` hold into `<name>.1`, whose former content goes; who has them open appends on.

    Lines that are written meanwhile may be lost. Where the copy cannot be made, the disk being full, there is none.
    """
    for path in paths:
        try:
            if path.stat().st_size <= most_bytes:
                continue
            try:
                shutil.copyfile(path, path.with_name(f"{path.name}.1"))
            except OSError:
                with contextlib.suppress(OSError):
                    path.with_name(f"{path.name}.1").unlink()
            os.truncate(path, 0)
        except OSError as error:
            logging.getLogger(__name__).warning("event=log_not_bounded path=%s error=%s", path, error)


def _unwritten(handler: logging.Handler, record: logging.LogRecord) -> None:
    """A line that finds no room, or nobody to read it, is lost, and is no reason for a traceback in its place."""
    if not isinstance(sys.exc_info()[1], OSError):
        logging.Handler.handleError(handler, record)


def configure_logging(worker: str, *, file: Path | None = None, level: int = logging.INFO, stderr: bool = True) -> None:
    """Send the process's log to stderr, to `file` (appended, at most `LOG_BYTES` and as many in `<file>.1`), or to both.

    Replaces what was set up before. The same traceback is written a few times a minute only.

    A supervised worker logs to stderr alone: the supervisor has pointed that at the worker's file, so that a crash outside
    Python lands in it as well.
    """
    handlers: list[logging.Handler] = []
    if stderr:
        handlers.append(logging.StreamHandler(sys.stderr))
    if file is not None:
        handlers.append(RotatingFileHandler(file, maxBytes=LOG_BYTES, backupCount=1, encoding="utf-8"))
    for handler in handlers:
        handler.addFilter(RepeatedTracebacks())
        handler.setFormatter(LineFormatter(worker))
        handler.handleError = partial(_unwritten, handler)  # type: ignore[method-assign]
    logging.basicConfig(level=level, handlers=handlers, force=True)
    logging.captureWarnings(True)
