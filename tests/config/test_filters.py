"""The sections filters, sampling, gateway and weights: what they may not say, and what they mean."""

import json
from pathlib import Path
from typing import Any

import pytest

from streamrl.config import check_sampling
from streamrl.config.check import check
from streamrl.config.filters import DECIDED, FiltersConfig
from streamrl.config.load import convert, dump, from_json, load, override
from streamrl.config.tree import Config
from streamrl.config.weights import WeightsConfig
from streamrl.core.fold_config import fold_config
from streamrl.core.state import FoldConfig
from streamrl.errors import ConfigError
from tests.support.errors import raises


def filters(**section: Any) -> Config:
    config = convert({"data": {"train": "x"}, "filters": section}, where="run.toml")
    check(config)
    return config


@pytest.mark.parametrize(
    ("key", "section"),
    [
        ("max_tokens", {"min_tokens": 5, "max_tokens": 4}),
        ("min_tokens", {"min_tokens": 100_000}),
        ("mean_reward", {"mean_reward": [0.5]}),
        ("mean_reward", {"mean_reward": [0.0, 0.5, 1.0]}),
        ("mean_reward", {"mean_reward": [0.9, 0.1]}),
        ("mean_reward", {"mean_reward": [0.1, "0.9"]}),
        ("mean_reward", {"mean_reward": [float("nan"), 1.0]}),
        ("max_repetition", {"max_repetition": 1.5}),
        ("repetition_ngram", {"max_repetition": 0.5, "repetition_ngram": 8, "repetition_tokens": 8}),
        ("repetition_ngram", {"repetition_ngram": 0}),
        ("refused", {"refused": "keep"}),
        ("min_reward_std", {"min_reward_std": -1}),
        ("max_token", {"max_token": 4}),
    ],
)
def test_what_it_may_not_say_is_named(key: str, section: dict[str, Any]) -> None:
    with raises(ConfigError) as caught:
        filters(**section)
    assert f"filters.{key}" in caught.value.message


def test_what_is_said_reaches_the_record_and_what_is_not_decides_nothing() -> None:
    config = filters(min_tokens=3, mean_reward=[0.1, 0.9], refused="mask", max_repetition=0.8)
    assert fold_config(config).filters is config.filters and config.filters.mean_reward == (0.1, 0.9)
    assert from_json(dump(config)) == config
    tree = json.loads(dump(filters()))
    del tree["filters"]
    recorded = from_json(json.dumps(tree))
    assert recorded.filters == FoldConfig(batch_tasks=1, max_staleness=0).filters == FiltersConfig(min_reward_std=0.0)
    assert "min_reward_std" not in json.loads(dump(recorded))["filters"], "a run that began without it stays so"
    assert filters().filters.min_reward_std > 0
    own = {f"filters.{name}" for name in FiltersConfig.__struct_fields__}
    assert own - set(DECIDED) == {"filters.function", "filters.options", "filters.timeout_s"} and set(DECIDED) < own


@pytest.mark.parametrize(
    ("key", "tree"),
    [
        ("reward.overlong_buffer", {"reward": {"overlong_buffer": 65}, "sampling": {"max_new_tokens": 64}}),
        ("reward.overlong_buffer", {"reward": {"overlong_buffer": 65, "overlong_length": 60}}),
        ("reward.overlong_length", {"reward": {"overlong_length": 60}}),
        ("reward.overlong_buffer", {"reward": {"overlong_buffer": 8}, "loss": {"advantage": "maxrl"}}),
    ],
)
def test_a_penalty_that_punishes_all_or_none_is_refused(key: str, tree: dict[str, Any]) -> None:
    with raises(ConfigError, key=key):
        check(convert({"data": {"train": "x"}, **tree}, where="run.toml"))


@pytest.mark.parametrize(
    ("key", "tree"),
    [
        ("filters.function", {"filters": {"function": "zero_std"}}),
        ("filters.function", {"filters": {"function": "mine.py:keep"}, "reward": {"kind": "late"}}),
        ("filters.options", {"filters": {"options": {"least": 3}}}),
    ],
)
def test_a_function_that_could_not_be_asked_is_refused(key: str, tree: dict[str, Any]) -> None:
    with raises(ConfigError, key=key):
        check(convert({"data": {"train": "x"}, **tree}, where="run.toml"))


def test_a_logit_bias_is_by_token_in_a_file_an_override_and_a_record(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1", "label": "1"}\n')
    file = tmp_path / "run.toml"
    file.write_text(f"[data]\ntrain = {str(rows)!r}\n[sampling]\nlogit_bias = {{ 17 = -1, 3 = 2.5 }}\nstop = ['</a>']\nregex = '[0-9]+'\n")
    config = load(file, ["sampling.logit_bias.9=1.5", "evaluation.sampling.min_p=0.05"])
    assert config.sampling.logit_bias == {17: -1.0, 3: 2.5, 9: 1.5} and config.sampling.stop == ("</a>",)
    assert config.evaluation.sampling.min_p == 0.05
    assert from_json(dump(config)).sampling == config.sampling
    assert override(config, ["sampling.logit_bias.3=0"]).sampling.logit_bias == {17: -1.0, 3: 0.0, 9: 1.5}


def test_a_grammar_that_is_none_or_has_no_library_is_refused_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1", "label": "1"}\n')
    file = tmp_path / "run.toml"
    file.write_text(f"[data]\ntrain = {str(rows)!r}\n")
    for given in ("sampling.regex='('", 'sampling.json_schema=\'{"type": "foo"}\'', 'evaluation.sampling.json_schema=\'{"type": "foo"}\''):
        with raises(ConfigError, key=given.partition("=")[0]) as caught:
            load(file, [given])
        assert "llguidance" in caught.value.message
    monkeypatch.setattr(check_sampling.importlib.util, "find_spec", lambda name: None)
    with raises(ConfigError, key="sampling.regex") as caught:
        load(file, ["sampling.regex='[0-9]+'"])
    assert "streamrl[grammar]" in caught.value.hint


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"gateway": {"workers": 2, "port": 65535}}, "gateway.port"),
        ({"gateway": {"max_sessions": 7}, "tasks": {"num_rollouts": 8}}, "gateway.max_sessions"),
        ({"gateway": {"max_sessions": 8}, "tasks": {"num_rollouts": 8}, "loss": {"advantage": "remax"}}, "gateway.max_sessions"),
    ],
)
def test_what_cannot_be_served_is_refused(sections: dict[str, object], key: str) -> None:
    config = convert({"data": {"train": "x.jsonl"}, **sections}, where="a test")
    with raises(ConfigError, key=key):
        check(config)


def test_a_gateway_is_off_and_changes_take_one_more_than_the_ring() -> None:
    config = convert({"data": {"train": "x.jsonl"}}, where="a test")
    check(config)
    assert (config.gateway.workers, config.gateway.host, config.gateway.prompts) == (0, "127.0.0.1", "task")
    assert WeightsConfig().buffers == 1
    assert WeightsConfig(transport="ipc").buffers == 2
    assert WeightsConfig(transport="ipc", ring=3).buffers == 3
    assert WeightsConfig(transport="ipc", ring=3, also_on_bus=True).buffers == 4
    assert WeightsConfig(transport="bus", ring=1).buffers == 2
    assert WeightsConfig(transport="bus", ring=1, anchor_every=1).buffers == 1


@pytest.mark.parametrize(
    ("weights", "snapshots"),
    [
        (WeightsConfig(), 1),
        (WeightsConfig(transport="ipc"), 2),
        (WeightsConfig(transport="bus"), 2),
        (WeightsConfig(also_on_bus=True), 2),
        (WeightsConfig(ring=3), 3),
        (WeightsConfig(transport="ipc", ring=1), 1),
    ],
)
def test_a_trainer_keeps_one_snapshot_where_it_is_copied_at_once(weights: WeightsConfig, snapshots: int) -> None:
    assert weights.snapshots == snapshots
