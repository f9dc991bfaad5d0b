"""Two gloo ranks: the same gradients as one rank, and the same parameters on both."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from streamrl.config.loss import CorrectionConfig, KLConfig, LossConfig, RejectionConfig
from streamrl.config.tree import TrainerConfig
from streamrl.errors import TrainingError
from streamrl.trainers.mesh import mesh_of
from streamrl.trainers.torch.parallel import Parallel
from tests.support.errors import raises
from tests.support.meshes import parameters, slow
from tests.support.preloaded import Preloaded

RANK = """
import json, sys
from pathlib import Path
import numpy as np
import torch.distributed as dist
import msgspec
from streamrl.config.tree import Config, LossConfig, OptimizerConfig, TrainerConfig
from streamrl.core.batches import TrainBatch
from streamrl.schemas.versions import Version
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.ranks.process_group import leave
from streamrl.config.registry import Role
from tests.support.scoring import score

model, out, rank, ranks, shards = Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:6])
if ranks > 1:
    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=ranks)

def batch(kind, step, groups):
    rng = np.random.default_rng(step)
    lengths = np.repeat(rng.integers(4, 12, groups), 3) + rng.integers(0, 4, 3 * groups)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    mask = np.ones(offsets[-1], np.bool_)
    for first in offsets[:-1]:
        mask[first : first + 3] = False
    n = 3 * groups
    return TrainBatch(
        kind=kind, version=Version(), stage_step=step, tokens=rng.integers(0, 16, offsets[-1]).astype(np.int32), offsets=offsets,
        loss_mask=mask, sampler_logprobs=np.where(mask, -2.5, 0).astype(np.float32), staleness=np.zeros(offsets[-1], np.int32),
        temperature=np.ones(offsets[-1], np.float32), top_p=np.ones(offsets[-1], np.float32), top_k=np.full(offsets[-1], -1, np.int32),
        rewards=np.tile([1.0, 0.0, 0.0], groups), tasks=np.arange(n) // 3, rollouts=np.arange(n) % 3, status=np.zeros(n, np.int8),
    )

def train(loss, out):
    optimizer = OptimizerConfig(clip_norm=0.0, ess_scaling="sqrt")
    options = TrainerConfig(ranks=ranks, shards=shards, minibatches=2, gradient_cosine=True, optimizer=optimizer)
    trainer = make_trainer(Config(trainer=options, loss=loss), model)
    scores = score(trainer, batch("rl", 9, 5), Role.POLICY).tolist()
    results = [trainer.step(batch("sft", 0, 7)), trainer.step(batch("rl", 0, 7))]
    trainer.save(out, b"extra", version=Version(0, 2)).result()
    if ranks > 1:
        dist.barrier()
    extra = trainer.load(out).decode()
    # A batch of one group leaves the second rank without work.
    results.append(trainer.step(batch("rl", 1, 1)))
    return {"scores": scores, "extra": extra, "digests": [r.digest for r in results], "metrics": [r.metrics for r in results]}

answer = {name: train(loss, out / name) for name, loss in msgspec.json.decode(sys.argv[6], type=dict[str, LossConfig]).items()}
(out / f"{rank}.json").write_text(json.dumps(answer))
if ranks > 1:
    leave()
"""


LOSSES = {
    "default": LossConfig(),
    "sequences": LossConfig(
        advantage="ppo",
        policy="gspo",
        whiten="on",
        gae_lambda=0.9,
        kl=KLConfig(loss_coef=0.1, estimator="k3"),
        correction=CorrectionConfig(
            level="sequence", high=5.0, normalize=True, reject=(RejectionConfig(measure="k3", level="sequence_mean", high=0.5),)
        ),
    ),
    "chosen": LossConfig(policy="m2po", m2po_bound=0.01, top_entropy=0.5, reduction="token_mean", correction=CorrectionConfig(kind="none")),
}


def launch(preloaded: Preloaded, model: Path, out: Path, ranks: int, shards: int = 1) -> list[dict[str, Any]]:
    out.mkdir()
    losses = msgspec.json.encode(LOSSES).decode()
    children = [preloaded.start("-c", RANK, str(model), str(out), str(rank), str(ranks), str(shards), losses) for rank in range(ranks)]
    try:
        assert [child.wait(timeout=120) for child in children] == [0] * ranks
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.process
@pytest.mark.parametrize(("ranks", "shards"), [slow(2, 1), (2, 2), slow(4, 2)])
def test_ranks_train_as_one(preloaded: Preloaded, model_dir: Path, tmp_path: Path, ranks: int, shards: int) -> None:
    (alone,) = launch(preloaded, model_dir, tmp_path / "one", 1)
    first, *others = launch(preloaded, model_dir, tmp_path / "more", ranks, shards)
    assert all(other == first for other in others)
    for name in LOSSES:
        assert first[name]["extra"] == "extra"
        assert first[name]["scores"] == pytest.approx(alone[name]["scores"], abs=1e-5)
        for found, expected in zip(first[name]["metrics"], alone[name]["metrics"], strict=True):
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-4), name
    # After two steps of a stage Adam's first moment is a mean of two gradients.
    for loss, stem in (("default", "optimizer"), ("sequences", "optimizer"), ("sequences", "critic_optimizer")):
        one, two = (parameters(tmp_path / ranks / loss, stem) for ranks in ("one", "more"))
        assert one.keys() == two.keys()
        for name in one:
            if name.endswith("exp_avg"):
                assert torch.allclose(one[name], two[name], rtol=1e-3, atol=1e-5), name
        assert max(float(value.abs().max()) for name, value in one.items() if name.endswith("exp_avg")) > 1e-2


def test_more_ranks_without_a_process_group_are_refused() -> None:
    with raises(TrainingError, expected=2, got=1):
        Parallel(mesh_of(TrainerConfig(ranks=2)), torch.device("cpu"))
