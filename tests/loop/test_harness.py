"""The harness itself: a test whose trainer fails while a service stands still ends, and with the trainer's error."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from streamrl.bus.protocol import Bus
from streamrl.config.tree import Config
from streamrl.errors import TrainingError
from streamrl.runtime.kinds import MAINS
from streamrl.runtime.worker import Worker
from tests.support import harness


async def stand_still(worker: Worker) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("fails", [True, False])
async def test_a_service_that_does_not_drain_hangs_no_test(fails: bool, bus: Bus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "MAINS", {**MAINS, "feeder": f"{__name__}:stand_still"})
    monkeypatch.setattr(harness, "DRAIN_S", 0.05)
    run, config = harness.make_run(tmp_path, Config())
    with pytest.raises(TrainingError if fails else AssertionError) as caught:
        async with harness.services(config, run, bus, ["feeder"]):
            if fails:
                raise TrainingError("the trainer failed")
    assert fails or "feeder" in str(caught.value)
