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
│   ├── EngineSilent       a request gets no answer, or one without an end
│   └── EngineUnavailable  the engine cannot be asked; another one can
│       └── EngineDied     its server has ended, or holds mixed weights: a new one is needed
├── RewardError            a server that is asked for a reward gives none
├── ToolError              a tool that a model has called ends its rollout
├── WeightSyncError        a manifest or its bytes cannot be taken
├── TrainingError          a step cannot be taken
│   ├── BatchDiffers       the stream gave another batch than the ledger has
│   ├── Diverged           a replayed step gave other digits than the ledger
│   ├── WeightsDiverged    parameters, or the gradients of many steps, are not finite
│   ├── OutOfMemory        a device has not enough memory for a step
│   └── CheckpointDamaged  a checkpoint is gone, or not what was written
├── CannotResume           checkpoints, ledger and streams do not fit together: somebody has to decide
├── Fenced                 another worker holds this role; this one must exit
└── LaunchError            a worker cannot be started or kept running
```

A message says what was expected, what was got and where; `hint` says what to do. Both survive pickling. What a program decides by is the
class, or an attribute of the class; the rest of `values` is for reports.
"""

from __future__ import annotations

import errno
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


def no_room(error: BaseException) -> StreamRLError | None:
    """The error to show for one of the operating system that says that a disk, or a user's part of it, is full; None for any other."""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    where = f" at {error.filename}" if error.filename else ""
    return LaunchError(
        f"{error.strerror or 'no space left on device'}{where}",
        hint="free some space there, or choose another place with run.dir; `up` goes on from what has been written",
        path=str(error.filename or ""),
    )


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
    """A reader needs messages that the stream no longer holds.

    Args:
        message: see `StreamRLError`.
        hint: see `StreamRLError`.
        needed: sequence of the message that was to be read next; None: the stream is another one altogether.
        first: the lowest sequence that the stream still holds.
        **values: see `StreamRLError`.
    """

    def __init__(self, message: str, *, hint: str = "", needed: int | None = None, first: int | None = None, **values: Any) -> None:
        super().__init__(message, hint=hint, needed=needed, first=first, **values)
        self.needed = needed
        self.first = first


class NotFound(BusError):
    """No such key, blob or message."""


class EngineError(StreamRLError):
    """An engine refused or failed a request."""


class RewardError(StreamRLError):
    """No reward for an episode: its rollout fails."""


class ToolError(StreamRLError):
    """A tool that a model has called failed, where that is to end the rollout."""


class EngineUnavailable(EngineError):
    """An engine cannot be asked at present: it is gone, stopped, or fails whatever it is asked. Another engine can do the same request."""


class EngineSilent(EngineError):
    """An engine does not answer a request, or does not end its answer, while it answers others."""


class EngineDied(EngineUnavailable):
    """An engine is of no use any more: its server has ended, or may hold a mixture of two versions. A new one can take its place."""


class WeightSyncError(StreamRLError):
    """A manifest or the bytes behind it cannot be taken: wrong shape, wrong digest, publisher gone."""


class TrainingError(StreamRLError):
    """A training step cannot be taken."""


class BatchDiffers(TrainingError):
    """The stream gave another batch than the one that a ledger says it gave (G4).

    Args:
        message: see `StreamRLError`.
        hint: see `StreamRLError`.
        version: the version that the ledger's batch made.
        what: the first group that differs, in words.
        sequences: messages of the sample stream that the ledger's batch was made of, rising.
        **values: see `StreamRLError`.
    """

    def __init__(self, message: str, *, hint: str = "", version: str, what: str, sequences: tuple[int, ...], **values: Any) -> None:
        super().__init__(message, hint=hint, version=version, what=what, sequences=sequences, **values)
        self.version = version
        self.what = what
        self.sequences = sequences


class Diverged(TrainingError):
    """A re-derived step gave another digest than its ledger entry; `values` has `version`."""


class WeightsDiverged(TrainingError):
    """The weights under training are of no use any more: training the same again would end in the same way."""


class OutOfMemory(TrainingError):
    """A device has not enough memory for a step, and it cannot be repeated here: the trainer begins again from its checkpoint.

    Args:
        message: see `StreamRLError`.
        hint: see `StreamRLError`.
        micro_tokens: budget of a micro-batch to begin again with; 0: none that is smaller would help.
        number: of the version that the step was to make.
        **values: see `StreamRLError`.
    """

    def __init__(self, message: str, *, hint: str = "", micro_tokens: int = 0, number: int = -1, **values: Any) -> None:
        super().__init__(message, hint=hint, micro_tokens=micro_tokens, number=number, **values)
        self.micro_tokens = micro_tokens
        self.number = number


class CheckpointDamaged(TrainingError):
    """A checkpoint is gone, or its files are not what was written; an older one serves. `values` has `path` and `problem`."""


class CannotResume(StreamRLError):
    """Checkpoints, ledger and streams of a run do not fit together, and going on by itself would hide a loss."""


class Fenced(StreamRLError):
    """Another worker has taken over this role; the one that gets this must stop."""


class LaunchError(StreamRLError):
    """A worker cannot be started, or died too often."""
