"""The trainer dies late and around a renewal of its reference, wakes beside its successor, has a full stream, ends lost tasks."""

import asyncio
import os
import signal
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from streamrl.bus.server import NatsServer
from streamrl.config.loss import KLConfig
from streamrl.config.tree import Config
from streamrl.history.replay import Range, verify
from streamrl.history.search import TaskFinder
from streamrl.history.trace import life_of
from streamrl.schemas.decoding import decode_samples
from tests.support.processes import stopped, until
from tests.support.world.fuse import Spot, around
from tests.support.world.nursery import TORCH, Nursery, nursery
from tests.support.world.table import OTHERS, TRAINER_AGAIN, TRIMMING
from tests.support.world.world import Row, World, table_config, vandals, world

pytestmark = pytest.mark.nats
FENCED = 3


async def test_one_that_wakes_beside_its_successor_is_refused_at_the_ledger(
    tmp_path: Path, own_server: NatsServer, children: Nursery
) -> None:
    """It is stopped with its step done and nothing of it stored; the other trains the same batch."""
    async with world(table_config(tmp_path, run={"steps": 12}), own_server, children) as w:
        async with w.around(*OTHERS):
            old = asyncio.create_task(w.child("trainer", Spot("publish ledger", count=4, stops=True)))
            await until(lambda: w.nursery.running and stopped(w.nursery.pid), within_s=60)
            async with w.around("trainer"):
                await w.trained(6)
                os.kill(w.nursery.pid, signal.SIGCONT)
                async with asyncio.timeout(60):
                    assert await old == FENCED
                await w.finished()
        report = await w.audit()
        assert report.problems == [] and report.counts["fences"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("stale", [pytest.param("mask", marks=pytest.mark.soak), "wait"])
async def test_later_calls_with_a_warm_up(tmp_path: Path, own_server: NatsServer, children: Nursery, stale: str) -> None:
    config = table_config(
        tmp_path,
        run={"steps": 30},
        tasks={"stale": stale, "max_staleness": 1},
        warmup={"max_steps": 6, "until": 1.0},
        weights={"transport": "shm"},
    )
    async with world(config, own_server, children) as w:
        async with vandals(w):
            await w.disturb(TRAINER_AGAIN)
            async with w.around(*OTHERS):
                await w.kill("trainer", around("put ends"))
                assert await w.child("trainer") == 0
        await w.check()
        sources = [entry.source for entry in await w.ledger()]
        warm = sources.count("warmup")
        assert warm >= 6 and set(sources[:warm]) == {"warmup"} and set(sources[warm:]) == {"main"}


async def test_a_full_stream_is_trimmed_only_below_what_a_restart_needs(tmp_path: Path, own_server: NatsServer, children: Nursery) -> None:
    config = table_config(tmp_path, run={"steps": 30}, trainer={"checkpoint_every": 1000}, bus={"samples_bytes": 300_000})
    async with world(config, own_server, children) as w:
        await w.disturb(TRIMMING)
        async with w.around(*OTHERS):
            assert await w.child("trainer") == 0
        assert (await w.bus.state("samples")).first > 60, "the run must have outgrown the stream several times"
        assert (await w.audit()).problems == []


async def test_a_lockstep_run_goes_on_past_tasks_that_were_acknowledged_without_a_record(
    tmp_path: Path, own_server: NatsServer, children: Nursery
) -> None:
    config = table_config(tmp_path, run={"steps": 8}, tasks={"max_staleness": 0})
    async with world(config, own_server, children) as w:
        async with w.around("feeder"):
            trainer = asyncio.create_task(w.child("trainer"))
            async with w.swallowed():
                assert len(w.lost) == 2
            async with w.around("engine", "producer"), asyncio.timeout(60):
                assert await trainer == 0
        ends = {drop.task: drop.reason for entry in await w.ledger() for drop in entry.drops if drop.retires and drop.task in w.lost}
        assert ends == dict.fromkeys(w.lost, "lost")
        await w.check()


RENEWED = (
    Spot("step", "after", 3),  # renewed, and not in the ledger
    Spot("publish ledger", "after", 3),  # and not in a checkpoint
    Spot("saved", "after", 1),  # in a checkpoint that nothing points to
    Spot("step", "after", 2),  # the next one, behind a checkpoint that has the one before
)


def renewing(base: Path) -> Config:
    return table_config(
        base,
        run={"steps": 6},
        model={"hidden": 32, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 48, "max_len": 32},
        tasks={"batch_tasks": 4, "num_rollouts": 2, "max_staleness": 1, "drop_zero_variance": False},
        reward={"kind": "random"},
        engine={"kind": "local", "slots": 8},
        trainer={"backend": "torch", "checkpoint_every": 3, "keep_checkpoints": 100},
        loss={"kl": KLConfig(loss_coef=0.5, estimator="k2", reference_every=2)},
    )


@pytest.mark.slow
async def test_a_run_goes_on_with_the_reference_that_it_had(tmp_path: Path, own_server: NatsServer) -> None:
    """The trainer is ended between the renewal of its reference and the checkpoint that has it."""
    async with nursery(tmp_path / "children.log", *TORCH) as children, world(renewing(tmp_path), own_server, children) as w:
        async with w.around("engine", "producer", "feeder"):
            await w.kill("trainer", RENEWED)
            assert await w.child("trainer") == 0
        entries = await w.ledger()
        assert [entry.version.number for entry in entries] == list(range(1, 7))
        assert {entry.version.epoch for entry in entries} == {0}, "trained again it gave the same digits"
        digests = [entry.digest for entry in entries]
        first = entries[0].reference
        assert [entry.reference for entry in entries] == [first, first, digests[1], digests[1], digests[3], digests[3]]
        assert len({first, *digests}) == 7
        for span in (Range(), Range(first=3)):
            report = await verify(w.config, w.bus, w.run.model_dir, checkpoints=w.run.checkpoints, span=span)
            assert report.ok and report.same_fingerprint and report.equal == report.versions > 0, report.lines


# The greedy answer of one task in nine fails, and so does a trained one of another in nine.
REWARD = """
def reward(task, episode):
    greedy = task.baseline == episode.rollout
    if task.index % 9 == (4 if greedy else 7) and episode.rollout in (0, task.baseline):
        raise ValueError("no reward for this one")
    return float(len(episode.completion) % 3)
"""
REMAX_TRAINER = Row("trainer", [*around("step", "publish ledger"), Spot("read samples"), Spot("put latest", "after")], OTHERS)
REMAX_PRODUCER = Row("producer", around("publish samples", "publish tombstones", counts=(2,)), ("engine", "trainer", "feeder"))
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


@pytest.mark.slow
async def test_killed_and_resumed_it_replays_bit_for_bit(tmp_path: Path, own_server: NatsServer, children: Nursery) -> None:
    """A run of ReMax whose trainer and producer are killed again and again: each batch has its greedy answers."""
    config = table_config(tmp_path, run={"steps": STEPS}, tasks={"num_rollouts": 2}, loss={"advantage": "remax"})
    (tmp_path / "reward.py").write_text(REWARD)
    async with world(config, own_server, children) as w:
        await w.disturb(REMAX_TRAINER, REMAX_PRODUCER)
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
