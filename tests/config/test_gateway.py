from __future__ import annotations

import pytest

from streamrl.config.check import check
from streamrl.config.load import convert
from streamrl.errors import ConfigError
from tests.support.errors import raises


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


def test_a_gateway_is_off_unless_it_is_asked_for() -> None:
    config = convert({"data": {"train": "x.jsonl"}}, where="a test")
    check(config)
    assert (config.gateway.workers, config.gateway.host, config.gateway.prompts) == (0, "127.0.0.1", "task")
