"""Some things hold in every run: hypothesis picks the world, `tests.support.simulation` runs it."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.core.assembly import used
from streamrl.core.fold import close, fold, trained
from streamrl.core.records import Rollouts
from streamrl.core.state import FoldState, initial_state
from streamrl.schemas.ledger import Drop
from tests.support.simulation import Result, Simulation, World

RARE = st.sampled_from([0.0, 0.05, 0.3])
WORLDS = st.builds(
    World,
    batch=st.integers(1, 4),
    staleness=st.integers(0, 4),
    stale=st.sampled_from(["drop", "mask", "wait"]),
    group=st.integers(2, 3),
    steps=st.integers(3, 10),
    warmup_steps=st.sampled_from([0, 0, 2]),
    slots=st.sampled_from([1, 3, 8, 40]),
    tail=st.sampled_from(["fixed", "uniform", "pareto", "rare"]),
    length=st.sampled_from([0.1, 0.7, 2.0]),
    publish_lag=st.sampled_from([0.0, 0.3, 2.5]),
    feed_lag=st.sampled_from([0.0, 0.4]),
    messages=st.sampled_from(["split", "whole"]),
    lost=RARE,
    duplicate=RARE,
    tombstone=RARE,
    poison=RARE,
    no_spread=RARE,
    apart=RARE,
    kill=st.sampled_from([0.0, 0.01, 0.05]),
    checkpoint_every=st.integers(1, 4),
    eager=st.sampled_from([0.0, 0.3, 1.0]),
    hold=st.booleans(),
    delay=st.sampled_from([0, 0, 0, 1, 2]),
    expire=st.sampled_from([0, 1, 1, 3]),
    baseline=st.booleans(),
    seed=st.integers(0, 2**32),
).map(lambda world: allowed(world))


def allowed(world: World) -> World:
    """The world as a configuration may be: engines lag within the bound, and tasks expire (`expire` versions) beyond it."""
    world = replace(world, delay=min(world.delay, world.staleness))
    left = world.staleness - world.delay
    expires = world.expire and left and world.stale != "wait"
    return replace(world, expire=left + world.expire if expires else 0)


def all_drops(result: Result) -> list[Drop]:
    return [drop for entry in result.ledger for drop in entry.drops] + list(result.state.drops)


@given(world=WORLDS)
@settings(max_examples=120, deadline=None)
def test_what_holds_in_every_world(world: World) -> None:
    result = Simulation(world).run()
    every_task_ends_once(result)
    every_rollout_of_the_stream_is_in_one_entry_or_one_drop_or_pending(result)
    staleness_is_bounded(world, result)
    the_same_stream_and_cursors_give_the_same_batches(world, result)
    what_is_trained_has_its_greedy_rollout_and_another(world, result)


def every_task_ends_once(result: Result) -> None:
    ended = Counter(group.task for entry in result.ledger for group in entry.used)
    ended.update(drop.task for drop in all_drops(result) if drop.retires)
    assert not [task for task, times in ended.items() if times > 1]
    assert set(ended) == {task for task in range(result.state.granted) if result.state.is_retired(task)}
    assert result.issued <= result.granted.granted


def every_rollout_of_the_stream_is_in_one_entry_or_one_drop_or_pending(result: Result) -> None:
    places: Counter[tuple[int, int]] = Counter()
    whole: Counter[int] = Counter()
    for entry in result.ledger:
        places.update((sequence, k) for group in entry.used for k, sequence in zip(group.rollouts, group.sequences, strict=True))
    for drop in all_drops(result):
        places.update((drop.sequence, k) for k in drop.rollouts)
        whole.update([drop.sequence] if not drop.rollouts else [])
    for task in result.state.pending.values():
        places.update((rollout.sequence, k) for k, rollout in task.rollouts.items())
    for record in result.log[: result.state.cursor]:
        if isinstance(record, Rollouts):
            found = {view.rollout: places[record.sequence, view.rollout] + whole[record.sequence] for view in record.rollouts}
            assert set(found.values()) == {1}, f"{record} is counted {found}"


def what_is_trained_has_its_greedy_rollout_and_another(world: World, result: Result) -> None:
    for entry in result.ledger if world.baseline else ():
        for group in entry.used:
            if result.state.warmup_end is not None and group.task >= result.state.warmup_end:
                assert group.rollouts[-1] == world.group - 1 and len(group.rollouts) > 1


def staleness_is_bounded(world: World, result: Result) -> None:
    for entry in result.ledger:
        match world.stale:
            case "drop":
                assert max(entry.ages) <= world.staleness
            case "mask":
                assert max(entry.newest) <= world.staleness, "every group has a token to train on"
            case "wait":
                # Whoever was granted at version g has ended by g + S; at most (S + 1) B such groups then go, oldest first, B a version.
                assert max(entry.ages) <= 2 * world.staleness
                assert not any(drop.reason == "stale" for drop in entry.drops)


def the_same_stream_and_cursors_give_the_same_batches(world: World, result: Result) -> None:
    state, folded = initial_state(world.config), 0
    for entry in result.ledger:
        while folded < entry.cursor:
            state, _ = fold(state, result.log[folded], world.config)
            folded += 1
        state = FoldState.decode(state.encode())
        batch = close(state, world.config)
        assert batch is not None and used(batch) == entry.used and state.drops == entry.drops
        state = trained(state, batch, world.config, warm=entry.warm)
    assert state == result.state or result.state.cursor > state.cursor


@given(
    batch=st.integers(1, 4),
    staleness=st.integers(1, 4),
    more=st.integers(1, 3),
    stale=st.sampled_from(["drop", "mask"]),
    hung_every=st.integers(7, 30),
    hold=st.booleans(),
    warmup_steps=st.sampled_from([0, 2]),
    kill=st.sampled_from([0.0, 0.02]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_hung_tasks_expire_and_their_credits_come_back(more: int, **options: object) -> None:
    world = World(**options | {"steps": 20, "slots": 40, "tail": "fixed"})  # type: ignore[arg-type]
    world = replace(world, expire=world.staleness + more)
    result = Simulation(world).run()
    expired = [drop for drop in all_drops(result) if drop.reason == "expired"]
    for number, entry in enumerate(result.ledger):
        hung = {drop.task for drop in entry.drops if drop.reason == "expired"}
        assert {task % world.hung_every for task in hung} <= {world.hung_every - 1}, f"version {number} expired what did not hang"
    # All that were granted so long before the end have ended.
    due = result.state.granted_by(result.state.version.number - world.expire)
    assert {drop.task for drop in expired if drop.retires} == {
        task for task in range(result.state.warmup_end or 0, due) if task % world.hung_every == world.hung_every - 1
    } | {drop.task for drop in expired if drop.task >= due}
    assert result.state.granted > 20 * world.batch


@pytest.mark.parametrize("stale", ["drop", "mask"])
def test_without_expiry_hung_tasks_stop_the_run(stale: str) -> None:
    world = World(stale=stale, hung_every=7, steps=20, slots=40, tail="fixed")
    with pytest.raises(AssertionError, match="deadlock"):
        Simulation(world).run()


def test_wait_is_not_bounded_by_s_alone() -> None:
    world = World(batch=2, staleness=3, stale="wait", tail="first", slots=40, steps=12, messages="whole", eager=0.0, publish_lag=0.0)
    assert max(max(entry.ages) for entry in Simulation(world).run().ledger) == 5


@given(
    staleness=st.integers(1, 4), length=st.floats(0.05, 8), batch=st.integers(1, 4), slots=st.integers(1, 30), publish_lag=st.floats(0, 3)
)
@settings(max_examples=60, deadline=None)
def test_equal_lengths_are_never_stale(staleness: int, length: float, batch: int, slots: int, publish_lag: float) -> None:
    world = World(batch, staleness, tail="fixed", length=length, slots=slots, publish_lag=publish_lag, messages="whole", no_spread=0.3)
    assert not [drop for drop in all_drops(Simulation(world).run()) if drop.reason != "zero_variance"]


@given(staleness=st.integers(2, 5), batch=st.integers(1, 4), seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_lengths_of_at_most_half_of_s_steps_are_never_stale(staleness: int, batch: int, seed: int) -> None:
    # Up to S - 1 steps one world in a thousand drops a group (S = 5, B = 2, seed 69340), up to S / 2 none of 11,200.
    slots = (staleness + 1) * batch
    world = World(batch, staleness, tail="uniform", length=staleness / 2, slots=slots, messages="whole", eager=0.0, seed=seed)
    assert not all_drops(Simulation(world).run())


@given(world=WORLDS.map(lambda w: World(w.batch, 0, group=w.group, slots=w.slots, tail=w.tail, eager=w.eager, kill=w.kill, seed=w.seed)))
@settings(max_examples=60, deadline=None)
def test_no_staleness_is_lockstep(world: World) -> None:
    result = Simulation(world).run()
    for number, entry in enumerate(result.ledger):
        assert [group.task for group in entry.used] == list(range(number * world.batch, (number + 1) * world.batch))
        assert set(entry.ages) == {0} and entry.drops == ()


def test_kills_leave_no_trace_and_a_dead_end_is_noticed() -> None:
    calm = World(staleness=2, steps=10, messages="whole", tail="fixed", eager=0.0, slots=40)
    results = [Simulation(World(**vars(calm) | {"kill": 0.05, "seed": seed})).run() for seed in range(20)]
    assert sum(result.kills for result in results) > 20
    trained_tasks = {tuple(sorted(group.task for entry in result.ledger for group in entry.used)) for result in results}
    assert trained_tasks == {tuple(range(30))}

    class Silent(Simulation):
        def publish(self, record: object) -> None:
            if len(self.log) < 9:
                super().publish(record)  # type: ignore[arg-type]

    with pytest.raises(AssertionError, match="deadlock"):
        Silent(World()).run()
