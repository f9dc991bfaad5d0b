"""Mixtures of experts on a GPU: grouped products against float64, equal bits, one compilation, what a compiled step learns.

`scripts/gpu/experts.sh` runs them and shows what was measured.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn.functional import silu

from streamrl.core.batches import TrainBatch
from streamrl.trainers.torch.experts import grouped_experts
from tests.support import trainers
from tests.support.gpus import LONG, answered
from tests.support.measured import fresh_digests, say
from tests.support.steps import LEARNED, check_alike
from tests.support.trainers import DIRECT, Models

pytestmark = [pytest.mark.gpu, pytest.mark.process, pytest.mark.timeout(400)]


def answers_of(count: int, *, seed: int, longest: int = 200) -> TrainBatch:
    """Groups of 4 with prompts of 4 tokens."""
    rng = np.random.default_rng(seed)
    answers = [rng.integers(2, 1000, int(n)).tolist() for n in rng.integers(20, longest, count)]
    return answered([5, 6, 7, 8], answers, group=4, mu=-7.0, step=seed)


make = partial(trainers.make, loss=DIRECT, rate=1e-4, dtype="bfloat16", device="cuda")


@pytest.mark.parametrize("compiled", [False, True])
def test_grouped_products_are_those_of_float64(compiled: bool) -> None:
    tokens, experts, k, hidden, inner = 3000, 16, 4, 256, 96
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (scale * torch.randn(*shape, device="cuda", generator=generator)).bfloat16().requires_grad_()

    x, up, down = normal(tokens, hidden), normal(experts, 2 * inner, hidden, scale=0.06), normal(experts, hidden, inner, scale=0.1)
    # Expert 3 gets nothing, expert 0 something of every token.
    odds = torch.rand(tokens, experts, device="cuda", generator=generator)
    odds[:, 0], odds[:, 3] = 2.0, -1.0
    chosen = odds.topk(k).indices
    weights = torch.rand(tokens, k, device="cuda", generator=generator).bfloat16().requires_grad_()
    slopes = torch.randn(tokens, hidden, device="cuda", generator=generator).bfloat16()
    module = Experts(experts, up, down)
    run: Any = torch.compile(grouped_experts, dynamic=False) if compiled else grouped_experts
    found: list[list[torch.Tensor]] = []
    for _ in range(2):
        for leaf in (x, weights, up, down):
            leaf.grad = None
        out = run(module, x, chosen, weights)
        out.backward(slopes)
        found.append([out.detach(), *(leaf.grad for leaf in (x, weights, up, down) if leaf.grad is not None)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True)), "the same bits again"
    wide = [leaf.detach().double().requires_grad_() for leaf in (x, weights, up, down)]
    exact = torch.zeros(tokens, hidden, device="cuda", dtype=torch.float64)
    for expert in range(experts):
        token, place = torch.where(chosen == expert)
        gate, value = (wide[0][token] @ wide[2][expert].T).chunk(2, -1)
        exact = exact.index_add(0, token, (silu(gate) * value) @ wide[3][expert].T * wide[1][token, place, None])
    exact.backward(slopes.double())
    for name, ours, theirs in zip(
        ("output", "tokens", "weights", "gate and up", "down"), found[0], [exact, *(w.grad for w in wide)], strict=True
    ):
        assert theirs is not None
        error = float((ours.double() - theirs).norm() / theirs.norm())
        say(f"grouped products, compiled={compiled}: {name}: relative error {error:.1e}")
        assert error < 1e-2, name


class Experts(torch.nn.Module):
    """What transformers' experts have that is looked at."""

    is_transposed, has_bias, has_gate = False, False, True

    def __init__(self, num_experts: int, gate_up_proj: torch.Tensor, down_proj: torch.Tensor) -> None:
        super().__init__()
        self.num_experts, self.gate_up_proj, self.down_proj = num_experts, gate_up_proj, down_proj

    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        gate, value = both.chunk(2, -1)
        return silu(gate) * value


@pytest.mark.parametrize("compile_", ["off", "on"])
def test_fresh_processes_give_the_same_digest(make_mixture: Models, tmp_path: Path, compile_: str) -> None:
    digests = fresh_digests(make_mixture("bfloat16", **LONG), compile_, ("one", "two"), tmp_path)
    assert len(set(digests)) == 1


def test_a_mixture_is_compiled_once_and_learns_what_a_plain_one_does(make_mixture: Models) -> None:
    directory = make_mixture("bfloat16", **LONG)
    torch.compiler.reset()
    fast = make(directory, micro_tokens=1024)
    graphs = counters["stats"]["unique_graphs"]
    plain = make(directory, micro_tokens=1024, compile="off", attention="sdpa")
    for seed in range(3):
        batch = answers_of(32, seed=seed)
        result, other = fast.step(batch), plain.step(batch)
        assert result.choices is not None and result.choices.compiled, result.notices
        check_alike([result], [other], *LEARNED, rel=5e-2, abs=5e-3)
    assert counters["stats"]["unique_graphs"] == graphs > 0
