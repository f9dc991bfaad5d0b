"""A newest checkpoint that is damaged or gone: the trainer goes back to an older one and says so, and no version comes out otherwise."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from streamrl.errors import CannotResume, TrainingError
from streamrl.history.replay import verify
from streamrl.runtime.service import Exit
from streamrl.runtime.worker import report_failure
from streamrl.schemas.codec import encode
from streamrl.trainers import checkpoints
from streamrl.trainers.checkpoints import SEAL_FILE
from tests.support.harness import read_ledger
from tests.support.world.place import place


def half(path: Path) -> None:
    file = path / "state.npz"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def one_bit(path: Path) -> None:
    """In the optimizer's moments, which the parameters' digest says nothing about."""
    data = bytearray((path / "state.npz").read_bytes())
    data[data.index(b"mean.npy") + 200] ^= 1
    (path / "state.npz").write_bytes(data)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "gone": shutil.rmtree,
    "a file is gone": lambda path: (path / "state.npz").unlink(),
    "empty": lambda path: (path / "state.npz").write_bytes(b""),
    "cut": half,
    "one bit": one_bit,
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_trainer_goes_back_to_an_older_checkpoint_and_says_so(tmp_path: Path, damage: str) -> None:
    async with place(tmp_path) as w:
        await w.train(until=14)
        newest, older, *_ = w.kept
        DAMAGES[damage](newest)
        await w.train()
        entries = await read_ledger(w.bus, w.config.run.name)
        assert [str(entry.version) for entry in entries] == [f"0.{n}" for n in range(1, 25)], "nothing was trained otherwise"
        passed, gone_back = await w.said()
        assert newest.name in passed and older.name in gone_back
        report = await verify(w.config, w.bus, w.run.model_dir)
        assert report.ok and report.equal == 24, report.lines


async def test_where_all_are_damaged_everything_is_trained_again_from_the_initial_weights(tmp_path: Path) -> None:
    async with place(tmp_path) as w:
        await w.train(until=14)
        for path in w.kept:
            half(path)
        await w.train()
        assert "initial weights" in (await w.said())[-1]
        report = await verify(w.config, w.bus, w.run.model_dir)
        assert report.ok and report.equal == 24, report.lines


async def test_where_the_stream_has_lost_its_beginning_too_it_is_refused_once(tmp_path: Path) -> None:
    async with place(tmp_path) as w:
        await w.train(until=14)
        await w.bus.trim("samples", through=3)
        for path in w.kept:
            half(path)
        for _ in range(2):  # a second start finds them set aside, and says the same
            with pytest.raises(CannotResume) as caught:
                await w.train()
            assert report_failure(caught.value) == Exit.CONFIG, "a restart would fail in the same way"


async def test_a_run_of_an_earlier_build_names_one_checkpoint_and_goes_back_to_another(tmp_path: Path) -> None:
    async with place(tmp_path) as w:
        await w.train(until=14)
        await w.bus.kv.put("latest/main", encode(replace(await w.latest(), older=UNSET)))
        newest, older, *_ = w.kept
        shutil.rmtree(newest)
        for path in w.kept:
            (path / SEAL_FILE).unlink()
        await w.train()
        assert older.name in (await w.said())[-1]
        assert (await verify(w.config, w.bus, w.run.model_dir)).ok


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


async def test_files_that_cannot_be_read_at_the_moment_are_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with place(tmp_path) as w:
        await w.train(until=14)
        kept = w.kept

        def full(path: Path) -> str:
            raise OSError(errno.EMFILE, "Too many open files", str(path))

        with monkeypatch.context() as patch:
            patch.setattr(checkpoints, "file_digest", full)
            with pytest.raises(TrainingError) as caught:
                await w.train()
        assert type(caught.value) is TrainingError and w.kept == kept and await w.said() == []


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


async def test_under_pressure_fewer_are_kept_and_the_run_goes_on(tmp_path: Path) -> None:
    sizes: dict[str, object] = {"checkpoint_every": 20, "keep_checkpoints": 3}
    async with place(tmp_path, run={"steps": 40}, trainer=sizes, bus={"samples_bytes": 40_000}) as w:
        await w.train()
        latest = await w.latest()
        assert (await w.bus.state("samples")).first > 1
        assert [w.run.path / one.path for one in latest.kept] == w.kept
        assert len(await read_ledger(w.bus, w.config.run.name)) == 40
