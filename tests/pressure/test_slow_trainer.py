"""Fast producers and a slow trainer: nothing grows, and a step longer than the ack wait takes no task from anybody."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from streamrl.bus.protocol import Bus
from streamrl.consumers.training import worker as trainer_module
from streamrl.data.model import ensure_model
from streamrl.schemas.codec import decode
from streamrl.schemas.control import Grant
from streamrl.schemas.events import MetricReport
from streamrl.schemas.subjects import KEY_GRANTED, METRICS, TASKS
from tests.support.harness import make_run, read_ledger, run_to_end
from tests.support.world.fuse import Fuse, Wrapped
from tests.support.world.world import table_config

pytestmark = pytest.mark.nats

ACK_WAIT_S = 2.0
LONG_STEP_S = 6.0
SLOW_STEP_S = 0.03
STEPS, LONG_STEP = 16, 6
BATCH, BOUND = 4, 3
WINDOW = (BOUND + 1) * BATCH


class SlowTrainer(Wrapped):
    """A trainer whose steps take their time: one of them three ack waits."""

    steps = 0

    def step(self, batch: Any) -> Any:
        self.steps += 1
        time.sleep(LONG_STEP_S if self.steps == LONG_STEP else SLOW_STEP_S)
        return self.inner.step(batch)


class Gauges:
    """Largest sizes seen while the run went on, and the resident memory at every sample."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.queued = self.outstanding = 0
        self.resident_bytes: list[int] = []

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            self.queued = max(self.queued, (await self._bus.state(TASKS)).messages)
            entry = await self._bus.kv.get(KEY_GRANTED)
            if entry is not None and entry.value:
                grant = decode(entry.value, Grant)
                self.outstanding = max(self.outstanding, grant.granted - grant.retired)
            self.resident_bytes.append(resident_bytes())


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def test_a_slow_trainer(tmp_path: Path, make_nats_bus: Any, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer_module.make_trainer
    monkeypatch.setattr(trainer_module, "make_trainer", lambda *given, **named: SlowTrainer(made(*given, **named), Fuse(None)))
    config = table_config(
        tmp_path,
        run={"name": run_id, "steps": STEPS},
        tasks={"batch_tasks": BATCH, "num_rollouts": 2, "max_staleness": BOUND},
        producer={"concurrency": 64},
        reward={"kind": "random"},
        bus={"ack_wait_s": ACK_WAIT_S},
    )
    nats_bus = await make_nats_bus(config.bus)
    run, config = make_run(tmp_path, config)
    ensure_model(config, run.model_dir)
    gauges = Gauges(nats_bus)
    watching = asyncio.create_task(gauges.watch())
    try:
        await run_to_end(config, run, nats_bus)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    assert 0 < gauges.queued <= WINDOW and 0 < gauges.outstanding <= WINDOW
    settled = max(gauges.resident_bytes[: len(gauges.resident_bytes) // 2])
    assert max(gauges.resident_bytes) < settled + 30e6
    ledger = await read_ledger(nats_bus, run_id)
    assert len(ledger) == STEPS and max(entry.metrics["perf/step_s"] for entry in ledger) >= LONG_STEP_S
    assert {drop.reason for entry in ledger for drop in entry.drops} <= {"zero_variance"}, "a second delivery would be a duplicate, or late"
    assert await redelivered(nats_bus) == 0


async def redelivered(bus: Bus) -> float:
    """Deliveries that were not the first, as the workers have counted them."""
    total, reports, end = 0.0, 0, (await bus.state(METRICS)).last
    async for message in bus.read(METRICS, after=0):
        values = decode(message.body, MetricReport).sum
        reports += "bus/redelivered_total" in values
        total += values.get("bus/redelivered_total", 0.0)
        if message.sequence == end:
            break
    assert reports > 1, "the producer must have reported"
    return total
