from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.config.check import check
from streamrl.config.reward_kinds import KINDS
from streamrl.config.tree import Config, DataConfig, RewardConfig
from streamrl.errors import ConfigError, SchemaError
from streamrl.rewards.f1 import f1_of
from streamrl.rewards.factory import built_in, make_reward, runs_in_children
from streamrl.rewards.gpqa import chosen
from streamrl.rewards.layers import MOST, ByRow
from streamrl.rewards.protocol import RewardValue
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.tasks import RewardSpec, RolloutTask
from tests.rewards.episodes import Episode, only, task
from tests.support.errors import raises

LETTERS = "ABCDEFGHIJ"


def test_dapo_looks_at_the_end() -> None:
    for label, completion, score in (
        ("34", "Answer: 34", 1),
        ("34", "answer : 34.0\n", 1),
        (34, "Answer: 34", 1),
        ("34", "Answer: 35\nAnswer: 34", 1),
        ("34", "Answer: 34\nAnswer: 35", -1),
        ("34", "Answer: $34$", 1),
        ("34", "Answer: x = 34", 1),
        ("34", "Answer: 34 dollars", 1),
        ("1234", "Answer: 1,234", 1),
        ("12", "Answer: 1,2", -1),
        (r"\frac{1}{2}", "Answer: 0.5", 1),  # slime raises for a label that is no whole number
        (r"\frac{1}{2}", r"Answer: \frac12", 1),
        ("0.25", "Answer: 1/4", 1),
        (r"\left(1,2\right)", r"Answer: \left(1, 2\right)", 1),
        ("34", "34", -1),
        ("34", "", -1),
        ("34", "Answer: 34" + "." * 300, -1),
        ("34", "Answer:\n34", 1),
    ):
        assert only("dapo", label, completion) == [RewardValue(score, {"score": score, "acc": (score + 1) / 2})]
    for completion, score in (
        (r"\boxed{34}", 1),
        (r"\boxed{34.0}", -1),
        (r"\boxed{34}" + " " * 100, -1),
        ("Answer: 34", -1),
        (r"\boxed{34", -1),
    ):
        assert only("dapo", "34", completion, strict_box=True)[0].value == score


def test_f1_of_the_best_of_several_labels() -> None:
    for label, answer, f1 in (
        ("a cat sat down", "the cat sat", 0.8),
        ("the cat sat", "a cat sat down", 0.8),
        ("The Cat, sat!", "cat sat", 1),
        ("yes", "yes", 1),
        ("yes", "yes it is", 0),
        ("no", "yes", 0),
        ("noanswer", "no answer", 0),
        ("Denver Broncos", "", 0),
        ("A", "", 0),
        ("A", "the", 0),
        ("A", "a", 1),
        ("cat cat dog", "cat dog dog", 2 / 3),
    ):
        assert f1_of(label, answer)[0] == pytest.approx(f1)
    assert only("f1", ["dog", "a cat sat down"], "<think>dog</think>the cat sat")[0].value == pytest.approx(0.8)


def test_the_letter_that_is_chosen() -> None:
    for text, letter in (
        ("The answer is (B)", "B"),  # slime reads the i of "is"
        ("The answer is B.", "B"),
        ("Answer: C", "C"),
        ("**Answer: B**", "B"),
        ("the answer is: \\textbf{(C)}", "C"),
        ("The correct answer is $B$", "B"),
        ("Answer:\nB", "B"),
        ("(c)", "C"),
        ("b", "B"),
        ("A", "A"),
        ("A because the rest is wrong? No. The answer is D.", "D"),
        ("I think it is B", "B"),
        ("The answer is A because it is", "A"),
        ("\\boxed{\\text{C}} and not \\boxed{D}", "D"),
        ("The answer is (A). No, wait: the answer is (C)", "C"),
        ("It's option B", "B"),
        ("I don't know", None),
        ("a dog", None),
        ("", None),
    ):
        assert chosen(text, LETTERS) == letter


@pytest.mark.parametrize("label", ["B", "(b)", 1, "4 apples", "1"])
def test_a_label_of_gpqa_is_a_letter_an_index_or_a_text(label: object) -> None:
    metadata = {"choices": ["3 apples", "4 apples", "5", "6"]}
    for completion in ("The answer is (B)", "The answer is 4 apples.", "\\boxed{B}", "4 apples", "<think>C</think>B"):
        assert only("gpqa", label, completion, metadata)[0].value == 1, completion
    assert only("gpqa", label, "The answer is (C)", metadata)[0].value == 0
    assert only("boxed_gpqa", label, "\\boxed{(B)} C", metadata)[0].value == 1


def test_what_gpqa_cannot_use_is_named_with_the_row() -> None:
    for label, metadata in (("Z", {}), (None, {}), (11, {}), ("A", {"valid_letters": "AA"}), ("A", {"choices": list("abcdefghijk")})):
        [error] = only("gpqa", label, "A", metadata)
        assert isinstance(error, SchemaError) and error.values["row"] == 7
    assert only("gpqa", "C", "B", {"correct_letter": "B", "valid_letters": ["A", "B"]})[0].value == 1


async def test_random_is_the_same_in_each_run() -> None:
    rewards = [built_in("random", {"probability": 0.25}) for _ in range(2)]
    episodes = [Episode("", rollout) for rollout in range(2000)]
    first, second = [await reward.score(task(seed=5), episodes) for reward in rewards]
    assert first == second != await rewards[0].score(task(seed=6), episodes)
    assert abs(sum(value.value for value in first if isinstance(value, RewardValue)) / 2000 - 0.25) < 0.05  # 5 sigma


def test_every_kind_can_be_made() -> None:
    needed = {"remote": {"url": "http://127.0.0.1:9"}, "judge": {"url": "http://127.0.0.1:9/v1", "model": "m"}}
    for kind, known in KINDS.items():
        if kind in ("python", "ifbench", "ifeval"):
            continue  # tests/rewards/test_python.py, test_instructions.py
        built_in(kind, needed.get(kind, {}))
        assert runs_in_children(RewardConfig(kind=kind)) == known.in_children
        if known.boxed:
            built_in(f"boxed_{kind}", needed.get(kind, {}))
            assert runs_in_children(RewardConfig(kind=f"boxed_{kind}")) == known.in_children


@pytest.mark.parametrize(
    ("kind", "options", "key"),
    [
        ("maths", {}, "reward.kind"),
        ("boxed_python", {}, "reward.kind"),
        ("boxed_late", {}, "reward.kind"),
        ("boxed_ifbench", {}, "reward.kind"),
        ("ifbench", {"strict": True}, "reward.options"),
        ("f1", {"x": 1}, "reward.options"),
        ("math", {"boxed": True}, "reward.options"),
        ("math", {"boxed_only": "yes"}, "reward.options"),
        ("random", {"probability": 1.5}, "reward.options"),
        ("remote", {}, "reward.options.url"),
        ("remote", {"url": "ftp://host/x"}, "reward.options.url"),
        ("remote", {"url": "http://user:secret@host/x"}, "reward.options.url"),
        ("remote", {"url": "http://host:99999/x"}, "reward.options.url"),
        ("remote", {"url": "http://host/", "api_key": "secret"}, "reward.options"),
        ("judge", {"url": "http://host/v1"}, "reward.options.model"),
        ("judge", {"url": "http://host/v1", "model": "m", "pattern": "(a"}, "reward.options.pattern"),
        ("judge", {"url": "http://host/v1", "model": "m", "pattern": "a"}, "reward.options.pattern"),
        ("judge", {"url": "http://host/v1", "model": "m", "template": "{prompt}"}, "reward.options.template"),
        ("judge", {"url": "http://host/v1", "model": "m", "low": 5.0, "high": 5.0}, "reward.options.high"),
        ("python", {"memory_bytes": 1}, "reward.options"),
    ],
)
def test_what_a_configuration_may_not_say(kind: str, options: dict, key: str) -> None:
    with raises(ConfigError, key=key) as caught:
        check(Config(data=DataConfig(train="rows.jsonl"), reward=RewardConfig(kind=kind, options=options)))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "reward", "key"),
    [
        ({"reward_options": {"math": {}}}, {}, "data.reward_options"),
        ({"reward_key": "r", "reward_options": {"boxed_math": {}}}, {}, "data.reward_options"),
        ({"reward_key": "r", "reward_options": {"judge": {}}}, {}, "data.reward_options.judge.options.url"),
        ({"reward_key": "r"}, {"kind": "late"}, "data.reward_key"),
        ({}, {"kind": "late", "key": "score"}, "reward.key"),
    ],
)
def test_keys_that_contradict_each_other(data: dict, reward: dict, key: str) -> None:
    with raises(ConfigError, key=key):
        check(Config(data=DataConfig(train="rows.jsonl", **data), reward=RewardConfig(**reward)))


async def test_a_row_has_its_own_reward() -> None:
    reward = make_reward(RewardConfig(kind="exact_match"), by_row={"math": {"boxed_only": True}})
    assert isinstance(reward, ByRow)
    for spec, completion, expected in (
        (None, "4", 1),
        (None, "#### 4", 0),
        (RewardSpec("gsm8k"), "#### 4", 1),
        (RewardSpec("math"), "#### 4", 0),
        (RewardSpec("math", {"boxed_only": False}), "#### 4", 1),
        (RewardSpec("boxed_math"), r"\boxed{8/2}", 1),
        (RewardSpec("dapo"), "4", -1),
    ):
        one = task("4", reward=spec) if spec else task("4")
        [value] = await reward.score(decode(encode(one), RolloutTask, where="here"), [Episode(completion)])
        assert isinstance(value, RewardValue) and value.value == expected, spec


@pytest.mark.parametrize(
    "spec",
    [
        RewardSpec("remote", {"url": "http://elsewhere/"}),
        RewardSpec("python", {"isolation": "limits"}),
        RewardSpec("os.py:system"),
        RewardSpec("late"),
        RewardSpec("maths"),
    ],
)
async def test_a_task_cannot_name_what_a_row_may_not(spec: RewardSpec) -> None:
    reward = make_reward(RewardConfig(), by_row={})
    assert reward is not None
    with pytest.raises(ConfigError):
        await reward.score(task("4", reward=spec), [Episode("4")])


async def test_rows_cannot_have_a_reward_each() -> None:
    reward = make_reward(RewardConfig(), by_row={})
    assert reward is not None
    for number in range(MOST):
        await reward.score(task("4", reward=RewardSpec("random", {"probability": number / 1000})), [Episode("4")])
    with raises(ConfigError, key="data.reward_key"):
        await reward.score(task("4", reward=RewardSpec("random", {"probability": 0.999})), [Episode("4")])


CODE = """
def parts(task, episode):
    return {"score": 2.0, "length": len(episode.completion), "reward": 7.0}

async def lacks(task, episode):
    return {"length": 1.0} if episode.rollout else {"score": 1.0}

class Both:
    async def score(self, task, episodes):
        return [{"score": 3.0, "other": 1.0} for _ in episodes]
"""


def scored(tmp_path, name: str, key: str, episodes: int = 1):
    file = tmp_path / "code.py"
    file.write_text(CODE)
    reward = make_reward(RewardConfig(kind=f"{file}:{name}", key=key))
    assert reward is not None
    return asyncio.run(reward.score(task("4"), [Episode("abc", rollout) for rollout in range(episodes)]))


def test_the_part_that_is_trained(tmp_path) -> None:
    assert scored(tmp_path, "parts", "") == [RewardValue(7, {"score": 2, "length": 3})]
    assert scored(tmp_path, "parts", "score") == [RewardValue(2, {"score": 2, "length": 3})]
    assert scored(tmp_path, "parts", "length") == [RewardValue(3, {"score": 2, "length": 3})]
    assert scored(tmp_path, "parts", "reward") == [RewardValue(7, {"score": 2, "length": 3})]
    assert scored(tmp_path, "Both", "score") == [RewardValue(3, {"score": 3, "other": 1})]
    first, second = scored(tmp_path, "lacks", "score", 2)
    assert first == RewardValue(1, {"score": 1})
    assert isinstance(second, SchemaError) and "row 7" in second.message and "length" in second.message
    keyed: Any = make_reward(RewardConfig(kind="dapo", key="acc"))
    assert asyncio.run(keyed.score(task("4"), [Episode("Answer: 4")])) == [RewardValue(1, {"score": 1, "acc": 1})]


@pytest.mark.parametrize("advantage", ["maxrl", "pass_at_k"])
def test_dapo_goes_with_estimators_of_right_and_wrong_by_its_part_of_them(advantage: str) -> None:
    def config(kind: str, key: str) -> Config:
        config = Config(data=DataConfig(train="x"), reward=RewardConfig(kind=kind, key=key))
        return replace(config, loss=replace(config.loss, advantage=advantage))

    for kind in ("dapo", "boxed_dapo"):
        with raises(ConfigError, key="reward.kind"):
            check(config(kind, ""))
        check(config(kind, "acc"))
