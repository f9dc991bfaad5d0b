"""Rewards of mathematics: final numbers, answers of the same value, and where an answer stands."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import streamrl
from streamrl.errors import SchemaError
from streamrl.rewards.answers import last_box, without_reasoning
from streamrl.rewards.factory import built_in
from streamrl.rewards.mathematics import equal, explodes
from streamrl.rewards.numbers import Answer, final_answer, numbers
from streamrl.rewards.protocol import RewardValue
from streamrl.schemas.samples import Status
from tests.rewards.episodes import Episode, only, task

BUILT_IN = built_in("gsm8k", {})
SOLUTION = "Natalia sold 48/2 = 24 clips in May.\nShe sold 48+24 = 72 clips altogether.\n#### 72"


def test_numbers() -> None:
    for text, expected in (
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
    ):
        assert numbers(text) == [Fraction(each) for each in expected]


def test_the_final_answer() -> None:
    for text, value, marked in (
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
    ):
        assert final_answer(text) == Answer(Fraction(value), marked)


@pytest.mark.parametrize("text", ["", "none at all", "#### unknown", "5 and then ####", r"\boxed{never closed 5", "<think> 5 and 6"])
def test_no_answer(text: str) -> None:
    assert final_answer(text) is None


async def test_the_value_counts_not_how_it_is_written() -> None:
    for label, completion, expected in (
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
    ):
        [value] = await BUILT_IN.score(task(label), [Episode(completion)])
        assert value == RewardValue(expected, {"answer": expected, "format": 0.0}), completion


async def test_the_format_is_rewarded_apart() -> None:
    for episode, answer, shaped in (
        (Episode("#### 72"), 1.0, 0.2),
        (Episode("#### 7"), 0.0, 0.2),
        (Episode("#### 72", status=Status.TRUNCATED), 1.0, 0.0),
        (Episode("72"), 0.0, 0.0),
    ):
        reward = built_in("gsm8k", {"format_reward": 0.2, "marked_only": True})
        assert await reward.score(task(SOLUTION), [episode]) == [RewardValue(answer + shaped, {"answer": answer, "format": shaped})], (
            episode
        )


GSM8K = Path(__file__).parents[2] / "examples" / "gsm8k"


def test_answers_of_the_same_value_are_right() -> None:
    for label, answer in (
        # what slime's grader is known to say, and what it is known to miss (2/4, intervals, sets)
        ("1/2", "0.50"),
        ("1234", "1,234"),
        ("x+1", "1+x"),
        (r"\frac{1}{2}", r"\frac{2}{4}"),
        (r"\frac12", "0.5"),
        (r"\{1,2\}", "2, 1"),
        ("[0,1)", r"\left[0, 1\right)"),
        ("(1,2)", "(1, 2)"),
        ("5", r"5\text{ cm}"),
        ("18", r"\$18.00"),
        ("18", "18 dollars"),
        ("50", r"50\%"),
        ("5", "x = 5"),
        (r"2\sqrt{2}", r"\sqrt{8}"),
        ("90", r"90^\circ"),
        ("1000", "10^{3}"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
        ("72", "72."),
    ):
        assert equal(label, answer)


def test_other_answers_are_wrong() -> None:
    for label, answer in (
        ("1/2", "0.51"),
        ("12", "1,2"),
        ("x+1", "x-1"),
        ("[0,1)", "[0,1]"),
        (r"\{1,2\}", r"\{1,3\}"),
        ("(1,2)", "(2,1)"),
        (r"\pi", "3.14"),
        ("5", "-5"),
        ("5", ""),
        ("5", "   "),
        ("5", "}{"),
        ("5", r"\frac{"),
        ("yes", "no"),
    ):
        assert not equal(label, answer)


def test_what_would_be_computed_for_ever_is_wrong_before_it_is() -> None:
    for bomb in (
        "10^{10^{10}}",
        "10^10^10",
        "9**9**9",
        "99999!",
        "((5!)!)!",
        r"\frac{1}{" * 30 + "2" + "}" * 30,
        "x^{100}(1+x)^{999}",
        "(a+b+c+d+e)^{99}",
        r"\sum_{n=1}^{999999999} n",
        "7" * 5000,
        r"\int_0^1 \int_0^1 \int_0^1 e^{xyz} dx",
    ):
        assert explodes(bomb) and not equal("42", bomb)
        [value] = only("math", "42", f"so \\boxed{{{bomb}}}")
        assert value == RewardValue(0.0, {"answer": 0.0, "boxed": 1.0}), bomb


@pytest.mark.parametrize("text", ["{" * 300_000, "\\boxed{" * 50_000, "}" * 300_000, "\\boxed{" + "{" * 150_000 + "}" * 150_000])
def test_megabytes_of_braces_are_wrong(text: str) -> None:
    for kind in ("math", "boxed_math", "deepscaler", "dapo", "boxed_f1", "gpqa"):
        [value] = only(kind, "A", f"{text}</think>{text}")
        assert isinstance(value, RewardValue) and value.value <= 0


def test_the_last_box() -> None:
    for text, box in (
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{x\right.}", r"\left\{x\right."),
        (r"\fbox{7}", "7"),
        (r"\boxed {7}", "7"),
        (r"\boxed{7", None),
        ("7", None),
        ("", None),
    ):
        assert last_box(text) == box


@pytest.mark.parametrize(
    ("text", "rest"), [("a</think>b</think>c", "c"), ("<think>a", None), ("a", "a"), ("<think>a</think>", ""), ("</think>", "")]
)
def test_reasoning_is_left_out(text: str, rest: str | None) -> None:
    assert without_reasoning(text) == rest


def test_where_the_answer_stands() -> None:
    cases: tuple[tuple[str, dict[str, Any], str, float], ...] = (
        ("math", {}, r"<think>\boxed{1}</think> \boxed{2}", 1.0),
        ("math", {}, r"<think>\boxed{2}", 0.0),
        ("math", {}, "1 + 1 = 2\n#### 2", 1.0),
        ("math", {}, "The final answer is $2$. I hope it is correct.", 1.0),
        ("math", {}, "It is 3.", 0.0),
        ("math", {"boxed_only": True}, "#### 2", 0.0),
        ("math", {"boxed_only": True}, r"\boxed{4/2}", 1.0),
        ("boxed_math", {}, r"\boxed{1} \boxed{4/2}", 1.0),
        ("boxed_math", {}, "#### 2", 0.0),
        ("deepscaler", {}, r"\boxed{2}", 0.0),
        ("deepscaler", {"marker": False}, r"\boxed{2}", 1.0),
        ("deepscaler", {}, r"<think>a</think>b</think>\boxed{2}", 1.0),
        ("deepscaler", {}, r"\boxed{2}</think>3", 0.0),
        ("deepscaler", {}, r"###Response \boxed{3} ###Response \boxed{2}", 1.0),
        ("deepscaler", {"marker": False}, "2", 0.0),
        ("gsm8k", {}, "so #### 2", 1.0),
        ("boxed_gsm8k", {}, r"#### 2, \boxed{3}", 0.0),
    )
    for kind, options, completion, expected in cases:
        [value] = only(kind, "2", completion, **options)
        assert value.value == expected, completion


def test_a_label_may_be_one_of_several_and_has_to_be_there() -> None:
    assert only("math", ["3", r"\boxed{4}"], r"\boxed{4}")[0].value == 1
    assert only("math", 4, r"\boxed{4}")[0].value == 1
    for label in (None, [], {"a": 1}, True):
        [error] = only("math", label, r"\boxed{4}")
        assert isinstance(error, SchemaError) and error.values["row"] == 7


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_solutions_of_gsm8k_are_right_and_wrong_ones_are_not(split: str) -> None:
    # All of the 8792 rows were graded once; these are a sample of them.
    file = GSM8K / f"{split}.parquet"
    rows = pq.read_table(file).to_pylist()[:100]
    for row in rows:
        label = str(row["label"])
        solution = f"...\n#### {label}" if "####" not in label else label
        number = label.rpartition("#### ")[2]
        for kind in ("math", "gsm8k"):
            assert only(kind, label, solution)[0].value == 1, (kind, label)
            assert only(kind, label, f"\\boxed{{{number}}}")[0].value == 1
            assert only(kind, label, f"\\boxed{{{number}1}}")[0].value == 0
            assert only(kind, label, f"{solution}1")[0].value == 0


@pytest.mark.process
def test_the_package_is_light() -> None:
    code = "import sys, streamrl.rewards.factory as f; f.built_in('f1', {}); print({'sympy', 'math_verify', 'aiohttp'} & set(sys.modules))"
    root = Path(streamrl.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, cwd=root)
    assert done.stdout.strip() == "set()"
