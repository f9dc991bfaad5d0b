from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.errors import LaunchError
from streamrl.producers.evaluation.store import ProblemRecord, SampleRecord, open_store


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "0.3" / "sums.jsonl"


def record(row: int, reward: float | None = 1.0) -> ProblemRecord:
    return ProblemRecord(row=row, samples=(SampleRecord(reward=reward, tokens=3, answer="7", versions=("0.3", "0.3")),))


def test_who_comes_next_finds_what_is_there_and_two_do_not_write_at_once(path: Path) -> None:
    with open_store(path, "a") as store:
        store.add(record(0))
        with pytest.raises(LaunchError, match="another process holds"), open_store(path, "a"):
            pass
        store.add(record(1, None))
    with open_store(path, "a") as store:
        assert store.found == {0: record(0), 1: record(1, None)}


def test_lines_that_are_none_or_of_a_row_that_is_there_are_passed_over(path: Path) -> None:
    with open_store(path, "a") as store:
        store.add(record(0))
        store.add(record(0, 0.0))
    path.write_bytes(path.read_bytes() + b'{"row":0,"samples":[]}\n{"row": "x"}\n\xff\xfe\n' + b'{"row":2,"samples":[]}\n')
    with open_store(path, "a") as store:
        assert store.found == {0: record(0), 2: ProblemRecord(row=2, samples=())}


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_line_that_was_cut_off_is_asked_for_again(path: Path, cut: int) -> None:
    with open_store(path, "a") as store:
        store.add(record(0))
        store.add(record(1))
    path.write_bytes(path.read_bytes()[:-cut])
    with open_store(path, "a") as store:
        assert store.found == {0: record(0)}
        store.add(record(1))
    with open_store(path, "a") as store:
        assert list(store.found) == [0, 1]


@pytest.mark.parametrize(
    "text", ["", "\n", "{}\n", '{"format":1,"asked":"b"}\n{"row":0,"samples":[]}\n', "not json\n", '{"format":2,"asked":"a"}\n']
)
def test_what_was_asked_otherwise_is_set_aside(path: Path, text: str) -> None:
    path.parent.mkdir()
    path.write_text(text)
    with open_store(path, "a") as store:
        assert store.found == {}
        store.add(record(5))
    with open_store(path, "a") as store:
        assert list(store.found) == [5]
    aside = [other for other in path.parent.iterdir() if other != path]
    assert [other.read_text() for other in aside] == ([text] if text.count("\n") > 1 else [])
