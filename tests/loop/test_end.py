"""Keys of a run: its end, written last by its newest trainer, by limits that count over all of them; what is granted never goes down."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from streamrl.bus.memory import MemoryBus
from streamrl.bus.protocol import Bus
from streamrl.config.load import dump
from streamrl.config.tree import Config, RunConfig
from streamrl.consumers.training.ledger import take_fence
from streamrl.consumers.training.loop import raise_grant, trained_s
from streamrl.data.model import ensure_model
from streamrl.errors import Fenced
from streamrl.history.replay import Range, verify
from streamrl.launch.prepare import prepare
from streamrl.runtime.run_end import read_end, read_fence, write_end
from streamrl.runtime.run_record import with_decay_steps, write_or_check
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import Grant, RunEnd
from streamrl.schemas.events import Event
from streamrl.schemas.subjects import EVENTS, KEY_GRANTED, Subjects
from streamrl.schemas.versions import Version
from streamrl.trainers.schedule import learning_rate
from tests.support.errors import raises
from tests.support.harness import make_run, read_ledger, run_to_end
from tests.support.streams import stored
from tests.support.tiny import ledger_entry
from tests.support.world.place import place
from tests.support.world.world import table_config


async def test_a_trainer_that_drains_leaves_no_end_and_one_that_reaches_a_limit_does(tmp_path: Path) -> None:
    """Whoever begins after it takes the end away; it comes back when there is nothing left to train."""
    async with place(tmp_path, run={"steps": 6}) as w:
        await w.train(until=3)
        assert await read_end(w.bus, "main") is None
        await w.train()
        expected = RunEnd(version=Version(0, 6), steps=6, limit="steps", fence=2)
        assert await read_end(w.bus, "main") == expected
        await take_fence(w.bus, "main")
        assert await read_end(w.bus, "main") is None
        await w.train()
        assert await read_end(w.bus, "main") == replace(expected, fence=4)


async def test_seconds_of_training_count_over_all_trainers_of_a_run(tmp_path: Path) -> None:
    async with place(tmp_path, run={"steps": 40}) as w:
        await w.train(until=5)
        made = len(await read_ledger(w.bus, w.config.run.name))
        w.config = replace(w.config, run=replace(w.config.run, max_seconds=1e-6))
        await w.train()
        end = await read_end(w.bus, "main")
        assert end is not None and (end.limit, end.steps) == ("max_seconds", made), "not one more"
        assert any("run.max_seconds" in text for text in await w.said())


@pytest.mark.parametrize(("kind", "seconds"), [("rl", 2 * 1.75), ("sft", 4 * 1.75)])
def test_seconds_of_training_are_those_after_the_first_batch_that_counts(kind: str, seconds: float) -> None:
    times = {"perf/wait_s": 1.5, "perf/step_s": 0.25}
    entries = [replace(ledger_entry("r", number), source="warmup" if number < 3 else "main", metrics=times) for number in (5, 4, 3, 2, 1)]
    assert trained_s(Config(run=RunConfig(kind=kind)), entries) == seconds  # type: ignore[arg-type]
    assert trained_s(Config(), [ledger_entry("r", 1), ledger_entry("r", 2)]) == 0.0, "earlier builds measured none"


async def test_a_trainer_that_has_been_replaced_cannot_end_the_run() -> None:
    bus = MemoryBus("r")
    end = RunEnd(version=Version(0, 6), steps=6, limit="steps", fence=await take_fence(bus, "main"))
    assert await read_fence(bus, "main") == 1
    await take_fence(bus, "main")
    with raises(Fenced, fence=1):
        await write_end(bus, "main", end)
    assert await read_end(bus, "main") is None
    await bus.close()


async def train(config: Config, run: RunDir, bus: MemoryBus, steps: int) -> tuple[Config, str]:
    """Start or resume the run once; return what it ran with and what it says of its schedule."""
    config, text = with_decay_steps(replace(config, run=replace(config.run, steps=steps)), run, trained=True)
    await write_or_check(bus, await prepare(config, run))
    run.write_config(config)
    await run_to_end(config, run, bus)
    return config, text


async def notices(bus: MemoryBus, run: str) -> list[str]:
    found = await stored(bus, EVENTS, Subjects(run).events("notice"))
    return [str(decode(message.body, Event).detail) for message in found]


@pytest.mark.process
async def test_a_run_grows_and_shrinks(tmp_path: Path) -> None:
    optimizer = {"schedule": "cosine", "warmup_steps": 2, "final_fraction": 0.1}
    base = table_config(tmp_path, run={"name": "grows"}, data={"max_prompt_tokens": 16}, trainer={"keep_checkpoints": 100})
    base = replace(base, trainer=replace(base.trainer, optimizer=replace(base.trainer.optimizer, **optimizer)))
    run, base = make_run(tmp_path, base)
    run.config_path.unlink()  # as before the first `up`
    ensure_model(base, run.model_dir)
    bus = MemoryBus("grows", base.bus)
    try:
        first, text = await train(base, run, bus, 4)
        assert (len(await read_ledger(bus, "grows")), text) == (4, "")
        grown, text = await train(base, run, bus, 8)
        assert "over 4 batches" in text
        assert replace(grown, run=first.run) == first, "of what decides only the end is another"
        entries = await read_ledger(bus, "grows")
        peak = base.trainer.optimizer.learning_rate
        expected = [learning_rate(step, peak=peak, warmup_steps=2, total_steps=4, final_fraction=0.1, kind="cosine") for step in range(8)]
        assert [entry.metrics["train/lr"] for entry in entries] == pytest.approx(expected)
        assert expected[4:] == pytest.approx([0.1 * peak] * 4)
        for span in (Range(), Range(first=4, last=6)):
            report = await verify(grown, bus, run.model_dir, checkpoints=run.checkpoints, span=span)
            assert report.ok and report.equal == report.versions, report.lines
        assert not any("ends at once" in text for text in await notices(bus, "grows"))
        shrunk, _ = await train(base, run, bus, 2)
        assert [entry.version for entry in await read_ledger(bus, "grows")] == [entry.version for entry in entries]
        assert any("run.steps is 2, but 8 batches" in text for text in await notices(bus, "grows"))
        report = await verify(shrunk, bus, run.model_dir)
        assert report.ok and report.equal == 8, report.lines
        assert "decay_steps" in dump(shrunk)
    finally:
        await bus.close()


def grant(granted: int) -> Grant:
    return Grant(granted=granted, version=0, retired=0)


async def granted(bus: Bus) -> int:
    entry = await bus.kv.get(KEY_GRANTED)
    assert entry is not None and entry.value is not None
    return decode(entry.value, Grant, where=KEY_GRANTED).granted


async def test_with_its_own_last_revision_a_grant_is_raised_without_asking(bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    revision = await raise_grant(bus, grant(8))

    async def refuse(key: str) -> None:
        raise AssertionError(f"asked for {key}")

    with monkeypatch.context() as patched:
        patched.setattr(type(bus.kv), "get", lambda self, key: refuse(key))
        after = await raise_grant(bus, grant(16), revision=revision)
    assert await granted(bus) == 16 and after is not None and revision is not None and after > revision


@pytest.mark.parametrize(("other", "left"), [(12, 16), (24, 24)])
async def test_what_another_process_has_put_is_seen_and_never_lowered(bus: Bus, other: int, left: int) -> None:
    revision = await raise_grant(bus, grant(8))
    await bus.kv.put(KEY_GRANTED, encode(grant(other)))
    after = await raise_grant(bus, grant(16), revision=revision)
    assert await granted(bus) == left
    await raise_grant(bus, grant(18), revision=after)
    assert await granted(bus) == max(left, 18)


@pytest.mark.parametrize(("version", "expected"), [((1, 3), (1, 3, 24)), ((0, 9), (0, 7, 24))])
async def test_a_new_epoch_is_told_with_all_that_was_granted(bus: Bus, version: tuple[int, int], expected: tuple[int, int, int]) -> None:
    await bus.kv.put(KEY_GRANTED, encode(Grant(24, 7, 12)))
    await raise_grant(bus, Grant(20, version[1], 8, epoch=version[0]))
    entry = await bus.kv.get(KEY_GRANTED)
    assert entry is not None and entry.value is not None
    found = decode(entry.value, Grant)
    assert (found.of_epoch, found.version, found.granted) == expected
