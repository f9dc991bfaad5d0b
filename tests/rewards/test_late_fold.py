"""Late rewards in the fold: any order of samples, rewards and revisions; a bound in versions; corrections that come too late."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.core.fold import close, fold, trained
from streamrl.core.records import Ended, Record, Rewarded, Rollouts
from streamrl.core.state import FoldConfig, FoldState, initial_state
from tests.support.records import Stream, view

GROUP = 2


def config(**options: object) -> FoldConfig:
    return FoldConfig(**{"batch_tasks": 1, "max_staleness": 3, "group_size": GROUP} | options)  # type: ignore[arg-type]


def test_a_group_waits_for_the_last_of_its_rewards() -> None:
    s = Stream(config())
    s.rollouts(0, view(0), view(1))
    s.reward(0, 1, 1.0)
    assert s.close() is None and s.state.pending[0].complete
    s.reward(0, 0, 0.0)
    assert [r.reward for r in s.train().groups[0].rollouts.values()] == [0.0, 1.0]


def test_a_complete_group_waits_as_many_versions_as_it_may() -> None:
    s = Stream(config(late_versions=2))
    s.rollouts(0, view(0), view(1))
    granted = s.state.granted
    for task in (1, 2):
        s.group(task)
        s.train()
    assert s.dropped == [(1, 0, (0, 1), "unrewarded", True)]
    assert s.state.granted == granted + 3, "its credit is back with those of the two that were trained"
    s.reward(0, 0, 1.0)
    assert s.dropped[-1] == (4, 0, (0,), "superseded_reward", False)


def test_the_wait_begins_with_the_last_sample_of_the_group() -> None:
    s = Stream(config(late_versions=2, max_staleness=9))
    s.rollouts(0, view(0))
    for task in (1, 2, 3):
        s.group(task)
        s.train()
    assert 0 in s.state.pending, "rollouts that are still to come have all the time they need"
    s.rollouts(0, view(1, oldest=2))
    s.group(4, oldest=2)
    s.train()
    s.reward(0, 0, 0.0)
    s.reward(0, 1, 1.0)
    assert s.train().groups[0].task == 0


def test_without_a_bound_it_waits_for_ever() -> None:
    s = Stream(config(late_versions=0))
    s.rollouts(0, view(0), view(1))
    for task in range(1, 30):
        s.group(task, oldest=s.state.version.number)
        s.train()
    assert 0 in s.state.pending and s.state.granted - s.state.retired == 4


def test_rewards_that_come_after_the_tokens_are_too_old_are_stale() -> None:
    s = Stream(config(max_staleness=1))
    s.rollouts(0, view(0), view(1))
    for task in (1, 2):
        s.group(task, oldest=s.state.version.number)
        s.train()
    s.reward(0, 0, 0.0)
    s.reward(0, 1, 1.0)
    assert s.dropped[-1] == (1, 0, (0, 1), "stale", True)


def test_rewards_of_a_sample_that_brought_its_own_are_corrections() -> None:
    s = Stream(config(batch_tasks=2))
    s.group(0, (0.0, 1.0))
    s.reward(0, 0, 0.5)
    assert s.state.pending[0].rollouts[0].reward == 0.5


def test_a_correction_after_training_is_written_down() -> None:
    s = Stream(config())
    s.group(0)
    s.train()
    s.reward(0, 1, 0.25, revision=9)
    assert s.dropped == [(2, 0, (1,), "superseded_reward", False)]
    s.group(1)
    assert s.train().groups[0].task == 1, "and nothing else comes of it"


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 7), st.integers(0, GROUP - 1), st.sampled_from(["rollout", "reward", "own", "end", "close"]), st.integers(1, 4)
    ),
    max_size=120,
)


@given(events=EVENTS, late=st.integers(0, 3), stale=st.sampled_from(["drop", "mask"]), batch=st.integers(1, 2))
@settings(max_examples=200, deadline=None)
def test_in_any_order(events: list[tuple[int, int, str, int]], late: int, stale: str, batch: int) -> None:
    """The highest revision folded before the batch counts, every task ends once, credits add up, and a replay decides alike."""
    c = config(batch_tasks=batch, late_versions=late, stale=stale, drop_zero_variance=False)
    state = initial_state(c)
    log: list[Record] = []
    newest: dict[tuple[int, int], tuple[int, float]] = {}
    ends: Counter[int] = Counter()
    closes: list[tuple[int, tuple[int, ...]]] = []
    for offset, rollout, event, revision in events:
        task = state.watermark + offset % (state.granted - state.watermark)
        number = state.version.number
        if event == "close":
            chosen = close(state, c)
            if chosen is not None:
                for group in chosen.groups:
                    for k, r in group.rollouts.items():
                        assert (r.revision, r.reward) == newest[group.task, k]
                ends.update(group.task for group in chosen.groups)
                ends.update(drop.task for drop in state.drops if drop.retires)
                closes.append((len(log), tuple(group.task for group in chosen.groups)))
                state = trained(state, chosen, c, warm=True)
                assert not any(t.complete and not t.ready and 0 < late <= state.version.number - t.arrived for t in state.pending.values())
            continue
        sequence = len(log) + 1
        known = state.pending.get(task)
        there = known is not None and (rollout in known.rollouts or rollout in known.ended)
        if event in ("rollout", "own"):
            own = float(sequence) if event == "own" else None
            log.append(Rollouts(sequence, "main", task, GROUP, (view(rollout, oldest=number, reward=own),)))
            if own is not None and not there and not state.is_retired(task):
                newest.setdefault((task, rollout), (0, own))
        elif event == "reward":
            log.append(Rewarded(sequence, task, rollout, float(sequence), revision))
            if revision > newest.get((task, rollout), (0, 0.0))[0] and not state.is_retired(task):
                newest[task, rollout] = (revision, float(sequence))
        else:
            log.append(Ended(sequence, "main", task, rollout, GROUP, "failed"))
        state, effects = fold(state, log[-1], c)
        assert effects.dead == ()
        assert state.granted == state.retired + 4 * batch and FoldState.decode(state.encode()) == state
    ends.update(drop.task for drop in state.drops if drop.retires)
    assert ends == {task: 1 for task in range(state.granted) if state.is_retired(task)}
    again = initial_state(c)
    for upto, tasks in closes:
        for record in log[again.cursor : upto]:
            again, _ = fold(again, record, c)
        chosen = close(again, c)
        assert chosen is not None and tuple(group.task for group in chosen.groups) == tasks
        again = trained(again, chosen, c, warm=True)
    for record in log[again.cursor :]:
        again, _ = fold(again, record, c)
    assert again == state
