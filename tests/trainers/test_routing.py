"""Routers of a mixture: losses against closed forms in float64, loads in every layout, choices that are forced or replayed from a batch."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from streamrl.config.loss import ExpertsConfig, LossConfig
from streamrl.config.tree import Config, OptimizerConfig, TrainerConfig
from streamrl.core.batch_bytes import pack, unpack
from streamrl.core.batches import TrainBatch
from streamrl.core.packing import empty_micro_batch, plan_micro_batches
from streamrl.errors import ConfigError, TrainingError
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.protocol import StepResult
from streamrl.trainers.ranks.local import open_trainer
from streamrl.trainers.torch.causal_lm import CausalLM
from streamrl.trainers.torch.routing import expert_metrics, loads
from tests.support import trainers
from tests.support.errors import raises
from tests.support.meshes import Mesh, slow, soak
from tests.support.steps import check_alike
from tests.support.trainers import Models, Rollouts
from tests.trainers.conftest import EXPERTS, SIZES, write_random

CPU = torch.device("cpu")
LOSSES = ExpertsConfig(balance_coef=0.3, z_coef=0.02)
LOADS = ("train/expert_load_max", "train/expert_load_min", "train/expert_load_entropy")


def config(experts: ExpertsConfig = LOSSES, **trainer: Any) -> Config:
    return trainers.config(LossConfig(proximal="sampler", experts=experts), **{"micro_tokens": 64, **trainer})


def make(directory: Path, experts: ExpertsConfig = LOSSES, **trainer: Any) -> Any:
    return make_trainer(config(experts, **trainer), directory)


def passed(model: CausalLM, ids: Tensor, weights: Tensor, coefs: Tensor, load: Tensor) -> Tensor:
    """A pass whose own loss has a gradient of zero; gives what the routers found."""
    model.routers.tell(weights, coefs, load)
    states = model.module.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    states.backward(torch.zeros_like(states))
    found = model.routers.told()
    model.routers.tell(None)
    return found


def test_gradients_of_the_last_router_are_those_of_the_closed_form(make_mixture: Models) -> None:
    model = CausalLM(make_mixture(num_experts=6, num_experts_per_tok=3), torch.float64, CPU)
    ids, w = torch.arange(2, 14)[None], torch.tensor([1.0, 2, 2, 0, 1, 1, 3, 1, 0, 1, 1, 0], dtype=torch.float64)
    load, coefs = torch.rand(2, 6, dtype=torch.float64), torch.tensor([0.7, 0.4], dtype=torch.float64)
    router, seen = model.module.model.layers[1].mlp.gate, list[Tensor]()
    router.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
    passed(model, ids, w, coefs, load)
    h = seen[-1].reshape(-1, 32)
    z = h @ router.weight.detach().T
    q, lse = z.softmax(-1), z.logsumexp(-1)
    # d sum_i f_i q_i / dz_j = q_j (f_j - sum_i f_i q_i); d lse^2 / dz_j = 2 lse q_j.
    slopes = w[:, None] * (0.7 * q * (load[1] - (q @ load[1])[:, None]) + 0.4 * 2 * lse[:, None] * q)
    torch.testing.assert_close(router.weight.grad, slopes.T @ h, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("again", [False, True])
def test_all_gradients_are_those_of_the_losses_written_down(make_mixture: Models, again: bool) -> None:
    """Also where layers are run again in the backward pass: nothing is counted twice."""
    model = CausalLM(make_mixture(), torch.float64, CPU)
    model.arrange(compiled=False, kept=0 if again else None)
    ids, w = torch.arange(2, 14)[None], torch.ones(12, dtype=torch.float64)
    w[9:] = 0
    load, coefs = torch.rand(2, 4, dtype=torch.float64), torch.tensor([0.7, 0.4], dtype=torch.float64)
    found = passed(model, ids, w, coefs, load)
    ours = {name: p.grad.clone() for name, p in model.parameters() if p.grad is not None}
    model.module.zero_grad()
    logits = model.module(input_ids=ids, output_router_logits=True, use_cache=False).router_logits
    loss = torch.zeros((), dtype=torch.float64)
    for number, z in enumerate(logits):
        q = z.softmax(-1)
        loss = loss + (w * (0.7 * (q @ load[number]) + 0.4 * z.logsumexp(-1) ** 2)).sum()
        chosen = torch.zeros_like(q).scatter(1, q.topk(2).indices, 1.0)
        exact = torch.cat([w @ chosen, w @ q, (w @ z.logsumexp(-1) ** 2)[None]])
        torch.testing.assert_close(found[number], exact, rtol=1e-12, atol=1e-12)
    loss.backward()
    for name, p in model.parameters():
        if p.grad is not None and p.grad.any():
            torch.testing.assert_close(ours[name], p.grad, rtol=1e-7, atol=1e-9, msg=name)  # weights of experts are float32 there
    assert ours["model.layers.0.mlp.gate.weight"].abs().max() > 1e-3


def test_balance_is_that_of_transformers_and_an_even_load_is_told_from_one_expert_alone(make_mixture: Models) -> None:
    """There each of the k choices counts as a whole, so that an even load gives k; here f sums to 1, as in the paper."""
    model = CausalLM(make_mixture(num_hidden_layers=1), torch.float64, CPU)
    ids = torch.arange(2, 14)[None]
    model.routers.tell(torch.ones(12, dtype=torch.float64))
    model.module.get_decoder()(input_ids=ids, use_cache=False)
    found = expert_metrics(model.routers.told(), 12.0, 2)
    model.routers.tell(None)
    theirs = load_balancing_loss_func(model.module(input_ids=ids, output_router_logits=True).router_logits, 4, 2)
    assert isinstance(theirs, Tensor) and 2 * found["train/balance_loss"] == pytest.approx(float(theirs.detach()), rel=1e-6)
    assert found["train/balance_loss"] > 1.001, "no even load, which gives 1 whatever is computed"
    even = torch.tensor([[2.0] * 4 + [1.0] * 4 + [9.0]])  # 4 tokens that meet 2 experts each
    found = expert_metrics(even, 4.0, 2)
    assert [found[name] for name in LOADS] == pytest.approx([1, 1, 1])
    assert (found["train/balance_loss"], found["train/router_z_loss"]) == pytest.approx((1, 9 / 4))
    alone = torch.tensor([[4.0, 0, 0, 0, 4.0, 0, 0, 0, 0.0]])
    found = expert_metrics(torch.cat([even, alone]), 4.0, 1)
    assert found["train/expert_load_max"] == 4 and found["train/expert_load_min"] == found["train/expert_load_entropy"] == 0
    assert loads(alone, 4.0, 1).tolist() == [[1, 0, 0, 0]]


LAYOUTS: list[Mesh] = [
    {"micro_tokens": 8},
    {"attention": "packed", "micro_tokens": 24},
    {"attention": "packed", "micro_tokens": 24, "activations": 0},
    soak({"ranks": 2}),
    slow({"ranks": 2, "shards": 2, "activations": 0}),
]


@pytest.fixture(scope="module")
def whole(make_mixture: Models, rollouts: Rollouts) -> tuple[Path, list[StepResult]]:
    """A mixture, and what three steps of one rank give."""
    trainer = make(directory := make_mixture())
    return directory, [trainer.step(rollouts(step)) for step in range(3)]


@pytest.mark.process
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_step_is_the_same_in_every_layout_and_on_ranks(whole: tuple[Path, list[StepResult]], rollouts: Rollouts, layout: Mesh) -> None:
    """A prompt that a group shares counts for each of its samples, padding for none. Bounds: float32 sums in another order."""
    directory, one = whole
    with open_trainer(config(**layout), directory) as trainer:
        found = [trainer.step(rollouts(step)) for step in range(3)]
    check_alike(found, one, *LOADS, rel=0.0, abs=1e-12)  # counts are exact
    check_alike(found, one, "train/balance_loss", "train/router_z_loss", "train/grad_norm", rel=2e-5)


def test_an_uneven_load_is_evened_out_by_losses_that_are_in_the_gradient(make_mixture: Models, rollouts: Rollouts) -> None:
    directory = make_mixture()
    norms = {
        key: make(directory, ExpertsConfig(**{key: 0.3} if key else {})).step(rollouts()).metrics["train/grad_norm"]
        for key in ("", "balance_coef", "z_coef")
    }
    assert len({round(norm, 4) for norm in norms.values()}) == 3
    directory, last = make_mixture(num_experts=8), list[float]()
    for coef in (0.0, 1.0):
        trainer = make(directory, ExpertsConfig(balance_coef=coef), optimizer=OptimizerConfig(learning_rate=0.01))
        last.append([trainer.step(rollouts()).metrics["train/balance_loss"] for _ in range(15)][-1])
    assert last[1] < 1.1 < last[0]


@pytest.mark.parametrize("key", ["balance_coef", "z_coef"])
def test_a_dense_model_is_refused_by_name(model_dir: Path, rollouts: Rollouts, key: str) -> None:
    with raises(ConfigError, key=f"loss.experts.{key}", got="qwen3"):
        make(model_dir, ExpertsConfig(**{key: 0.1}))
    assert not [name for name in make(model_dir, ExpertsConfig()).step(rollouts()).metrics if "expert" in name or "router" in name]


def chosen_by(model: CausalLM, ids: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad(), model.routers.choosing() as found:
        logits = model.module(input_ids=ids).logits
    return logits.log_softmax(-1), found[0]


ARCHITECTURES = {
    "Qwen3MoE": ("Qwen3Moe", EXPERTS),
    "Mixtral": ("Mixtral", {"num_local_experts": 4}),
    "OLMoE": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_forced_on_its_own_choices_a_model_gives_the_same_bits(tmp_path: Path, architecture: str) -> None:
    kind, experts = ARCHITECTURES[architecture]
    directory = write_random(tmp_path, kind, "float32", SIZES | experts)
    model, ids = CausalLM(directory, torch.float32, CPU), torch.arange(2, 14)[None]
    assert len(model.routers) == 2
    plain, chosen = chosen_by(model, ids)
    with model.routers.forcing(chosen):
        forced, again = chosen_by(model, ids)
    assert torch.equal(forced, plain) and torch.equal(again, chosen)
    assert torch.equal(chosen_by(model, ids)[0], plain), "nothing is forced any more"


def test_forced_choices_take_away_what_a_perturbed_router_does(make_mixture: Models) -> None:
    """Routers that differ by what rounding does where experts are nearly equal: other experts, though their weights are nearly the same."""
    directory = make_mixture(num_experts=8)
    ours, theirs = (CausalLM(directory, torch.float64, CPU) for _ in range(2))
    with torch.no_grad():
        for number, model in enumerate((ours, theirs)):
            for layer in model.module.model.layers:
                # All experts nearly equal: a difference of 1e-7 decides which are chosen.
                noise = torch.randn(layer.mlp.gate.weight.shape, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
                layer.mlp.gate.weight.copy_(1e-7 * noise)
    ids = torch.arange(2, 14)[None]
    sampled, chosen = chosen_by(ours, ids)
    free, other = chosen_by(theirs, ids)
    with theirs.routers.forcing(chosen):
        forced, _ = chosen_by(theirs, ids)
    assert not torch.equal(chosen, other)
    assert (free - sampled).abs().max() > 0.1
    assert (forced - sampled).abs().max() < 1e-5


def test_the_gradient_of_forced_choices_reaches_the_router_as_it_is(make_mixture: Models) -> None:
    model, ids = CausalLM(make_mixture(), torch.float64, CPU), torch.arange(2, 14)[None]
    chosen = torch.stack([torch.full((12, 2), 0), torch.full((12, 2), 2)], 1)
    chosen[..., 1] += 1
    with model.routers.forcing(chosen):
        model.module(input_ids=ids).logits.square().sum().backward()
    grads = [layer.mlp.gate.weight.grad for layer in model.module.model.layers]
    # Divided by their sum, two weights depend on the difference of these two logits alone.
    for number, grad in enumerate(grads):
        first = 2 * number
        assert grad[first].abs().max() > 1e-4 and torch.allclose(grad[first], -grad[first + 1], rtol=1e-4, atol=1e-6)
        assert grad[[one for one in range(4) if one not in (first, first + 1)]].abs().max() < 1e-5


def test_choices_of_another_model_are_refused(make_mixture: Models) -> None:
    model = CausalLM(make_mixture(), torch.float32, CPU)
    for wrong in (torch.zeros(12, 2), torch.zeros(12, 1, 2), torch.zeros(12, 2, 3), torch.full((12, 2, 2), 4)):
        with pytest.raises(TrainingError), model.routers.forcing(wrong.long()):
            raise AssertionError


def test_copies_are_counted_alike_in_every_layout(rollouts: Rollouts) -> None:
    batch = rollouts()
    samples = np.arange(batch.num_samples)
    fed = int((batch.lengths - 1).sum())
    layouts: list[dict[str, Any]] = [{}, {"share_prefixes": False}, {"several_per_row": False, "share_prefixes": False}, {"row_length": 32}]
    for layout in layouts:
        micros = plan_micro_batches(batch, batch.loss_mask, samples, budget=64, **layout)
        assert sum(int(micro.copies.sum()) for micro in micros) == fed
    assert not empty_micro_batch(batch, 32).copies.any() and not empty_micro_batch(batch).copies.any()


GREATEST = "train/train_rollout_logprob_abs_diff_max"
REPLAYED = [
    {},
    {"attention": "packed", "micro_tokens": 24, "activations": 0},
    slow({"ranks": 2, "shards": 2, "activations": 0}),
    slow({"ranks": 2, "context": 2, "micro_tokens": 32}),
    slow({"backend": "megatron", "ranks": 2, "experts": 2}),
    soak({"micro_tokens": 8}),
    soak({"attention": "packed", "micro_tokens": 24}),
    soak({"ranks": 2}),
    soak({"backend": "megatron", "micro_tokens": 24}),
]
replaying = partial(trainers.config, LossConfig(proximal="sampler", experts=ExpertsConfig(balance_coef=0.01)), micro_tokens=64)


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
def known(twins: tuple[Path, Path], rollouts: Rollouts) -> TrainBatch:
    """A batch with the log-probs and the experts that the sampler had, token by token of each sample alone."""
    model, batch = CausalLM(twins[0], torch.float32, CPU), rollouts()
    logprobs, experts = batch.sampler_logprobs.copy(), np.full((batch.num_tokens, 2, 2), -1, np.int16)
    for begin, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        ids = torch.from_numpy(batch.tokens[begin:end].astype(np.int64))
        with torch.no_grad(), model.routers.choosing() as found:
            logits = model.module(input_ids=ids[None, :-1]).logits[0].log_softmax(-1)
        logprobs[begin + 1 : end] = logits.gather(1, ids[1:, None])[:, 0].numpy()
        experts[begin : end - 1] = found[0].numpy()  # of the last token no engine says any
    return replace(batch, sampler_logprobs=np.where(batch.loss_mask, logprobs, 0.0).astype(np.float32), routed_experts=experts)


@pytest.mark.process
@pytest.mark.parametrize("layout", REPLAYED, ids=str)
def test_replayed_choices_take_away_what_a_perturbed_router_does(twins: tuple[Path, Path], known: TrainBatch, layout: Mesh) -> None:
    """Also in the step behind one without choices, and before one: nothing stays forced."""
    free = replace(known, routed_experts=None)
    still = replaying(**layout, optimizer=replace(TrainerConfig().optimizer, learning_rate=0.0))
    with open_trainer(still, twins[1]) as trainer:
        distances = [trainer.step(batch).metrics[GREATEST] for batch in (free, known, free, known)]
    assert distances[0] > 0.1 and distances[2] == distances[0]
    assert distances[1] < 1e-5 and distances[3] < 1e-5


def test_the_load_is_of_what_is_replayed_and_where_nothing_is_known_routers_choose(twins: tuple[Path, Path], known: TrainBatch) -> None:
    assert known.routed_experts is not None
    nothing = replace(known, routed_experts=np.full_like(known.routed_experts, -1))
    results = [make_trainer(replaying(), twins[1]).step(batch) for batch in (nothing, replace(known, routed_experts=None))]
    assert results[0].digest == results[1].digest
    alone = np.broadcast_to(np.array([0, 1], np.int16), known.routed_experts.shape).copy()
    found = make_trainer(replaying(), twins[1]).step(replace(known, routed_experts=alone)).metrics
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
def test_what_cannot_be_replayed_is_refused(twins: tuple[Path, Path], known: TrainBatch, change: Callable[[Any], Any], said: str) -> None:
    trainer = make_trainer(replaying(), twins[1])
    before = trainer.digest()
    with pytest.raises(TrainingError) as caught:
        trainer.step(replace(known, routed_experts=change(known.routed_experts)))
    assert said in str(caught.value) and trainer.digest() == before


def test_choices_reach_other_ranks_and_no_dense_model(model_dir: Path, rollouts: Rollouts) -> None:
    batch = rollouts()
    with pytest.raises(TrainingError, match="expected routed experts"):
        trainers.make(model_dir, trainers.DIRECT).step(replace(batch, routed_experts=np.zeros((batch.num_tokens, 2, 2), np.int16)))
    experts = np.arange(batch.num_tokens * 4, dtype=np.int16).reshape(-1, 2, 2)
    again = unpack(pack(replace(batch, routed_experts=experts)), TrainBatch)
    assert again.routed_experts is not None and again.routed_experts.dtype == np.int16
    assert (again.routed_experts == experts).all() and unpack(pack(batch), TrainBatch).routed_experts is None
    lists = TrainBatch.from_lists([[5, 6]], [[7]], routed_experts=[[[[1, 2]], [[0, 3]], [[-1, -1]]]])
    assert lists.routed_experts is not None and lists.routed_experts.tolist() == [[[1, 2]], [[0, 3]], [[-1, -1]]]
    with pytest.raises(TrainingError, match="routed_experts"):
        TrainBatch.from_lists([[5, 6]], [[7]], routed_experts=[[[[1, 2]]]])
