"""Answers of each kind that graders of others were reported to get wrong, and of the kinds beside them."""

from __future__ import annotations

import json
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from tests.rewards.episodes import only

CASES: list[dict[str, Any]] = [json.loads(line) for line in (Path(__file__).parent / "answers.jsonl").read_text().splitlines()]
KINDS = {key: list(cases) for key, cases in groupby(CASES, lambda case: f"{case['grader']}: {case['kind']}")}


@pytest.mark.parametrize("kind", KINDS)
def test_right_answers_count_and_wrong_ones_do_not(kind: str) -> None:
    wrong = []
    for case in KINDS[kind]:
        [value] = only(case["grader"], case["label"], case["answer"])
        if getattr(value, "value", value) != case["expected"]:
            wrong.append((case["label"], case["answer"], value))
    assert not wrong


def test_the_table_has_right_and_wrong_answers_of_each_kind_and_none_twice() -> None:
    assert len(CASES) >= 300 and Counter(map(json.dumps, CASES)).most_common(1)[0][1] == 1
    assert sum(map(len, KINDS.values())) == len(CASES)
    for kind, cases in KINDS.items():
        assert {case["expected"] > 0 for case in cases} == {True, False}, kind


PIECES = ("1/2 ", "½", "1,", "x=1 or ", "**a** ", "answer is ", "answer is correct. ", "#### ", r"\boxed{1}, ", "= ", "$")


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("grader", ["math", "gsm8k", "dapo", "gpqa"])
def test_long_texts_are_graded_at_once(grader: str, piece: str) -> None:
    for text in (piece * (50_000 // len(piece)), f"Answer: {piece * 100}", f"\\boxed{{{piece * 40}}}"):
        [value] = only(grader, "7" if grader != "gpqa" else "B", text)
        assert value.value <= 0, text[:80]
