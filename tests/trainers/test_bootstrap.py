"""`loss.bootstrap_truncated`: what a cut answer's return goes on with, on one rank by hand and on meshes as on one rank."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from streamrl.config.loss import CriticConfig, LossConfig
from streamrl.config.registry import Role
from streamrl.config.tree import Config
from streamrl.core.batches import STATUS_CODES, TrainBatch
from streamrl.schemas.samples import Status
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.protocol import StepResult
from streamrl.trainers.ranks.local import open_trainer
from tests.support import meshes
from tests.support import reference_returns as reference
from tests.support.meshes import Mesh, batch, slow, soak
from tests.support.scoring import prepare, prepared, score
from tests.support.trainers import Models

CUT = STATUS_CODES[Status.TRUNCATED]
STEPS = 3


def cut_batch(step: int, *, all_over: bool = False) -> TrainBatch:
    """Every second answer was cut."""
    given = batch(step)
    return given if all_over else replace(given, status=np.where(np.arange(given.num_samples) % 2 == 0, CUT, 0).astype(np.int8))


def config(mesh: Mesh, *, bootstraps: bool = True) -> Config:
    critic = CriticConfig(learning_rate=3e-2, clip=0.0)
    loss = LossConfig(advantage="ppo", gamma=0.9, gae_lambda=0.8, critic=critic, bootstrap_truncated=bootstraps)
    return meshes.config(loss, **{"backend": "torch", **mesh})


class Seen(NamedTuple):
    objectives: list[Any]
    results: list[StepResult]


def run(trainer: Any, **how: Any) -> Seen:
    return Seen(prepared(trainer), [trainer.step(cut_batch(step, **how)) for step in range(STEPS)])


def behind(trainer: Any, given: TrainBatch) -> npt.NDArray[np.float32]:
    """[N] V behind each sample: of another token that is put there, whichever it is."""
    ends = given.offsets[1:]
    own = {name: np.split(getattr(given, name), ends[:-1]) for name in ("tokens", "loss_mask")}
    longer = TrainBatch.from_lists(
        [tokens[:1].tolist() for tokens in own["tokens"]],
        [[*tokens[1:].tolist(), 11] for tokens in own["tokens"]],
        tasks=given.tasks.tolist(),
    )
    return score(trainer, longer, Role.VALUE)[longer.offsets[1:] - 1]


def test_the_value_behind_the_last_token_takes_the_place_of_nothing(model_dir: Path) -> None:
    trainer: Any = make_trainer(config({}), model_dir)
    run(trainer)
    given = cut_batch(7)
    values, after = score(trainer, given, Role.VALUE), behind(trainer, given)
    objective = prepare(trainer, given)
    cut = given.status == CUT
    assert objective.scores.ends == pytest.approx(np.where(cut, after, 0.0), abs=1e-5) and np.abs(after[cut]).min() > 1e-3
    assert objective.scores.values[given.loss_mask] == pytest.approx(values[given.loss_mask], abs=1e-5)
    for sample, (first, end) in enumerate(zip(given.offsets[:-1], given.offsets[1:], strict=True)):
        tokens = [t for t in range(first, end) if given.loss_mask[t]]
        steps = [(t, given.rewards[sample] if t == tokens[-1] else 0.0, float(values[t]), 1.0) for t in tokens]
        # As if there were one step more with nothing to learn: see tests/algorithms/test_returns.py.
        last = float(after[sample]) if cut[sample] else 0.0
        expected = reference.gae([*steps, (int(end), last, last, 1.0)], 0.9, 0.8)[:-1]
        assert objective.advantages[tokens] == pytest.approx(expected, abs=1e-5)
        assert objective.returns[tokens] == pytest.approx([a + s[2] for a, s in zip(expected, steps, strict=True)], abs=1e-5)


def test_where_nothing_was_cut_not_a_bit_changes(model_dir: Path) -> None:
    on, off = (run(make_trainer(config({}, bootstraps=one), model_dir), all_over=True).results for one in (True, False))
    assert on == off
    cut, ignored = (run(make_trainer(config({}, bootstraps=one), model_dir)).results for one in (True, False))
    assert cut[0] == ignored[0], "the critic begins at 0"
    assert cut[-1].digest != ignored[-1].digest


MEGATRON: Mesh = {"backend": "megatron", "ranks": 2}
MESHES = [
    slow({"ranks": 2}),
    slow({**MEGATRON, "pipeline": 2}),
    *map(soak, ({"ranks": 2, "shards": 2}, {**MEGATRON, "tensor": 2}, {**MEGATRON, "context": 2})),
]


@pytest.mark.process
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_meshes_see_the_same_values(make_model: Models, mesh: Mesh) -> None:
    directory = make_model(vocab_size=19, num_attention_heads=4, num_key_value_heads=2)
    alone = run(make_trainer(config({}), directory))
    with open_trainer(config(mesh), directory) as trainer:
        found = run(trainer)
    for step, (ours, theirs) in enumerate(zip(found.objectives, alone.objectives, strict=True)):
        assert ours.scores.ends == pytest.approx(theirs.scores.ends, abs=1e-4), step
        assert ours.returns == pytest.approx(theirs.returns, abs=1e-4), step
    assert np.abs(alone.objectives[-1].scores.ends).max() > 1e-2
