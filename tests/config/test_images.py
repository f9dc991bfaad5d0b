"""The keys of rows' images: where they have a use, and where they are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamrl.cli import main
from streamrl.config.check import check
from streamrl.config.load import convert
from streamrl.config.tree import Config
from streamrl.errors import ConfigError
from streamrl.runtime.rundir import RunDir
from tests.support.errors import raises


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
    with raises(ConfigError) as caught:
        images(**sections)
    assert key in caught.value.message and caught.value.hint


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("gateway",), "agents are given no images"),
        (("worker", "gateway"), "agents are given no images"),
        (("attach", "single_turn"), "got producer.function = single_turn: no engine does"),
        (("attach", "look.py:look"), "nobody supervises run 'demo'"),
    ],
)
def test_who_joins_a_run_and_looks_at_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "demo").mkdir()
    RunDir(tmp_path / "demo").write_config(images())
    assert main([*arguments, "--run", "demo", "--dir", str(tmp_path)]) == 1
    assert said in (found := capsys.readouterr().err) and "\nhint: " in found
