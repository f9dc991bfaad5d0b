"""What must be true before the first worker starts: a readable dataset, a model, a run record that fits."""

from __future__ import annotations

import asyncio
import platform
import time
from importlib import metadata

from streamrl import __version__
from streamrl.config.load import dump
from streamrl.config.tree import Config
from streamrl.data.model import check_positions
from streamrl.data.problems import load_problems
from streamrl.data.tokenizer import load_tokenizer
from streamrl.launch.build_model import build_model
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.control import RunRecord


async def prepare(config: Config, run: RunDir) -> RunRecord:
    """Build the model, read both datasets, and return the record that this configuration gives.

    Every row is read here once, so that a broken one is reported before anything runs.

    Raises:
        DataError: a row cannot be used; names the file and the line.
        ConfigError: `model.path` names no model, or one with fewer positions than `model.max_len`.
        LaunchError: the model cannot be built.
    """
    model = await build_model(config, run)
    check_positions(config, model)
    tokenizer = load_tokenizer(model)
    train = await asyncio.to_thread(load_problems, config.data.train, config.data, tokenizer)
    if config.data.heldout:
        await asyncio.to_thread(load_problems, config.data.heldout, config.data, tokenizer)
    return RunRecord(
        run=run.name,
        config=dump(config),
        dataset_digest=train.digest,
        num_rows=len(train),
        code_version=__version__,
        fingerprint=machine(),
        created_s=time.time(),
    )


def machine() -> dict[str, str]:
    """Versions and the kind of machine, for people; the trainer writes its own numerics fingerprint into the ledger."""
    packages = ("torch", "transformers", "numpy", "pyarrow", "nats-py")
    versions = {name: metadata.version(name) for name in packages}
    return {"python": platform.python_version(), "system": platform.system(), "machine": platform.machine(), **versions}
