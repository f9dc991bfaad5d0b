"""What a branch folds of a record that its parent has refused."""

from __future__ import annotations

import pytest

from streamrl.core.records import Ended, Rewarded, Rollouts
from streamrl.core.state import FoldConfig
from streamrl.history.branch_state import begin, take
from tests.support.records import view

CONFIG = FoldConfig(batch_tasks=1, max_staleness=1)
IMPOSSIBLE = {
    "an agent that there is not": Rewarded(2, 0, 0, 1.0, 1, agent="solver"),
    "a sample that there is not": Rewarded(2, 0, 0, 1.0, 1, sample=5),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_reward_that_cannot_be_ends_no_task_of_a_branch(name: str) -> None:
    state = begin(CONFIG, CONFIG)
    for record in (Rollouts(1, "main", 0, 2, (view(0), view(1))), IMPOSSIBLE[name], Rewarded(3, 0, 0, 1.0, 1), Rewarded(4, 0, 1, 0.0, 1)):
        state = take(state, record, CONFIG, CONFIG)
    assert state.own.ready == state.parent.ready == 1
    assert [drop.reason for drop in state.own.drops] == [drop.reason for drop in state.parent.drops] == ["poison"]


def test_an_end_that_cannot_be_ends_its_task_in_both() -> None:
    state = begin(CONFIG, CONFIG)
    for record in (Rollouts(1, "main", 0, 2, (view(0),)), Ended(2, "main", 0, 0, 7, "failed")):
        state = take(state, record, CONFIG, CONFIG)
    assert state.own.retired == state.parent.retired == 1
