from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.config.loss import LossConfig
from streamrl.config.tree import Config, DataConfig, RunConfig, TasksConfig
from streamrl.data.problems import Problem, Problems, Unusable
from streamrl.producers.feeder import min_version, plan_tasks
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import Grant
from streamrl.schemas.tasks import Refused, RolloutTask
from streamrl.schemas.versions import Version

PROBLEMS = Problems(
    problems=tuple(Problem(row=i, line=i + 1, prompt_ids=(i, i + 1), prompt=f"p{i}", label=f"l{i}", metadata={"i": i}) for i in range(7)),
    digest="d",
)
CONFIG = Config(run=RunConfig(name="r", seed=3), tasks=TasksConfig(batch_tasks=4, num_rollouts=2, max_staleness=1))


def test_a_task_carries_its_row():
    for task in plan_tasks(Grant(8, 0, 0), 0, 100, PROBLEMS, CONFIG):
        problem = PROBLEMS[task.row]
        assert (task.prompt_ids, task.prompt, task.label) == (problem.prompt_ids, problem.prompt, problem.label)
        assert (task.metadata, task.sampling, task.run, task.policy) == (problem.metadata, CONFIG.sampling, "r", "policy")


def test_a_plan_ends_with_the_grant_or_where_asked():
    assert [task.index for task in plan_tasks(Grant(8, 0, 0), 3, 6, PROBLEMS, CONFIG)] == [3, 4, 5]
    assert [task.index for task in plan_tasks(Grant(8, 0, 0), 6, 100, PROBLEMS, CONFIG)] == [6, 7]
    assert plan_tasks(Grant(8, 0, 0), 8, 100, PROBLEMS, CONFIG) == []


def test_each_epoch_goes_through_all_rows():
    tasks = plan_tasks(Grant(21, 0, 0), 0, 100, PROBLEMS, CONFIG)
    for epoch in range(3):
        rows = [task.row for task in tasks if task.data_epoch == epoch]
        assert sorted(rows) == list(range(7))
    assert [task.row for task in tasks[:7]] != [task.row for task in tasks[7:14]]


def test_a_row_that_cannot_be_used_is_a_task_with_the_reason():
    class Rows(Problems, frozen=True):
        def take(self, rows):
            return [Unusable(row=row, reason="row_broken", detail="line 3") if row == 2 else self.problems[row] for row in rows]

    config = msgspec.structs.replace(CONFIG, data=DataConfig(shuffle=False))
    rows = Rows(problems=PROBLEMS.problems, digest="d")
    tasks, plain = (plan_tasks(Grant(7, 0, 0), 0, 7, given, config) for given in (rows, PROBLEMS))
    assert tasks[:2] + tasks[3:] == plain[:2] + plain[3:]
    bare = {"prompt_ids": (), "prompt": None, "label": None, "metadata": {}, "refused": Refused("row_broken", "line 3")}
    assert tasks[2] == msgspec.structs.replace(plain[2], **bare)
    assert decode(encode(tasks[2]), RolloutTask) == tasks[2] and b"refused" not in encode(tasks[1])


def test_file_order():
    config = msgspec.structs.replace(CONFIG, data=DataConfig(shuffle=False))
    assert [task.row for task in plan_tasks(Grant(9, 0, 0), 0, 9, PROBLEMS, config)] == [0, 1, 2, 3, 4, 5, 6, 0, 1]


def test_a_plan_does_not_depend_on_where_it_starts():
    whole = plan_tasks(Grant(20, 2, 8), 0, 20, PROBLEMS, CONFIG)
    assert plan_tasks(Grant(20, 2, 8), 11, 15, PROBLEMS, CONFIG) == whole[11:15]


def test_seeds_differ_by_task_and_by_run_seed():
    def seeds(config):
        return [task.seed for task in plan_tasks(Grant(20, 0, 0), 0, 20, PROBLEMS, config)]

    other = msgspec.structs.replace(CONFIG, run=RunConfig(name="r", seed=4))
    assert len({*seeds(CONFIG), *seeds(other)}) == 40


def test_the_warm_up_comes_first_and_the_rows_begin_again_after_it():
    during = plan_tasks(Grant(8, 0, 0, None), 0, 8, PROBLEMS, CONFIG)
    assert {(task.source, task.num_rollouts, task.min_version) for task in during} == {("warmup", 1, 0)}
    after = plan_tasks(Grant(16, 1, 4, 8), 0, 16, PROBLEMS, CONFIG)
    assert after[:8] == during
    assert {(task.source, task.num_rollouts) for task in after[8:]} == {("main", 2)}
    straight = plan_tasks(Grant(8, 0, 0, 0), 0, 8, PROBLEMS, CONFIG)
    assert [(task.row, task.data_epoch) for task in after[8:]] == [(task.row, task.data_epoch) for task in straight]


@pytest.mark.parametrize(
    ("staleness", "expected"),
    [(0, [5, 5, 5, 5]), (1, [4, 4, 4, 4, 5, 5, 5, 5]), (2, [3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5])],
)
def test_min_version_by_hand(staleness, expected):
    """B = 4, version 5, 20 tasks retired: the open ones are trained in batches of four, by versions 5, 6 and 7."""
    config = msgspec.structs.replace(CONFIG, tasks=TasksConfig(batch_tasks=4, max_staleness=staleness))
    grant = Grant(20 + 4 * (staleness + 1), 5, 20)
    assert [task.min_version for task in plan_tasks(grant, 20, 99, PROBLEMS, config)] == expected
    later = plan_tasks(msgspec.structs.replace(grant, epoch=2), 20, 99, PROBLEMS, config)
    assert [task.least for task in later] == [Version(2, number) for number in expected]


@given(
    version=st.integers(0, 50),
    batch=st.integers(1, 9),
    staleness=st.integers(0, 8),
    refills=st.integers(0, 30),
    offset=st.integers(0, 100),
)
def test_min_version_keeps_the_bound_and_never_waits_for_the_future(version, batch, staleness, refills, offset):
    config = msgspec.structs.replace(CONFIG, tasks=TasksConfig(batch_tasks=batch, max_staleness=staleness))
    retired = version * batch + refills
    grant = Grant(retired + (staleness + 1) * batch, version, retired)
    index = min(retired + offset, grant.granted - 1)
    lowest = min_version(grant, index, config)
    trained_from = version + (index - retired) // batch
    assert 0 <= lowest <= version
    assert trained_from - lowest <= staleness
    assert lowest in (0, trained_from - staleness)


def test_an_estimator_that_asks_for_it_gets_one_greedy_rollout_more():
    config = msgspec.structs.replace(CONFIG, loss=LossConfig(advantage="remax"))
    tasks, plain = (plan_tasks(Grant(8, 0, 0, 3), 0, 8, PROBLEMS, one) for one in (config, CONFIG))
    assert tasks[:3] == plain[:3] and tasks[2].baseline is None, "demonstrations have none"
    for task, one in zip(tasks[3:], plain[3:], strict=True):
        assert (task.num_rollouts, task.baseline) == (3, 2)
        assert msgspec.structs.replace(task, num_rollouts=2, greedy_baseline=msgspec.UNSET) == one
        assert [task.for_rollout(k).sampling.temperature for k in range(3)] == [1.0, 1.0, 0.0]
        assert decode(encode(task), RolloutTask) == task and b"greedy_baseline" not in encode(one)
