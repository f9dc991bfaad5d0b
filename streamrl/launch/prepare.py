"""What must be true before the first worker starts: a readable dataset, a model, a run record that fits."""

from __future__ import annotations

import asyncio
import platform
import sys
import time
from importlib import metadata

from streamrl import __version__
from streamrl.bus.protocol import Bus
from streamrl.config.load import dump
from streamrl.config.tree import Config
from streamrl.consumers.training.checkpoints import read_latest
from streamrl.consumers.training.gaps import NEED_CONSENT, find_gap, refusal, versions_made
from streamrl.data.problems import load_problems
from streamrl.data.tokenizer import load_tokenizer
from streamrl.history.replay_log import read_past
from streamrl.launch.build_model import build_model
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.control import RunRecord
from streamrl.schemas.subjects import KEY_ACCEPTED_GAP, TASKS, Subjects


async def prepare(config: Config, run: RunDir) -> RunRecord:
    """Build the model, read both datasets, and return the record that this configuration gives.

    Every row is read here once, so that a broken one is reported before anything runs.

    Raises:
        DataError: a row cannot be used; names the file and the line.
        ConfigError: `model.path` names no model.
        LaunchError: the model cannot be built.
    """
    model = await build_model(config, run)
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


async def check_log(bus: Bus, config: Config, run: RunDir, *, accept_gap: bool) -> list[str]:
    """Compare ledger, checkpoints, newest manifest and task queue before anything starts; returns what people should know.

    A ledger that lost its end is the trainer's to go on from, which also knows what the sample stream still has.

    Raises:
        CannotResume: the ledger has lost more than its end, and `accept_gap` is false.
    """
    subjects, trainer = Subjects(config.run.name), config.trainer.name
    latest = await read_latest(bus, trainer)
    made = await versions_made(bus, subjects, latest, trainer=trainer, run_path=run.path)
    past = await read_past(bus, subjects, trainer)
    newest = max(past.entries, default=0)
    found = find_gap(past.entries, past.gaps, start=newest, made=made, readable=sys.maxsize)
    if found is not None and found[1].lost in NEED_CONSENT:
        if not accept_gap:
            raise refusal(found[1], trainer)
        end = await bus.last(subjects.ledger(trainer))
        await bus.kv.put(KEY_ACCEPTED_GAP, str(end.sequence if end else 0).encode())
    issued = 1 + max((group.task for entry in past.entries.values() for group in entry.used), default=-1)
    queue = await bus.state(TASKS)
    if queue.last < issued:
        return [
            f"the task queue has lost its end: at least {issued} tasks were issued, it has {queue.last}; those between are issued again, "
            "and what they give is dropped as late"
        ]
    return []
