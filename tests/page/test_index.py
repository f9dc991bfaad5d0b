from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.errors import LaunchError
from streamrl.monitor.metrics_file import CURRENT
from streamrl.monitor.series import WINDOW, Row
from streamrl.page.index import Index, open_index
from streamrl.runtime.rundir import RunDir
from tests.page.conftest import batches, write
from tests.support.rotation import EACH_LISTING, Rotation


def read(index: Index) -> None:
    while index.read_rows():
        pass


def test_rows_are_taken_once_over_restarts_files_that_are_put_aside_and_torn_ends(run: RunDir) -> None:
    # The least size of a file: these rows fill several.
    for first in range(1, 2001, 100):
        write(run, batches(first, first + 99), file_bytes=1 << 16)
        if first % 500 == 1:
            with open_index(run) as index:
                read(index)
    with (run.metrics / CURRENT).open("ab") as file:
        file.write(b'{"time_s":1,"kind":"bat')
    for _ in range(2):
        with open_index(run) as index:
            read(index)
            assert index.columns("batch", ["version"])["version"].tolist() == list(range(1, 2001))
            assert index.newest["rollout/raw_reward"] == 0.5
            progress = index.progress()
            assert 0 < progress.total - progress.done < 100  # the torn line


@EACH_LISTING
def test_rows_are_taken_once_whatever_a_listing_has(run: RunDir, monkeypatch: pytest.MonkeyPatch, rows: int, listing: str) -> None:
    write(run, batches(1, 9))
    files = Rotation(
        run.metrics, monkeypatch, lambda number: batches(number, number)[0], last=9, keep_bytes=1 << 20, rows=rows, listing=listing
    )
    with open_index(run) as index:
        for written in (0, 2, 1, 3, 2):
            files.write(written)
            files.room = 35
            read(index)
        assert index.columns("batch", ["version"])["version"].tolist() == list(range(1, files.number + 1))


def test_a_new_file_with_the_inode_of_one_that_has_gone_is_read_from_its_beginning(run: RunDir) -> None:
    """ext4 gives the inode of the oldest file, which goes, to the next new one."""
    current, gone = run.metrics / CURRENT, run.path / "gone"
    write(run, batches(1, 5))
    with open_index(run) as index:
        read(index)
    current.rename(gone)
    write(run, batches(6, 9))
    current.rename(run.metrics / "metrics-000002.jsonl")
    write(run, batches(10, 30))
    rows = current.read_bytes()
    current.unlink()
    gone.write_bytes(rows)
    gone.rename(current)
    for _ in range(2):
        with open_index(run) as index:
            read(index)
            assert index.columns("batch", ["version"])["version"].tolist() == list(range(1, 31))


def test_a_fork_replaces_batches_that_it_makes_void(run: RunDir) -> None:
    write(run, [*batches(1, 9), *batches(5, 6, epoch=1, reward=1.0)])
    with open_index(run) as index:
        read(index)
        series = index.series("batch", ["rollout/raw_reward"], x="version")
    assert series.x == [1, 2, 3, 4, 5, 6]
    assert series.values["rollout/raw_reward"] == [0.5] * 4 + [1.0] * 2


def test_many_batches_are_thinned_and_no_extreme_is_lost(run: RunDir) -> None:
    rows = batches(1, 10_000)
    rows[7777] = batches(7778, 7778, reward=99.0)[0]
    write(run, rows)
    with open_index(run) as index:
        read(index)
        series = index.series("batch", ["rollout/raw_reward"], x="version", most=500)
    assert len(series.x) == 500
    assert series.rows == 10_000
    assert max(value for value in series.values["rollout/raw_reward"] if value is not None) == 99.0


def test_amounts_of_windows_are_divided_by_the_seconds_between_rows(run: RunDir) -> None:
    name = "tokens/sampled_total"
    times = (0.0, 10.0, 15.0, 15.0, 45.0)
    write(run, [Row(time_s=1e9 + time_s, kind=WINDOW, values={name: 300.0, "lag/stream_s": 2.0}) for time_s in times])
    with open_index(run) as index:
        assert index.rate(WINDOW, name) is None
        read(index)
        rates = index.series(WINDOW, [name, "lag/stream_s"], rates=frozenset({name}))
        assert rates.values == {name: [None, 30.0, 60.0, None, 10.0], "lag/stream_s": [2.0] * 5}
        assert index.series(WINDOW, [name], rates=frozenset({name}), last=2).values[name] == [None, 10.0]
        assert index.series(WINDOW, [name]).values[name] == [300.0] * 5
        assert index.rate(WINDOW, name) == 10.0


def test_no_metrics_and_lines_that_are_no_rows_are_no_tables(run: RunDir) -> None:
    with open_index(run) as index:
        assert not index.read_rows()
        assert (index.tables(), index.progress().total) == ([], 0)
        assert index.series("batch", ["rollout/raw_reward"]).x == []
    write(run, batches(1, 1))
    with (run.metrics / CURRENT).open("ab") as file:
        file.write(b"\xff\xfe\n{}\n[1]\n" + b'{"time_s":1,"kind":"../../x","of":"","version":"0.1","step":1,"rollout/raw_reward":1}\n')
        file.write(b'{"time_s":1,"kind":"window","of":"../../x","version":"0.1","step":1,"rollout/raw_reward":1}\n')
        file.write(b'{"time_s":1,"kind":"window","of":"","version":"x","step":1,"rollout/raw_reward":1}\n')
    before = set(Path(run.path).iterdir())
    with open_index(run) as index:
        read(index)
        assert index.tables() == ["batch"]
    assert set(Path(run.path).iterdir()) - before <= {run.path / "page"}
    with open_index(run), pytest.raises(LaunchError, match="no other page"), open_index(run):
        pass
    with open_index(run):
        pass
