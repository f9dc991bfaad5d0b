"""Logging of a process: one line per event, `time level worker logger: event=... key=value ...`, secrets masked."""

from __future__ import annotations

import logging
import re
import sys
import time
from pathlib import Path

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
        return mask_secrets(super().formatMessage(record))

    def formatException(self, ei: object) -> str:
        """The traceback with its secrets masked."""
        return mask_secrets(super().formatException(ei))  # type: ignore[arg-type]


def configure_logging(worker: str, *, file: Path | None = None, level: int = logging.INFO, stderr: bool = True) -> None:
    """Send the process's log to stderr, to `file` (appended), or to both; replaces what was set up before.

    A supervised worker logs to stderr alone: the supervisor has pointed that at the worker's file, so that a crash outside
    Python lands in it as well.
    """
    handlers: list[logging.Handler] = []
    if stderr:
        handlers.append(logging.StreamHandler(sys.stderr))
    if file is not None:
        handlers.append(logging.FileHandler(file, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(LineFormatter(worker))
    logging.basicConfig(level=level, handlers=handlers, force=True)
    logging.captureWarnings(True)
