"""What a run of a taskset lacks is said before it starts; no verifiers is needed to say it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamrl.bridges.verifiers.adapter import check
from streamrl.bridges.verifiers.guests import Said
from streamrl.bridges.verifiers.worker import Sessions
from streamrl.config.check import check as check_config
from streamrl.config.load import convert
from streamrl.config.tree import Config, ProducerConfig
from streamrl.errors import ConfigError, LaunchError
from streamrl.producers.functions import make_producer
from tests.support.errors import raises

TABLE: dict[str, Any] = {
    "run": {"name": "run"},
    "data": {"train": "tasks.jsonl", "label_key": "", "metadata_key": "metadata"},
    "producer": {"function": "verifiers:gsm8k", "python": "python3"},
    "gateway": {"workers": 1},
}


def config_of(section: str, **values: Any) -> Config:
    config = convert({**TABLE, section: {**TABLE.get(section, {}), **values}}, where="here")
    check_config(config)
    return config


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("producer", "python", ""),
        ("gateway", "workers", 0),
        ("data", "train", ""),
        ("data", "heldout", "heldout.jsonl"),
        ("data", "metadata_key", ""),
        ("data", "label_key", "label"),
        ("data", "chat_template", False),
        ("ray", "address", "auto"),
    ],
)
def test_a_key_that_does_not_go_with_a_taskset_is_refused(section: str, key: str, value: Any) -> None:
    config_of("gateway")
    with raises(ConfigError, key=f"{section}.{key}"):
        config_of(section, **{key: value})


@pytest.mark.process
def test_an_environment_without_verifiers_or_of_another_series_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for python in (str(tmp_path / "none" / "python"), sys.executable):
        with raises(ConfigError, key="producer.python") as caught:
            check("gsm8k", ProducerConfig(python=python))
        assert "make verifiers" in caught.value.hint
    about = tmp_path / "verifiers-0.5.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: verifiers\nVersion: 0.5.1\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with raises(ConfigError, key="producer.python") as caught:
        check("gsm8k", ProducerConfig(python=sys.executable))
    assert "expected verifiers 0.4, got 0.5.1" in caught.value.message


def test_a_taskset_is_not_run_by_children_and_its_section_goes_out_as_json() -> None:
    with raises(LaunchError):
        make_producer("verifiers:gsm8k")
    section = ProducerConfig(function="verifiers:x", options={"player": {"max_turns": 3}})
    assert msgspec.json.decode(msgspec.json.encode(section), type=ProducerConfig) == section


def test_a_session_is_lost_with_the_second_guest_that_dies_while_it_plays_it() -> None:
    sessions = Sessions([{"session_id": "0.0", "base_url": "http://gateway/sessions/a/v1"}])
    second = {"session_id": "1.0", "base_url": "http://gateway/sessions/b/v1"}
    sessions.begin()
    sessions.take(Said(opened=second))
    assert sessions.died() == [], "one was not begun, the other may not have done it"
    sessions.begin()
    sessions.take(Said(opened=second))
    [lost] = sessions.died()
    assert (lost.told["session_id"], lost.root) == ("1.0", "http://gateway/sessions/b")
    assert list(sessions.open) == ["0.0"]
