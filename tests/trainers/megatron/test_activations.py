"""Layers of megatron-core that keep no activations are run again in the backward pass: no digit depends on it, on any mesh."""

from typing import Any

import pytest
import torch

from streamrl.config.loss import ExpertsConfig, LossConfig
from streamrl.config.tree import Config
from streamrl.errors import ConfigError
from streamrl.trainers.megatron.core import Decoder, Rows
from streamrl.trainers.ranks.local import open_trainer
from tests.support import meshes
from tests.support.errors import raises
from tests.support.meshes import batch, slow, soak
from tests.support.scoring import policy_of
from tests.support.trainers import Models

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]
BOTH = {"ranks": 4, "tensor": 2, "pipeline": 2}
MESHES = [slow({"ranks": 2, "pipeline": 2}), *map(soak, ({}, BOTH, {"ranks": 2, "context": 2}, {"ranks": 2, "experts": 2}))]


def config(activations: Any, mesh: dict[str, int]) -> Config:
    experts = ExpertsConfig(balance_coef=0.01, z_coef=0.001) if "experts" in mesh else ExpertsConfig()
    loss = LossConfig(advantage="ppo", experts=experts)
    return meshes.config(loss, backend="megatron", activations=activations, minibatches=1, **mesh)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_no_digit_depends_on_what_is_kept(make_model: Models, make_mixture: Models, mesh: dict[str, int]) -> None:
    """Of policy and critic. On two stages micro-batches are on their way meanwhile, each of which attends by its own samples."""
    directory = make_mixture() if "experts" in mesh else make_model(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    found = []
    for activations in ("all", 0, 1):
        with open_trainer(config(activations, mesh), directory) as trainer:
            results = [trainer.step(batch(step)) for step in range(3)]
            found.append([(result.digest, result.metrics) for result in results])
    assert found[1] == found[0] and found[2] == found[0]


@pytest.mark.slow
def test_fewer_activations_are_kept(make_model: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by autograd: what a pass saves for the backward pass, in bytes."""
    directory = make_model(num_hidden_layers=4)
    saved = []
    for activations in ("all", 2, 0):
        total = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.nbytes
            return tensor

        with open_trainer(config(activations, {}), directory) as trainer, torch.autograd.graph.saved_tensors_hooks(count, lambda one: one):
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
    with open_trainer(config(0, {}), make_model()) as trainer:
        trainer.step(batch(0))
        layers = policy_of(trainer)._decoder.layers
        assert layers and all(getattr(layer, "mlp_norm_manager", None) is None for layer in layers)


def test_more_layers_than_a_rank_has_are_refused(make_model: Models) -> None:
    with raises(ConfigError, key="trainer.activations", got=5), open_trainer(config(5, {}), make_model()):
        pass
