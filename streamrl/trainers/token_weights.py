"""What the trainer gave each token of the newest batches, in the run directory: its own log-prob, importance weight and advantage.

```text
tokens/00000017-e0.arrow     one row a sample: task, rollout, logprobs, weights, advantages [n] each; NaN at tokens that were not trained
```

Files of earlier builds have no advantages.

They are for people and decide nothing. The log has the sampler's log-probs; these are made in the step.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamrl.core.batches import TrainBatch
from streamrl.schemas.versions import Version
from streamrl.trainers.protocol import TokenValues

logger = logging.getLogger(__name__)

FOLDER = "tokens"
_SUFFIX = ".arrow"
_VALUES = ("logprobs", "weights", "advantages")
_SCHEMA = pa.schema([("task", pa.int64()), ("rollout", pa.int64()), *((name, pa.list_(pa.float32())) for name in _VALUES)])
_FORMER_SCHEMA = _SCHEMA.remove(_SCHEMA.get_field_index("advantages"))


class SampleWeights(NamedTuple):
    """Of one sample, [n] float32 each; NaN where a token was not trained."""

    logprobs: npt.NDArray[np.float32]
    """Of the policy under training, at the optimizer step that trained the token."""
    weights: npt.NDArray[np.float32]
    """What the policy loss of the token was multiplied by: 1 without a correction, 0 where it was rejected."""
    advantages: npt.NDArray[np.float32] | None = None
    """None: an earlier build has kept none."""


class TokenWeights:
    """Writes a file a batch in a thread of its own, and removes the oldest. What goes wrong is said once and costs only these files.

    Args:
        folder: `FOLDER` of the run directory; made if it is not there.
        keep_bytes: of all files together; 0: nothing is written.
    """

    def __init__(self, folder: Path, keep_bytes: int) -> None:
        self._folder = folder
        self._keep_bytes = keep_bytes
        self._thread = ThreadPoolExecutor(1, "token-weights")
        self._writing: Future[None] | None = None
        self._failed = False

    def put(self, version: Version, batch: TrainBatch, values: TokenValues) -> None:
        """Write what made a version, unless the file before is still being written: a slow disk stops nobody."""
        if self._keep_bytes and (self._writing is None or self._writing.done()):
            self._writing = self._thread.submit(self._write, version, batch, values)

    def close(self) -> None:
        """Wait for the last file."""
        self._thread.shutdown()

    def _write(self, version: Version, batch: TrainBatch, values: TokenValues) -> None:
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            target = _path(self._folder, version)
            beside = target.with_suffix(".partial")
            options = pa.ipc.IpcWriteOptions(compression="zstd")
            with pa.OSFile(str(beside), "wb") as file, pa.ipc.new_file(file, _SCHEMA, options=options) as writer:
                writer.write_batch(_rows(batch, values))
            os.replace(beside, target)
            self._trim(target)
        except Exception as error:  # whatever it is: nothing depends on these files
            if not self._failed:
                logger.warning("event=token_weights_not_written version=%s error=%s", version, error)
            self._failed = True

    def _trim(self, newest: Path) -> None:
        files = sorted(self._folder.glob(f"*{_SUFFIX}"), reverse=True)
        total = 0
        for file in (newest, *(file for file in files if file != newest)):
            with contextlib.suppress(FileNotFoundError):
                total += file.stat().st_size
                if total > self._keep_bytes and file != newest:
                    file.unlink()


def read_token_weights(folder: Path, version: Version) -> dict[tuple[int, int], list[SampleWeights]]:
    """The samples of each (task, rollout) of the batch that made a version, in order; nothing where there is no file that can be read."""
    try:
        with pa.ipc.open_file(_path(folder, version)) as reader:
            rows = reader.read_all()
    except (OSError, pa.ArrowException):
        return {}
    if rows.schema not in (_SCHEMA, _FORMER_SCHEMA):
        return {}
    found: dict[tuple[int, int], list[SampleWeights]] = {}
    columns = (rows[name].to_pylist() for name in ("task", "rollout"))
    for at, (task, rollout) in enumerate(zip(*columns, strict=True)):
        values = (rows[name][at].values.to_numpy(zero_copy_only=False) for name in rows.column_names[2:])
        found.setdefault((task, rollout), []).append(SampleWeights(*values))
    return found


def logprob_distance(kept: Mapping[tuple[int, int], Sequence[SampleWeights]], batch: TrainBatch, values: TokenValues) -> float | None:
    """The mean distance of log-probs from those that were kept, over tokens that both have trained; None where there are none.

    Args:
        kept: of another trainer, by task and rollout.
        batch: whose samples are looked for among them.
        values: of that batch.
    """
    taken = Counter[tuple[int, int]]()
    distances = [np.empty(0, np.float32)]
    for at, key in enumerate(zip(batch.tasks.tolist(), batch.rollouts.tolist(), strict=True)):
        place, part = taken[key], slice(batch.offsets[at], batch.offsets[at + 1])
        taken[key] += 1
        others = kept.get(key, ())
        if place < len(others) and len(theirs := others[place].logprobs) == batch.lengths[at]:
            ours = values.logprobs[part].astype(np.float32)
            distances.append(np.abs(ours - theirs)[batch.loss_mask[part] & np.isfinite(ours) & np.isfinite(theirs)])
    found = np.concatenate(distances)
    return float(found.mean(dtype=np.float64)) if found.size else None


def shown(values: npt.NDArray[np.float32]) -> Iterator[float | None]:
    """Numbers for people; None where a token was not trained."""
    return (None if math.isnan(value) else round(value, 4) for value in values.tolist())


def _path(folder: Path, version: Version) -> Path:
    return folder / f"{version.number:08d}-e{version.epoch}{_SUFFIX}"


def _rows(batch: TrainBatch, values: TokenValues) -> pa.RecordBatch:
    def column(of_tokens: npt.NDArray[np.float64]) -> pa.Array:
        kept = np.where(batch.loss_mask, of_tokens, np.nan).astype(np.float32)
        return pa.ListArray.from_arrays(pa.array(batch.offsets, pa.int32()), pa.array(kept))

    arrays = [pa.array(batch.tasks), pa.array(batch.rollouts), *(column(getattr(values, name)) for name in _VALUES)]
    return pa.RecordBatch.from_arrays(arrays, schema=_SCHEMA)
