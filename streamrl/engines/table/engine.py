"""The `table` engine: a tabular policy without any framework, for problems of a few tokens and for testing everything else."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.config.recording import NOTHING, Recording
from streamrl.config.tree import EngineConfig
from streamrl.engines.batching.buffers import TensorLayout
from streamrl.engines.batching.delays import TokenDelay
from streamrl.engines.batching.engine import BatchingEngine
from streamrl.engines.batching.model import Drawn, Draws
from streamrl.engines.table.sampling import draw
from streamrl.errors import ConfigError

TABLE_FILE = "table.json"
DEFAULT_MAX_LEN = 4096


class TableShape(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `table.json`."""

    vocab: int
    """V"""
    max_position: int
    """P: response positions that are told apart; later ones share the last."""
    eos: int


def read_shape(model_dir: Path) -> TableShape:
    """Read `table.json`; raises ConfigError when it is missing or no table's."""
    path = model_dir / TABLE_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=TableShape)
    except OSError as error:
        raise ConfigError(f"expected {TABLE_FILE} in {model_dir}, got {error}", hint="is it a table run's directory?") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"expected vocab, max_position and eos in {path}, got: {error}", hint="write it anew") from error


class TableModel:
    """Next-token logits [P, V, V] float32 by (response position, previous token); parameter name `logits`.

    A row keeps no state between passes, so rows need not be compact and results never depend on the rest of the batch.
    """

    def __init__(self, shape: TableShape, *, max_len: int, recording: Recording = NOTHING) -> None:
        self._recording = recording
        self.vocab_size = shape.vocab
        self.max_len = max_len
        self.eos_ids = (shape.eos,)
        self.layout: tuple[TensorLayout, ...] = (TensorLayout("logits", "float32", (shape.max_position, shape.vocab, shape.vocab)),)
        self._tables: list[npt.NDArray[np.float32]] = []
        self._active = 0

    def bind(self, buffers: Sequence[npt.NDArray[np.uint8]]) -> None:
        """See `DecodeModel.bind`."""
        only = self.layout[0]
        self._tables = [buffer[: only.nbytes].view(np.float32).reshape(only.shape) for buffer in buffers]

    def prepare(self, index: int) -> None:
        """Nothing is derived from the table."""

    def activate(self, index: int) -> None:
        """See `DecodeModel.activate`."""
        self._active = index

    @contextmanager
    def thread(self) -> Generator[None]:
        """Nothing to set up."""
        yield

    def join(self, rows: Sequence[int], prompts: Sequence[tuple[int, ...]]) -> None:
        """Only the previous token counts, and `step` gets it."""

    def move(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        """Rows have no state here."""

    def experts(self, row: int) -> None:
        """It has none."""

    def step(self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], drawn: npt.NDArray[np.int64], draws: Draws) -> Drawn:
        """See `DecodeModel.step`."""
        table = self._tables[self._active]
        return draw(table[np.minimum(drawn, len(table) - 1), tokens], draws, self._recording)


class TableEngine(BatchingEngine):
    """Engine and weight host over a table; always deterministic.

    Args:
        model_dir: holds `table.json`.
        config: `slots` is used; `threads` and `deterministic` change nothing here.
        engine_id: names this engine.
        policy: name of the policy it serves.
        max_len: longest sequence in tokens.
        delay: artificial time per token.
        recording: what completions say beside their tokens.
    """

    def __init__(
        self,
        model_dir: Path,
        config: EngineConfig,
        *,
        engine_id: str,
        policy: str,
        max_len: int = DEFAULT_MAX_LEN,
        delay: TokenDelay | None = None,
        recording: Recording = NOTHING,
    ) -> None:
        model = TableModel(read_shape(model_dir), max_len=max_len, recording=recording)
        super().__init__(model, slots=config.slots, engine_id=engine_id, policy=policy, model_dir=model_dir, delay=delay)
