"""Where rows come from, the keys of their images, and the files that a configuration names."""

from pathlib import Path
from typing import Any

import pytest

from streamrl.config.check import check
from streamrl.config.check_data import weight_at
from streamrl.config.data import SourceConfig
from streamrl.config.load import convert, dump, from_json, load
from streamrl.config.tree import Config
from streamrl.errors import ConfigError
from streamrl.runtime.rundir import RunDir
from streamrl.system import new_directory, write_private
from tests.support.errors import raises
from tests.support.printed import printed
from tests.support.refusals import refused


def images(*, data: dict[str, Any] | None = None, **sections: Any) -> Config:
    said: dict[str, Any] = {"producer": {"function": "look.py:look"}} | sections
    config = convert({"data": {"train": "x", "images_key": "images"} | (data or {})} | said, where="run.toml")
    check(config)
    return config


def test_a_producer_function_source_or_set_may_have_them() -> None:
    assert images().data.images_key
    images(bus={"sample_blobs_bytes": 4_000_000}, data={"max_image_bytes": 1_000_000})
    source = {"name": "a", "train": "x", "images_key": "pictures"}
    with raises(ConfigError, key="producer.function"):
        images(data={"train": "", "images_key": "", "sources": [source]}, producer={})
    asked = {"name": "seen", "path": "y", "images_key": "pictures", "function": "single_turn"}
    with raises(ConfigError, key="producer.function"):
        images(data={"images_key": ""}, evaluation={"sets": [asked]})
    images(data={"images_key": ""}, evaluation={"sets": [asked | {"function": "look.py:look"}]}, bus={"sample_blobs_bytes": 1_000_000})


@pytest.mark.parametrize(
    ("key", "sections"),
    [
        ("data.images_key", {"run": {"kind": "sft"}, "reward": {"kind": "exact"}}),
        ("data.reading", {"data": {"reading": "whole"}}),
        ("gateway.workers", {"gateway": {"workers": 1}}),
        ("producer.function", {"producer": {}}),
        ("producer.function", {"producer": {"function": "verifiers:wordle"}}),
        ("producer.function", {"producer": {"function": "openenv:http://127.0.0.1:9"}}),
        ("bus.sample_blobs_bytes", {"bus": {"sample_blobs_bytes": 60_000_000}}),
        ("data.max_image_bytes", {"data": {"max_image_bytes": 0}}),
    ],
)
def test_what_nobody_would_look_at_or_could_store_is_refused(key: str, sections: dict[str, Any]) -> None:
    with refused(ConfigError, key, hint=True):
        images(**sections)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("gateway",), "agents are given no images"),
        (("worker", "gateway"), "agents are given no images"),
        (("attach", "single_turn"), "got producer.function = single_turn: no engine does"),
        (("attach", "look.py:look"), "nobody supervises run 'demo'"),
    ],
)
def test_who_looks_at_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str) -> None:
    (tmp_path / "demo").mkdir()
    RunDir(tmp_path / "demo").write_config(images())
    assert said in (found := printed(capsys, *arguments, "--run", "demo", "--dir", str(tmp_path), code=1).err) and "\nhint: " in found


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
    with refused(ConfigError, hint=True, key="data.sources"):
        load(write(place, *sources))


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


def test_a_weight_is_that_of_the_last_version_and_one_of_train_and_sources_is_needed() -> None:
    source = SourceConfig(name="a", train="x", weight=((0, 1.0), (10, 3.0), (20, 0.0)))
    assert [weight_at(source, version) for version in (0, 9, 10, 19, 20, 99)] == [1, 1, 3, 3, 0, 0]
    assert weight_at(SourceConfig(weight=2.0), 7) == 2.0
    with raises(ConfigError, key="data.train"):
        check(convert({"data": {}}, where="test"))


def test_a_private_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("old and readable by all")
    write_private(path, b"new")
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["secret"]


def test_a_directory_is_complete_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "parent" / "made"
    with new_directory(path) as scratch:
        (scratch / "a").write_text("1")
        assert not path.exists()
    assert (path / "a").read_text() == "1"
    with pytest.raises(ZeroDivisionError), new_directory(path.with_name("other")) as scratch:
        (scratch / "a").write_text(str(1 / 0))
    with pytest.raises(FileExistsError), new_directory(path):
        pass
    with pytest.raises(NotADirectoryError), new_directory(path / "a" / "below a file"):
        pass
    assert [one.name for one in path.parent.iterdir()] == ["made"]
