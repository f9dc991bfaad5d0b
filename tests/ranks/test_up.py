"""`streamrl up` with a trainer of two ranks: it learns, loses a rank, resumes, and its log gives its ledger again."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from streamrl.history.source import open_source
from streamrl.models.directories import list_checkpoints
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode
from streamrl.schemas.events import Event
from streamrl.schemas.ledger import TrainedOn
from streamrl.schemas.subjects import EVENTS, Subjects
from tests.ranks.trained import PIPELINE, SHARED, SHORT, TENSOR, Trained, real_up
from tests.support.forked_up import forked_up, process_id
from tests.support.mixtures import write_mixture
from tests.support.processes import stopped, until
from tests.support.streams import stored
from tests.support.world.shapes import NAME

pytestmark = [pytest.mark.nats, pytest.mark.timeout(600)]
OFTEN = (*SHORT, "trainer.checkpoint_every=2")
SLOW, SOAK = pytest.mark.slow, pytest.mark.soak
EXPERTS = "trainer.backend=megatron trainer.experts=2"
REPLAYED = f"{EXPERTS} trainer.routing_replay=true"
PPO = "loss.advantage=ppo loss.gae_lambda=0.95 loss.critic.learning_rate=1e-3 loss.critic.only_steps=1"
CRITIC = (*OFTEN, "model.layers=2", PPO)
MIXTURE = (*OFTEN, "model.path=mixture", "loss.experts.balance_coef=0.01 loss.experts.z_coef=0.001")


def marked(mark: pytest.MarkDecorator, cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [pytest.param(*case, marks=mark) for case in cases]


# Of the others the parts are run by the critics and mixtures, and by the stretches below.
OTHERS = [("trainer.shards=1", real_up), ("trainer.context=2", forked_up), (TENSOR, real_up), (PIPELINE, forked_up), (SHARED, forked_up)]


@pytest.mark.parametrize(("mesh", "by"), [pytest.param("trainer.shards=2", forked_up, marks=SLOW), *marked(SOAK, OTHERS)])
async def test_a_run_with_two_ranks_learns_survives_one_and_is_replayed(tmp_path: Path, mesh: str, by: Any) -> None:
    trained = Trained(tmp_path, mesh, by=by)
    trained.begin()
    summary = await trained.loses_a_rank()
    assert summary["steps"] == 12
    assert summary["heldout_last"] >= 0.5


async def check_critic(trained: Trained) -> None:
    """The critic was taught in each step of reinforcement learning, and the policy from the second one on."""
    taught = [entry for entry in await trained.entries() if entry.source == "main"]
    norms = [entry.metrics["train/value_norm"] for entry in taught]
    assert len(norms) == len(set(norms))
    assert [entry.metrics["train/lr"] > 0 for entry in taught] == [number > 0 for number in range(len(taught))]


@pytest.mark.parametrize("mesh", [*marked(SLOW, [(PIPELINE,)]), *marked(SOAK, [(TENSOR,)])])
async def test_a_critic_survives_a_rank_that_is_killed_and_is_replayed(tmp_path: Path, mesh: str) -> None:
    trained = Trained(tmp_path, *CRITIC, "run.steps=8", mesh)
    trained.begin()
    assert (await trained.loses_a_rank(checkpoints=3))["steps"] == 8
    await check_critic(trained)


@pytest.mark.parametrize("mesh", [*marked(SLOW, [(REPLAYED,)]), *marked(SOAK, [("trainer.shards=2",), (EXPERTS,)])])
async def test_a_mixture_survives_a_rank_that_is_killed_and_is_replayed(tmp_path: Path, mesh: str) -> None:
    trained = Trained(tmp_path, *MIXTURE, "run.steps=8", mesh)
    write_mixture(tmp_path / "mixture")
    trained.begin()
    assert (await trained.loses_a_rank())["steps"] == 8
    entries = await trained.entries()
    loads = [entry.metrics["train/expert_load_max"] for entry in entries]
    assert len(loads) >= 8 and all(1 <= load <= 4 for load in loads)
    replayed = [entry.metrics.get("train/routing_replayed", 0.0) for entry in entries if entry.source == "main"]
    assert all(replayed) if mesh == REPLAYED else not any(replayed)


class Stretches(NamedTuple):
    """A run that goes on from mesh to mesh: settings of all stretches, the mesh of each, and how many steps teach the policy nothing."""

    settings: tuple[str, ...]
    meshes: Sequence[str]
    idle: int = 0


MESHES = {
    "trainer.shards=2": TrainedOn(ranks=2, shards=2),
    "trainer.ranks=1": TrainedOn(),
    "trainer.context=2": TrainedOn(ranks=2, context=2),
    "trainer.shards=1": TrainedOn(ranks=2),
    PIPELINE: TrainedOn(ranks=2, backend="megatron", tensor=1, pipeline=2),
    TENSOR: TrainedOn(ranks=2, backend="megatron", tensor=2),
    EXPERTS: TrainedOn(ranks=2, backend="megatron", tensor=1, experts=2),
}
FOUR = ("trainer.shards=2", "trainer.ranks=1", "trainer.context=2", PIPELINE)
DENSE = (*OFTEN, "model.layers=2")
STRETCHES = [
    pytest.param(Stretches(DENSE, FOUR), marks=SLOW, id="four"),
    pytest.param(Stretches(DENSE, (*FOUR, "trainer.shards=1", TENSOR, "trainer.shards=2")), marks=SOAK, id="all"),
    # Checkpoints that another backend goes on with: tests/trainers/megatron, test_critic.py and test_meshes.py.
    pytest.param(Stretches(CRITIC, (PIPELINE, "trainer.ranks=1", TENSOR, "trainer.shards=2"), idle=1), marks=SOAK, id="critic"),
    pytest.param(Stretches(MIXTURE, ("trainer.shards=2", EXPERTS, "trainer.ranks=1")), marks=SOAK, id="mixture"),
]


@pytest.mark.parametrize("given", STRETCHES)
async def test_each_stretch_of_a_run_is_replayed_on_its_own_mesh(tmp_path: Path, given: Stretches) -> None:
    trained = Trained(tmp_path, *given.settings)
    write_mixture(tmp_path / "mixture")
    for number, mesh in enumerate(given.meshes):
        await trained.up(f"run.steps={2 * number + 3}", mesh)
    assert len({entry.fingerprint for entry in await trained.entries()}) == len(set(given.meshes))
    await trained.has_stretches([MESHES[mesh] for mesh in given.meshes], idle=given.idle)
    if given.settings is CRITIC:
        await check_critic(trained)


@pytest.mark.slow
async def test_a_damaged_part_of_the_newest_checkpoint_is_gone_back_behind(tmp_path: Path) -> None:
    trained = Trained(tmp_path, *OFTEN, "trainer.shards=2")
    await trained.up("run.steps=4")
    older, newest = (path for _, path in list_checkpoints(trained.run.checkpoints, "main-"))
    moments = newest / "part-2-of-2" / "optimizer.safetensors"
    data = bytearray(moments.read_bytes())
    data[-1] ^= 1
    moments.write_bytes(data)
    await trained.up("run.steps=5")
    said = trained.run.events_path.read_text()
    assert newest.name in said and "part-2-of-2/optimizer.safetensors" in said
    assert f"goes on from checkpoint {older.name}" in said
    entries = await trained.entries()
    assert len({entry.version.number for entry in entries}) == len(entries) and entries[-1].version.epoch == 0
    await trained.is_in_order()


def contributed(run: RunDir, rank: int) -> list[str]:
    """Versions that a rank has stored its part of, as its log says."""
    path = run.log_path(f"trainer-{rank}")
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.partition("version=")[2].split()[0] for line in lines if "event=weights_contributed" in line]


async def told(place: Path) -> list[dict[str, Any]]:
    """What engines have said of versions that they took, or could not."""
    async with open_source(NAME, base=place / "runs") as source:
        return [decode(message.body, Event).detail for message in await stored(source.log, EVENTS, Subjects(NAME).events("weights"))]


CUTS = [*marked(SLOW, [("bus", "trainer.shards=2"), ("shm", TENSOR)]), pytest.param("shm", "trainer.shards=2", marks=SOAK)]


@pytest.mark.parametrize(("transport", "cut"), CUTS)
async def test_engines_serve_what_the_parts_of_a_cut_model_make_together(tmp_path: Path, transport: str, cut: str) -> None:
    """Rank 1 is killed as soon as it is asked for its part of a version; engines go on, and serve the ledger's digests at every commit."""
    trained = Trained(tmp_path, *SHORT, "run.steps=10", cut)
    trained.begin(f"weights.transport={transport}", f"weights.also_on_bus={str(transport == 'shm').lower()}", "weights.anchor_every=4")
    await trained.until(lambda: len(contributed(trained.run, 1)) >= 3)
    first = process_id(trained.run, "trainer-1")
    os.kill(first, signal.SIGSTOP)  # it takes part in no further version, whatever is asked of it
    await until(lambda: stopped(first))
    os.kill(first, signal.SIGKILL)
    await trained.end()
    entries = await trained.entries()
    assert contributed(trained.run, 1)[-1] == str(entries[-1].version)
    ledger = {str(entry.version): entry.digest for entry in entries}
    assert len(set(ledger.values())) == len(ledger), "each has taught something"
    events = [detail for detail in await told(tmp_path) if "digest" in detail]
    taken = {str(detail["version"]): detail["digest"] for detail in events}
    taken.pop("0.0", None)  # the initial weights have no entry, and an engine that came late has not seen them
    assert len(taken) >= 3
    assert taken == {version: ledger[version] for version in taken}
    assert {detail["transport"] for detail in events} == {transport}
    await trained.is_in_order()


@pytest.mark.parametrize(("shards", "short"), [pytest.param(2, [1], marks=SLOW), *marked(SOAK, [(1, []), (2, []), (2, [0]), (1, [1])])])
async def test_ranks_that_are_out_of_memory_begin_again_with_half_the_budget(tmp_path: Path, shards: int, short: list[int]) -> None:
    """Also where one of them is alone: the other one waits for it in the middle of a pass, and only learns that it has ended."""
    trained = Trained(tmp_path, *SHORT, "run.steps=3", "trainer.micro_tokens=64", "debug.profile_versions=[2]", "debug.memory_tokens=40")
    await trained.up(f"trainer.shards={shards}", f"debug.memory_ranks={short}".replace(" ", ""))
    run = trained.run
    said = run.events_path.read_text()
    assert "micro-batches of 32 tokens" in said and "restart 1 of all 2 trainers" in said
    if short:
        assert "out of memory" not in run.log_path(f"trainer-{1 - short[0]}").read_text()
    await trained.is_in_order(fences=2)
    entries = await trained.entries()
    # The demonstrations are short enough.
    assert [entry.micro_tokens for entry in entries] == [64 if entry.source == "warmup" else 32 for entry in entries]
    assert {entry.source for entry in entries} == {"warmup", "main"}
    assert {path.name for path in run.profile.iterdir()} == {f"v00000002-rank{rank}.json.gz" for rank in range(2)}
