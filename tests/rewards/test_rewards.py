from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from streamrl.config.tree import RewardConfig
from streamrl.errors import ConfigError, SchemaError
from streamrl.producers.episode import Episode as Whole
from streamrl.producers.episode import Segment
from streamrl.rewards.built_in import ExactMatch
from streamrl.rewards.factory import make_reward
from streamrl.rewards.functions import as_value
from streamrl.rewards.protocol import RewardValue
from streamrl.rewards.votes import answer_of
from streamrl.schemas.samples import VersionSpan
from streamrl.schemas.versions import Version
from tests.rewards.episodes import Episode, task
from tests.support.errors import raises


async def test_exact_match() -> None:
    for label, completion, expected in (
        ("45", "45", 1.0),
        ("45", " 45\n", 1.0),
        (45, "45", 1.0),
        ("45", "4 5", 0.0),
        ("45", "", 0.0),
        (None, "None", 0.0),
        ("", "x", 0.0),
    ):
        assert await ExactMatch().score(task(label), [Episode(completion)]) == [RewardValue(expected)]


def test_what_a_function_may_give() -> None:
    for given, value, parts in (
        (1, 1.0, {}),
        (True, 1.0, {}),
        ({"format": 0.25, "answer": 0.5}, 0.75, {"format": 0.25, "answer": 0.5}),
        ({"reward": 2.0, "length": 9.0}, 2.0, {"length": 9.0}),
    ):
        assert as_value(given) == RewardValue(value, parts)


@pytest.mark.parametrize("given", ["1.0", None, {}, {"a": "1"}, math.nan, math.inf, {"a": math.nan}, [1.0]])
def test_what_it_may_not_give(given: Any) -> None:
    with raises(SchemaError, got=ANY):
        as_value(given)


CODE = """
import asyncio

def half(task, episode, scale=1.0):
    return {"half": 0.5 * scale if episode.completion == task.label else 0.0}

async def slow(task, episode):
    await asyncio.sleep(0)
    if episode.completion == "crash":
        raise ValueError("no verdict")
    return len(episode.completion)

class Rank:
    def __init__(self, top=1.0):
        self.top = top

    async def score(self, task, episodes):
        longest = max(len(e.completion) for e in episodes)
        return [self.top if len(e.completion) == longest else 0.0 for e in episodes]

NUMBER = 7
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(CODE)
    return path


async def test_functions_and_classes_get_their_options_and_may_be_async(code: Path) -> None:
    half: Any = make_reward(RewardConfig(kind=f"{code}:half", options={"scale": 2.0}))
    assert await half.score(task("45"), [Episode("45"), Episode("4")]) == [RewardValue(1.0, {"half": 1.0}), RewardValue(0.0, {"half": 0.0})]
    slow: Any = make_reward(RewardConfig(kind="my_rewards.py:slow"), base=code.parent)
    first, second = await slow.score(task("45"), [Episode("crash"), Episode("123")])
    assert isinstance(first, ValueError)
    assert second == RewardValue(3.0)
    rank: Any = make_reward(RewardConfig(kind=f"{code}:Rank", options={"top": 3.0}))
    assert list(await rank.score(task("45"), [Episode("1"), Episode("22")])) == [0.0, 3.0], "a class sees the whole group"


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("exact_matsch", "must be exact_match, gsm8k, .*, late or name user code"),
        ("{code}:NUMBER", "expected a function of"),
        ("{code}:hafl", "called 'hafl'.*\nhint: did you mean 'half'"),
        ("{code}x.py:half", "there is none"),
        ("no_such_module_here:score", "expected a module no_such_module_here"),
    ],
)
def test_what_is_no_reward_is_refused(code: Path, kind: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make_reward(RewardConfig(kind=kind.format(code=code)))
    with raises(ConfigError, key="reward.kind"):
        make_reward(RewardConfig(kind=f"{code}:Rank", options={"bottom": 1}))
    with raises(ConfigError, key="reward.options", got=["x"]):
        make_reward(RewardConfig(options={"x": 1}))


@pytest.mark.parametrize("value", [1e308, -1e39, math.inf, math.nan])
def test_a_reward_that_no_advantage_can_hold_is_none(value: float) -> None:
    with raises(SchemaError, part="value", got=repr(value)):
        as_value(value)


def test_what_a_completion_votes_for() -> None:
    for kind, text, left, answer in (
        ("exact_match", " 7 \n", {}, "7"),
        ("exact_match", "  ", {}, None),
        ("gsm8k", "so it is #### 1,234.0", {}, "1234"),
        ("gsm8k", "the answer is 1234", {}, "1234"),
        ("gsm8k", "I do not know", {}, None),
        ("math", "so \\boxed{7}", {}, "7"),
        ("gpqa", "It is A or C. The answer is (B).", {}, "B"),
        ("gpqa", "I think so", {}, None),
        ("dapo", "It is 3 + 4.\nAnswer: $7$", {}, "7"),
        ("dapo", "7", {}, None),
        ("mine.py:grade", "long text", {"answer": "B"}, "B"),
        ("mine.py:grade", "long text", {"answer": 3}, "3"),
        ("mine.py:grade", "long text", {"answer": [3]}, "long text"),
    ):
        segments = (Segment([1]), Segment([2], [-0.1], (VersionSpan(1, Version()),)))
        episode = Whole(segments=segments, finish_reason="stop", turns=(text,), metadata=left)
        assert answer_of(kind, episode, {}) == answer, text
