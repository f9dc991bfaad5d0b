from __future__ import annotations

import socket

import pytest
from msgspec.structs import replace

from streamrl.config.code import check_trust, reward_addresses
from streamrl.config.evaluation import EvaluationConfig, EvaluationSetConfig, SetRewardConfig
from streamrl.config.tree import Config, DataConfig, RewardConfig
from streamrl.doctor.rewards import check_rewards
from streamrl.errors import ConfigError


def config(kind: str, shared: dict | None = None, **options: object) -> Config:
    data = DataConfig(train="rows.jsonl", reward_key="r" if shared else "", reward_options=shared or {})
    return Config(data=data, reward=RewardConfig(kind=kind, options=options))


@pytest.mark.parametrize("kind", ["exact_match", "late", "mine.py:score", "boxed_math", "python"])
def test_what_needs_nothing_is_not_said(kind: str) -> None:
    assert check_rewards(config(kind)) == []


def test_a_server_that_listens_and_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        [check] = check_rewards(config("remote", url=url))
        assert check.state == "ok"
        monkeypatch.delenv("NO_SUCH_KEY", raising=False)
        [check] = check_rewards(config("boxed_judge", url=url, model="m", token_env="NO_SUCH_KEY"))
        assert check.state == "fail" and "NO_SUCH_KEY holds no key" in check.found and check.hint
    [check] = check_rewards(config("exact_match", {"judge": {"url": url, "model": "m"}}))
    assert check.state == "warn" and "nobody answers" in check.found and check.hint


def test_addresses_of_rewards_and_of_sets_are_asked_for() -> None:
    asks = config("boxed_judge", {"remote": {"url": "http://b/"}}, url="http://a/v1", model="m", token_env="KEY")
    named = reward_addresses(asks)
    assert named == {"reward.options.url": "http://a/v1 with the value of KEY", "data.reward_options.remote.url": "http://b/"}
    with pytest.raises(ConfigError, match="would be sent"):
        check_trust(named, "the recording x", trusted=False)
    assert reward_addresses(config("mine.py:score", url="http://a/")) == {}
    reward = SetRewardConfig(kind="judge", options={"url": "http://127.0.0.1:9/", "model": "m", "token_env": "NO_SUCH_KEY"})
    one = EvaluationSetConfig(name="hard", path="x", reward=reward)
    asks = replace(config("exact_match"), evaluation=EvaluationConfig(sets=(one,)))
    assert reward_addresses(asks) == {"evaluation.sets[hard].reward.options.url": "http://127.0.0.1:9/ with the value of NO_SUCH_KEY"}
    [check] = check_rewards(asks)
    assert check.state == "fail" and "NO_SUCH_KEY" in check.found
