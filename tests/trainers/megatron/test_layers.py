"""Layers of megatron-core that keep activations or not, and compiled ones, beside plain ones; models that are looked at, beside torch's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from streamrl.config.loss import DistillationConfig, ExpertsConfig, KLConfig, LossConfig
from streamrl.config.tree import Config
from streamrl.errors import ConfigError
from streamrl.schemas.versions import Version
from streamrl.trainers.megatron.core import Decoder, Rows
from streamrl.trainers.ranks.local import open_trainer
from tests.support import meshes
from tests.support.compilers import COMPILES, without_compiler
from tests.support.errors import raises
from tests.support.meshes import Mesh, batch, slow, soak
from tests.support.scoring import policy_of
from tests.support.steps import check_alike, stepped
from tests.support.trainers import Models

pytestmark = [pytest.mark.process, *COMPILES]
BOTH = {"ranks": 4, "tensor": 2, "pipeline": 2}
KEEPING = [slow({"ranks": 2, "pipeline": 2}), *map(soak, ({}, BOTH, {"ranks": 2, "context": 2}, {"ranks": 2, "experts": 2}))]


def keeping(activations: Any, mesh: dict[str, int]) -> Config:
    experts = ExpertsConfig(balance_coef=0.01, z_coef=0.001) if "experts" in mesh else ExpertsConfig()
    loss = LossConfig(advantage="ppo", experts=experts)
    return meshes.config(loss, backend="megatron", activations=activations, minibatches=1, **mesh)


@pytest.mark.parametrize("mesh", KEEPING, ids=str)
def test_no_digit_depends_on_what_is_kept(make_model: Models, make_mixture: Models, mesh: dict[str, int]) -> None:
    """Of policy and critic. On two stages micro-batches are on their way meanwhile, each of which attends by its own samples."""
    directory = make_mixture() if "experts" in mesh else make_model(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    found = [[(one.digest, one.metrics) for one in stepped(keeping(kept, mesh), directory)] for kept in ("all", 0, 1)]
    assert found[1] == found[0] and found[2] == found[0]


@pytest.mark.slow
def test_fewer_activations_are_kept(make_model: Models) -> None:
    """Counted by autograd: what a pass saves for the backward pass, in bytes."""
    directory = make_model(num_hidden_layers=4)
    saved = []
    for activations in ("all", 2, 0):
        total = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.nbytes
            return tensor

        with open_trainer(keeping(activations, {}), directory) as trainer, torch.autograd.graph.saved_tensors_hooks(count, lambda one: one):
            trainer.step(batch(0))
        saved.append(total)
    assert saved[0] > saved[1] > saved[2]


class Holding(torch.nn.Module):
    """What a layer of megatron-core 0.19 does with the input of its MLP's norm, whose graph holds what attention computed."""

    mlp_norm_manager: Any = None

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        self.mlp_norm_manager = (states.sin(),)
        found = self.mlp_norm_manager[0].exp()  # the last that the backward pass needs: run once more, it ends here
        self.mlp_norm_manager = None
        return found


def test_a_layer_that_is_run_again_holds_nothing_behind_its_backward_pass() -> None:
    decoder: Any = Decoder.__new__(Decoder)
    layer = Holding()
    decoder._rows = Rows()
    decoder.run_again(layer.forward, torch.ones(3, requires_grad=True)).sum().backward()
    assert layer.mlp_norm_manager is None


@pytest.mark.slow
def test_no_layer_holds_anything_between_two_steps(make_model: Models) -> None:
    """Of the megatron-core that is installed."""
    with open_trainer(keeping(0, {}), make_model()) as trainer:
        trainer.step(batch(0))
        layers = policy_of(trainer)._decoder.layers
        assert layers and all(getattr(layer, "mlp_norm_manager", None) is None for layer in layers)


def test_more_layers_than_a_rank_has_are_refused(make_model: Models) -> None:
    with raises(ConfigError, key="trainer.activations", got=5), open_trainer(keeping(5, {}), make_model()):
        pass


COMPILING = [slow({}), *map(soak, ({"ranks": 2, "pipeline": 2}, {"ranks": 2, "context": 2}, {"experts": 1}, {"ranks": 2, "experts": 2}))]


def compiling(compiled: Any, mesh: dict[str, int], **trainer: Any) -> Config:
    experts = ExpertsConfig(balance_coef=0.3, z_coef=0.02) if "experts" in mesh else ExpertsConfig()
    loss = LossConfig(advantage="ppo" if "pipeline" in mesh else "grpo", proximal="sampler", experts=experts)
    return meshes.config(loss, backend="megatron", compile=compiled, attention="packed", minibatches=1, **mesh, **trainer)


@pytest.fixture
def directory(make_model: Models, make_mixture: Models, mesh: dict[str, int]) -> Path:
    return make_mixture() if "experts" in mesh else make_model(num_attention_heads=4, num_key_value_heads=2)


@pytest.mark.parametrize("mesh", COMPILING, ids=str)
def test_it_learns_what_a_plain_one_does(directory: Path, mesh: dict[str, int]) -> None:
    """One layer of a rank that has two is run again in the backward pass; some ranks have fewer rows than others. Stages have a critic."""
    found = []
    for compiled in ("on", "off"):
        torch.compiler.reset()
        found.append(stepped(compiling(compiled, mesh, activations=1), directory))
    check_alike(*found, rel=1e-3, abs=1e-5)
    for ours, theirs in zip(*found, strict=True):
        assert ours.choices is not None and ours.choices.compiled and not ours.notices
        assert theirs.choices is not None and not theirs.choices.compiled
    assert found[0][-1].digest != found[1][-1].digest, "else nothing was compiled"


@pytest.mark.soak
def test_a_run_is_compiled_once_whatever_its_depth(make_model: Models) -> None:
    found: list[list[int]] = []
    for layers in (2, 5):
        torch.compiler.reset()
        counters.clear()
        with open_trainer(compiling("on", {}, activations=1), make_model(num_hidden_layers=layers)) as trainer:
            found.append([counters["stats"]["unique_graphs"]])
            for step in range(3):
                trainer.step(batch(step))
                found[-1].append(counters["stats"]["unique_graphs"])
    assert found[0] == found[1] and found[0][0] > 0 and found[0][1] == found[0][2] == found[0][3]


@pytest.mark.slow
def test_what_cannot_be_compiled_is_run_as_it_is_and_says_so(model_dir: Path) -> None:
    with without_compiler():
        found, after = stepped(compiling("on", {}), model_dir, range(2))
    [expected] = stepped(compiling("off", {}), model_dir, [0])
    assert found.digest == expected.digest and found.choices == expected.choices
    assert len(found.notices) == 1 and "not compiled" in found.notices[0] and "no-such-compiler" in found.notices[0]
    assert not after.notices


ALONE, TENSOR = {"ranks": 1}, {"ranks": 2, "tensor": 2}


def looking(loss: LossConfig, mesh: Mesh, **changes: Any) -> Config:
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
    ours, theirs = (stepped(looking(loss, asked), policy) for asked in ({"backend": "torch"}, mesh))
    check_alike(theirs, ours, "rollout/ref_log_probs", "train/kl_loss", "train/loss", "train/grad_norm", rel=1e-3, abs=1e-5)
    assert ours[0].metrics["train/kl_loss"] > 1e-3, "the reference is another model"


@pytest.mark.parametrize("mesh", [slow(TENSOR), soak(ALONE), soak(BOTH)], ids=str)
def test_a_reference_is_renewed_and_restored(models: tuple[Path, Path, Path], mesh: Mesh, tmp_path: Path) -> None:
    """In bfloat16: before the third batch it becomes the second version, of which it has the digest; a resume goes on with equal bits."""
    asked = looking(LossConfig(kl=KLConfig(loss_coef=0.5, reference_every=2)), mesh, dtype="bfloat16")
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
    with raises(ConfigError, key="loss.distillation.teacher", got=20), open_trainer(looking(loss, ALONE), models[0]):
        pass
