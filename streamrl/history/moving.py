"""A trainer that trains each version again on the mesh that it was trained on, since sums over other ranks have other last bits."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import UNSET
from msgspec.structs import asdict, replace

from streamrl.config.tree import Config
from streamrl.core.batches import TrainBatch
from streamrl.history.replay_log import PastLedger
from streamrl.schemas.ledger import TrainedOn
from streamrl.schemas.versions import Version
from streamrl.tensors.mesh import trained_on
from streamrl.trainers.fingerprint import mesh_keys
from streamrl.trainers.protocol import StepResult, Trainer
from streamrl.trainers.ranks.local import open_trainer
from streamrl.weights.protocol import Shard

logger = logging.getLogger(__name__)


class Meshes(NamedTuple):
    """On which mesh each version of a ledger was trained.

    `config`: that of the replay, for versions whose trainer has told nothing. Entries of earlier builds do not say; their fingerprints do.
    """

    config: Config
    past: PastLedger
    told: Mapping[str, Mapping[str, str]]
    """Values of fingerprints by digest."""

    def at(self, number: int) -> Config:
        """The configuration with the mesh of version `number`."""
        entry = self.past.at(number)
        if entry is None:
            return self.config
        if entry.trained_on is not UNSET:
            keys = self._keys(entry.trained_on)
        elif values := self.told.get(entry.fingerprint):
            keys = mesh_keys(values)
        else:
            return self.config
        return replace(self.config, trainer=replace(self.config.trainer, **keys))

    def _keys(self, told: TrainedOn) -> dict[str, Any]:
        """Where entries name no context, one rank had a row; where no backend, it was torch, or the tabular one, alone in its run."""
        unnamed: dict[str, Any] = {"context": 1}
        if not self.config.trainer.tabular:
            unnamed |= {"backend": "torch", "tensor": 1, "experts": 1, "pipeline": 1}
        return unnamed | {key: value for key, value in asdict(told).items() if value is not UNSET}

    def all(self) -> list[Config]:
        """One configuration for each mesh that there is."""
        found = {text: self.at(number) for number in self.past.entries if (text := str(self.at(number).trainer))}
        return list(found.values())


class MovingTrainer:
    """Implements `streamrl.trainers.protocol.Trainer`, as a context manager: a checkpoint is carried from one mesh's ranks to the next's.

    Args:
        config_at: of a version's number.
        model_dir: initial policy.
        first: number of the version that is trained first.
    """

    def __init__(self, config_at: Callable[[int], Config], model_dir: Path, first: int) -> None:
        self._config_at = config_at
        self._model_dir = model_dir
        self._stack = ExitStack()
        self._config = config_at(first)
        self._trainer: Trainer | None = None

    def __enter__(self) -> MovingTrainer:
        self._open(self._config)
        return self

    def __exit__(self, *raised: object) -> bool | None:
        return self._stack.__exit__(*raised)  # pyright: ignore[reportArgumentType]

    def step(self, batch: TrainBatch) -> StepResult:
        config = self._config_at(batch.version.number + 1)
        if config.trainer != self._config.trainer:
            self._move(config, batch.version)
        return self._own.step(batch)

    def digest(self) -> str:
        return self._own.digest()

    def shards(self) -> Iterator[Shard]:
        return self._own.shards()

    def save(self, path: Path, extra: bytes, *, version: Version, beside: Mapping[str, bytes] | None = None) -> Future[None]:
        return self._own.save(path, extra, version=version, beside=beside)

    def load(self, path: Path) -> bytes:
        return self._own.load(path)

    def export(self, path: Path) -> None:
        self._own.export(path)

    @property
    def _own(self) -> Trainer:
        assert self._trainer is not None
        return self._trainer

    def _open(self, config: Config) -> None:
        self._trainer = self._stack.enter_context(open_trainer(config, self._model_dir))
        self._config = config

    def _move(self, config: Config, version: Version) -> None:
        mesh = (f"{key}={value}" for key, value in asdict(trained_on(config.trainer)).items() if value is not UNSET)
        logger.info("event=replay_moves version=%s %s", version, " ".join(mesh))
        with tempfile.TemporaryDirectory(prefix="streamrl-replay-") as folder:
            path = Path(folder) / "at"
            self._own.save(path, b"", version=version).result()
            self._trainer = None
            self._stack.close()
            self._open(config)
            self._own.load(path)
