"""Routers of a mixture: their losses against closed forms in float64, loads that do not depend on the layout, choices that are forced."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from streamrl.config.loss import ExpertsConfig, LossConfig
from streamrl.config.tree import Config, OptimizerConfig
from streamrl.errors import ConfigError, TrainingError
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.protocol import StepResult
from streamrl.trainers.ranks.local import open_trainer
from streamrl.trainers.torch.causal_lm import CausalLM
from streamrl.trainers.torch.routing import expert_metrics, loads
from tests.support import trainers
from tests.support.errors import raises
from tests.support.meshes import slow, soak
from tests.support.trainers import Models, Rollouts

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


def test_the_balancing_loss_is_that_of_transformers_over_the_experts_of_a_token(make_mixture: Models) -> None:
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


def test_an_even_load_is_told_from_one_expert_alone() -> None:
    even = torch.tensor([[2.0] * 4 + [1.0] * 4 + [9.0]])  # 4 tokens that meet 2 experts each
    found = expert_metrics(even, 4.0, 2)
    assert [found[name] for name in LOADS] == pytest.approx([1, 1, 1])
    assert (found["train/balance_loss"], found["train/router_z_loss"]) == pytest.approx((1, 9 / 4))
    alone = torch.tensor([[4.0, 0, 0, 0, 4.0, 0, 0, 0, 0.0]])
    found = expert_metrics(torch.cat([even, alone]), 4.0, 1)
    assert found["train/expert_load_max"] == 4 and found["train/expert_load_min"] == found["train/expert_load_entropy"] == 0
    assert loads(alone, 4.0, 1).tolist() == [[1, 0, 0, 0]]


LAYOUTS: list[dict[str, Any]] = [
    {"micro_tokens": 8},
    {"attention": "packed", "micro_tokens": 24},
    {"attention": "packed", "micro_tokens": 24, "activations": 0},
    soak({"ranks": 2}),
    slow({"ranks": 2, "shards": 2, "activations": 0}),
]


@pytest.fixture(scope="module")
def whole(make_mixture: Models) -> tuple[Path, list[StepResult]]:
    return make_mixture(), []


@pytest.mark.process
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_step_is_the_same_in_every_layout_and_on_two_ranks(
    whole: tuple[Path, list[StepResult]], rollouts: Rollouts, layout: dict[str, Any]
) -> None:
    """A prompt that a group shares counts for each of its samples, padding for none. Bounds: float32 sums in another order."""
    directory, one = whole
    if not one:
        trainer = make(directory)
        one += [trainer.step(rollouts(step)) for step in range(3)]
    with open_trainer(config(**layout), directory) as trainer:
        for step, wanted in enumerate(one):
            found = trainer.step(rollouts(step)).metrics
            for name in LOADS:
                assert found[name] == pytest.approx(wanted.metrics[name], abs=1e-12), "counts are exact"
            for name in ("train/balance_loss", "train/router_z_loss", "train/grad_norm"):
                assert found[name] == pytest.approx(wanted.metrics[name], rel=2e-5), name


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


@pytest.mark.parametrize("architecture", ["Qwen3MoE", "Mixtral", "OLMoE"])
def test_forced_on_its_own_choices_a_model_gives_the_same_bits(make_mixture: Models, tmp_path: Path, architecture: str) -> None:
    from transformers import AutoModelForCausalLM, MixtralConfig, OlmoeConfig

    directory = tmp_path
    sizes: dict[str, Any] = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    if architecture == "Qwen3MoE":
        directory = make_mixture()
    else:
        mixtral = MixtralConfig(**sizes, num_key_value_heads=1, num_local_experts=4)
        AutoModelForCausalLM.from_config(
            mixtral if architecture == "Mixtral" else OlmoeConfig(**sizes, num_experts=4, num_experts_per_tok=2)
        ).save_pretrained(directory)
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


@pytest.mark.parametrize("wrong", [torch.zeros(12, 2), torch.zeros(12, 1, 2), torch.zeros(12, 2, 3), torch.full((12, 2, 2), 4)])
def test_choices_of_another_model_are_refused(make_mixture: Models, wrong: Tensor) -> None:
    model = CausalLM(make_mixture(), torch.float32, CPU)
    with pytest.raises(TrainingError), model.routers.forcing(wrong.long()):
        raise AssertionError


def test_copies_are_counted_alike_in_every_layout(make_mixture: Models, rollouts: Rollouts) -> None:
    from streamrl.core.packing import empty_micro_batch, plan_micro_batches

    batch = rollouts()
    samples = np.arange(batch.num_samples)
    fed = int((batch.lengths - 1).sum())
    layouts: list[dict[str, Any]] = [{}, {"share_prefixes": False}, {"several_per_row": False, "share_prefixes": False}, {"row_length": 32}]
    for layout in layouts:
        micros = plan_micro_batches(batch, batch.loss_mask, samples, budget=64, **layout)
        assert sum(int(micro.copies.sum()) for micro in micros) == fed
    assert not empty_micro_batch(batch, 32).copies.any() and not empty_micro_batch(batch).copies.any()
