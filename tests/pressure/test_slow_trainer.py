"""Fast producers and a slow trainer: nothing grows, and a step longer than the ack wait takes no task from anybody."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest
from msgspec.structs import replace

from streamrl.bus.protocol import Bus
from streamrl.config.tree import DebugConfig, TasksConfig
from streamrl.consumers.training import worker as trainer_module
from streamrl.consumers.training.reader import RecordReader
from streamrl.data.model import ensure_model
from streamrl.schemas.codec import decode
from streamrl.schemas.control import Grant
from streamrl.schemas.events import MetricReport
from streamrl.schemas.subjects import KEY_GRANTED, METRICS, TASKS
from tests.conftest import MakeBus
from tests.staleness.conftest import table_config
from tests.staleness.slow import SlowTrainer
from tests.support.harness import make_run, read_ledger, run_to_end

pytestmark = pytest.mark.nats

ACK_WAIT_S = 2.0
LONG_STEP_S = 6.0
SLOW_STEP_S = 0.03
STEPS = 25
BATCH, BOUND = 4, 3
WINDOW = (BOUND + 1) * BATCH


def step_s(number: int) -> float:
    """The sixth step is three ack waits long."""
    return LONG_STEP_S if number == 6 else SLOW_STEP_S


class Gauges:
    """Largest sizes seen while the run went on, and the resident memory at every sample."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.queued = self.outstanding = self.read_ahead = 0
        self.resident_bytes: list[int] = []
        self._readers: list[RecordReader] = []

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            self.queued = max(self.queued, (await self._bus.state(TASKS)).messages)
            entry = await self._bus.kv.get(KEY_GRANTED)
            if entry is not None and entry.value:
                grant = decode(entry.value, Grant)
                self.outstanding = max(self.outstanding, grant.granted - grant.retired)
            self._readers = self._readers or [found for found in gc.get_objects() if type(found) is RecordReader]
            self.read_ahead = max([self.read_ahead, *(reader._queue.qsize() for reader in self._readers)])
            self.resident_bytes.append(resident_bytes())


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def test_a_slow_trainer(tmp_path: Path, make_nats_bus: MakeBus, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer_module.make_trainer
    monkeypatch.setattr(trainer_module, "make_trainer", lambda *given, **named: SlowTrainer(made(*given, **named), step_s))
    tasks = TasksConfig(batch_tasks=BATCH, num_rollouts=2, max_staleness=BOUND)
    config = table_config(tmp_path, run_id, steps=STEPS, tasks=tasks, debug=DebugConfig())
    config = replace(config, bus=replace(config.bus, ack_wait_s=ACK_WAIT_S, samples_bytes=200_000_000, blobs_bytes=200_000_000))
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
    assert gauges.queued <= WINDOW and gauges.outstanding <= WINDOW and gauges.read_ahead <= 4 * BATCH
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
