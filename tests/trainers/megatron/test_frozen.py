"""megatron-core's models that are looked at: a reference, one that is renewed, and a teacher, beside the torch backend's."""

from pathlib import Path
from typing import Any

import pytest

from streamrl.config.loss import DistillationConfig, KLConfig, LossConfig
from streamrl.config.tree import Config
from streamrl.errors import ConfigError
from streamrl.schemas.versions import Version
from streamrl.trainers.ranks.local import open_trainer
from tests.support import meshes
from tests.support.errors import raises
from tests.support.meshes import Mesh, batch, slow, soak
from tests.support.trainers import Models

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
ALONE, TENSOR, BOTH = {"ranks": 1}, {"ranks": 2, "tensor": 2}, {"ranks": 4, "tensor": 2, "pipeline": 2}


def config(loss: LossConfig, mesh: Mesh, **changes: Any) -> Config:
    return meshes.config(loss, **{"backend": "megatron", "minibatches": 1, **mesh, **changes})


@pytest.fixture(scope="module")
def models(make_model: Models) -> tuple[Path, Path, Path]:
    """The policy, a model of another width, and one of other layers and states, tied, all of 19 tokens."""
    heads = {"vocab_size": 19, "num_attention_heads": 4, "num_key_value_heads": 2}
    like = make_model(tie_word_embeddings=False, intermediate_size=48, **heads)
    return make_model(tie_word_embeddings=False, **heads), like, make_model(hidden_size=16, num_hidden_layers=4, **heads)


@pytest.mark.parametrize("mesh", [slow(BOTH), soak(ALONE), soak(TENSOR)], ids=str)
def test_reference_and_teacher_score_as_torchs_do(models: tuple[Path, Path, Path], mesh: Mesh) -> None:
    policy, like, other = models
    kl = KLConfig(loss_coef=0.5, estimator="k3", reference=str(like))
    loss = LossConfig(kl=kl, distillation=DistillationConfig(coef=0.2, teacher=str(other)))
    found = []
    for asked in (config(loss, {"backend": "torch"}), config(loss, mesh)):
        with open_trainer(asked, policy) as trainer:
            found.append([trainer.step(batch(step)).metrics for step in range(3)])
    for ours, theirs in zip(*found, strict=True):
        for name in ("rollout/ref_log_probs", "train/kl_loss", "train/loss", "train/grad_norm"):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-3, abs=1e-5), name
    assert found[0][0]["train/kl_loss"] > 1e-3, "the reference is another model"


@pytest.mark.parametrize("mesh", [slow(TENSOR), soak(ALONE), soak(BOTH)], ids=str)
def test_a_reference_is_renewed_and_restored(models: tuple[Path, Path, Path], mesh: Mesh, tmp_path: Path) -> None:
    """In bfloat16: before the third batch it becomes the second version, of which it has the digest; a resume goes on with equal bits."""
    asked = config(LossConfig(kl=KLConfig(loss_coef=0.5, reference_every=2)), mesh, dtype="bfloat16")
    with open_trainer(asked, models[0]) as trainer:
        begun = trainer.digest()
        results = [trainer.step(batch(step)) for step in range(3)]
        trainer.save(tmp_path / "at", b"at", version=Version(0, 3)).result()
        results += [trainer.step(batch(step)) for step in (3, 4)]
    digests = [result.digest for result in results]
    assert [result.reference for result in results] == [begun, begun, digests[1], digests[1], digests[3]]
    with open_trainer(asked, models[0]) as trainer:
        assert trainer.load(tmp_path / "at") == b"at"
        assert [trainer.step(batch(step)).digest for step in (3, 4)] == digests[3:]


def test_a_teacher_that_it_cannot_build_is_named(models: tuple[Path, Path, Path], make_model: Models) -> None:
    teacher = make_model(vocab_size=20)
    loss = LossConfig(distillation=DistillationConfig(coef=0.2, teacher=str(teacher)))
    with raises(ConfigError, key="loss.distillation.teacher", got=20), open_trainer(config(loss, ALONE), models[0]):
        pass
