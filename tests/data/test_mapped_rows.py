"""Rows of each kind of file read one by one are those of the whole file; a pass gives each once; what changes under a run is found out."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamrl.data import mapped_rows
from streamrl.data.mapped_rows import blocks_digest, open_first, open_mapped
from streamrl.data.order import row_of
from streamrl.data.rows import open_rows
from streamrl.errors import DataError
from tests.support.errors import raises
from tests.support.refusals import refused

ROWS = [{"chat": [{"role": "user", "content": f"{i}+1="}], "label": str(i + 1), "more": {"n": i}} for i in range(50)]
KINDS = ["jsonl", "parquet", "arrow", "saved"]


def write(place: Path, kind: str) -> Path:
    table = pa.Table.from_pylist(ROWS)
    path = place / (f"rows.{kind}" if kind != "saved" else "saved")
    match kind:
        case "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        case "parquet":
            pq.write_table(table, path, row_group_size=7)
        case "arrow":
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=7)
        case _:
            path.mkdir()
            files = [f"data-{n:05d}-of-00002.arrow" for n in range(2)]
            for file, part in zip(files, (table.slice(0, 20), table.slice(20)), strict=True):
                with pa.OSFile(str(path / file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                    writer.write_table(part, max_chunksize=7)
            state = {"_data_files": [{"filename": file} for file in files], "_fingerprint": "a", "_split": "train", "_format_type": None}
            (path / "state.json").write_text(json.dumps(state))
            (path / "dataset_info.json").write_text("{}")
    return path


@pytest.fixture(params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write(tmp_path, request.param)


@pytest.mark.parametrize(
    ("window", "expected"), [("", slice(None)), ("@[3:9]", slice(3, 9)), ("@[-10:]", slice(-10, None)), ("@[:5]", slice(5))]
)
def test_they_are_those_of_the_whole_file(path: Path, tmp_path: Path, window: str, expected: slice) -> None:
    rows = open_mapped(f"{path}{window}", tmp_path / "kept")
    assert [rows.read(row) for row in range(len(rows))] == ROWS[expected] == list(open_rows(f"{path}{window}"))
    assert [rows.line(row) for row in range(len(rows))] == list(range(1, 51))[expected]
    for shuffle in (True, False):
        drawn = [rows.order(3, place, shuffle=shuffle) for place in range(120)]
        assert drawn == [row_of(3, place, len(rows), shuffle=shuffle) for place in range(120)]
    first = open_first(f"{path}{window}", tmp_path / "kept", 4)
    assert [first.read(row) for row in range(4)] == ROWS[expected][:4]


@pytest.mark.parametrize("window", ["", "@[3:44]", "@[8:9]"])
def test_windows_of_row_groups_give_each_row_once_a_pass(tmp_path: Path, window: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "parquet")
    monkeypatch.setattr(mapped_rows, "WINDOW_BYTES", 2 * pq.ParquetFile(path).metadata.row_group(0).total_byte_size)
    rows = open_mapped(f"{path}{window}", tmp_path)
    count = len(rows)
    drawn = [rows.order(5, place, shuffle=True) for place in range(3 * count)]
    for turn in range(3):
        of_turn = [row for epoch, row in drawn if epoch == turn]
        assert sorted(of_turn) == list(range(count))
    if count > 40:
        assert drawn[:count] != [(0, row) for _, row in drawn[count : 2 * count]]
        assert len({(rows.line(row) - 1) // 7 for _, row in drawn[:14]}) <= 3, "what follows each other lies in few row groups"
    assert [rows.order(5, place, shuffle=True) for place in (2, 1)] == [drawn[2], drawn[1]]


def test_only_a_window_of_row_groups_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "parquet")
    monkeypatch.setattr(mapped_rows, "WINDOW_BYTES", 2 * pq.ParquetFile(path).metadata.row_group(0).total_byte_size)
    rows: Any = open_mapped(str(path), tmp_path)
    assert [rows.read(row) for row in range(50)] == ROWS
    assert len(rows.held) <= 3


@pytest.mark.parametrize("harm", ["grown", "gone"])
def test_a_file_that_changes_under_the_run_is_named(path: Path, tmp_path: Path, harm: str) -> None:
    rows = open_mapped(str(path), tmp_path / "kept")
    rows.check()
    file = next(path.glob("*.arrow")) if path.is_dir() else path
    if harm == "gone":
        file.unlink()
    else:
        with file.open("ab") as end:
            end.write(b"\n{}")
    with raises(DataError, path=str(file)):
        rows.check()


def test_sampled_blocks_know_contents_and_slice_but_no_path(path: Path, tmp_path: Path) -> None:
    whole = blocks_digest(str(path))
    assert whole != blocks_digest(f"{path}@[1:]")
    path.rename(moved := path.with_name(f"moved{path.suffix}"))
    assert blocks_digest(str(moved)) == whole
    file = next(moved.glob("*.arrow")) if moved.is_dir() else moved
    file.write_bytes(file.read_bytes() + b" ")
    assert blocks_digest(str(moved)) != whole


@pytest.mark.parametrize(
    "state", ["{", "[]", "{}", '{"_data_files": 3}', '{"_data_files": [{"filename": "../rows.arrow"}]}', '{"_data_files": [{}]}']
)
def test_a_state_file_that_names_no_shard_of_its_own_is_refused(tmp_path: Path, state: str) -> None:
    path = write(tmp_path, "saved")
    (path / "state.json").write_text(state)
    with raises(DataError, path=str(path / "state.json") if state == "{" else str(path)):
        open_mapped(str(path), tmp_path)


def test_other_directories_are_refused_with_what_to_do(tmp_path: Path) -> None:
    path = write(tmp_path, "saved")
    with refused(DataError, "save_to_disk", path=str(tmp_path)):
        open_mapped(str(tmp_path), tmp_path)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["saved", "test"]}')
    with refused(DataError, "saved, test", path=str(tmp_path)):
        open_mapped(str(tmp_path), tmp_path)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(state | {"_indices_data_files": [{"filename": "indices.arrow"}]}))
    with refused(DataError, hint="flatten_indices", path=str(path)):
        open_mapped(str(path), tmp_path)
    (path / "state.json").write_text(json.dumps(state))
    (path / "data-00001-of-00002.arrow").write_bytes(b"ARROW1 but no more")
    with raises(DataError, path=str(path / "data-00001-of-00002.arrow")):
        open_mapped(str(path), tmp_path)
    (path / "data-00001-of-00002.arrow").unlink()
    with raises(DataError, path=str(path)):
        open_mapped(str(path), tmp_path)


def test_no_such_file_and_no_rows(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n \n")
    none = [str(tmp_path / name) for name in ("none.jsonl", "none.parquet", "none.arrow", "none")]
    empty = [f"{tmp_path}/empty.jsonl", f"{write(tmp_path, 'jsonl')}@[50:]", f"{write(tmp_path, 'parquet')}@[7:7]"]
    for text in (*none, *empty):
        for opened in (open_mapped, lambda text, kept: open_first(text, kept, 9)):
            with raises(DataError, **({"path": text} if text in none else {"rows": 0})):
                opened(text, tmp_path / "kept")
