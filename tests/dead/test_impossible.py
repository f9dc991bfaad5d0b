"""What the fold does not believe: versions that there have not been, groups of another size, rewards for nobody."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from streamrl.core.records import Forked, Rewarded, Rollouts
from streamrl.core.state import Epoch, FoldConfig
from tests.support.records import Stream, view


def config(**options: object) -> FoldConfig:
    return FoldConfig(batch_tasks=1, max_staleness=9, **options)  # type: ignore[arg-type]


def sampled(s: Stream, task: int, *epochs: tuple[int, int, int]) -> str:
    """A whole group whose tokens are of these (epoch, lowest, highest); returns why it was quarantined, if it was."""
    views = [replace(view(k, oldest=0, reward=float(k), highest=max(e[2] for e in epochs)), epochs=epochs) for k in range(2)]
    effects = s.put(Rollouts(s.next(), "main", task, 2, tuple(views)))
    return effects.dead[0].reason if effects.dead else ""


def trained_to(number: int, **options: object) -> Stream:
    s = Stream(config(**options))
    for task in range(number):
        s.group(task)
        s.train()
    return s


def test_an_epoch_exists_from_its_mark_on() -> None:
    s = trained_to(6)
    assert "got 1.4 to 1.6" in sampled(s, 6, (1, 4, 6))
    s.put(Forked(s.next(), 1, 4, 5))
    assert s.state.epochs == (Epoch(0, 0, 5), Epoch(1, 4))
    assert sampled(s, 7, (1, 4, 6)) == ""
    assert sampled(s, 8, (0, 3, 5), (1, 4, 4)) == ""


@pytest.mark.parametrize(("span", "got"), [((1, 3, 5), "1.3 to 1.5"), ((0, 2, 6), "0.2 to 0.6"), ((2, 6, 6), "2.6 to 2.6")])
def test_a_number_exists_under_the_epochs_that_had_it(span: tuple[int, int, int], got: str) -> None:
    s = trained_to(6)
    s.put(Forked(s.next(), 1, 4, 5))
    reason = sampled(s, 6, span)
    assert "(0.0 to 0.5, 1.4 to 1....)" in reason and f"got {got}" in reason
    assert s.state.is_retired(6)


@pytest.mark.parametrize(("fork", "dead"), [((1, 2, 2), False), ((3, 5, 6), True), ((2, 4, 3), True)])
def test_marks_that_repeat_or_come_out_of_turn_change_nothing(fork: tuple[int, int, int], dead: bool) -> None:
    s = trained_to(6)
    s.put(Forked(s.next(), 1, 4, 5))
    before = s.state.epochs
    s.put(Forked(s.next(), *fork))
    assert s.state.epochs == before and bool(s.effects.dead) == dead


def test_a_group_has_the_size_that_the_configuration_says() -> None:
    s = Stream(config(group_size=2))
    effects = s.rollouts(0, view(0, reward=0.0), group=3)
    assert "expected a group of 2" in effects.dead[0].reason and s.state.is_retired(0)
    assert "expected a group of 2" in s.end(1, 0, group=5).dead[0].reason
    assert s.end(2, group=5).dead == (), "the end of a whole task needs no size"


def test_a_task_of_the_warm_up_has_one_rollout() -> None:
    s = Stream(config(group_size=2, warmup_steps=1))
    s.demonstration(0)
    s.train(warm=True)
    assert s.rollouts(1, view(0, reward=0.0), group=2).dead != ()
    first = s.state.warmup_end
    assert first is not None
    for task in range(2, first):
        s.end(task)
    assert s.rollouts(first, view(0, reward=0.0), group=2).dead == ()


def test_a_reward_for_nobody_is_quarantined_and_ends_no_task() -> None:
    s = Stream(config(group_size=2))
    s.rollouts(0, view(0), view(1))
    for record in (
        Rewarded(s.next(), 0, 2, 1.0, 1),
        Rewarded(s.next(), 5, 2, 1.0, 1),
        Rewarded(s.next(), 10**6, 0, 1.0, 1),
        Rewarded(s.next(), 0, 1, 1.0, 1, sample=1),
    ):
        assert s.put(record).dead[0].sequence == record.sequence
    assert s.state.retired == 0 and s.state.early_rewards == {}
    s.reward(0, 0, 0.0)
    s.reward(0, 1, 1.0)
    assert s.train().groups[0].task == 0


def test_a_reward_for_a_rollout_that_has_failed_is_not_kept() -> None:
    s = Stream(config())
    s.end(0, 1)
    s.reward(0, 1, 1.0)
    assert s.dropped[-1] == (2, 0, (1,), "superseded_reward", False) and s.state.early_rewards == {}
