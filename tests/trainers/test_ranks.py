"""A trainer with two ranks, led by this process; and the arithmetic of how ranks share a model."""

import asyncio
import gc
import itertools
import math
import os
import signal
import socket
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from msgspec import UNSET

from streamrl.config.tree import Config, TrainerConfig
from streamrl.errors import TrainingError
from streamrl.runtime.processes import started
from streamrl.schemas.versions import Version
from streamrl.tensors.digest import MASK, slice_digest, tensor_digest
from streamrl.tensors.mesh import Mesh, gathers_once, mesh_of, trained_on
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.ranks import local
from streamrl.trainers.ranks.local import open_trainer
from streamrl.trainers.ranks.process_group import Rendezvous, RendezvousAddress, join
from tests.support.errors import raises
from tests.support.meshes import config, killed_in_a_step, slow
from tests.support.needs import need
from tests.support.preloaded import Preloaded
from tests.support.processes import children, until
from tests.support.programs import Start
from tests.support.scoring import policy_of
from tests.support.trainers import Rollouts

CONFIG = Config(trainer=TrainerConfig(ranks=2, minibatches=2, rank_timeout_s=60.0))
"""With two minibatches, before which the ranks score the batch together."""
MODULE = "streamrl.trainers.ranks.local"


@pytest.fixture
def real_ranks() -> None:
    """Ranks are started as `open_trainer` does it, and not forked (tests/trainers/conftest.py)."""


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.usefixtures("real_ranks")
def test_two_ranks_do_everything_as_one_and_load_what_only_one_sees(model_dir: Path, rollouts: Rollouts, tmp_path: Path) -> None:
    alone = make_trainer(Config(trainer=TrainerConfig(minibatches=2)), model_dir)
    with open_trainer(CONFIG, model_dir) as trainer:
        assert len(children(MODULE)) == 1
        assert trainer.digest() == alone.digest()
        first = trainer.step(rollouts(0))
        assert first.metrics == pytest.approx(alone.step(rollouts(0)).metrics, rel=1e-3, abs=1e-4)
        trainer.save(tmp_path / "at", b"state", version=Version(0, 1)).result()
        second = trainer.step(rollouts(1))
        shards = {shard.name for shard in trainer.shards()}
        assert shards == {shard.name for shard in alone.shards()}
        # The other rank has not opened this descriptor, as if the path were on another host.
        descriptor = os.open(tmp_path / "at", os.O_RDONLY | os.O_DIRECTORY)
        assert trainer.load(Path(f"/proc/self/fd/{descriptor}")) == b"state"
        os.close(descriptor)
        assert trainer.step(rollouts(1)) == second
        assert trainer.load(tmp_path / "at") == b"state"
        assert trainer.step(rollouts(1)) == second
    assert children(MODULE) == []
    with open_trainer(CONFIG, model_dir) as trainer:
        assert trainer.step(rollouts(0)) == first


@pytest.mark.process
@pytest.mark.parametrize("mesh", [{}, slow({"shards": 2}), slow({"context": 2}), slow({"shards": 2, "context": 2})], ids=str)
def test_a_rank_that_is_killed_ends_the_step(model_dir: Path, preloaded: Preloaded, mesh: dict[str, Any]) -> None:
    killed_in_a_step(config(ranks=2, **mesh), model_dir, preloaded)


@pytest.mark.slow
@pytest.mark.process
def test_a_rank_that_hangs_ends_the_step_within_the_timeout(model_dir: Path, rollouts: Rollouts, preloaded: Preloaded) -> None:
    config = Config(trainer=TrainerConfig(ranks=2, rank_timeout_s=15.0))
    with raises(TrainingError, what=ANY), open_trainer(config, model_dir) as trainer:
        trainer.step(rollouts(0))
        (pid,) = preloaded.running()
        os.kill(pid, signal.SIGSTOP)
        trainer.step(rollouts(1))
    assert preloaded.running() == []


LEADER = """
import sys, time
from pathlib import Path
from streamrl.config.tree import Config, TrainerConfig
from streamrl.trainers.ranks.local import open_trainer
from tests.support.processes import children
with open_trainer(Config(trainer=TrainerConfig(ranks=2)), Path(sys.argv[1])):
    print(*children("streamrl.trainers.ranks.local"), flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.process
async def test_a_rank_that_hangs_dies_with_rank_0(model_dir: Path, start: Start) -> None:
    leader = await start("-c", LEADER, str(model_dir))
    assert leader.stdout is not None
    rank = int(await asyncio.wait_for(leader.stdout.readline(), 120))
    os.kill(rank, signal.SIGSTOP)  # as in a collective that nobody else comes to
    leader.kill()
    await until(lambda: not started(rank), within_s=60)


@pytest.mark.process
def test_ranks_that_begin_with_other_weights_are_refused(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(config: Config, path: Path) -> Any:
        trainer = make_trainer(config, path)
        next(policy_of(trainer).module.parameters()).data[0] += 1
        return trainer

    monkeypatch.setattr(local, "make_trainer", changed)
    with raises(TrainingError, when="at the start"), open_trainer(CONFIG, model_dir):
        pass


@pytest.mark.gpu
def test_two_gpus_train_as_one(model_dir: Path, rollouts: Rollouts, tmp_path: Path) -> None:
    need("two gpus")
    alone = make_trainer(Config(trainer=TrainerConfig(device="cuda")), model_dir)
    expected = [alone.step(rollouts(step)).metrics for step in range(2)]
    for _ in range(2):
        with open_trainer(Config(trainer=TrainerConfig(ranks=2, device="cuda")), model_dir) as trainer:
            results = [trainer.step(rollouts(step)) for step in range(2)]
            assert {shard.name for shard in trainer.shards()} == {shard.name for shard in alone.shards()}
            trainer.save(tmp_path / "at", b"", version=Version(0, 2)).result()
            trainer.load(tmp_path / "at")
        for result, metrics in zip(results, expected, strict=True):
            assert result.metrics == pytest.approx(metrics, rel=1e-3, abs=1e-4)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.usefixtures("real_ranks")
def test_a_rank_that_cannot_start_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = Config(trainer=TrainerConfig(ranks=2, device="cuda"))
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    with raises(TrainingError, rank=1, ended=True), open_trainer(config, tmp_path):
        pass
    assert "rank 1: error:" in capfd.readouterr().err


def test_nobody_joins_a_meeting_that_is_not_his() -> None:
    meeting = Rendezvous("127.0.0.1", ranks=3, timeout_s=5.0)
    place = meeting.place

    def come(at: RendezvousAddress, rank: int) -> object:
        return join(at, rank=rank, ranks=3, cuda=False, timeout_s=5.0, stop=lambda: True)

    assert meeting.missing() == [1, 2]
    assert come(RendezvousAddress(place.host, place.port, "of another group"), 1) is None
    assert meeting.missing() == [1, 2]
    assert come(place, 1) is None  # came, and was told to stop
    assert meeting.missing() == [2]
    assert come(place, 1) is None
    assert meeting.missing() == [2]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert come(RendezvousAddress("127.0.0.1", free.getsockname()[1], place.generation), 2) is None
    with raises(TrainingError, host="192.0.2.1"):
        Rendezvous("192.0.2.1", ranks=2, timeout_s=5.0)


@pytest.mark.process
@pytest.mark.parametrize(("ranks", "shards"), [(1, 1), slow(2, 1), slow(2, 2)])
def test_a_trainer_that_was_left_holds_no_memory(model_dir: Path, ranks: int, shards: int) -> None:
    """A replay makes the next one in the same process, on the same GPU."""
    config = Config(trainer=TrainerConfig(ranks=ranks, shards=shards))
    gc.collect()
    gc.disable()
    try:
        with open_trainer(config, model_dir) as trainer:
            model = weakref.ref(policy_of(trainer).module)
            del trainer
        assert model() is None
    finally:
        gc.enable()


def test_ranks_are_copies_times_parts_and_neighbours_share_rows() -> None:
    mesh = mesh_of(TrainerConfig(ranks=6, shards=3))
    assert (mesh.replicate, mesh.shard, mesh.ranks) == (2, 3, 6)
    assert [mesh.place(rank) for rank in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert mesh_of(TrainerConfig(ranks=2)) == Mesh(replicate=2, shard=1)
    mesh = mesh_of(TrainerConfig(ranks=6, shards=2, context=3))
    assert (mesh.replicate, mesh.shard, mesh.context) == (3, 2, 3)
    assert [mesh.share(rank) for rank in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [mesh.whole(length) for length in (1, 6, 7)] == [6, 6, 12]
    assert [Mesh(replicate=2).whole(length) for length in (1, 7)] == [1, 7]
    assert [trained_on(TrainerConfig(ranks=2, context=count)).context for count in (1, 2)] == [UNSET, 2]


def test_layers_stay_gathered_where_that_is_a_quarter_of_the_memory() -> None:
    assert [gathers_once("auto", 100, memory) for memory in (400, 399, 0)] == [True, False, True]
    assert gathers_once("step", 100, 1) and not any(gathers_once("micro_batch", 100, memory) for memory in (400, 0))


def test_rows_are_cut_as_torch_cuts_them() -> None:
    for shard, rows in itertools.product((1, 2, 3, 4, 7), (0, 1, 2, 5, 8)):
        chunks = [chunk.tolist() for chunk in torch.arange(rows).chunk(shard)] if rows else []
        expected = chunks + [[]] * (shard - len(chunks))
        assert [list(Mesh(shard=shard).rows(rows, part)) for part in range(shard)] == expected


@pytest.mark.parametrize("shape", [(5, 3), (4,), (1, 2), (0, 3), (3, 2, 2)])
def test_slices_cover_a_tensor_and_their_digests_add_up(shape: tuple[int, ...]) -> None:
    data = np.random.default_rng(0).integers(0, 256, 4 * math.prod(shape), np.uint8)
    total, first = 0, 0
    for part in range(4):
        offset, size = Mesh(shard=4).slice(shape, part)
        nbytes = 4 * math.prod(size)
        total += slice_digest(data[first : first + nbytes], 4, shape, offset, size)
        first += nbytes
    assert (first, total & MASK) == (data.nbytes, tensor_digest(data, 4))
