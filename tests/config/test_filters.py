"""The sections filters, sampling, gateway and weights: what they may not say, and what they mean."""

import json
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
from tests.support.refusals import refused


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
    with refused(ConfigError, f"filters.{key}"):
        filters(**section)


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
        ("filters.function", {"filters": {"function": "zero_std"}}),
        ("filters.function", {"filters": {"function": "mine.py:keep"}, "reward": {"kind": "late"}}),
        ("filters.options", {"filters": {"options": {"least": 3}}}),
        ("gateway.port", {"gateway": {"workers": 2, "port": 65535}}),
        ("gateway.max_sessions", {"gateway": {"max_sessions": 7}, "tasks": {"num_rollouts": 8}}),
        ("gateway.max_sessions", {"gateway": {"max_sessions": 8}, "tasks": {"num_rollouts": 8}, "loss": {"advantage": "remax"}}),
    ],
)
def test_what_punishes_all_or_none_or_could_not_be_asked_or_served_is_refused(key: str, tree: dict[str, Any]) -> None:
    with raises(ConfigError, key=key):
        check(convert({"data": {"train": "x"}, **tree}, where="run.toml"))


def test_a_logit_bias_is_by_token_in_a_file_an_override_and_a_record(write) -> None:
    file = write("[sampling]\nlogit_bias = { 17 = -1, 3 = 2.5 }\nstop = ['</a>']\nregex = '[0-9]+'\n")
    config = load(file, ["sampling.logit_bias.9=1.5", "evaluation.sampling.min_p=0.05"])
    assert config.sampling.logit_bias == {17: -1.0, 3: 2.5, 9: 1.5} and config.sampling.stop == ("</a>",)
    assert config.evaluation.sampling.min_p == 0.05
    assert from_json(dump(config)).sampling == config.sampling
    assert override(config, ["sampling.logit_bias.3=0"]).sampling.logit_bias == {17: -1.0, 3: 0.0, 9: 1.5}


def test_a_grammar_that_is_none_or_has_no_library_is_refused_before_the_start(write, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write("")
    for given in ("sampling.regex='('", 'sampling.json_schema=\'{"type": "foo"}\'', 'evaluation.sampling.json_schema=\'{"type": "foo"}\''):
        with refused(ConfigError, "llguidance", key=given.partition("=")[0]):
            load(file, [given])
    monkeypatch.setattr(check_sampling.importlib.util, "find_spec", lambda name: None)
    with refused(ConfigError, hint="streamrl[grammar]", key="sampling.regex"):
        load(file, ["sampling.regex='[0-9]+'"])


def test_a_gateway_is_off() -> None:
    config = convert({"data": {"train": "x.jsonl"}}, where="a test")
    check(config)
    assert (config.gateway.workers, config.gateway.host, config.gateway.prompts) == (0, "127.0.0.1", "task")


@pytest.mark.parametrize(
    ("weights", "buffers", "snapshots"),
    [
        ({}, 1, 1),
        ({"transport": "ipc"}, 2, 2),
        ({"transport": "ipc", "ring": 1}, 1, 1),
        ({"transport": "ipc", "ring": 3}, 3, 3),
        ({"transport": "ipc", "ring": 3, "also_on_bus": True}, 4, 3),
        ({"transport": "bus"}, 3, 2),
        ({"transport": "bus", "ring": 1}, 2, 1),
        ({"transport": "bus", "ring": 1, "anchor_every": 1}, 1, 1),
        ({"also_on_bus": True}, 3, 2),
        ({"ring": 3}, 3, 3),
    ],
)
def test_changes_take_one_more_than_the_ring_and_one_snapshot_is_kept_of_what_is_copied_at_once(
    weights: dict[str, Any], buffers: int, snapshots: int
) -> None:
    assert (WeightsConfig(**weights).buffers, WeightsConfig(**weights).snapshots) == (buffers, snapshots)
