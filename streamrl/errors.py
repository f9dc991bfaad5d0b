"""Every error streamrl raises on purpose, in one tree.

```text
StreamRLError
├── ConfigError            the TOML file, --set, or a file it names
│   └── DataError          a dataset row: names the file and the line
├── SchemaError            bytes or a struct that are not what their header says
├── BusError               the message bus
│   ├── BusUnavailable     cannot be reached, or refused the credentials
│   ├── Forbidden          the credentials lack the right to do this
│   ├── Conflict           compare-and-set lost: somebody else wrote first
│   ├── StreamFull         a byte budget is used up; publishing waits for a trim
│   ├── LogTruncated       a reader needs messages that are no longer there
│   └── NotFound           no such key, blob or message
├── EngineError            generation failed or was refused
├── WeightSyncError        a manifest or its bytes cannot be taken
├── TrainingError          a step cannot be taken
│   └── Diverged           a replayed step gave other digits than the ledger
├── Fenced                 another worker holds this role; this one must exit
└── LaunchError            a worker cannot be started or kept running
```

A message says what was expected, what was got and where; `hint` says what to do. Both survive pickling.
"""

from __future__ import annotations

from typing import Any


class StreamRLError(Exception):
    """Base of all errors raised by streamrl.

    Args:
        message: what was expected, what was got, and where.
        hint: what the reader can do about it; printed on its own line.
        **values: machine-readable details (subject, sequence, path ...), kept in `values`.
    """

    def __init__(self, message: str, *, hint: str = "", **values: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.values = values

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.hint, self.values)


def _rebuild(cls: type[StreamRLError], message: str, hint: str, values: dict[str, Any]) -> StreamRLError:
    return cls(message, hint=hint, **values)


class ConfigError(StreamRLError):
    """The configuration, or a file that it names, cannot be used."""


class DataError(ConfigError):
    """A dataset cannot be read; `values` has `path` and `line` (1-based)."""


class SchemaError(StreamRLError):
    """Bytes are not what their header or schema version says."""


class BusError(StreamRLError):
    """The message bus refused or lost an operation."""


class BusUnavailable(BusError):
    """The bus cannot be reached, or it refused the credentials."""


class Forbidden(BusError):
    """The credentials lack a right; `values` has the `subject` that was refused."""


class Conflict(BusError):
    """A compare-and-set lost; `values` has `expected` and, where known, `actual`."""


class StreamFull(BusError):
    """A stream or blob store has used up its byte budget; nothing was stored."""


class LogTruncated(BusError):
    """A reader needs messages that the stream no longer holds; `values` has `needed` and `first`."""


class NotFound(BusError):
    """No such key, blob or message."""


class EngineError(StreamRLError):
    """An engine refused or failed a request."""


class WeightSyncError(StreamRLError):
    """A manifest or the bytes behind it cannot be taken: wrong shape, wrong digest, publisher gone."""


class TrainingError(StreamRLError):
    """A training step cannot be taken."""


class Diverged(TrainingError):
    """A re-derived step gave another digest than its ledger entry; `values` has `version`."""


class Fenced(StreamRLError):
    """Another worker has taken over this role; the one that gets this must stop."""


class LaunchError(StreamRLError):
    """A worker cannot be started, or died too often."""
