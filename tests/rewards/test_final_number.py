from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from streamrl.config.tree import RewardConfig
from streamrl.errors import ConfigError
from streamrl.rewards.factory import built_in, is_user_code, make_reward
from streamrl.rewards.numbers import Answer, final_answer, numbers
from streamrl.rewards.protocol import RewardValue
from streamrl.schemas.samples import Status
from tests.rewards.episodes import Episode, task
from tests.support.errors import raises

GSM8K = built_in("gsm8k", {})
SOLUTION = "Natalia sold 48/2 = 24 clips in May.\nShe sold 48+24 = 72 clips altogether.\n#### 72"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1,234", ["1234"]),
        ("12,345,678.90", ["12345678.9"]),
        ("1,23", ["1", "23"]),  # no thousands separator: two numbers of a list
        ("$18.50 each", ["18.5"]),
        ("-$5 and $-5 and -5 and \N{MINUS SIGN}5", ["-5", "-5", "-5", "-5"]),
        ("+7", ["7"]),
        (".5", ["0.5"]),
        ("50%", ["50"]),
        ("72.", ["72"]),
        ("3/4 of 12", ["3/4", "12"]),
        ("5/0", []),
        ("10-3", ["10", "3"]),
        ("10 - 3", ["10", "3"]),
        ("(4)-3", ["4", "3"]),
        ("x-3", ["3"]),
        ("= -3", ["-3"]),
        (r"\frac{3}{4}", ["3/4"]),
        (r"-\dfrac{1}{2}", ["-1/2"]),
        (r"\$1{,}000\text{ dollars}", ["1000"]),
        ("20cm", ["20"]),
        ("no number", []),
        ("", []),
        ("9" * 70, []),
    ],
)
def test_numbers(text: str, expected: list[str]) -> None:
    assert numbers(text) == [Fraction(each) for each in expected]


@pytest.mark.parametrize(
    ("text", "value", "marked"),
    [
        (SOLUTION, "72", True),
        ("#### 1,450", "1450", True),
        ("#### -12", "-12", True),
        ("#### $8.00 a day", "8", True),
        ("####72\nand 5 more words", "72", True),
        ("####\n 72", "72", True),
        ("#### 3\nno, wait\n#### 4", "4", True),
        (r"so \boxed{\frac{1}{2}} of 10", "1/2", True),
        (r"\boxed{72 \text{ clips}} in 2 months", "72", True),
        (r"#### 5 but \boxed{6}", "6", True),
        (r"\boxed{6} or #### 5", "5", True),
        ("The answer is 3 * 4 = 12 apples.", "12", True),
        ("Answer: $-3.", "-3", True),
        ("She has 3 apples and 4 pears", "4", False),
        ("<think>#### 5</think> The answer is 6", "6", True),
    ],
)
def test_the_final_answer(text: str, value: str, marked: bool) -> None:
    assert final_answer(text) == Answer(Fraction(value), marked)


@pytest.mark.parametrize("text", ["", "none at all", "#### unknown", "5 and then ####", r"\boxed{never closed 5", "<think> 5 and 6"])
def test_no_answer(text: str) -> None:
    assert final_answer(text) is None


@pytest.mark.parametrize(
    ("label", "completion", "expected"),
    [
        (SOLUTION, "24 + 48 is 72\n#### 72", 1.0),
        (SOLUTION, "#### 72.0", 1.0),
        (SOLUTION, "#### 73", 0.0),
        ("72", "#### $72", 1.0),
        (72, "it is 72", 1.0),
        ("1,000", "#### 1000", 1.0),
        ("1/2", "#### 0.5", 1.0),
        (SOLUTION, "", 0.0),
        (None, "72", 0.0),
        ("", "72", 0.0),
        ("no number", "no number", 0.0),
    ],
)
async def test_the_value_counts_not_how_it_is_written(label: Any, completion: str, expected: float) -> None:
    [value] = await GSM8K.score(task(label), [Episode(completion)])
    assert value == RewardValue(expected, {"answer": expected, "format": 0.0})


@pytest.mark.parametrize(
    ("episode", "answer", "shaped"),
    [
        (Episode("#### 72"), 1.0, 0.2),
        (Episode("#### 7"), 0.0, 0.2),
        (Episode("#### 72", status=Status.TRUNCATED), 1.0, 0.0),
        (Episode("72"), 0.0, 0.0),
    ],
)
async def test_the_format_is_rewarded_apart(episode: Episode, answer: float, shaped: float) -> None:
    reward = built_in("gsm8k", {"format_reward": 0.2, "marked_only": True})
    assert await reward.score(task(SOLUTION), [episode]) == [RewardValue(answer + shaped, {"answer": answer, "format": shaped})]


def test_it_is_built_in() -> None:
    assert not is_user_code(RewardConfig(kind="gsm8k")) and make_reward(RewardConfig(kind="gsm8k")) is not None
    with raises(ConfigError, key="reward.options", kind="gsm8k"):
        make_reward(RewardConfig(kind="gsm8k", options={"form": 1}))
