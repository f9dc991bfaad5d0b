"""A newest checkpoint that is damaged or gone: the trainer goes back to an older one and says so, and no version comes out otherwise."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from streamrl.history.replay import verify
from tests.support.harness import read_ledger
from tests.support.world.place import place

pytestmark = pytest.mark.whole


def half(path: Path) -> None:
    file = path / "state.npz"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def one_bit(path: Path) -> None:
    """Turn one in the optimizer's moments, which the parameters' digest says nothing about."""
    data = bytearray((path / "state.npz").read_bytes())
    data[data.index(b"mean.npy") + 200] ^= 1
    (path / "state.npz").write_bytes(data)


@pytest.mark.parametrize("damage", [shutil.rmtree, one_bit])
async def test_a_trainer_goes_back_to_an_older_checkpoint_and_says_so(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    async with place(tmp_path) as w:
        await w.train(until=14)
        newest, older, *_ = w.kept
        damage(newest)
        await w.train()
        entries = await read_ledger(w.bus, w.config.run.name)
        assert [str(entry.version) for entry in entries] == [f"0.{n}" for n in range(1, 25)], "nothing was trained otherwise"
        passed, gone_back = await w.said()
        assert newest.name in passed and older.name in gone_back
        report = await verify(w.config, w.bus, w.run.model_dir)
        assert report.ok and report.equal == 24, report.lines


async def test_after_going_back_the_damaged_one_is_not_counted_among_those_that_are_kept(tmp_path: Path) -> None:
    async with place(tmp_path) as w:
        await w.train(until=14)
        newest, older, *_ = w.kept
        half(newest)
        await w.train(until=len(await read_ledger(w.bus, w.config.run.name)) + 1)
        assert not newest.with_name(newest.name + ".damaged").exists(), "there is a newer one"
        latest = await w.latest()
        assert [w.run.path / one.path for one in latest.kept] == w.kept and older in w.kept and len(w.kept) == 3
        half(w.kept[0])
        half(w.kept[1])
        await w.train()
        assert (await verify(w.config, w.bus, w.run.model_dir)).ok


async def test_the_stream_is_held_for_the_oldest_checkpoint_that_is_kept(tmp_path: Path) -> None:
    """Small enough to be trimmed again and again, and large enough for three checkpoints."""
    sizes: dict[str, object] = {"checkpoint_every": 2, "keep_checkpoints": 3}
    async with place(tmp_path, run={"steps": 60}, trainer=sizes, bus={"samples_bytes": 700_000}) as w:
        await w.train(until=50)
        state, latest = await w.bus.state("samples"), await w.latest()
        assert state.first > 1 and len(latest.kept) == 3
        assert min(one.oldest_needed for one in latest.kept) >= state.first
        half(w.kept[0])
        half(w.kept[1])
        oldest = w.kept[2]
        await w.train()
        assert oldest.name in (await w.said())[-1]
        assert len(await read_ledger(w.bus, w.config.run.name)) == 60


async def test_under_pressure_fewer_are_kept_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.consumers.training.checkpoints.LOOK_EVERY_S", 0.02)
    monkeypatch.setattr("streamrl.producers.publishing._FULL_MAX_S", 0.1)
    sizes: dict[str, object] = {"checkpoint_every": 12, "keep_checkpoints": 3}
    async with place(tmp_path, run={"steps": 24}, trainer=sizes, bus={"samples_bytes": 40_000}) as w:
        await w.train()
        latest = await w.latest()
        assert (await w.bus.state("samples")).first > 1
        assert [w.run.path / one.path for one in latest.kept] == w.kept
        assert len(await read_ledger(w.bus, w.config.run.name)) == 24
