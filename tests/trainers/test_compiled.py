"""Compiled layers and head on a CPU: the numbers of plain ones, one compilation a run, and what cannot be compiled is run as it is.

One small model is compiled with the slow tests. Models and cut models are with the soak, for test_experts_gpu.py and test_shards_gpu.py
compile them too.
"""

from collections.abc import Generator
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from torch._dynamo.utils import counters

from streamrl.config.loss import ExpertsConfig
from streamrl.config.tree import DebugConfig, LossConfig
from streamrl.errors import ConfigError
from streamrl.schemas.ledger import Choices
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.ranks.local import open_trainer
from tests.support import trainers
from tests.support.compilers import COMPILES, without_compiler
from tests.support.errors import raises
from tests.support.steps import check_alike
from tests.support.trainers import DIRECT, Models, Rollouts

pytestmark = [pytest.mark.process, *COMPILES]
ROW = 24
PLAIN = Choices(attention="packed", row_length=ROW)
config = partial(trainers.config, DIRECT, attention="packed", micro_tokens=ROW)
make = partial(trainers.make, loss=DIRECT, attention="packed", micro_tokens=ROW)


@pytest.fixture
def no_compiler() -> Generator[None]:
    with without_compiler():
        yield


@pytest.mark.slow
def test_a_run_is_compiled_once_and_learns_what_a_plain_one_does(model_dir: Path, rollouts: Rollouts) -> None:
    torch.compiler.reset()
    compiled, plain = make(model_dir, compile="on"), make(model_dir, compile="off")
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0, "compiled before the first step, so that what cannot be is known"
    for step in range(3):
        ours, theirs = (trainer.step(rollouts(step)) for trainer in (compiled, plain))
        check_alike([ours], [theirs], rel=1e-3, abs=1e-5)
        assert (ours.choices, theirs.choices) == (replace(PLAIN, compiled=True), PLAIN) and not ours.notices
    assert counters["stats"]["unique_graphs"] == graphs, "other samples in the rows are no other shapes"


@pytest.mark.soak
def test_a_mixture_is_compiled_once_whatever_its_depth_and_tells_the_load_of_its_experts(make_mixture: Models, rollouts: Rollouts) -> None:
    losses, found = LossConfig(proximal="sampler", experts=ExpertsConfig(balance_coef=0.3, z_coef=0.02)), list[list[int]]()
    for layers in (2, 5):
        directory = make_mixture(num_hidden_layers=layers)
        torch.compiler.reset()
        counters.clear()
        compiled, plain = (make_trainer(replace(config(compile=how, activations=1), loss=losses), directory) for how in ("on", "off"))
        found.append([])
        for step in range(3):
            found[-1].append(counters["stats"]["unique_graphs"])
            ours, theirs = (trainer.step(rollouts(step)) for trainer in (compiled, plain))
            assert ours.choices == replace(PLAIN, compiled=True, kept_layers=1) and not ours.notices
            assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-3, abs=1e-5)
            assert ours.metrics["train/expert_load_max"] > 1
        found[-1].append(counters["stats"]["unique_graphs"])
    # The first step has the variant without a gradient, which finds the load of the step.
    assert found[0] == found[1] and 0 < found[0][0] < found[0][1] == found[0][2] == found[0][3]


@pytest.mark.slow
def test_what_was_trained_before_is_run_as_it_was(model_dir: Path, rollouts: Rollouts) -> None:
    torch.compiler.reset()
    compiled, plain, free = make(model_dir, compile="on"), make(model_dir, compile="off"), make(model_dir)
    before = compiled.step(rollouts()), plain.step(rollouts())
    assert before[0].digest != before[1].digest, "else nothing is shown"
    assert free.step(replace(rollouts(), choices=before[0].choices)) == before[0]
    again = make(model_dir)
    assert again.step(replace(rollouts(), choices=before[1].choices)) == before[1]
    # What the configuration names stands above what was recorded.
    assert make(model_dir, compile="off").step(replace(rollouts(), choices=before[0].choices)) == before[1]


@pytest.mark.usefixtures("no_compiler")
def test_what_cannot_be_compiled_is_run_as_it_is_and_says_so(model_dir: Path, rollouts: Rollouts) -> None:
    trainer = make(model_dir, compile="on")
    found, expected = trainer.step(rollouts()), make(model_dir, compile="off").step(rollouts())
    assert found.digest == expected.digest and found.choices == expected.choices
    assert len(found.notices) == 1 and "not compiled" in found.notices[0] and "Qwen3ForCausalLM" in found.notices[0]
    assert "no-such-compiler" in found.notices[0]
    assert not trainer.step(rollouts(1)).notices


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("shards", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.soak)])
def test_where_one_rank_cannot_none_does(model_dir: Path, rollouts: Rollouts, shards: int) -> None:
    """The other rank is another process, which can."""
    both = {"ranks": 2, "shards": shards, "rank_timeout_s": 300.0}
    with open_trainer(config(compile="on", **both), model_dir) as leading:
        found = leading.step(rollouts())
    with open_trainer(config(compile="off", **both), model_dir) as leading:
        assert leading.step(rollouts()).digest == found.digest
    assert found.choices == PLAIN and "no-such-compiler" in found.notices[0]


@pytest.mark.soak
@pytest.mark.parametrize("gather", ["step", "micro_batch"])
def test_a_model_that_is_cut_is_compiled_once_and_learns_what_a_whole_one_does(model_dir: Path, rollouts: Rollouts, gather: str) -> None:
    """One layer is run again in the backward pass, and a rank has fewer rows than the other."""
    torch.compiler.reset()
    plain = make(model_dir, compile="off")
    with open_trainer(config(compile="on", ranks=2, shards=2, gather=gather, activations=1, rank_timeout_s=300.0), model_dir) as cut:
        graphs = counters["stats"]["unique_graphs"]
        assert graphs > 0
        for step in range(3):
            ours, theirs = (trainer.step(rollouts(step)) for trainer in (cut, plain))
            assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-3, abs=1e-5)
            assert ours.choices == replace(PLAIN, compiled=True, kept_layers=1)
        assert counters["stats"]["unique_graphs"] == graphs


def test_a_row_that_a_cut_model_has_no_memory_for_is_refused_at_the_start(model_dir: Path) -> None:
    """Whole models begin with half the row: a rank of a cut one cannot stop amid a pass and go on."""
    asked = config(compile="on", ranks=2, shards=2, rank_timeout_s=300.0)
    with raises(ConfigError, key="trainer.micro_tokens"), open_trainer(replace(asked, debug=DebugConfig(memory_tokens=ROW - 1)), model_dir):
        pass
