"""Several ranks write one checkpoint together, each its own part; rank 0 tells them where, and hears what each has written.

```text
rank 0      begin_directory ─ name ─> writes its part ─────────── hears of all ─> seals, renames
rank r > 0              sees it? <─┴─> writes its part, reads it back ─┘ or, on a host that does not see it, sends it
```
A rank that dies fails what rank 0 waits for, and the directory never gets its name.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import msgspec
import torch
import torch.distributed as dist

from streamrl.errors import StreamRLError, TrainingError
from streamrl.models.directories import Sealed, begin_directory, write_part
from streamrl.tensors.collectives import among_ranks

_CHUNK_BYTES = 256 << 20
_WRITE_S = 3600.0
"""Seconds that one rank's disk may take longer than another's."""


class _Part(msgspec.Struct, frozen=True):
    """The message of a rank to rank 0."""

    files: Sealed = {}
    sent: bool = False
    """True where their bytes follow, in this order."""
    error: str = ""


class Writers:
    """Ranks 0 .. `count` - 1 of the default group, which write checkpoints together; all ranks of that group make one.

    A checkpoint is begun on all of them (`meet`) before the next is; `tell` and `hear` belong to the threads that write.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self.rank = dist.get_rank()
        with among_ranks("the group of those that write checkpoints"):
            # Of its own: it speaks from other threads, while the ranks train.
            group = dist.new_group(list(range(count)), timeout=timedelta(seconds=_WRITE_S), backend="gloo")
        self._group = cast("dist.ProcessGroup", group)

    def meet(self, path: Path) -> tuple[Path, bool]:
        """Begin the checkpoint `path`: the directory to write into, and whether this rank sees it. All ranks of these call it.

        Raises:
            TrainingError: rank 0 cannot make it.
        """
        with among_ranks("the beginning of a checkpoint"):
            if self.rank > 0:
                if not (name := self._receive(0).decode()):
                    raise TrainingError(f"rank 0 cannot write {path}", hint="its log says why")
                return path.with_name(name), path.with_name(name).is_dir()
            name = ""
            try:
                begun = begin_directory(path)
                name = begun.name
                return begun, True
            finally:
                for rank in range(1, self._count):
                    self._send(name.encode(), rank)

    def write(self, begun: Path, folder: str, fill: Callable[[Path], None], *, seen: bool) -> None:
        """Another rank than 0: write its part, and tell rank 0 whatever came of it; raises TrainingError."""
        with ExitStack() as stack:
            try:
                root = begun if seen else Path(stack.enter_context(TemporaryDirectory(prefix="streamrl-checkpoint-")))
                part = _Part(write_part(root, folder, fill), sent=not seen)
            except BaseException as error:
                self._tell(_Part(error=error.message if isinstance(error, StreamRLError) else repr(error)))
                raise
            self._tell(part)
            for name in part.files if part.sent else ():
                with among_ranks("a part of a checkpoint"), (root / name).open("rb") as file:
                    while data := file.read(_CHUNK_BYTES):
                        self._send(data, 0)

    def hear(self, begun: Path) -> tuple[Sealed, Set[str]]:
        """Rank 0: `streamrl.models.directories.Others`. All are heard, so that the next checkpoint finds nothing of this one on its way.

        Raises:
            TrainingError: a rank has ended, or cannot write.
        """
        found: Sealed = {}
        sent: set[str] = set()
        problems: list[str] = []
        with among_ranks("a checkpoint"):
            for rank in range(1, self._count):
                part = msgspec.json.decode(self._receive(rank), type=_Part)
                if part.error:
                    problems.append(f"rank {rank} could not write its part of a checkpoint: {part.error}")
                found |= part.files
                if part.sent:
                    sent |= part.files.keys()
                    problems += filter(None, [self._take(begun, name, one.nbytes, rank) for name, one in part.files.items()])
        if problems:
            raise TrainingError(problems[0], hint=f"its log, logs/trainer-<rank>.log, says more; {begun.name} is removed")
        return found, sent

    def _take(self, begun: Path, name: str, nbytes: int, rank: int) -> str:
        """Write a file that a rank sends, all of which is received whatever the disk says; returns what that was."""
        target = begun / name
        if begun.resolve() not in target.resolve().parents:
            raise TrainingError(f"expected a file within the checkpoint, got {name!r}")
        problem = ""
        while nbytes:
            nbytes -= len(body := self._receive(rank))
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("ab") as file:
                    file.write(body)
            except OSError as error:
                problem = f"cannot write {target}: {error}"
        return problem

    def _tell(self, part: _Part) -> None:
        with among_ranks("a checkpoint"):
            self._send(msgspec.json.encode(part), 0)

    def _send(self, body: bytes, rank: int) -> None:
        dist.send(torch.tensor([len(body)]), rank, self._group)
        if body:
            dist.send(torch.frombuffer(bytearray(body), dtype=torch.uint8), rank, self._group)

    def _receive(self, rank: int) -> bytes:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, rank, self._group)
        found = torch.empty(int(length), dtype=torch.uint8)
        if len(found):
            dist.recv(found, rank, self._group)
        return found.numpy().tobytes()
