from __future__ import annotations

import json
import statistics
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.config.evaluation_sets import ProblemSet, problem_sets
from streamrl.config.tree import Config, DataConfig, EvaluationConfig
from streamrl.data.problems import Problem
from streamrl.producers.evaluation.results import summarize
from streamrl.producers.evaluation.store import ProblemRecord, SampleRecord
from streamrl.schemas.tasks import Sampling

PROBLEMS = tuple(Problem(row=row, line=row + 1, prompt_ids=(1,), prompt=f"p{row}", label="7") for row in range(3))


@pytest.fixture
def one() -> ProblemSet:
    config = Config(data=DataConfig(heldout="rows.jsonl"), evaluation=EvaluationConfig(n=4, sampling=Sampling()))
    return problem_sets(config)[0]


def sample(
    reward: float | None, *, status: str = "completed", tokens: int = 2, answer: str | None = "7", version: str = "0.5"
) -> SampleRecord:
    return SampleRecord(reward=reward, status=status, tokens=tokens, answer=answer, text="x", versions=(version, version))


def records(*rows: list[SampleRecord]) -> dict[int, ProblemRecord]:
    return {row: ProblemRecord(row=row, samples=tuple(samples)) for row, samples in enumerate(rows)}


def told(one: ProblemSet, found: dict[int, ProblemRecord], **more: object) -> dict[str, Any]:
    given = {"number": 5, "pinned": True, "took_s": 1.5, "resumed": 0} | more
    return json.loads(json.dumps(summarize(one, PROBLEMS[: len(found)], found, **given)))  # type: ignore[arg-type]


def test_the_published_example(one: ProblemSet) -> None:
    found = told(one, records([sample(float(r)) for r in (1, 0, 0, 0)], [sample(float(r)) for r in (1, 1, 0, 0)]))
    assert {k: round(rate["value"], 4) for k, rate in found["pass"].items()} == {"1": 0.375, "2": 0.6667, "4": 1.0}
    assert found["accuracy"] == 0.375
    assert (found["num"], found["n"], found["samples"], found["answered"], found["failed"], found["right"], found["wrong"]) == (
        2,
        4,
        8,
        8,
        0,
        3,
        5,
    )


def test_failed_and_truncated_are_apart_from_wrong(one: ProblemSet) -> None:
    failed = SampleRecord(status="timeout", detail="too slow")
    cut = sample(0.0, status="truncated", tokens=10)
    found = told(one, records([sample(1.0), failed, cut, sample(0.0)], [failed] * 4, [sample(1.0)] * 4))
    assert (found["samples"], found["answered"], found["failed"], found["truncated"], found["right"], found["wrong"]) == (12, 7, 5, 1, 5, 1)
    # The problem that nobody answered is in no mean, and is no 0.
    assert found["accuracy"] == pytest.approx(statistics.mean([1 / 3, 1.0]))
    assert {k: rate["problems"] for k, rate in found["pass"].items()} == {"1": 2, "2": 2, "4": 1}
    assert found["reasons"] == {"timeout: too slow": 5}
    assert found["tokens"]["sum"] == 7 * 2 + 8


def test_where_all_have_failed_there_is_no_mean(one: ProblemSet) -> None:
    found = told(one, records([SampleRecord(status="failed")] * 4))
    assert (found["accuracy"], found["interval"], found["pass"], found["majority"]) == (None, None, {}, {})
    assert found["problems"] == [{"prompt": "p0", "expected": "7", "got": "", "reward": None}]


def test_what_newer_versions_have_answered_is_not_called_pinned(one: ProblemSet) -> None:
    older, newer = [sample(1.0)] * 4, [sample(1.0, version="0.7")] * 4
    assert told(one, records(older))["pinned"] is True
    mixed = told(one, records(older, newer))
    assert (mixed["pinned"], mixed["version"], mixed["versions"]) == (False, "0.5", ["0.5", "0.7"])
    assert told(one, records(older), pinned=False)["pinned"] is False


def test_what_is_right_has_at_least_the_reward_that_passes(one: ProblemSet) -> None:
    given = records([sample(0.6, answer="a"), sample(0.6, answer="a"), sample(0.4, answer="b"), sample(0.0, answer=None)])
    assert told(one, given)["right"] == 0
    found = told(replace(one, pass_reward=0.5), given)
    assert found["right"] == 2
    assert found["accuracy"] == pytest.approx(0.4)
    assert found["majority"]["4"]["value"] == pytest.approx(0.6)
