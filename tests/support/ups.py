"""Runs that begin as `up` has them begin, on one event loop and a bus in this process."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from streamrl.bus.memory import MemoryBus
from streamrl.config.load import load
from streamrl.config.tree import Config
from streamrl.data.model import ensure_model
from streamrl.history.replay import ReplayReport, verify
from streamrl.launch.prepare import prepare
from streamrl.runtime.run_record import with_decay_steps, write_or_check
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.ledger import LedgerEntry
from tests.support.harness import make_run, read_ledger, run_to_end


@asynccontextmanager
async def begun(base: Path, config: Config) -> AsyncGenerator[tuple[RunDir, Config, MemoryBus]]:
    """A run whose model and record are there, in a directory of its own below `base`, and its bus."""
    run, config = make_run(base, config)
    ensure_model(config, run.model_dir)  # which `prepare` would start a process for
    bus = MemoryBus(config.run.name, config.bus)
    try:
        await write_or_check(bus, await prepare(config, run))
        yield run, config, bus
    finally:
        await bus.close()


class Ups:
    """A run from a run file, started again and again: each `up` takes `place/run.toml` as it is then."""

    def __init__(self, place: Path, *settings: str) -> None:
        self.place = place
        self._settings = settings
        first = self.config(1)
        self.name = first.run.name
        self.bus = MemoryBus(self.name, first.bus)
        self._run: RunDir | None = None

    @property
    def run(self) -> RunDir:
        assert self._run is not None, "nothing has been up"
        return self._run

    def config(self, steps: int) -> Config:
        return load(self.place / "run.toml", overrides=[*self._settings, f"run.steps={steps}"])

    async def up(self, steps: int) -> list[str]:
        """To that version; returns what people are told before anything runs."""
        notes = list[str]()
        config = self.config(steps)
        if self._run is not None:
            config, _ = with_decay_steps(config, self._run, trained=True)
        self._run, config = make_run(self.place, config)
        ensure_model(config, self._run.model_dir)
        await write_or_check(self.bus, await prepare(config, self._run, notes.append))
        await run_to_end(config, self._run, self.bus)
        return notes

    async def ledger(self) -> list[LedgerEntry]:
        return await read_ledger(self.bus, self.name)

    async def replayed(self) -> ReplayReport:
        return await verify(self.run.load_config(), self.bus, self.run.model_dir)
