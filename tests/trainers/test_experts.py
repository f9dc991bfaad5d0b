"""Models of experts on a CPU: the sum over chosen experts against float64, and that no token's experts depend on its neighbours."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import silu

from streamrl.core.batches import TrainBatch
from streamrl.core.packing import plan_micro_batches
from streamrl.trainers.torch.causal_lm import CausalLM
from streamrl.trainers.torch.experts import EXPERTS, added, by_expert, grouped_experts, permute, register, sums
from streamrl.trainers.torch.kernels import Kernels
from tests.support.batches import train_batch
from tests.support.trainers import DIRECT, Models, make

CPU = torch.device("cpu")


class Experts(torch.nn.Module):
    """What is looked at of transformers' experts: `num` of them, [num, 2 I, H] and [num, H, I]."""

    is_transposed, has_bias, has_gate = False, False, True

    def __init__(self, num: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.num_experts = num
        self.gate_up_proj = torch.nn.Parameter(torch.randn(num, 2 * inner, hidden, dtype=torch.float64))
        self.down_proj = torch.nn.Parameter(torch.randn(num, hidden, inner, dtype=torch.float64))

    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        gate, value = both.chunk(2, -1)
        return silu(gate) * value


@pytest.mark.parametrize(("tokens", "k"), [(1, 1), (1, 3), (17, 1), (40, 3)])
def test_a_token_gets_the_weighted_sum_of_its_experts(tokens: int, k: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(tokens)
        module, x = Experts(5, 6, 4), torch.randn(tokens, 6, dtype=torch.float64, requires_grad=True)
        odds, weights = torch.rand(tokens, 5), torch.rand(tokens, k, dtype=torch.float64, requires_grad=True)
        slopes = torch.randn(tokens, 6, dtype=torch.float64)
    odds[:, 2] = -1.0  # chosen by nobody
    chosen = odds.topk(k).indices
    leaves = [x, weights, module.gate_up_proj, module.down_proj]
    out = grouped_experts(module, x, chosen, weights)
    gradients = torch.autograd.grad(out, leaves, slopes)
    rows: list[torch.Tensor] = []
    for t in range(tokens):  # one token and one expert at a time
        row = torch.zeros(6, dtype=torch.float64)
        for place, expert in enumerate(chosen[t].tolist()):
            gate, value = (module.gate_up_proj[expert] @ x[t]).chunk(2)
            row = row + weights[t, place] * (module.down_proj[expert] @ (silu(gate) * value))
        rows.append(row)
    exact = torch.stack(rows)
    torch.testing.assert_close(out, exact, rtol=1e-12, atol=1e-12)
    for found, wanted in zip(gradients, torch.autograd.grad(exact, leaves, slopes), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("absent", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("compiled", [False, True])
def test_pairs_of_no_expert_here_add_nothing(absent: float, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a matrix of ones and zeros, forward and backward; compiled code unrolls the sums."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        values, slopes = torch.randn(7, 3, dtype=torch.float64, requires_grad=True), torch.randn(7, 3, dtype=torch.float64)
        chosen = torch.where(torch.rand(21) < absent, 4, torch.randint(0, 4, (21,)))
    order, places, ends = by_expert(chosen, 4)
    order = order[: int(ends[-1])]
    assert chosen[order].tolist() == sorted(chosen[chosen < 4].tolist())
    matrix = torch.zeros(len(order), 7, dtype=torch.float64)
    matrix[torch.arange(len(order)), order // 3] = 1
    rows = permute(values, order, places, 3)
    assert torch.equal(rows, matrix @ values)
    torch.testing.assert_close(added(rows.detach(), places, 3), matrix.T @ rows.detach())
    (gradient,) = torch.autograd.grad(sums(rows * 2, order, places, 3), values, slopes)
    torch.testing.assert_close(gradient, 2 * matrix.T @ (matrix @ slopes))


@pytest.mark.parametrize("layout", ["experts.Mixtral", "experts.OLMoE", "transposed with biases"])
def test_models_give_what_they_give_by_their_own_loop(layout: str) -> None:
    from transformers import AutoModelForCausalLM, GptOssConfig, MixtralConfig, OlmoeConfig

    sizes: dict[str, Any] = {"vocab_size": 16, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {
        "experts.Mixtral": MixtralConfig(**sizes, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2),
        "experts.OLMoE": OlmoeConfig(**sizes, num_experts=4, num_experts_per_tok=2),
        "transposed with biases": GptOssConfig(**sizes, num_key_value_heads=1, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    }[layout]
    register()
    ids = torch.arange(2, 14)[None]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config).double()
    logits: list[torch.Tensor] = []
    for way in ("eager", EXPERTS):
        model.set_experts_implementation(way)
        logits.append(model(input_ids=ids).logits.detach())
    torch.testing.assert_close(*logits, rtol=1e-6, atol=1e-6)  # gpt-oss computes its routing in float32


def groups() -> TrainBatch:
    """Two groups of three with a prompt of four and answers of different lengths."""
    rng, samples = np.random.default_rng(0), list[dict[str, Any]]()
    for task in range(2):
        prompt = rng.integers(2, 16, 4).tolist()
        for n in range(3):
            samples.append({"prompt": prompt, "answer": rng.integers(2, 16, 3 + n).tolist(), "task": task, "rollout": n, "reward": n})
    return train_batch(samples, mu=-2.0)


@pytest.mark.parametrize("attention", ["sdpa", "packed"])
def test_what_a_sample_gets_does_not_depend_on_its_row(make_mixture: Models, attention: Any) -> None:
    """Nothing is dropped for want of capacity: log-probs of rows of one sample, of packed rows, and of a prompt that a group shares."""
    model = CausalLM(make_mixture(), torch.float64, CPU, kernels=Kernels(attention=attention))
    batch, samples = groups(), np.arange(6)

    def logprobs(**layout: Any) -> np.ndarray[Any, Any]:
        found, micros = np.zeros(batch.num_tokens), plan_micro_batches(batch, batch.loss_mask, samples, budget=64, **layout)
        with torch.no_grad():
            for micro in micros:
                found[micro.target] = model.predict(micro, batch)[0].numpy()
        return found

    alone = logprobs(share_prefixes=False, several_per_row=False)
    assert (alone[batch.loss_mask] < 0).all()
    if attention == "packed":
        assert model.packs
        together = logprobs(row_length=64)
    else:
        micros = plan_micro_batches(batch, batch.loss_mask, samples, budget=64)
        assert model.free_masks and any((micro.branch == 0).any() for micro in micros)
        together = logprobs()
    np.testing.assert_allclose(together, alone, rtol=0, atol=1e-6)  # of the router's weights, which it computes in float32


def test_an_expert_without_a_token_has_a_gradient_of_zero_and_training_goes_on(make_mixture: Models) -> None:
    trainer = make(make_mixture(num_experts=64), DIRECT, numerics="bitwise", micro_tokens=64)
    results = [trainer.step(groups()) for _ in range(2)]
    assert all(one.finite and one.metrics["train/grad_norm"] > 0 for one in results) and results[0].digest != results[1].digest
