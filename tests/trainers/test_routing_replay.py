"""Routing replay: a batch that says where the sampler's tokens went has the policy's go there, in every layout and on every mesh."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from streamrl.config.loss import ExpertsConfig, LossConfig
from streamrl.config.tree import TrainerConfig
from streamrl.core.batch_bytes import pack, unpack
from streamrl.core.batches import TrainBatch
from streamrl.core.packing import plan_micro_batches
from streamrl.errors import TrainingError
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.ranks.local import open_trainer
from streamrl.trainers.torch.causal_lm import CausalLM
from tests.support import trainers
from tests.support.meshes import slow, soak
from tests.support.trainers import Models, Rollouts

CPU = torch.device("cpu")
GREATEST = "train/train_rollout_logprob_abs_diff_max"
LAYOUTS = [
    {},
    {"attention": "packed", "micro_tokens": 24, "activations": 0},
    slow({"ranks": 2, "shards": 2, "activations": 0}),
    slow({"ranks": 2, "context": 2, "micro_tokens": 32}),
    slow({"backend": "megatron", "ranks": 2, "experts": 2}),
    *map(
        soak, ({"micro_tokens": 8}, {"attention": "packed", "micro_tokens": 24}, {"ranks": 2}, {"backend": "megatron", "micro_tokens": 24})
    ),
]


config = partial(trainers.config, LossConfig(proximal="sampler", experts=ExpertsConfig(balance_coef=0.01)), micro_tokens=64)


@pytest.fixture(scope="module")
def twins(make_mixture: Models, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Sampler and policy: one mixture, whose routers differ by what decides between experts that are nearly equal, and by no more."""
    made = []
    source = make_mixture(num_experts=8)
    for seed in range(2):
        directory = tmp_path_factory.mktemp("twin")
        weights = load_file(source / "model.safetensors")
        for name, value in weights.items():
            if name.endswith("mlp.gate.weight"):
                weights[name] = 1e-7 * torch.randn(value.shape, generator=torch.Generator().manual_seed(seed))
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_bytes((source / "config.json").read_bytes())
        made.append(directory)
    return made[0], made[1]


@pytest.fixture(scope="module")
def sampled(twins: tuple[Path, Path]) -> Callable[[TrainBatch], TrainBatch]:
    """The same batch with the log-probs and the experts that the sampler had, token by token of each sample alone."""
    model = CausalLM(twins[0], torch.float32, CPU)

    def sample(batch: TrainBatch) -> TrainBatch:
        logprobs, experts = batch.sampler_logprobs.copy(), np.full((batch.num_tokens, 2, 2), -1, np.int16)
        for begin, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
            ids = torch.from_numpy(batch.tokens[begin:end].astype(np.int64))
            with torch.no_grad(), model.routers.choosing() as found:
                logits = model.module(input_ids=ids[None, :-1]).logits[0].log_softmax(-1)
            logprobs[begin + 1 : end] = logits.gather(1, ids[1:, None])[:, 0].numpy()
            experts[begin : end - 1] = found[0].numpy()  # of the last token no engine says any
        return replace(batch, sampler_logprobs=np.where(batch.loss_mask, logprobs, 0.0).astype(np.float32), routed_experts=experts)

    return sample


@pytest.mark.process
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_replayed_choices_take_away_what_a_perturbed_router_does(
    twins: tuple[Path, Path], sampled: Callable[[TrainBatch], TrainBatch], rollouts: Rollouts, layout: dict[str, Any]
) -> None:
    """Also in the step behind one without choices, and before one: nothing stays forced."""
    known = sampled(rollouts())
    free = replace(known, routed_experts=None)
    still = config(**layout, optimizer=replace(TrainerConfig().optimizer, learning_rate=0.0))
    with open_trainer(still, twins[1]) as trainer:
        distances = [trainer.step(batch).metrics[GREATEST] for batch in (free, known, free, known)]
    assert distances[0] > 0.1 and distances[2] == distances[0]
    assert distances[1] < 1e-5 and distances[3] < 1e-5


def test_the_load_is_that_of_what_is_replayed_and_where_nothing_is_known_routers_choose(
    twins: tuple[Path, Path], sampled: Callable[[TrainBatch], TrainBatch], rollouts: Rollouts
) -> None:
    known = sampled(rollouts())
    assert known.routed_experts is not None
    nothing = replace(known, routed_experts=np.full_like(known.routed_experts, -1))
    results = [make_trainer(config(), twins[1]).step(batch) for batch in (nothing, replace(known, routed_experts=None))]
    assert results[0].digest == results[1].digest
    known = sampled(rollouts())
    assert known.routed_experts is not None
    alone = np.broadcast_to(np.array([0, 1], np.int16), known.routed_experts.shape).copy()
    found = make_trainer(config(), twins[1]).step(replace(known, routed_experts=alone)).metrics
    assert found["train/expert_load_max"] == pytest.approx(4.0), "2 of 8 experts have all"
    assert found["train/expert_load_min"] == 0


def test_a_prompt_is_shared_as_far_as_it_was_routed_alike(rollouts: Rollouts) -> None:
    batch = rollouts()
    experts = np.zeros((batch.num_tokens, 2, 2), np.int16)
    experts[..., 1] = 1
    samples = np.arange(batch.num_samples)
    fed = [
        sum(int((micro.fed >= 0).sum()) for micro in plan_micro_batches(one, batch.loss_mask, samples, budget=64))
        for one in (batch, replace(batch, routed_experts=experts))
    ]
    assert fed[0] == fed[1], "of one routing nothing changes"
    other = experts.copy()
    other[batch.offsets[1] + 1, 1, 0] = 5  # the second token of the first group's second sample
    found = plan_micro_batches(replace(batch, routed_experts=other), batch.loss_mask, samples, budget=64)
    assert sum(int((micro.fed >= 0).sum()) for micro in found) > fed[0]
    for micro in found:
        there = micro.fed >= 0
        assert (batch.tokens[micro.fed[there]] == micro.inputs[there]).all() and not micro.copies[~there].any()
        # Where several samples stand in one token's place, all of them went to its experts.
        of_sample = np.searchsorted(batch.offsets, micro.fed, side="right") - 1
        assert (micro.fed - batch.offsets[of_sample] == micro.positions)[there].all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda experts: experts[:-1], "expected routed experts"),
        (lambda experts: experts[:, :1], ", 1, 2]"),
        (lambda experts: experts[..., :1], ", 2, 1]"),
        (lambda experts: experts + 7, "from 0 to 7, or -1, got"),
        (lambda experts: experts - 2, "got -3 to"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    twins: tuple[Path, Path],
    sampled: Callable[[TrainBatch], TrainBatch],
    rollouts: Rollouts,
    change: Callable[[Any], Any],
    said: str,
) -> None:
    known = sampled(rollouts())
    trainer = make_trainer(config(), twins[1])
    before = trainer.digest()
    with pytest.raises(TrainingError) as caught:
        trainer.step(replace(known, routed_experts=change(known.routed_experts)))
    assert said in str(caught.value) and trainer.digest() == before


def test_a_dense_model_refuses_choices(model_dir: Path, rollouts: Rollouts) -> None:
    batch = rollouts()
    with pytest.raises(TrainingError, match="expected routed experts"):
        trainers.make(model_dir, trainers.DIRECT).step(replace(batch, routed_experts=np.zeros((batch.num_tokens, 2, 2), np.int16)))


def test_choices_reach_other_ranks_as_they_are(rollouts: Rollouts) -> None:
    batch = rollouts()
    experts = np.arange(batch.num_tokens * 4, dtype=np.int16).reshape(-1, 2, 2)
    again = unpack(pack(replace(batch, routed_experts=experts)), TrainBatch)
    assert again.routed_experts is not None and again.routed_experts.dtype == np.int16
    assert (again.routed_experts == experts).all() and unpack(pack(batch), TrainBatch).routed_experts is None
    lists = TrainBatch.from_lists([[5, 6]], [[7]], routed_experts=[[[[1, 2]], [[0, 3]], [[-1, -1]]]])
    assert lists.routed_experts is not None and lists.routed_experts.tolist() == [[[1, 2]], [[0, 3]], [[-1, -1]]]
    with pytest.raises(TrainingError, match="routed_experts"):
        TrainBatch.from_lists([[5, 6]], [[7]], routed_experts=[[[[1, 2]]]])
