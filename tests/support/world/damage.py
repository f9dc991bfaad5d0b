"""What happens to the disk of a run between its death and its next start: files cut, changed or gone, ends of streams torn off.

```text
<store>/jetstream/RUN/streams/<run>-ledger/msgs/1.blk     length | sequence | time | subject ... | checksum, one message after another
```

A power cut leaves a block that ends in the middle of a message; nats-server goes on from the last whole one, and gives the sequences
behind it again.
"""

import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

from streamrl.models.directories import list_checkpoints
from streamrl.runtime.rundir import RunDir
from tests.support.world.shapes import NAME

MOST = 4
"""Messages that are torn off at most."""
_HEAD = struct.Struct("<IQ")
_LENGTH, _REMOVED = (1 << 31) - 1, 3 << 62
"""Bits of the length that are one; bits of the sequence that say of a record that it is no message."""

Damage = Callable[[RunDir, random.Random], str]
"""Does it, and says what was done; an empty string where there was nothing to damage."""


def newest_checkpoint(run: RunDir) -> Path | None:
    return next((path for _, path in reversed(list_checkpoints(run.checkpoints, "main-"))), None)


def _files(path: Path | None) -> list[Path]:
    files = [file for file in path.rglob("*") if file.is_file() and file.stat().st_size] if path else []
    return sorted(files, key=lambda file: file.stat().st_size)


def cut_checkpoint(run: RunDir, rng: random.Random) -> str:
    """Its largest file ends early."""
    files = _files(newest_checkpoint(run))
    if not files:
        return ""
    data = files[-1].read_bytes()
    files[-1].write_bytes(data[: rng.randrange(len(data))])
    return f"{files[-1].parent.name}/{files[-1].name} was cut"


def flip_checkpoint(run: RunDir, rng: random.Random) -> str:
    """A few bits of its largest file are others."""
    files = _files(newest_checkpoint(run))
    if not files:
        return ""
    data = bytearray(files[-1].read_bytes())
    for place in rng.sample(range(len(data)), min(3, len(data))):
        data[place] ^= 1 << rng.randrange(8)
    files[-1].write_bytes(data)
    return f"{files[-1].parent.name}/{files[-1].name} has other bits"


def remove_checkpoint(run: RunDir, _: random.Random) -> str:
    path = newest_checkpoint(run)
    if path is None:
        return ""
    shutil.rmtree(path)
    return f"{path.name} was removed"


def records(data: bytes) -> list[tuple[int, int]]:
    """Where each record of a block begins, and the sequence of its message; 0 where it is none."""
    found: list[tuple[int, int]] = []
    place = 0
    while place + _HEAD.size <= len(data):
        length, sequence = _HEAD.unpack_from(data, place)
        length &= _LENGTH
        if length < _HEAD.size or place + length > len(data):
            break
        found.append((place, 0 if sequence & _REMOVED else sequence))
        place += length
    return found


def torn(stream: str) -> Damage:
    """The end of a stream's last block is not there: up to `MOST` messages, the first of them in part."""

    def tear(run: RunDir, rng: random.Random) -> str:
        folder = next((run.bus_store / "store").glob(f"jetstream/*/streams/{NAME}-{stream}/msgs"))
        block = max(folder.glob("*.blk"), key=lambda path: int(path.stem))
        data = block.read_bytes()
        messages = [each for each in records(data) if each[1]]
        if len(messages) < 2:
            return ""
        number = rng.randint(1, min(MOST, len(messages) - 1))
        place, sequence = messages[-number]
        block.write_bytes(data[: place + rng.randrange(_HEAD.size)])
        return f"{stream}: {number} messages from sequence {sequence} on were torn off"

    return tear


CHECKPOINTS: dict[str, Damage] = {
    "newest checkpoint cut": cut_checkpoint,
    "newest checkpoint changed": flip_checkpoint,
    "newest checkpoint gone": remove_checkpoint,
}
"""Nothing is lost by these: the run must come out as if there had been none."""
STREAMS: dict[str, Damage] = {
    "end of the ledger torn off": torn("ledger"),
    "end of the samples torn off": torn("samples"),
    "end of the task queue torn off": torn("tasks"),
}
"""By these something is lost: it is named, and the rest is as it was."""
DAMAGES = CHECKPOINTS | STREAMS
