"""The trainer dies late in its life, around a renewal of its reference, wakes beside its successor, and with a stream that is full."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from streamrl.bus.server import NatsServer
from streamrl.config.loss import KLConfig
from streamrl.config.tree import Config
from streamrl.history.replay import Range, verify
from tests.support.processes import stopped, until
from tests.support.world.fuse import Spot, around
from tests.support.world.nursery import TORCH, Nursery, nursery
from tests.support.world.table import OTHERS, TRAINER_AGAIN, TRIMMING
from tests.support.world.world import table_config, vandals, world

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
