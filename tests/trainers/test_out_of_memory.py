"""A step that is out of memory is repeated with half the budget, unless something was written; torch's own error is raised in the model."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from streamrl.config.loss import CorrectionConfig, KLConfig, LossConfig
from streamrl.errors import OutOfMemory
from streamrl.schemas.versions import Version
from streamrl.trainers.ranks.local import open_trainer
from tests.support import trainers
from tests.support.errors import raises
from tests.support.scoring import body_of
from tests.support.trainers import Rollouts

BUDGET = 32
LOSSES = {
    "policy": LossConfig(),
    "critic and reference": LossConfig(advantage="ppo", kl=KLConfig(loss_coef=0.1, estimator="k2", reference_every=1)),
    "chosen over the step": LossConfig(policy="m2po", top_entropy=0.5, correction=CorrectionConfig(kind="none")),
}
DIRECT = LossConfig(proximal="sampler", correction=CorrectionConfig(kind="none"))
"""Without a pass before the first optimizer step."""


make = partial(trainers.make, micro_tokens=BUDGET)


def fails_at(trainer: Any, number: int) -> list[int]:
    """Let the policy's pass of that number, from 1, be out of memory, once; gives the row positions of all passes as they come."""
    sizes: list[int] = []

    def hook(module: Any, given: Any, named: dict[str, Any]) -> None:
        sizes.append(named["input_ids"].numel())
        if len(sizes) == number:
            raise torch.OutOfMemoryError("planted")

    body_of(trainer).register_forward_pre_hook(hook, with_kwargs=True)
    return sizes


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("number", [1, 2])
def test_a_step_is_repeated_as_with_half_the_budget(model_dir: Path, rollouts: Rollouts, tmp_path: Path, name: str, number: int) -> None:
    disturbed, half, whole = (make(model_dir, LOSSES[name], micro_tokens=budget) for budget in (BUDGET, BUDGET // 2, BUDGET))
    disturbed.step(rollouts(0))
    disturbed.save(tmp_path / "at", b"", version=Version(0, 1)).result()
    for trainer in (half, whole):
        trainer.load(tmp_path / "at")
    sizes = fails_at(disturbed, number)
    assert (found := disturbed.step(rollouts(1))) == half.step(rollouts(1))
    assert len(sizes) > number and found.micro_tokens == BUDGET // 2
    assert whole.step(rollouts(1)).digest != found.digest, "other micro-batches sum in another order"
    # The next one is tried as it is asked for, and one that names a budget is cut by that.
    assert disturbed.step(rollouts(2)).micro_tokens == BUDGET
    asked = replace(rollouts(3), micro_tokens=BUDGET // 2)
    for trainer in (half, disturbed):
        trainer.load(tmp_path / "at")
    assert disturbed.step(asked) == half.step(rollouts(3))


def test_packed_rows_shrink_with_the_budget_and_never_under_the_longest_sample(model_dir: Path, rollouts: Rollouts) -> None:
    disturbed, half = (make(model_dir, DIRECT, attention="packed", micro_tokens=n) for n in (BUDGET, BUDGET // 2))
    sizes = fails_at(disturbed, 2)
    assert disturbed.step(rollouts()) == half.step(rollouts())
    assert sizes[:2] == [BUDGET] * 2 and set(sizes[2:]) == {BUDGET // 2}
    longest = int(rollouts().lengths.max())
    tight = make(model_dir, DIRECT, attention="packed", limit=longest)
    sizes = fails_at(tight, 0)
    assert tight.step(rollouts()).micro_tokens == BUDGET // 4 < longest == sizes[-1]
    with raises(OutOfMemory, micro_tokens=0) as caught:
        make(model_dir, DIRECT, attention="packed", limit=longest - 1).step(rollouts())
    assert str(longest) in caught.value.message


def test_what_has_been_written_is_not_repeated(model_dir: Path, rollouts: Rollouts) -> None:
    clean, disturbed = (make(model_dir, DIRECT, minibatches=2) for _ in range(2))
    before = disturbed.digest()
    all_passes = fails_at(clean, 0)
    clean.step(rollouts())
    fails_at(disturbed, len(all_passes))
    with raises(OutOfMemory, micro_tokens=BUDGET // 2):
        disturbed.step(rollouts())
    assert disturbed.digest() != before


def test_it_is_halved_until_it_fits_or_one_sample_is_too_long(model_dir: Path, rollouts: Rollouts) -> None:
    found = make(model_dir, DIRECT, limit=BUDGET // 3).step(rollouts())
    assert found.micro_tokens == BUDGET // 4
    assert found == make(model_dir, DIRECT, micro_tokens=BUDGET // 4).step(rollouts())
    with raises(OutOfMemory, micro_tokens=0) as caught:
        make(model_dir, DIRECT, limit=1).step(rollouts())
    assert "trainer.activations" in caught.value.hint


@pytest.mark.slow
@pytest.mark.process
def test_several_ranks_do_not_repeat(model_dir: Path, rollouts: Rollouts) -> None:
    config = trainers.config(DIRECT, ranks=2, micro_tokens=BUDGET, rank_timeout_s=60.0, limit=BUDGET // 3)
    with raises(OutOfMemory, micro_tokens=BUDGET // 2), open_trainer(config, model_dir) as leading:
        leading.step(rollouts())
    with open_trainer(config, model_dir) as leading:
        assert leading.step(replace(rollouts(), micro_tokens=BUDGET // 4)).micro_tokens == BUDGET // 4
