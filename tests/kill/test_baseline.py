"""A run of ReMax whose trainer and producer are killed again and again: each batch has its greedy answers, and trains to the same bits."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from streamrl.bus.server import NatsServer
from streamrl.history.trace_find import TaskFinder
from streamrl.history.trace_task import life_of
from streamrl.schemas.decoding import decode_samples
from tests.support.world.fuse import Spot, around
from tests.support.world.nursery import Nursery
from tests.support.world.table import OTHERS
from tests.support.world.world import Row, World, table_config, world

pytestmark = [pytest.mark.nats, pytest.mark.slow]

# The greedy answer of one task in nine fails, and so does a trained one of another in nine.
REWARD = """
def reward(task, episode):
    greedy = task.baseline == episode.rollout
    if task.index % 9 == (4 if greedy else 7) and episode.rollout in (0, task.baseline):
        raise ValueError("no reward for this one")
    return float(len(episode.completion) % 3)
"""
TRAINER = Row("trainer", [*around("step", "publish ledger"), Spot("read samples"), Spot("put latest", "after")], OTHERS)
PRODUCER = Row("producer", around("publish samples", "publish tombstones", counts=(2,)), ("engine", "trainer", "feeder"))
STEPS = 28


async def by_hand(w: World) -> None:
    """The metrics of each version again, from the rewards on the stream."""
    for entry in await w.ledger():
        advantages: list[float] = []
        baselines: list[float] = []
        for group in entry.used:
            rewards: dict[int, float] = {}
            trained: set[int] = set()
            for rollout, sequence in zip(group.rollouts, group.sequences, strict=True):
                rows = decode_samples((await w.bus.fetch("samples", sequence)).body).rows()
                [row] = [row for row in rows if row.rollout == rollout]
                rewards[rollout] = float(row.reward if row.reward is not None else np.nan)
                trained |= {rollout} if row.loss_mask.any() else set()
            greedy = max(rewards)
            assert greedy == 2 and trained == set(rewards) - {greedy} != set(), f"task {group.task} of version {entry.version}"
            advantages += [rewards[k] - rewards[greedy] for k in sorted(trained)]
            baselines.append(rewards[greedy])
        assert entry.metrics["rollout/advantages"] == pytest.approx(np.mean(advantages), abs=1e-12)
        assert entry.metrics["rollout/baseline_reward"] == pytest.approx(np.mean(baselines), abs=1e-12)
        assert entry.num_samples == len(advantages), "greedy answers are no samples of a batch"


async def test_killed_and_resumed_it_replays_bit_for_bit(tmp_path: Path, own_server: NatsServer, children: Nursery) -> None:
    config = table_config(tmp_path, run={"steps": STEPS}, tasks={"num_rollouts": 2}, loss={"advantage": "remax"})
    (tmp_path / "reward.py").write_text(REWARD)
    async with world(config, own_server, children) as w:
        await w.disturb(TRAINER, PRODUCER)
        async with w.around(*OTHERS):
            assert await w.child("trainer") == 0
        assert (report := await w.audit()).problems == []
        replay = await w.replay()
        assert replay.ok and replay.versions == report.counts["versions"] == STEPS, replay.lines
        await by_hand(w)
        reasons: defaultdict[str, set[int]] = defaultdict(set)
        for entry in await w.ledger():
            for drop in entry.drops:
                reasons[drop.reason].add(drop.task % 9)
        assert reasons["no_baseline"] == {4}, "each group without a greedy answer is dropped for that, and no other"
        assert reasons["failed"] == {4, 7}
        group = (await w.ledger())[-1].used[0]
        found = await TaskFinder(w.bus, w.bus, w.subjects, "main").find(group.task)
        states = [one.state for one in life_of(found, w.config.run.name, group_size=3).rollouts]
        assert states[-1] == "baseline" and set(states[:-1]) <= {"trained", "dropped"}
