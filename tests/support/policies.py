"""A table engine whose every answer is known beforehand, so that a test can say exactly what must come out."""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import numpy as np

from streamrl.config.tree import EngineConfig
from streamrl.data.model import write_table
from streamrl.data.tokenizer import Tokenizer, load_tokenizer
from streamrl.engines.batching.delays import TokenDelay
from streamrl.engines.table.engine import TableEngine
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import PartRef
from streamrl.weights.manifest import Content, build
from streamrl.weights.protocol import Part, Shard

POSITIONS = 8
SURE = 30.0
"""Logit of the scripted token; all others are 0."""


def make_model(directory: Path) -> Tokenizer:
    write_table(directory, max_position=POSITIONS)
    return load_tokenizer(directory)


def script(tokenizer: Tokenizer, answers: Mapping[tuple[int, str], str], *, otherwise: str = "<|end|>") -> np.ndarray:
    """Logits [P, V, V] under which token `answers[position, previous]` is sampled almost surely, else `otherwise`."""
    vocab = 104
    logits = np.zeros((POSITIONS, vocab, vocab), np.float32)
    logits[:, :, tokenizer.encode(otherwise)[0]] = SURE
    for (position, previous), answer in answers.items():
        row = logits[position, tokenizer.encode(previous)[0]]
        row[:] = 0.0
        row[tokenizer.encode(answer)[0]] = SURE
    return logits


async def serve_logits(engine: TableEngine, logits: np.ndarray, version: Version) -> None:
    """Have the engine take and serve `logits` as `version`."""
    data = np.ascontiguousarray(logits).view(np.uint8).reshape(-1)
    shard = Shard(name="logits", dtype="float32", global_shape=logits.shape, offset=(0, 0, 0), data=data, shape=logits.shape)
    manifest = build(Content([shard]), run="run", policy="policy", version=version, parts=[PartRef("all", 0, len(data))], transport="bus")

    async def parts() -> AsyncIterator[Part]:
        yield Part(0, memoryview(data))  # type: ignore[arg-type]

    await engine.stage(manifest, parts())
    await engine.commit(version)


async def start_engine(
    directory: Path, logits: np.ndarray, *, engine_id: str = "table-0", slots: int = 64, delay: TokenDelay | None = None
) -> TableEngine:
    engine = TableEngine(directory, EngineConfig(kind="table", slots=slots), engine_id=engine_id, policy="policy", max_len=256, delay=delay)
    await engine.start()
    await serve_logits(engine, logits, Version(0, 0))
    return engine
