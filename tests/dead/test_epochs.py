"""A restart that forks the epoch says so on the stream; tokens of the new epoch are trained, invented ones are not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.bus.protocol import Bus
from streamrl.config.tree import Config
from streamrl.consumers.training import worker as trainer_service
from streamrl.consumers.training.ledger import open_ledger
from streamrl.consumers.training.reader import open_message
from streamrl.core.records import Forked, Rollouts
from streamrl.data.model import ensure_model
from streamrl.runtime.worker import Worker
from streamrl.schemas.samples import EpochMark
from streamrl.schemas.subjects import SAMPLES, Subjects
from streamrl.trainers.factory import make_trainer
from tests.support.bad_messages import Author, patched
from tests.support.harness import make_run, read_ledger, services
from tests.support.world.world import table_config

FORK_AT = 3


class Unlike:
    """The table trainer; `odd`, it takes other steps from the FORK_AT-th on, as another machine may. It may die at one of its steps."""

    def __init__(self, inner: Any, *, odd: bool = False, dies_at: int = 0) -> None:
        self.inner, self.odd, self.dies_at, self.steps = inner, odd, dies_at, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, batch: Any) -> Any:
        self.steps += 1
        if self.steps == self.dies_at:
            raise RuntimeError("killed")
        return self.inner.step(replace(batch, rewards=-batch.rewards) if self.odd and self.steps >= FORK_AT else batch)


async def test_a_fork_is_marked_and_its_tokens_are_trained(tmp_path: Path, bus: Bus, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config: Config = table_config(
        tmp_path,
        run={"name": run_id, "steps": 16, "numerics": "fast"},
        tasks={"num_rollouts": 2, "batch_tasks": 2},
        trainer={"checkpoint_every": 100},
        reward={"kind": "random"},
    )
    run, config = make_run(tmp_path, config)
    ensure_model(config, run.model_dir)

    async def train(**options: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(trainer_service, "make_trainer", lambda *given, **named: Unlike(make_trainer(*given, **named), **options))
            async with asyncio.timeout(60):
                await trainer_service.main(Worker(config=config, run_dir=run, bus=bus, kind="trainer", index=0))

    async with services(config, run, bus, ["engine", "producer", "feeder"]):
        with pytest.raises(RuntimeError, match="killed"):
            await train(dies_at=6)
        invented = Author(0).broken["epoch of the future"]  # epoch 7
        await bus.publish(Subjects(run_id).samples("main"), patched(invented, 0, 0))
        with pytest.raises(RuntimeError, match="killed"):
            await train(odd=True, dies_at=8)
        await train(odd=True)

    entries = await read_ledger(bus, run_id)
    versions = [str(entry.version) for entry in entries]
    assert versions[:5] == ["0.1", "0.2", "0.3", "0.4", "0.5"] and versions[5:] == [f"1.{n}" for n in range(FORK_AT, 17)]
    ledger = await open_ledger(bus, Subjects(run_id), "main")
    assert ledger.forks == (EpochMark(1, FORK_AT, 5),)
    marks, sampled, letters = [], set[int](), [drop for entry in entries for drop in entry.drops if drop.reason == "poison"]
    used = {sequence for entry in entries for group in entry.used for sequence in group.sequences}
    async for message in bus.read(SAMPLES, after=0):
        record = open_message(message).record
        if isinstance(record, Forked):
            marks.append(record)
        if isinstance(record, Rollouts) and message.sequence in used:
            epochs = {epoch for view in record.rollouts for epoch, _, _ in view.epochs}
            assert marks or epochs == {0}, "the mark comes before every token of its epoch"
            sampled |= epochs
        if message.sequence >= entries[-1].cursor:
            break
    assert {(mark.epoch, mark.first, mark.last_before) for mark in marks} == {(1, FORK_AT, 5)}
    assert sampled == {0, 1}
    assert {drop.detail.endswith("got 7.0 to 7.0") for drop in letters} == {True}
