"""What an evaluation keeps: of a rollout, whose answers, in which file, and what it says of them."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from streamrl.config.evaluation_sets import ProblemSet, problem_sets
from streamrl.config.tree import Config, DataConfig, EvaluationConfig, RewardConfig
from streamrl.data.images import RowImage
from streamrl.data.problems import Problem, Problems
from streamrl.errors import LaunchError
from streamrl.producers.episode import Episode, Segment
from streamrl.producers.evaluation.asking import asked_digest, sample_record
from streamrl.producers.evaluation.results import summarize
from streamrl.producers.evaluation.store import ProblemRecord, SampleRecord, open_store
from streamrl.schemas.images import image_of
from streamrl.schemas.samples import VersionSpan
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from tests.support.images import png

CONFIG = Config(data=DataConfig(train="rows.jsonl", heldout="rows.jsonl"))


def episode(text: str, reward: float | None, agent: str = "") -> Episode:
    sampled = Segment([1], [-1.0], (VersionSpan(1, Version(0, 0)),))
    return Episode(segments=(Segment([2]), sampled), finish_reason="stop", turns=(text,), reward=reward, agent=agent)


def test_a_rollout_is_judged_by_its_own_reward_as_in_training() -> None:
    for given, reward, answer in (
        ([episode("mine", 1.0), episode("helper's", 0.25, "helper")], 1.0, "mine"),
        ([episode("first", 1.0), episode("last", 0.0)], 0.0, "last"),
        ([episode("solver's", 0.5, "solver"), episode("judge's", 1.0, "judge")], 1.0, "judge's"),
        ([episode("mine", None), episode("helper's", 0.25, "helper")], None, "mine"),
    ):
        found = sample_record("exact_match", cast(Any, SimpleNamespace(metadata={})), given, 100)
        assert (found.reward, found.text) == (reward, answer)
        assert found.answer == (answer if reward is not None else None), reward


def test_answers_are_not_kept_for_another_reward() -> None:
    for change in ({"reward": RewardConfig(key="answer")}, {"data": replace(CONFIG.data, reward_key="grade")}):
        rows = cast(Any, type("Rows", (), {"digest": "r"}))
        [one], [other] = problem_sets(CONFIG), problem_sets(replace(CONFIG, **change))
        assert asked_digest(one, rows, "w") == asked_digest(problem_sets(CONFIG)[0], rows, "w") != asked_digest(other, rows, "w"), change


def test_answers_are_not_kept_for_other_images_of_the_same_names() -> None:
    def rows(data: bytes) -> Any:
        return Problems(
            problems=(Problem(row=0, line=1, prompt_ids=(1,), prompt="p", images=(RowImage(image_of(data), data),)),), digest="r"
        )

    [one] = problem_sets(replace(CONFIG, data=replace(CONFIG.data, images_key="images")))
    assert asked_digest(one, rows(png(1)), "w") == asked_digest(one, rows(png(1)), "w") != asked_digest(one, rows(png(2)), "w")


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


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "0.3" / "sums.jsonl"


def record_of(row: int, reward: float | None = 1.0) -> ProblemRecord:
    return ProblemRecord(row=row, samples=(SampleRecord(reward=reward, tokens=3, answer="7", versions=("0.3", "0.3")),))


def test_who_comes_next_finds_what_is_there_and_two_do_not_write_at_once(path: Path) -> None:
    with open_store(path, "a") as store:
        store.add(record_of(0))
        with pytest.raises(LaunchError, match="another process holds"), open_store(path, "a"):
            pass
        store.add(record_of(1, None))
    with open_store(path, "a") as store:
        assert store.found == {0: record_of(0), 1: record_of(1, None)}


def test_lines_that_are_none_or_of_a_row_that_is_there_are_passed_over(path: Path) -> None:
    with open_store(path, "a") as store:
        store.add(record_of(0))
        store.add(record_of(0, 0.0))
    path.write_bytes(path.read_bytes() + b'{"row":0,"samples":[]}\n{"row": "x"}\n\xff\xfe\n' + b'{"row":2,"samples":[]}\n')
    with open_store(path, "a") as store:
        assert store.found == {0: record_of(0), 2: ProblemRecord(row=2, samples=())}


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_line_that_was_cut_off_is_asked_for_again(path: Path, cut: int) -> None:
    with open_store(path, "a") as store:
        store.add(record_of(0))
        store.add(record_of(1))
    path.write_bytes(path.read_bytes()[:-cut])
    with open_store(path, "a") as store:
        assert store.found == {0: record_of(0)}
        store.add(record_of(1))
    with open_store(path, "a") as store:
        assert list(store.found) == [0, 1]


@pytest.mark.parametrize(
    "text", ["", "\n", "{}\n", '{"format":1,"asked":"b"}\n{"row":0,"samples":[]}\n', "not json\n", '{"format":2,"asked":"a"}\n']
)
def test_what_was_asked_otherwise_is_set_aside(path: Path, text: str) -> None:
    path.parent.mkdir()
    path.write_text(text)
    with open_store(path, "a") as store:
        assert store.found == {}
        store.add(record_of(5))
    with open_store(path, "a") as store:
        assert list(store.found) == [5]
    aside = [other for other in path.parent.iterdir() if other != path]
    assert [other.read_text() for other in aside] == ([text] if text.count("\n") > 1 else [])
