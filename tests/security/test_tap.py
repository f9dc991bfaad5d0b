"""A tap beside a real run whose server has one user a role: it gets along with the trainer's rights, and leaves the run alone."""

import asyncio
import signal
from pathlib import Path

import pytest

from streamrl.bus import BusAddress, connect
from streamrl.bus.protocol import Bus
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.ledger import LedgerEntry
from tests.support.harness import read_ledger
from tests.support.role_server import started, trained, until, write_run

pytestmark = [pytest.mark.nats, pytest.mark.slow]


async def entries_of(bus: Bus, trainer: str, number: int, process: asyncio.subprocess.Process, place: Path) -> list[LedgerEntry]:
    """The trainer's ledger, once it has so many entries."""
    async with asyncio.timeout(80):
        while len(found := await read_ledger(bus, "demo", trainer)) < number:
            assert process.returncode is None, (place / "out").read_text()[-3000:]
            await asyncio.sleep(0.2)
    return found


async def test_a_tap_has_the_rights_that_it_needs(tmp_path: Path) -> None:
    toml = write_run(tmp_path, steps=100_000, checkpoint_every=2)
    run = RunDir(tmp_path / "runs" / "demo")
    command = ("tap", "demo", "--name", "shadow", "--lease", "3", "--set", "trainer.optimizer.learning_rate=0.02")
    async with started(("up", str(toml)), tmp_path) as up:
        await until(lambda: trained(tmp_path) >= 2, up, tmp_path)
        assert BusAddress.load(run.bus_path_of("trainer")).user == "trainer"
        # The operator's password is out of reach, as it is on another host.
        hidden = run.bus_path.with_suffix(".hidden")
        reader = BusAddress.load(run.bus_path_of("reader"))
        run.bus_path.rename(hidden)
        bus = await connect(reader, "demo", run.load_config().bus, create=False)
        try:
            async with started(command, tmp_path) as tap:
                await entries_of(bus, "shadow", 10, tap, tmp_path)
                assert await bus.kv.get("positions/shadow") is not None
                tap.send_signal(signal.SIGINT)
                assert await asyncio.wait_for(tap.wait(), 60) == 0, (tmp_path / "out").read_text()[-3000:]
            first = await read_ledger(bus, "demo", "shadow")
            async with started(command, tmp_path) as tap:
                more = await entries_of(bus, "shadow", len(first) + 10, tap, tmp_path)
                tap.send_signal(signal.SIGINT)
                assert await asyncio.wait_for(tap.wait(), 60) == 0, (tmp_path / "out").read_text()[-3000:]
            assert [entry.version.number for entry in more] == list(range(1, len(more) + 1)), "it went on where it had left"
            assert {entry.fence for entry in more} == {1, 2}
            main = await entries_of(bus, "main", len(more), up, tmp_path)
            assert [entry.used for entry in more] == [entry.used for entry in main][: len(more)]
            assert not {entry.digest for entry in more[5:]} & {entry.digest for entry in main}
            assert {entry.fence for entry in main} == {1}
        finally:
            await bus.close()
            hidden.rename(run.bus_path)
        assert up.returncode is None
        said = (tmp_path / "out").read_text() + "".join(path.read_text() for path in run.logs.glob("*.log"))
        assert "orbidden" not in said and "lacks this right" not in said and "ermissions" not in said
