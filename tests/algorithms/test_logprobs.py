"""Log-probs by both forms: against log_softmax written out in float64, with gradients, chunking, truncation and memory."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from streamrl.algorithms.logit_bias import LogitBias
from streamrl.algorithms.logprobs import LinearHead, linear_logprobs, token_logprobs

M, H, V = 13, 5, 19
SHAPES = [1, 8 * M, 3 * V, 1 << 20]
"""Bounds: one token at a time, one block of eight columns, three tokens, everything at once."""


class Problem(NamedTuple):
    hidden: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    added: LogitBias


class Case(NamedTuple):
    scale: float = 1.0
    softcap: float = 0.0
    truncated: bool = False
    least: bool = False
    """min-p"""
    biased: bool = False


Form = Callable[..., tuple[Tensor, Tensor]]


@pytest.fixture
def problem() -> Problem:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    top_p = torch.where(torch.rand(M, generator=generator) < 0.5, 1.0, 0.7)
    top_k = torch.where(torch.rand(M, generator=generator) < 0.5, -1, 4)
    temperature = torch.rand(M, dtype=torch.float64, generator=generator) + 0.5
    matrices = normal(M, H), normal(V, H), normal(V)
    targets = torch.randint(0, V, (M,), generator=generator)
    min_p = torch.where(torch.rand(M, generator=generator) < 0.5, 0.0, 0.3)
    # Two biases and tokens without one; of the first the columns of several blocks, of the second the last column.
    bias = LogitBias(torch.arange(M) % 3 - 1, (torch.tensor([0, 3, 8, 17]), torch.tensor([V - 1])), (normal(4), normal(1) + 3))
    return Problem(*matrices, targets, temperature, top_p, top_k, min_p, bias)


def options(problem: Problem, case: Case) -> dict[str, Any]:
    asked = {"top_p_M": problem.top_p, "top_k_M": problem.top_k} if case.truncated else {}
    more = ({"min_p_M": problem.min_p} if case.least else {}) | ({"logit_bias": problem.added} if case.biased else {})
    return {"temperature_M": problem.temperature} | asked | more


def fused(problem: Problem, case: Case, **more: Any) -> tuple[Tensor, Tensor]:
    head = LinearHead(problem.weight, problem.bias, case.scale, case.softcap)
    logprobs, entropy = linear_logprobs(problem.hidden, problem.targets, head, **options(problem, case), **more)
    return logprobs, entropy


def checkpointed(problem: Problem, case: Case, **more: Any) -> tuple[Tensor, Tensor]:
    def head(states: Tensor) -> Tensor:
        return logits_of(states, problem, case)

    logprobs, entropy = token_logprobs(problem.hidden, problem.targets, head, vocab_size=V, **options(problem, case), **more)
    return logprobs, entropy


def logits_of(states: Tensor, problem: Problem, case: Case) -> Tensor:
    logits = (states @ problem.weight.T + problem.bias) * case.scale
    return case.softcap * torch.tanh(logits / case.softcap) if case.softcap else logits


def written_out(problem: Problem, case: Case) -> tuple[Tensor, Tensor]:
    """One token at a time, kept tokens found by sorting a Python list."""
    logprobs: list[Tensor] = []
    entropies: list[Tensor] = []
    for row, target in enumerate(problem.targets.tolist()):
        z = logits_of(problem.hidden[row], problem, case)
        if case.biased and (which := int(problem.added.of_M[row])) >= 0:
            added = dict(zip(problem.added.ids[which].tolist(), problem.added.values[which].tolist(), strict=True))
            z = z + torch.tensor([added.get(j, 0.0) for j in range(V)], dtype=torch.float64)
        z = z / problem.temperature[row]
        kept = list(range(V))
        if case.least:
            p = z.detach().softmax(-1)
            kept = sorted({*(p >= problem.min_p[row].double() * p.max()).nonzero()[:, 0].tolist(), target})
        if case.truncated:
            p = z.detach().softmax(-1).tolist()
            ranked = sorted(range(V), key=lambda j: (-p[j], j))
            top_k, top_p = int(problem.top_k[row]), float(problem.top_p[row])
            whole = kept
            kept = [
                j
                for r, j in enumerate(ranked)
                if j in whole and (top_k < 0 or r < top_k) and (top_p >= 1 or sum(p[i] for i in ranked[:r]) < top_p)
            ]
            kept = sorted({*kept, target})
        q = z[kept].log_softmax(-1)
        logprobs.append(q[kept.index(target)])
        entropies.append(-(q.exp() * q).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def leaves(problem: Problem, dtype: torch.dtype = torch.float64) -> Problem:
    hidden, weight, bias = (x.clone().to(dtype).requires_grad_() for x in problem[:3])
    return problem._replace(hidden=hidden, weight=weight, bias=bias)


def rounded(problem: Problem) -> Problem:
    """In float64 what a problem of another type holds."""
    hidden, weight, bias = (x.detach().double() for x in problem[:3])
    return problem._replace(hidden=hidden, weight=weight, bias=bias)


def grads(problem: Problem) -> list[Tensor]:
    found = [problem.hidden.grad, problem.weight.grad, problem.bias.grad]
    assert all(x is not None for x in found)
    return [x for x in found if x is not None]


CASES = [
    *(Case(), Case(scale=0.25), Case(softcap=1.5), Case(scale=3.0, softcap=2.0, truncated=True), Case(truncated=True)),
    *(Case(least=True), Case(biased=True), Case(scale=3.0, softcap=2.0, truncated=True, least=True, biased=True)),
]


def hold_to_log_softmax(problem: Problem, case: Case, form: Form, entropy_gradient: bool) -> None:
    """Compare log-probs, entropies and gradients of a form with those of log_softmax."""
    ours, plain = leaves(problem), leaves(problem)
    logprobs, entropy = form(ours, case, entropy_gradient=entropy_gradient)
    expected, expected_entropy = written_out(plain, case)
    assert torch.allclose(logprobs, expected, atol=1e-12)
    assert torch.allclose(entropy, expected_entropy, atol=1e-12)
    assert entropy.requires_grad == entropy_gradient
    slopes = torch.arange(M, dtype=torch.float64) - 3  # one of them is 0
    (logprobs @ slopes + (entropy @ slopes.flip(0) if entropy_gradient else 0)).backward()
    (expected @ slopes + (expected_entropy @ slopes.flip(0) if entropy_gradient else 0)).backward()
    for mine, reference in zip(grads(ours), grads(plain), strict=True):
        assert torch.allclose(mine, reference, atol=1e-12)


@pytest.mark.parametrize("form", [fused, checkpointed])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunk_elements", SHAPES)
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_equals_log_softmax_with_its_gradient(
    problem: Problem, form: Form, case: Case, chunk_elements: int, entropy_gradient: bool
) -> None:
    hold_to_log_softmax(problem, case, partial(form, chunk_elements=chunk_elements), entropy_gradient)


@pytest.mark.parametrize("chunk_elements", [8 * M, 1 << 20])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_narrow_types_are_summed_in_float32(problem: Problem, dtype: torch.dtype, close: float, chunk_elements: int) -> None:
    ours = leaves(problem, dtype)
    plain = leaves(rounded(ours))
    logprobs, entropy = fused(ours, Case(truncated=True), chunk_elements=chunk_elements, entropy_gradient=True)
    expected, expected_entropy = written_out(plain, Case(truncated=True))
    # Products of bfloat16 numbers are exact in float32: values agree as closely as float32's do.
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert torch.allclose(logprobs.double(), expected, atol=3e-6) and torch.allclose(entropy.double(), expected_entropy, atol=3e-6)
    (logprobs.sum() + entropy.sum()).backward()
    (expected.sum() + expected_entropy.sum()).backward()
    for mine, reference in zip(grads(ours), grads(plain), strict=True):
        assert mine.dtype == dtype
        assert torch.allclose(mine.double(), reference, rtol=close, atol=2e-6)


def test_many_tokens_of_one_weight_do_not_drown_in_bfloat16() -> None:
    """4,096 equal small parts: summed in bfloat16 one after the other they would stop growing at 256 of them."""
    tokens = 4096
    hidden = torch.ones(tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    head, targets, temperature = LinearHead(weight), torch.zeros(tokens, dtype=torch.int64), torch.ones(tokens)
    linear_logprobs(hidden, targets, head, temperature_M=temperature, chunk_elements=16)[0].sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [[tokens / 2], [-tokens / 2]]


def test_heads_are_given_what_fits_and_may_rule_tokens_out(problem: Problem) -> None:
    for elements, sizes in ((1, [1] * M), (3 * V, [3, 3, 3, 3, 1]), (M * V, [M])):
        ours, given = leaves(problem), list[int]()

        def head(states: Tensor, ours: Problem = ours, given: list[int] = given) -> Tensor:
            given.append(len(states))
            return logits_of(states, ours, Case())

        found, _ = token_logprobs(ours.hidden, ours.targets, head, vocab_size=V, temperature_M=ours.temperature, chunk_elements=elements)
        assert given == sizes
        found.sum().backward()
        assert len(given) == len(sizes) * (1 if len(sizes) == 1 else 2)
    out = torch.zeros(V, dtype=torch.float64)
    out[[3, 7]] = -torch.inf
    targets = torch.zeros(M, dtype=torch.int64)
    cut: dict[str, Any] = {"temperature_M": problem.temperature, "top_p_M": torch.full((M,), 0.9), "top_k_M": torch.full((M,), V - 2)}
    found = token_logprobs(problem.hidden, targets, lambda h: h @ problem.weight.T + out, vocab_size=V, **cut)
    assert all(values.isfinite().all() for values in found)


@pytest.mark.parametrize("chunk_elements", [8 * M, 1 << 20])
@pytest.mark.parametrize("truncated", [False, True])
def test_a_token_that_counts_for_nothing_reaches_nothing_whatever_it_holds(problem: Problem, chunk_elements: int, truncated: bool) -> None:
    case, others = Case(truncated=truncated), torch.arange(M) != 4
    broken = leaves(problem._replace(hidden=problem.hidden.masked_fill(~others[:, None], torch.nan)))
    logprobs, entropy = fused(broken, case, chunk_elements=chunk_elements, entropy_gradient=True)
    assert torch.equal(logprobs.isnan(), ~others)
    (logprobs[others].sum() + entropy[others].sum()).backward()
    plain = leaves(problem)
    expected, expected_entropy = written_out(plain, case)
    (expected[others].sum() + expected_entropy[others].sum()).backward()
    for mine, reference in zip(grads(broken), grads(plain), strict=True):
        assert torch.allclose(mine, reference, atol=1e-12)
    assert not grads(broken)[0][4].any()


@pytest.mark.parametrize("form", [fused, checkpointed])
@pytest.mark.parametrize("chunk_elements", SHAPES)
def test_the_same_call_gives_the_same_bits(problem: Problem, form: Form, chunk_elements: int) -> None:
    runs: list[list[Tensor]] = []
    for _ in range(2):
        ours = leaves(problem, torch.float32)._replace(temperature=problem.temperature.float())
        logprobs, entropy = form(ours, Case(truncated=True), chunk_elements=chunk_elements)
        logprobs.sum().backward()
        runs.append([logprobs, entropy, *grads(ours)])
    with torch.no_grad():
        ours = leaves(problem, torch.float32)._replace(temperature=problem.temperature.float())
        scored = form(ours, Case(truncated=True), chunk_elements=chunk_elements)
    assert all(torch.equal(one, other) for one, other in zip(runs[0], runs[1], strict=True))
    assert all(torch.equal(one, other) for one, other in zip(runs[0], scored, strict=False))


@pytest.mark.parametrize("form", [fused, checkpointed])
def test_no_tokens_have_no_gradient(problem: Problem, form: Form) -> None:
    none = leaves(problem._replace(**{name: getattr(problem, name)[:0] for name in ("hidden", "targets", "temperature", "top_p", "top_k")}))
    logprobs, entropy = form(none, Case(), chunk_elements=3 * V)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert not grads(none)[1].any()


class Largest(TorchDispatchMode):
    """Elements of the largest float tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.elements = max([self.elements, *self._sizes(result)])
        return result

    def _sizes(self, result: Any) -> Iterator[int]:
        return (leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point())


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("form", ["fused", "checkpointed", "whole"])
def test_never_holds_all_logits_forward_or_backward(form: str, truncated: bool) -> None:
    tokens, width, vocab, bound = 96, 4, 200, 2000
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    more: dict[str, Any] = {"temperature_M": torch.ones(tokens), "entropy_gradient": True}
    if truncated:
        more |= {"top_p_M": torch.full((tokens,), 0.9), "top_k_M": torch.full((tokens,), 50)}
    with Largest() as largest:
        if form == "checkpointed":
            found = token_logprobs(hidden, targets, lambda h: h @ weight.T, vocab_size=vocab, chunk_elements=bound, **more)
        else:
            found = linear_logprobs(hidden, targets, LinearHead(weight), chunk_elements=bound if form == "fused" else 1 << 20, **more)
        (found[0] + found[1]).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    if form == "whole":
        assert largest.elements == tokens * vocab  # what the other two are measured against is seen
    else:
        assert largest.elements <= bound
