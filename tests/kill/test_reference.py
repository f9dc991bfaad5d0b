"""The trainer is ended between the renewal of its reference and the checkpoint that has it: the run goes on with the same reference."""

from pathlib import Path

import pytest

from streamrl.bus.server import NatsServer
from streamrl.config.loss import KLConfig
from streamrl.config.tree import Config
from streamrl.history.replay import Range, verify
from tests.support.world.fuse import Spot
from tests.support.world.nursery import TORCH, nursery
from tests.support.world.world import table_config, world

pytestmark = [pytest.mark.nats, pytest.mark.slow]

SPOTS = (
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


async def test_a_run_goes_on_with_the_reference_that_it_had(tmp_path: Path, own_server: NatsServer) -> None:
    async with nursery(tmp_path / "children.log", *TORCH) as children, world(renewing(tmp_path), own_server, children) as w:
        async with w.around("engine", "producer", "feeder"):
            await w.kill("trainer", SPOTS)
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
