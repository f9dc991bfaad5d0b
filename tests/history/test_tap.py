"""Taps beside live runs: in process for what they decide, as processes on a real nats-server for what happens when they are killed."""

import asyncio
from pathlib import Path
from typing import Literal

import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from streamrl.bus.protocol import Bus
from streamrl.config.tree import Config
from streamrl.errors import BatchDiffers, ConfigError, Diverged
from streamrl.history.record import record_run
from streamrl.history.tap import TapSettings, tap, tap_config
from streamrl.runtime.lock import lock_run
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.worker import Worker
from streamrl.schemas.codec import decode
from streamrl.schemas.control import Position
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import KEY_LATEST
from tests.support.errors import raises
from tests.support.harness import read_ledger, run_to_end
from tests.support.programs import STREAMRL, Start
from tests.support.recorded_run import FIXED
from tests.support.ups import begun
from tests.support.world.world import World, table_config, world

pytestmark = pytest.mark.process
"""The rewards of these runs are functions, which have processes of their own."""


async def lockstep(base: Path, *taps: TapSettings) -> tuple[list[LedgerEntry], dict[str, list[LedgerEntry]], dict[str, int]]:
    """A lockstep run with taps beside it: its ledger, theirs, and how much there is of what only the run itself may write."""
    fixed: dict[str, dict[str, object]] = {**FIXED, "engine": {"deterministic": True}}
    config = table_config(base, run={"name": "live", "steps": 6}, tasks={"max_staleness": 0}, **fixed)
    async with begun(base, config) as (run, config, bus):
        workers = [Worker(config=config, run_dir=run, bus=bus, kind="trainer", index=n + 1) for n in range(len(taps))]
        async with asyncio.TaskGroup() as group:
            states = [group.create_task(tap(worker, settings)) for worker, settings in zip(workers, taps, strict=True)]
            await run_to_end(config, run, bus)
        ledgers = {settings.name: await read_ledger(bus, "live", settings.name) for settings in taps}
        for state, settings in zip(states, taps, strict=True):
            assert state.result().version == ledgers[settings.name][-1].version
        written = {stream: (await bus.state(stream)).last for stream in ("weights", "dead")}
        return await read_ledger(bus, "live"), ledgers, written


async def test_a_tap_shadows_the_run_and_leaves_it_alone(tmp_path_factory: pytest.TempPathFactory) -> None:
    alone, _, written = await lockstep(tmp_path_factory.mktemp("alone"))
    main, taps, beside = await lockstep(
        tmp_path_factory.mktemp("beside"),
        TapSettings(name="shadow"),
        TapSettings(name="fast", overrides=("trainer.optimizer.learning_rate=0.02",)),
        TapSettings(name="halves", overrides=("tasks.batch_tasks=1", "tasks.max_staleness=2")),
    )
    assert [e.digest for e in main] == [e.digest for e in alone] and len(main) == 6
    assert beside == written, "a tap publishes no weights and publishes nothing"
    assert [e.digest for e in taps["shadow"]] == [e.digest for e in main]
    assert [e.used for e in taps["fast"]] == [e.used for e in main]
    assert not {e.digest for e in taps["fast"]} & {e.digest for e in main}
    assert [g.task for e in taps["halves"] for g in e.used] == [g.task for e in main for g in e.used], "in other portions"
    assert len(taps["halves"]) == 3 * len(main)


async def test_a_tap_that_begins_again_with_other_values_finds_its_ledger(tmp_path: Path) -> None:
    """Its checkpoints are lost, so it trains by its ledger: other batches are refused before they are trained, other digits by numerics."""
    config = table_config(tmp_path, run={"name": "live", "steps": 4}, tasks={"max_staleness": 0}, **FIXED)
    async with begun(tmp_path, config) as (run, config, bus):
        await run_to_end(config, run, bus)

        # One that is behind has no need to wait before it has caught up, and heeds its drain nevertheless.
        worker = Worker(config=config, run_dir=run, bus=bus, kind="trainer", index=1)
        worker.draining.set()
        state = await tap(worker, TapSettings(name="drained", first=1))
        assert state.version.number <= 1  # 1, unless the first record was not there yet when it looked
        assert [entry.version.number for entry in await read_ledger(bus, "live", "drained")] == [*range(1, state.version.number + 1)]

        async def again(*overrides: str, numerics: Literal["bitwise", "fast"] = "bitwise") -> list[LedgerEntry]:
            changed = replace(config, run=replace(config.run, numerics=numerics))
            await bus.kv.delete(f"{KEY_LATEST}/late")
            await tap(Worker(config=changed, run_dir=run, bus=bus, kind="trainer", index=1), TapSettings(name="late", overrides=overrides))
            return await read_ledger(bus, "live", "late")

        first = await again()
        assert len(first) == 4 and await again() == first
        with pytest.raises(BatchDiffers) as differs:
            await again("tasks.batch_tasks=1", "tasks.max_staleness=2")
        assert differs.value.version == "0.1" and "another --name" in differs.value.hint
        faster = "trainer.optimizer.learning_rate=0.02"
        with raises(Diverged, version="0.1"):
            await again(faster)
        forked = await again(faster, numerics="fast")
        assert forked[:4] == first and [str(entry.version) for entry in forked[4:]] == ["1.1", "1.2", "1.3", "1.4"]


def test_names_and_values_that_a_tap_cannot_have() -> None:
    config = Config()
    for name in ("main", "main-2"):
        with pytest.raises(ConfigError, match="begin with 'main-'"):
            tap_config(config, TapSettings(name=name))
    with raises(ConfigError, key="engine.slots"):
        tap_config(config, TapSettings(name="shadow", overrides=("engine.slots=2",)))
    with pytest.raises(ConfigError, match="at least 3 seconds"):
        tap_config(config, TapSettings(name="shadow", lease_s=1))


async def tapping(start: Start, run: RunDir, lease_s: int) -> asyncio.subprocess.Process:
    """`streamrl tap` as a process of its own."""
    with (run.path / "tap.log").open("ab") as log:
        return await start(*STREAMRL, "tap", str(run.path), "--name", "shadow", "--lease", str(lease_s), "--from", "1000000", stderr=log)


async def position(bus: Bus) -> Position | None:
    entry = await bus.kv.get("positions/shadow")
    return decode(entry.value, Position) if entry is not None and entry.value is not None else None


async def newest(bus: Bus, w: World) -> int:
    message = await bus.last(w.subjects.ledger("shadow"))
    return 0 if message is None else decode(message.body, LedgerEntry).version.number


async def until_trained(w: World, number: int, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(80):
        while await newest(w.bus, w) < number:
            assert process.returncode is None, (w.run.path / "tap.log").read_text()[-2000:]
            await held(w.bus)
            await asyncio.sleep(0.05)


async def held(bus: Bus) -> Position | None:
    """The tap's position, below which alone the stream may have been trimmed."""
    mine = await position(bus)
    first = (await bus.state("samples")).first
    assert mine is None or first <= mine.oldest_needed, "trimmed under the tap"
    return mine


@pytest.mark.nats
async def test_a_killed_tap_holds_the_stream_resumes_and_lapses(tmp_path: Path, own_server: object, children: object, start: Start) -> None:
    config = table_config(tmp_path, run={"name": "live", "steps": 100_000}, bus={"samples_bytes": 300_000}, **FIXED)
    async with world(config, own_server, children) as w:  # type: ignore[arg-type]
        # The lock as a supervisor holds it while the run is up.
        with lock_run(w.run):
            async with w.around("engine", "producer", "feeder", "trainer"):
                process = await tapping(start, w.run, 60)
                await until_trained(w, 1, process)
                process.kill()
                await process.wait()
                known = await newest(w.bus, w)
                assert await w.bus.kv.get("latest/shadow") is not None, "it has a checkpoint before its first entry, so that none is lost"
                # Nobody renews the lease now, and it lasts: the stream fills up to what the dead tap needs.
                for _ in range(20):
                    assert await held(w.bus) is not None
                    await asyncio.sleep(0.05)
                process = await tapping(start, w.run, 3)
                await until_trained(w, known + 10, process)
                process.kill()
                await process.wait()
                last = await held(w.bus)
                assert last is not None
                async with asyncio.timeout(80):
                    while (await w.bus.state("samples")).first <= last.oldest_needed:
                        await asyncio.sleep(0.1)
                assert await position(w.bus) is None, "trimming went on because the lease had lapsed"
                recording = await record_run(w.run, tmp_path / "recording", checkpoints=True)
                assert not [key for key in await w.bus.kv.keys("positions/") if "record" in key], "a recording lets go at its end"
                messages = pq.read_table(tmp_path / "recording" / "messages.parquet")
                facts = recording.streams["samples"]
                assert messages.column("sequence").to_pylist() == list(range(facts.first, facts.last + 1))
                shadow = await read_ledger(w.bus, "live", "shadow")
                begin = shadow[0].version.number
                main = {e.version: e for e in await read_ledger(w.bus, "live")}
                assert [e.version.number for e in shadow] == list(range(begin, begin + len(shadow))), "once, without a gap"
                assert all(e.digest == main[e.version].digest and e.used == main[e.version].used for e in shadow)
                assert {e.fence for e in shadow} == {1, 2} and {e.fence for e in main.values()} == {1}
