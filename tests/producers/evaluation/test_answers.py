"""What an evaluation keeps of a rollout, and when answers that are there are those of the same question."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from streamrl.config.evaluation_sets import problem_sets
from streamrl.config.tree import Config, DataConfig, RewardConfig
from streamrl.data.images import RowImage
from streamrl.data.problems import Problem, Problems
from streamrl.producers.episode import Episode, Segment
from streamrl.producers.evaluation.asking import asked_digest, sample_record
from streamrl.schemas.images import image_of
from streamrl.schemas.samples import VersionSpan
from streamrl.schemas.versions import Version
from tests.support.images import png

CONFIG = Config(data=DataConfig(train="rows.jsonl", heldout="rows.jsonl"))


def episode(text: str, reward: float | None, agent: str = "") -> Episode:
    sampled = Segment([1], [-1.0], (VersionSpan(1, Version(0, 0)),))
    return Episode(segments=(Segment([2]), sampled), finish_reason="stop", turns=(text,), reward=reward, agent=agent)


@pytest.mark.parametrize(
    ("given", "reward", "answer"),
    [
        ([episode("mine", 1.0), episode("helper's", 0.25, "helper")], 1.0, "mine"),
        ([episode("first", 1.0), episode("last", 0.0)], 0.0, "last"),
        ([episode("solver's", 0.5, "solver"), episode("judge's", 1.0, "judge")], 1.0, "judge's"),
        ([episode("mine", None), episode("helper's", 0.25, "helper")], None, "mine"),
    ],
)
def test_a_rollout_is_judged_by_its_own_reward_as_in_training(given: list[Episode], reward: float | None, answer: str) -> None:
    found = sample_record("exact_match", cast(Any, SimpleNamespace(metadata={})), given, 100)
    assert (found.reward, found.text) == (reward, answer)
    assert found.answer == (answer if reward is not None else None)


@pytest.mark.parametrize(
    "change",
    [{"reward": RewardConfig(key="answer")}, {"data": replace(CONFIG.data, reward_key="grade")}],
)
def test_answers_are_not_kept_for_another_reward(change: dict[str, Any]) -> None:
    rows = cast(Any, type("Rows", (), {"digest": "r"}))
    [one], [other] = problem_sets(CONFIG), problem_sets(replace(CONFIG, **change))
    assert asked_digest(one, rows, "w") == asked_digest(problem_sets(CONFIG)[0], rows, "w") != asked_digest(other, rows, "w")


def test_answers_are_not_kept_for_other_images_of_the_same_names() -> None:
    def rows(data: bytes) -> Any:
        return Problems(
            problems=(Problem(row=0, line=1, prompt_ids=(1,), prompt="p", images=(RowImage(image_of(data), data),)),), digest="r"
        )

    [one] = problem_sets(replace(CONFIG, data=replace(CONFIG.data, images_key="images")))
    assert asked_digest(one, rows(png(1)), "w") == asked_digest(one, rows(png(1)), "w") != asked_digest(one, rows(png(2)), "w")
