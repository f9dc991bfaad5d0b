"""Rows of every format are the same rows, and what cannot be read is refused with what to do about it."""

from __future__ import annotations

import csv
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamrl.config.check_files import check_files
from streamrl.config.tree import Config, DataConfig
from streamrl.data.formats import place_of
from streamrl.data.mapped_rows import blocks_digest, open_first, open_mapped
from streamrl.data.problems import Problem, Unusable, load_problems
from streamrl.data.rows import digest, open_rows
from streamrl.data.streamed import StreamedProblems
from streamrl.errors import DataError
from tests.support.chat_templates import family
from tests.support.errors import raises

ROWS = [{"prompt": f'{i} + 1,\n"{i}" is é?', "label": str(i + 1)} for i in range(9)]


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def as_csv(path: Path, separator: str = ",") -> None:
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        table = csv.DictWriter(file, ["prompt", "label"], delimiter=separator)
        table.writeheader()
        table.writerows(ROWS)


def shards(folder: Path) -> Path:
    folder.mkdir()
    table = pa.Table.from_pylist(ROWS)
    for number, part in enumerate((table.slice(0, 4), table.slice(4))):
        pq.write_table(part, folder / f"train-{number:05}-of-00002.parquet", row_group_size=3)
    return folder


def write(place: Path, kind: str) -> str:
    """ROWS in a format; what names them."""
    path = place / f"rows.{kind}"
    match kind:
        case "json":
            path.write_text(json.dumps(ROWS, indent=2))
        case "lines.json":
            path.write_text(lines(ROWS))
        case "csv" | "tsv":
            as_csv(path, "," if kind == "csv" else "\t")
        case "jsonl.gz":
            path.write_bytes(gzip.compress(lines(ROWS).encode()))
        case "json.gz":
            path.write_bytes(gzip.compress(json.dumps(ROWS).encode()))
        case "csv.gz":
            as_csv(place / "plain.csv")
            path.write_bytes(gzip.compress((place / "plain.csv").read_bytes()))
        case "folder":
            return str(shards(path))
        case _:
            return f"{shards(place / 'data')}/train-*.parquet"
    return str(path)


FORMATS = ["json", "lines.json", "csv", "tsv", "jsonl.gz", "json.gz", "csv.gz", "folder", "pattern"]


@pytest.mark.parametrize("window", ["", "@[2:7]", "@[-3:]"])
@pytest.mark.parametrize("kind", FORMATS)
def test_rows_of_every_format(tmp_path: Path, kind: str, window: str) -> None:
    name, kept = f"{write(tmp_path, kind)}{window}", tmp_path / "kept"
    start, stop = {"": (0, 9), "@[2:7]": (2, 7), "@[-3:]": (6, 9)}[window]
    check_files(Config(data=DataConfig(train=name)))
    rows, mapped = open_rows(name), open_mapped(name, kept)
    assert list(rows) == [mapped.read(row) for row in range(len(mapped))] == ROWS[start:stop]
    assert [rows.line(row) for row in range(len(rows))] == [mapped.line(row) for row in range(len(mapped))]
    assert open_first(name, kept, 2).read(0) == ROWS[start]
    (tmp_path / "same.jsonl").write_text(lines(ROWS))
    assert digest(rows) == digest(open_rows(f"{tmp_path / 'same.jsonl'}{window}"))
    assert (mapped.digest, blocks_digest(name)) == (open_mapped(name, kept).digest, blocks_digest(name))
    assert sorted(mapped.order(1, place, shuffle=True)[1] for place in range(len(mapped))) == list(range(len(mapped)))


def test_lines_of_csv_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('prompt,label\n"a\nb",1\n\nc,\n')
    rows = open_rows(str(path))
    assert list(rows) == [{"prompt": "a\nb", "label": "1"}, {"prompt": "c", "label": None}]
    assert [rows.line(row) for row in range(2)] == [2, 5]


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "rows.jsonl").write_text(lines(ROWS))
    assert list(open_rows("~/rows.jsonl@[:1]")) == ROWS[:1]
    assert len(open_mapped("~/rows.jsonl", tmp_path / "kept")) == 9


def test_a_broken_row_of_a_file_that_is_held_is_one_broken_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"a": 1}\n\n[1]\n{"a": '))
    rows = open_mapped(str(path), tmp_path)
    assert rows.read(0) == {"a": 1}
    for row, line in ((1, 3), (2, 4)):
        with raises(DataError, line=line, path=str(path)):
            rows.read(row)
    with raises(DataError, line=3, bad=2):
        open_rows(str(path))


def two_splits(place: Path) -> str:
    shards(place / "data")
    os.link(place / "data" / "train-00000-of-00002.parquet", place / "data" / "test-00000-of-00001.parquet")
    return str(place / "data")


def two_schemas(place: Path) -> str:
    shards(place / "data")
    pq.write_table(pa.table({"question": ["1"], "label": ["2"]}), place / "data" / "train-00002-of-00003.parquet")
    return f"{place}/data/train-*.parquet"


def two_types(place: Path) -> str:
    shards(place / "data")
    pq.write_table(pa.table({"prompt": ["1"], "label": [2]}), place / "data" / "train-00002-of-00003.parquet")
    return f"{place}/data/train-*.parquet"


def file(name: str, content: bytes) -> Callable[[Path], str]:
    def made(place: Path) -> str:
        (place / name).write_bytes(content)
        return str(place / name)

    return made


def parent(place: Path) -> str:
    shards(place / "data")
    return str(place)


def of_lines(pattern: bool) -> Callable[[Path], str]:
    def made(place: Path) -> str:
        for name in ("a.jsonl", "b.jsonl"):
            (place / name).write_text(lines(ROWS))
        return f"{place}/*.jsonl" if pattern else str(place)

    return made


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (two_splits, "train*.parquet"),
        (two_schemas, "one schema"),
        (two_types, "one schema"),
        (parent, "/data"),
        (of_lines(pattern=False), "cat "),
        (of_lines(pattern=True), "cat "),
        (lambda place: f"{place}/*.parquet", "pattern"),
        (file("rows.jsonl.gz", b""), "completely"),
        (file("rows.jsonl.gz", gzip.compress(b'{"a": 1}' * 99)[:-9]), "completely"),
        (file("rows.csv.gz", b"prompt,label\n"), "without .gz"),
        (file("rows.parquet.gz", b""), "gunzip"),
        (file("rows.tar.gz", b""), "tar xzf"),
        (file("rows.jsonl.zst", b""), "zstd -d"),
        (file("rows.xlsx", b""), "read_excel"),
        (file("rows.csv", b'prompt,label\n"a,1\n'), "quote"),
        (file("rows.csv", b"prompt,prompt\n1,2\n"), "columns"),
        (file("rows.csv", b"prompt,label\n\xe9,1\n"), "iconv"),
        (file("rows.csv", b"prompt,label\n1,2,3\n"), "stands in quotes"),
        (file("rows.csv", b"prompt,label\n"), "slice"),
        (file("rows.csv", b""), "slice"),
        (file("rows.json", b'[{"a": 1}'), "completely"),
        (file("rows.json", b"[]"), "slice"),
        (file("rows.json", b"[1]"), "JSON object"),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_to_do(tmp_path: Path, make: Callable[[Path], str], advice: str) -> None:
    name = make(tmp_path)
    with pytest.raises(DataError) as refusal:
        open_rows(name)
    assert advice in refusal.value.hint
    with pytest.raises(DataError):
        rows = open_mapped(name, tmp_path / "kept")
        rows.read(0)


def test_a_column_may_be_null_in_one_of_the_shards(tmp_path: Path) -> None:
    for number, note in enumerate([None, "x"]):
        pq.write_table(pa.Table.from_pylist([{"prompt": "1", "note": note}]), tmp_path / f"{number}.parquet")
    rows = [{"prompt": "1", "note": None}, {"prompt": "1", "note": "x"}]
    mapped = open_mapped(str(tmp_path), tmp_path / "kept")
    assert list(open_rows(str(tmp_path))) == [mapped.read(row) for row in range(2)] == rows


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {name: {"type": "string"}}}}}
    for name in "ab"
]
CALL = {"id": "1", "type": "function", "function": {"name": "a", "arguments": {"a": "x"}}}
CHATS = [
    {
        "messages": [
            {"role": "user", "content": "2+3?"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "5", "tool_call_id": "1"},
            {"role": "assistant", "content": "5"},
        ],
        "tools": TOOLS,
    },
    {
        "messages": [
            {"role": "system", "content": "s", "name": "x"},
            {"role": "user", "content": "1?"},
            {"role": "assistant", "content": "1"},
        ]
    },
]


@pytest.mark.parametrize("messages_key", ["", "messages"])
def test_the_same_rows_as_parquet_are_the_same_prompts_and_have_the_same_digest(tmp_path: Path, messages_key: str) -> None:
    """Arrow gives each message, each definition and each call all fields that one of them has."""
    (tmp_path / "rows.jsonl").write_text(lines(CHATS))
    pq.write_table(pa.Table.from_pylist(CHATS), tmp_path / "rows.parquet")
    texts = [{**row, "tools": json.dumps(row["tools"])} if "tools" in row else row for row in CHATS]
    (tmp_path / "texts.jsonl").write_text(lines(texts))
    config = DataConfig(messages_key=messages_key, prompt_key="messages", label_key="", tools_key="tools", max_prompt_tokens=4096)
    lined, columns, of_text = (
        load_problems(str(tmp_path / name), config, family("qwen3")) for name in ("rows.jsonl", "rows.parquet", "texts.jsonl")
    )
    assert lined.problems == columns.problems == of_text.problems
    assert lined.problems[0].tools == TOOLS
    assert lined.digest == columns.digest


@pytest.mark.parametrize(
    ("row", "values"),
    [
        ({"label": float("nan")}, {"key": "data.label_key", "got": "NaN"}),
        ({"label": ["1", [float("nan")]]}, {"key": "data.label_key", "got": "NaN"}),
        ({"label": 1 << 64}, {"key": "data.label_key", "got": "int"}),
        ({"label": "1", "metadata": {"n": [-(1 << 63) - 1]}}, {"key": "data.metadata_key", "got": "int"}),
        ({"label": "1", "prompt": [{"role": "user", "content": 7}]}, {"key": "data.prompt_key", "number": 1}),
        ({"label": "1", "tools": "{"}, {"key": "data.tools_key"}),
        ({"label": "1", "tools": float("nan")}, {"key": "data.tools_key"}),
    ],
)
def test_a_value_that_no_task_can_use_is_named_with_its_row(row: dict[str, Any], values: dict[str, Any]) -> None:
    class One:
        path, digest = "file", ""

        def __len__(self) -> int:
            return 1

        def check(self) -> None: ...

        def read(self, _: int) -> dict[str, Any]:
            return {"prompt": "1", **row}

        def line(self, _: int) -> int:
            return 3

    config = DataConfig(metadata_key="metadata", tools_key="tools")
    from streamrl.data.problems import read_problem

    with raises(DataError, path="file", line=3, **values):
        read_problem(One().read(0), config, row_number=0, line=3, path="file")
    [found] = StreamedProblems(One(), config, family("qwen3")).take([0])  # type: ignore[arg-type]
    assert isinstance(found, Unusable) and "file line 3" in found.detail


def test_numbers_that_a_task_can_carry_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(lines([{"prompt": "1", "label": (1 << 64) - 1, "other": 1 << 90}]))
    problems = load_problems(str(path), DataConfig(), family("qwen3"))
    assert isinstance(problems[0], Problem) and problems[0].label == (1 << 64) - 1


@pytest.mark.parametrize(
    ("path", "word"), [("a.jsonl", "line"), ("a.csv.gz", "line"), ("a.parquet", "row"), ("b/*.parquet", "row"), (".", "row")]
)
def test_rows_that_are_no_lines_are_called_rows(path: str, word: str) -> None:
    assert place_of(path, 7) == f"{path} {word} 7"
