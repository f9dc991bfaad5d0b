"""Workers that are not heard, with real processes: who hangs is restarted and says where, who is only busy is left alone."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest

from streamrl.bus import BusAddress
from streamrl.bus.protocol import Bus
from streamrl.config.tree import BusConfig, Config, SuperviseConfig
from streamrl.launch.local import LocalLauncher
from streamrl.launch.supervisor import Supervisor
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode
from streamrl.schemas.control import WorkerPresence
from tests.support.processes import until
from tests.support.runs import named_run

pytestmark = [pytest.mark.nats, pytest.mark.process]

SILENT_S = 3.0


class Watched:
    """A supervisor of one real worker."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.how = ""
        self.notes: list[str] = []
        launcher = LocalLauncher(run, Config(), command=self._command)
        self.supervisor = Supervisor(launcher, SuperviseConfig(silent_s=SILENT_S, backoff_s=0.05), note=self.notes.append)

    def start(self, how: str) -> None:
        self.how = how
        self.supervisor.start("producer", 0)

    @property
    def pid(self) -> int:
        return self.supervisor.children["producer-0"].process.pid

    @property
    def log(self) -> str:
        return self.run.log_path("producer-0").read_text()

    async def tick_until(self, condition: Callable[[], object]) -> None:
        def there() -> object:
            self.supervisor.tick()
            return condition()

        await until(there, within_s=90.0)

    async def restarted(self) -> None:
        await self.tick_until(lambda: self.supervisor.children["producer-0"].restarts)

    def _command(self, kind: str, index: int) -> Sequence[str]:
        return (sys.executable, str(Path(__file__).with_name("hanging_worker.py")), str(self.run.path), str(index), self.how)


@pytest.fixture
async def watched(tmp_path: Path, nats_address: BusAddress, nats_bus: Bus, run_id: str) -> AsyncIterator[Watched]:
    run = named_run(tmp_path / run_id, bus=BusConfig(patience_s=20.0))
    nats_address.save(run.bus_path)
    one = Watched(run)
    yield one
    await one.supervisor.kill_all()


async def runs(bus: Bus) -> bool:
    entry = await bus.kv.get("presence/workers/producer-0")
    return entry is not None and bool(entry.value) and decode(entry.value, WorkerPresence).state == "running"


async def test_a_stopped_worker_is_killed_and_restarted_and_its_stacks_are_in_its_log(watched: Watched, nats_bus: Bus) -> None:
    watched.start("waits")
    while not await runs(nats_bus):
        watched.supervisor.tick()
        await asyncio.sleep(0.05)
    os.kill(watched.pid, signal.SIGSTOP)
    await watched.restarted()
    silent, restarted = watched.notes
    assert "silent for 3 s" in silent and "logs/producer-0.log" in silent
    assert "SIGKILL (silent for 3 s); restart 1" in restarted
    assert "most recent call first" in watched.log


@pytest.mark.parametrize("how", ["blocks", "blocks at once"])
async def test_a_worker_whose_loop_is_blocked_is_restarted_and_its_log_says_where(watched: Watched, how: str) -> None:
    """Also one that blocks before its next beat: it has loaded, and what counts is the time that it may be silent."""
    watched.start(how)
    await watched.restarted()
    assert "silent for 3 s" in watched.notes[0]
    assert "in hold_the_loop" in watched.log
    assert not (watched.run.path / "over").exists()


@pytest.mark.parametrize("how", ["steps", "loads"])
async def test_a_long_step_in_a_thread_and_a_long_load_are_no_silence(watched: Watched, how: str) -> None:
    watched.start(how)
    await watched.tick_until((watched.run.path / "over").exists)
    assert (watched.notes, watched.supervisor.lines()["producer-0"].restarts) == ([], 0)
