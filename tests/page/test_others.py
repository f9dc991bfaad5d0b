import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from streamrl.config.tree import Config, RunConfig, TasksConfig
from streamrl.errors import NotFound
from streamrl.monitor.series import BATCH, WINDOW, Row
from streamrl.page.address import page_folder
from streamrl.page.index import open_index
from streamrl.page.others import Others, rolling_rate
from streamrl.runtime.rundir import RunDir
from tests.page.conftest import batches, page, write


def beside(run: RunDir, name: str, rows: list[Row] | None = None) -> RunDir:
    """Another run of the same directory, of 40 batches."""
    other = RunDir(run.path.parent / name)
    other.create()
    other.write_config(Config(run=RunConfig(name=name, dir=str(run.path.parent)), tasks=TasksConfig(batch_tasks=3)))
    write(other, batches(1, 40, reward=0.25) if rows is None else rows)
    return other


def timed(first: int, last: int, *, every_s: float, tokens: float) -> list[Row]:
    values = {"tokens/trained_total": tokens, "perf/step_time": every_s, "train/loss": 2.0}
    return [
        Row(time_s=1e9 + number * every_s, kind=BATCH, version=f"0.{number}", step=number, values=values)
        for number in range(first, last + 1)
    ]


def contents(path: Path) -> dict[str, tuple[int, bytes]]:
    return {str(one): (one.stat().st_mtime_ns, one.read_bytes()) for one in path.rglob("*") if one.is_file()}


async def test_both_runs_are_there_by_version_and_by_time_and_the_other_one_is_not_changed(run: RunDir) -> None:
    write(run, timed(1, 100, every_s=2.0, tokens=10.0))
    rows = [*timed(1, 50, every_s=1.0, tokens=10.0), Row(time_s=2e9, kind=WINDOW, values={"lag/stream_s": 1.0})]
    other = beside(run, "other", rows)
    before = contents(other.path)
    with open_index(run) as index:
        while index.read_rows():
            pass
        others = Others(run, run.load_config(), index)
        assert others.names() == ["other"]
        found = await others.compare("other", "version")
        assert found.reading is None
        first, second = found.runs
        assert (first.name, first.batches, first.seconds) == ("demo", 100, 198.0)
        assert (second.name, second.batches, second.seconds) == ("other", 50, 49.0)
        assert second.x == list(range(1, 51))
        assert (first.last["throughput"], second.last["throughput"]) == (5.0, 10.0)
        assert (first.last["loss"], first.last["reward"]) == (2.0, None)
        assert ("tasks.batch_tasks", "3") in [(key, value) for key, _, value in found.differences]
        first, second = (await others.compare("other", "elapsed_s")).runs
        assert (first.x[0], first.x[-1], second.x[-1]) == (0.0, 198.0, 49.0)
    assert contents(other.path) == before
    assert set(other.path.iterdir()) == {path for path in other.path.iterdir() if path.name != "page"}


async def test_rows_that_come_later_and_a_run_that_is_deleted_and_made_anew_are_seen(run: RunDir) -> None:
    other = beside(run, "other")
    with open_index(run) as index:
        others = Others(run, run.load_config(), index)
        assert (await others.compare("other", "version")).runs[1].batches == 40
        write(other, batches(41, 45))
        assert (await others.compare("other", "version")).runs[1].batches == 45
        shutil.rmtree(other.path)
        with pytest.raises(NotFound, match="other"):
            await others.compare("other", "version")
        assert not (page_folder(run) / "others" / "other").exists()
        beside(run, "other", batches(1, 7))
        assert (await others.compare("other", "version")).runs[1].batches == 7
    # What a page has left behind is of a run that may be another one by now.
    shutil.rmtree(other.path)
    beside(run, "other", batches(1, 3))
    with open_index(run) as index:
        assert (await Others(run, run.load_config(), index).compare("other", "version")).runs[1].batches == 3


async def test_only_runs_of_the_same_directory_can_be_opened(run: RunDir, tmp_path: Path) -> None:
    elsewhere = RunDir(tmp_path / "elsewhere" / "secret")
    elsewhere.create()
    elsewhere.write_config(Config())
    write(elsewhere, batches(1, 3))
    beside(run, "other")
    (run.path.parent / "linked").symlink_to(elsewhere.path)
    with_links = beside(run, "with-links")
    shutil.rmtree(with_links.metrics)
    with_links.metrics.symlink_to(elsewhere.metrics)
    with_file = beside(run, "with-file")
    (with_file.metrics / "metrics.jsonl").unlink()
    (with_file.metrics / "metrics.jsonl").symlink_to(elsewhere.metrics / "metrics.jsonl")
    with_pipe = beside(run, "with-pipe")
    (with_pipe.metrics / "metrics.jsonl").unlink()
    os.mkfifo(with_pipe.metrics / "metrics.jsonl")
    (run.path.parent / "no-run").mkdir()
    (run.path.parent / "a-file").write_text("x")
    async with page(run) as (base, _, client):
        async with client.get(f"{base}/api/others") as answer:
            assert set(await answer.json()) == {"other", "with-file", "with-pipe"}
        for name in (
            *("linked", "with-links", "with-file", "no-run", "a-file", "demo", "nobody"),
            *("..", "%2e%2e", "..%2Felsewhere%2Fsecret", "x" * 300),
        ):
            async with client.get(f"{base}/api/compare/{name}") as answer:
                assert answer.status == 404, name
        async with client.get(f"{base}/api/compare/with-pipe") as answer:
            assert (answer.status, (await answer.json())["runs"][1]["batches"]) == (200, 0)
        async with client.get(f"{base}/api/compare/other?x=../..") as answer:
            assert answer.status == 400
        async with client.get(f"{base}/api/compare/other?x=elapsed_s") as answer:
            assert (await answer.json())["runs"][1]["values"]["reward"] == [0.25] * 40


async def test_a_configuration_that_cannot_be_read_and_many_runs_leave_the_curves(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    beside(run, "other").config_path.write_text('{"run":{"nobody":1}}')
    with open_index(run) as index:
        found = await Others(run, run.load_config(), index).compare("other", "version")
    assert found.runs[1].batches == 40
    assert "nobody" in found.trouble
    monkeypatch.setattr("streamrl.page.others.MOST_KEPT", 2)
    for name in "abc":
        beside(run, name)
    with open_index(run) as index:
        others = Others(run, run.load_config(), index)
        for name in ("a", "b", "a", "c"):
            await others.compare(name, "version")
        assert {path.name for path in (page_folder(run) / "others").iterdir()} == {"a", "c"}
        assert (await others.compare("b", "version")).runs[1].batches == 40


def test_a_rate_is_taken_over_the_rows_that_have_both_numbers() -> None:
    amounts, seconds = np.array([math.nan, 10.0, 20.0, math.nan, 30.0]), np.array([1.0, 1.0, 0.0, 1.0, 2.0])
    assert [None if math.isnan(one) else one for one in rolling_rate(amounts, seconds, 20).tolist()] == [None, 10.0, None, None, 40 / 3]
    assert rolling_rate(np.full(5, 6.0), np.array([1.0, 1, 1, 2, 2]), 2).tolist() == [6, 6, 6, 4, 3]
    assert rolling_rate(np.empty(0), np.empty(0), 20).tolist() == []
