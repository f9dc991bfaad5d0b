"""Late rewards in the fold, in any order of samples, rewards and revisions. By hand: `tests/core/test_fold_rewards.py`."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.core.fold import close, fold, trained
from streamrl.core.records import Ended, Record, Rewarded, Rollouts
from streamrl.core.state import FoldConfig, FoldState, initial_state
from tests.support.records import view

GROUP = 2


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
    bounds = {"batch_tasks": batch, "max_staleness": 3, "group_size": GROUP, "late_versions": late}
    c = FoldConfig(**bounds, stale=stale, drop_zero_variance=False)  # type: ignore[arg-type]
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
