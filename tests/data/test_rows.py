from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamrl.data.rows import digest, open_rows
from streamrl.errors import DataError
from tests.support.errors import raises

ROWS = [{"prompt": f"{i}+1=", "label": str(i + 1), "metadata": {"n": i}} for i in range(10)]


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def parquet(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=3)
    return path


@pytest.fixture(params=["jsonl", "parquet"])
def path(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize(
    ("suffix", "expected"),
    [
        ("", slice(None)),
        ("@[0:3]", slice(0, 3)),
        ("@[4:]", slice(4, None)),
        ("@[:2]", slice(None, 2)),
        ("@[-3:]", slice(-3, None)),
        ("@[:-4]", slice(None, -4)),
        ("@[-5:-2]", slice(-5, -2)),
        ("@[7:100]", slice(7, 100)),
        ("@[:]", slice(None)),
    ],
)
def test_slices_are_those_of_a_list(path, suffix, expected):
    rows = open_rows(f"{path}{suffix}")
    assert list(rows) == ROWS[expected]
    assert [rows[i] for i in range(len(rows))] == ROWS[expected]
    assert [rows.line(i) for i in range(len(rows))] == list(range(1, 11))[expected]


def test_the_digest_is_of_the_contents(jsonl, parquet, tmp_path):
    spaced = tmp_path / "spaced.jsonl"
    spaced.write_text("\r\n\r\n".join(json.dumps(dict(reversed(row.items())), indent=None) for row in ROWS))
    assert digest(open_rows(str(jsonl))) == digest(open_rows(str(parquet))) == digest(open_rows(str(spaced)))
    assert digest(open_rows(f"{jsonl}@[0:9]")) != digest(open_rows(str(jsonl)))
    assert digest(open_rows(f"{jsonl}@[1:3]")) == digest(open_rows(f"{parquet}@[1:3]"))


def test_the_digest_depends_on_order_and_values(tmp_path):
    def of(rows):
        path = tmp_path / "one.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return digest(open_rows(str(path)))

    assert len({of(ROWS), of(ROWS[::-1]), of([*ROWS[:-1], {**ROWS[-1], "label": "x"}]), of(ROWS[:-1])}) == 4


def test_files_of_any_ending_and_of_none(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\n{"a": 2}')
    assert list(open_rows(str(path))) == [{"a": 1}, {"a": 2}]
    path.write_text('{"a": 1}\n{"a":\n{"a": 2}\n3\n')
    with raises(DataError, path=str(path), line=2, bad=2):
        open_rows(str(path))
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 not really")
    for name in ("none.jsonl", "rows.parquet"):
        with raises(DataError, path=str(tmp_path / name)):
            open_rows(str(tmp_path / name))


@pytest.mark.parametrize("broken", ['{"prompt": "1', "[1, 2]", "3", '{"a": 1} {"b": 2}', '{"a": "\udcff"}'])
def test_a_broken_line_is_named(tmp_path, broken):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(f'{{"prompt": "1"}}\n\n{broken}\n{{"prompt": "2"}}\n'.encode(errors="surrogateescape"))
    with raises(DataError, path=str(path), line=3):
        open_rows(str(path))
    assert list(open_rows(f"{path}@[0:1]")) == [{"prompt": "1"}]


def test_no_rows(jsonl, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    for text in (f"{jsonl}@[10:]", f"{jsonl}@[5:5]", str(tmp_path / "empty.jsonl")):
        with raises(DataError, path=text.partition("@")[0], rows=0):
            open_rows(text)
