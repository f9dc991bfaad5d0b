"""One trainer on several ranks: rank 0 is a `Trainer` like any other, and has the other ranks do what it does.

```text
rank 0       LiveTrainer, replay or tap -> LeadingTrainer.step(batch) ─┬─> own trainer's step ──┬─> digests agree -> StepResult
                                                    order, batch bytes │     collectives        │
rank r > 0                                 follow: wait for an order <─┴─> own trainer's step ──┘
```
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path

import msgspec

from streamrl.core.batch_bytes import pack, unpack
from streamrl.core.batches import TrainBatch
from streamrl.errors import TrainingError
from streamrl.models.directories import check_files, recover
from streamrl.schemas.versions import Version
from streamrl.tensors.digest import digest_text
from streamrl.trainers.protocol import StepResult, Trainer
from streamrl.trainers.ranks.process_group import ProcessGroup
from streamrl.weights.protocol import Shard

_CHUNK_BYTES = 256 << 20


class Step(msgspec.Struct, frozen=True, tag=True):
    """Order: `Trainer.step`."""

    batch: TrainBatch


class Digest(msgspec.Struct, frozen=True, tag=True):
    """Order: compare parameters."""


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Order: take `Trainer.shards` for `RankOffer`, for rank 0 may publish them."""

    word: str
    version: Version
    kept: tuple[Version, ...]


class Export(msgspec.Struct, frozen=True, tag=True):
    """Order: `Trainer.export`."""

    path: str


class Save(msgspec.Struct, frozen=True, tag=True):
    """Order: `Trainer.save`."""

    path: str
    extra: bytes
    version: Version


class Load(msgspec.Struct, frozen=True, tag=True):
    """Order: `Trainer.load`, after the ranks have told whether they see the path's files."""

    path: str
    files: dict[str, int]
    """Bytes of each file on rank 0, by its path within."""


Order = Step | Digest | Offer | Export | Save | Load
RankOffer = Callable[[str, Version, Sequence[Version], Iterator[Shard]], None]
"""`streamrl.weights.slices.RankPublisher.offer`."""


class LeadingTrainer:
    """Rank 0's trainer and, through orders, everybody else's. Implements `streamrl.trainers.protocol.Trainer`.

    After each step and each load the parameters' digests of all ranks are compared.

    Args:
        own: this rank's trainer.
        group: formed, this process rank 0 of it.

    Raises:
        TrainingError: the ranks began with different parameters. So do all methods when a rank has ended, or hangs for longer than
            `trainer.rank_timeout_s`, or has other parameters than this one; the trainer is of no use then.
    """

    def __init__(self, own: Trainer, group: ProcessGroup) -> None:
        self.own = own
        self._group = group
        self._saved: Future[None] | None = None
        self._agree("at the start", own.digest())

    def step(self, batch: TrainBatch) -> StepResult:
        self._group.order(pack(Step(batch)))
        result = self.own.step(batch)
        self._finish(f"after the step from {batch.version}", result.digest)
        return result

    def digest(self) -> str:
        """Digest of the parameters, the same on all ranks."""
        self._group.order(pack(Digest()))
        digest = self.own.digest()
        self._finish("when asked", digest)
        return digest

    def shards(self) -> Iterator[Shard]:
        """See `Trainer.shards`: those of rank 0."""
        return self.own.shards()

    def offer(self, word: str, version: Version, kept: Sequence[Version]) -> None:
        """Have the other ranks take theirs, too: see `streamrl.weights.slices.RankPublisher.offer`."""
        self._group.order(pack(Offer(word, version, tuple(kept))))
        self._finish()

    def save(self, path: Path, extra: bytes, *, version: Version, beside: Mapping[str, bytes] | None = None) -> Future[None]:
        self._group.order(pack(Save(str(path), extra, version)))
        self._saved = self.own.save(path, extra, version=version, beside=beside)
        self._finish()
        return self._saved

    def load(self, path: Path) -> bytes:
        """See `Trainer.load`. Ranks that do not see the files, being on another host, are sent them."""
        # Once, before all ranks look at the same files: an order that fails on one of them would end all.
        recover(path)
        check_files(path)
        files = _files(path)
        self._group.order(pack(Load(str(path), files)))
        if not all(self._group.gather(1)):
            _send_files(self._group, path, files)
        extra = self.own.load(path)
        self._finish(f"after loading {path}", self.own.digest())
        return extra

    def export(self, path: Path) -> None:
        """See `Trainer.export`; rank 0 alone writes."""
        self._group.order(pack(Export(str(path))))
        self.own.export(path)
        self._finish()

    def close(self) -> None:
        """Let the other ranks end when the last checkpoint is written, and leave the group.

        Call it when nothing else is under way; afterwards this is of no use.
        """
        self._group.dismiss()
        if self._saved is not None:
            wait([self._saved])
        del self.own  # a model that is cut holds the group
        self._group.close()

    def _finish(self, when: str = "", digest: str = "") -> None:
        if digest:
            self._agree(when, digest)
        else:
            self._group.gather(0)
        self._group.done()

    def _agree(self, when: str, digest: str) -> None:
        digests = [digest_text(one) for one in self._group.gather(int(digest, 16))]
        if len(set(digests)) > 1:
            said = ", ".join(f"{one} on rank {rank}" for rank, one in enumerate(digests))
            raise TrainingError(
                f"expected the same parameters on all ranks {when}, got digests {said}",
                hint="do all ranks have the same model directory, checkpoints, torch and kind of device?",
                when=when,
                digests=digests,
            )


def follow(own: Trainer, group: ProcessGroup, offer: RankOffer | None = None) -> None:
    """Do what rank 0 orders until it dismisses this rank.

    Args:
        own: this rank's trainer.
        group: formed.
        offer: gets this rank's part of what rank 0 publishes; None: it has none.

    Raises:
        TrainingError: rank 0 or another one has ended, or an order failed here; this process must end then.
    """
    group.gather(int(own.digest(), 16))
    saved: Future[None] | None = None
    while (body := group.next_order()) is not None:
        order = unpack(body, Order)
        if isinstance(order, Save):
            # What becomes of it is rank 0's to say, which hears of it.
            saved = own.save(Path(order.path), order.extra, version=order.version)
            group.gather(0)
            continue
        digest = _execute(own, group, order, offer)
        group.gather(int(digest, 16) if digest else 0)
    if saved is not None:
        wait([saved])


def _execute(own: Trainer, group: ProcessGroup, order: Step | Digest | Offer | Export | Load, offer: RankOffer | None) -> str:
    """The digest that rank 0 compares; empty where it compares none."""
    match order:
        case Step():
            return own.step(order.batch).digest
        case Digest():
            return own.digest()
        case Offer():
            if offer is not None:
                offer(order.word, order.version, order.kept, own.shards())
        case Export():
            own.export(Path(order.path))
        case Load():
            _load(own, group, order)
            return own.digest()
    return ""


def _load(own: Trainer, group: ProcessGroup, order: Load) -> None:
    seen = _files(Path(order.path)) == order.files
    if all(group.gather(int(seen))):
        own.load(Path(order.path))
        return
    copy = Path(tempfile.mkdtemp(prefix="streamrl-checkpoint-"))
    try:
        _receive_files(group, copy, order.files)
        own.load(copy)
    finally:
        shutil.rmtree(copy)


def _files(path: Path) -> dict[str, int]:
    return {str(file.relative_to(path)): file.stat().st_size for file in sorted(path.rglob("*")) if file.is_file()}


def _send_files(group: ProcessGroup, path: Path, files: dict[str, int]) -> None:
    for name, nbytes in files.items():
        with (path / name).open("rb") as file:
            for first in range(0, nbytes, _CHUNK_BYTES):
                group.send(file.read(min(_CHUNK_BYTES, nbytes - first)))


def _receive_files(group: ProcessGroup, path: Path, files: dict[str, int]) -> None:
    for name, nbytes in files.items():
        target = path / name
        if path not in target.resolve().parents:
            raise TrainingError(f"expected a file within the checkpoint, got {name!r}")
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            for first in range(0, nbytes, _CHUNK_BYTES):
                file.write(group.receive(min(_CHUNK_BYTES, nbytes - first)))
