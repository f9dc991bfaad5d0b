"""Versions of a small table, of which what was drawn tells which weights drew it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from streamrl.weights.protocol import Shard

POSITIONS = 3


def write_table(directory: Path, vocab: int = 5) -> Path:
    """Make a model directory of `directory`; the last token ends a completion."""
    directory.mkdir(exist_ok=True)
    (directory / "table.json").write_bytes(msgspec.json.encode({"vocab": vocab, "max_position": POSITIONS, "eos": vocab - 1}))
    return directory


def table(number: int, vocab: int = 5) -> list[Shard]:
    """Logits under which every token is almost surely `number`."""
    logits = np.zeros((POSITIONS, vocab, vocab), np.float32)
    logits[:, :, number] = 50.0
    return [Shard(name="logits", dtype="float32", global_shape=logits.shape, shape=logits.shape, data=logits.reshape(-1).view(np.uint8))]
