"""Compiled layers of megatron-core on CPUs: the numbers of plain ones on every mesh, one compilation a run whatever its depth.

One rank is compiled with the slow tests, other meshes with the soak: test_megatron_gpu.py, too, compiles on each of them.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from streamrl.config.loss import ExpertsConfig
from streamrl.config.tree import Config, LossConfig
from streamrl.trainers.ranks.local import open_trainer
from tests.support import meshes
from tests.support.compilers import COMPILES, without_compiler
from tests.support.meshes import batch, slow, soak
from tests.support.trainers import Models

pytestmark = [pytest.mark.process, *COMPILES]
MESHES = [
    slow({}),
    *map(soak, ({"ranks": 2, "pipeline": 2}, {"ranks": 2, "context": 2}, {"experts": 1}, {"ranks": 2, "experts": 2})),
]


def config(compiled: Any, mesh: dict[str, int], **trainer: Any) -> Config:
    experts = ExpertsConfig(balance_coef=0.3, z_coef=0.02) if "experts" in mesh else ExpertsConfig()
    loss = LossConfig(advantage="ppo" if "pipeline" in mesh else "grpo", proximal="sampler", experts=experts)
    return meshes.config(loss, backend="megatron", compile=compiled, attention="packed", minibatches=1, **mesh, **trainer)


@pytest.fixture
def directory(make_model: Models, make_mixture: Models, mesh: dict[str, int]) -> Path:
    return make_mixture() if "experts" in mesh else make_model(num_attention_heads=4, num_key_value_heads=2)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_it_learns_what_a_plain_one_does(directory: Path, mesh: dict[str, int]) -> None:
    """One layer of a rank that has two is run again in the backward pass; some ranks have fewer rows than others. Stages have a critic."""
    found = []
    for compiled in ("on", "off"):
        torch.compiler.reset()
        with open_trainer(config(compiled, mesh, activations=1), directory) as trainer:
            found.append([trainer.step(batch(step)) for step in range(3)])
    for ours, theirs in zip(*found, strict=True):
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-3, abs=1e-5)
        assert ours.choices is not None and ours.choices.compiled and not ours.notices
        assert theirs.choices is not None and not theirs.choices.compiled
    assert found[0][-1].digest != found[1][-1].digest, "else nothing was compiled"


@pytest.mark.soak
def test_a_run_is_compiled_once_whatever_its_depth(make_model: Models) -> None:
    found: list[list[int]] = []
    for layers in (2, 5):
        torch.compiler.reset()
        counters.clear()
        with open_trainer(config("on", {}, activations=1), make_model(num_hidden_layers=layers)) as trainer:
            found.append([counters["stats"]["unique_graphs"]])
            for step in range(3):
                trainer.step(batch(step))
                found[-1].append(counters["stats"]["unique_graphs"])
    assert found[0] == found[1] and found[0][0] > 0 and found[0][1] == found[0][2] == found[0][3]


@pytest.mark.slow
def test_what_cannot_be_compiled_is_run_as_it_is_and_says_so(model_dir: Path) -> None:
    with without_compiler(), open_trainer(config("on", {}), model_dir) as trainer:
        found, after = trainer.step(batch(0)), trainer.step(batch(1))
    with open_trainer(config("off", {}), model_dir) as trainer:
        expected = trainer.step(batch(0))
    assert found.digest == expected.digest and found.choices == expected.choices
    assert len(found.notices) == 1 and "not compiled" in found.notices[0] and "no-such-compiler" in found.notices[0]
    assert not after.notices
