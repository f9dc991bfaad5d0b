"""Tables [[data.sources]]: what they mean, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config.check import check
from streamrl.config.check_data import weight_at
from streamrl.config.load import convert, dump, from_json, load
from streamrl.config.sources import SourceConfig
from streamrl.errors import ConfigError
from tests.support.errors import raises


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "1", "label": "2"}\n')
    return tmp_path


def write(place: Path, *sources: str, data: str = "") -> Path:
    path = place / "run.toml"
    path.write_text(f"[data]\n{data}\n" + "".join(f"[[data.sources]]\n{source}\n" for source in sources))
    return path


A, B = 'name = "a"\ntrain = "a.jsonl"', 'name = "b"\ntrain = "b.jsonl@[0:1]"\nweight = [[0, 1], [10, 0.5]]'


def test_paths_are_relative_to_the_file_and_all_is_recorded(place: Path) -> None:
    config = load(write(place, A, B))
    assert [one.train for one in config.data.sources] == [str(place / "a.jsonl"), f"{place / 'b.jsonl'}@[0:1]"]
    assert from_json(dump(config)) == config


@pytest.mark.parametrize(
    "sources",
    [
        (A, A),
        (A, 'train = "b.jsonl"'),
        ('name = "a b"\ntrain = "a.jsonl"',),
        ('name = "a"',),
        ('name = "a"\ntrain = "none.jsonl"',),
        (f"{A}\nweight = 0",),
        (f"{A}\nweight = nan",),
        (f"{A}\nweight = inf",),
        (f"{A}\nweight = []",),
        (f"{A}\nweight = [[1, 1]]",),
        (f"{A}\nweight = [[0, 1], [5, 2], [5, 3]]",),
        (f"{A}\nweight = [[0, 1], [5, 0]]", 'name = "b"\ntrain = "b.jsonl"\nweight = [[0, 1], [4, 0]]'),
    ],
)
def test_what_is_no_source_is_refused(place: Path, sources: tuple[str, ...]) -> None:
    with raises(ConfigError, key="data.sources") as caught:
        load(write(place, *sources))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("source", "data"),
    [
        (f"{A}\nwieght = 2", ""),
        (f"{A}\nweight = -1", ""),
        (f'{A}\nweight = "x"', ""),
        (f"{A}\nweight = [[0]]", ""),
        (A, "train = 'a.jsonl'"),
        (A, "reading = 'whole'"),
    ],
)
def test_wrong_keys_and_types_are_refused(place: Path, source: str, data: str) -> None:
    with pytest.raises(ConfigError):
        load(write(place, source, data=data))


def test_a_weight_is_that_of_the_last_version_before() -> None:
    source = SourceConfig(name="a", train="x", weight=((0, 1.0), (10, 3.0), (20, 0.0)))
    assert [weight_at(source, version) for version in (0, 9, 10, 19, 20, 99)] == [1, 1, 3, 3, 0, 0]
    assert weight_at(SourceConfig(weight=2.0), 7) == 2.0


def test_one_of_train_and_sources_is_needed() -> None:
    with raises(ConfigError, key="data.train"):
        check(convert({"data": {}}, where="test"))
