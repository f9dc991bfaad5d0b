"""The section `filters`: what it may not say, and what a record that lacks it means."""

from __future__ import annotations

import json
from typing import Any

import pytest

from streamrl.config.check import check
from streamrl.config.filters import DECIDED, FiltersConfig
from streamrl.config.load import convert, dump, from_json
from streamrl.config.tree import Config
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
