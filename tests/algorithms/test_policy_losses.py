"""Policy losses: golden numbers, closed forms, and gradients of a second implementation, at clip boundaries too."""

import itertools
import math
import random

import pytest
import torch

from streamrl.algorithms.policy_losses import clip_cov, gmpo, gspo, gspo_token, kl_cov, opsm_keep, ppo_clip, sapo, sft, value_loss
from streamrl.algorithms.sequences import Packed, Padded
from tests.algorithms import reference_policy_losses as reference
from tests.algorithms.policy_cases import Layout, one_token, packed, padded, random_sequences, reference_result, weights_for
from tests.algorithms.policy_pairs import PAIRS, Ours, Theirs
from tests.support.float64 import gradient, t


def check(ours: Ours, theirs: Theirs, sequences: list[reference.Sequence], layout: Layout, case: object) -> None:
    weights = weights_for(sequences)
    values, gradient = reference_result(sequences, theirs(sequences), weights)
    if layout.padded:
        zeros = {name: getattr(layout, name).nan_to_num(0.0) for name in ("old", "mu", "ref", "advantages")}
        logprobs = layout.logprobs.detach().nan_to_num(0.0).requires_grad_()
        layout = Layout(logprobs=logprobs, sequences=layout.sequences, padded=True, **zeros)
    loss, metrics = ours(layout)
    assert layout.flat(loss) == pytest.approx(values, rel=1e-11, abs=1e-12), case
    assert layout.gradient(loss, weights) == pytest.approx(gradient, rel=1e-11, abs=1e-12), case
    assert all(m.shape == loss.shape and not m.requires_grad for m in metrics.values())


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_value_and_gradient_are_those_of_the_second_implementation(name: str) -> None:
    for seed, layout in itertools.product(range(12), (packed, padded)):
        sequences = random_sequences(seed, spread=0.02 if name == "gspo_narrow" else 0.6)
        check(*PAIRS[name], sequences, layout(sequences), case=(seed, layout.__name__))


EDGES = {
    "ppo": (0.8, 1.28),
    "ppo_narrow": (0.95, 1.1),
    "ppo_dual": (0.8, 1.28, 1.3),
    "gspo": (0.8, 1.28),
    "gspo_narrow": (1 - 3e-4, 1 + 4e-4),
    "gspo_token": (0.8, 1.28),
    "gspo_token_narrow": (1 - 3e-4, 1 + 4e-4),
    "gmpo": (math.exp(-0.4), math.exp(0.4)),
    "gmpo_narrow": (math.exp(-0.1), math.exp(0.05)),
    "cispo": (1.5,),
    "cispo_both": (0.8, 1.28),
    "sapo": (),
    "sapo_steep": (),
    "aipo": (1.4,),
    "vespo": (),
    "vespo_flat": (),
    "m2po": (math.exp(0.4), math.exp(-0.4)),
    "clip_cov": (0.8, 1.28),
    "kl_cov": (),
    "dppo": (1 - 0.1 * math.e, 1 + 0.1 * math.e),
    "dppo_plain": (1 - 0.02 * math.e, 1 + 0.02 * math.e),
    "dppo_two": (1 - 0.03 * math.e, 1 + 0.03 * math.e, 1 + 0.1 * math.e),
    "dppo_symmetric": (1 - 0.03 * math.e, 1 + 0.03 * math.e, 1 + 0.1 * math.e),
    "dppo_kl": (),  # `test_sampler_losses` has its bounds
    "dppo_kl_symmetric": (),
}


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_on_both_sides_of_every_bound_and_at_ratio_one(name: str) -> None:
    sides = (-1e-7, 1e-7, -1e-2, 1e-2)
    ratios = [1.0, *(edge + offset for edge in (1.0, *EDGES[name]) for offset in sides)]
    for case in itertools.product(ratios, (1.7, -1.7, 0.0)):
        sequences = one_token(*case)
        check(*PAIRS[name], sequences, packed(sequences), case)


@pytest.mark.parametrize("name", sorted(PAIRS))
def test_what_holds_of_every_loss(name: str) -> None:
    logprobs = t(-1.0, -2.0, -0.5).requires_grad_()
    same = logprobs.detach().clone()
    advantages = t(2.0, -1.0, 0.0)
    layout = Layout(logprobs, same, same, same, advantages, Packed(torch.tensor([0, 1, 2]), 3), padded=False)
    loss, metrics = PAIRS[name][0](layout)
    assert gradient(loss, logprobs).tolist() == pytest.approx([-2.0, 1.0, 0.0], abs=1e-15)
    assert metrics["train/ois"].tolist() == [1.0, 1.0, 1.0]
    assert metrics["train/ppo_kl"].tolist() == [0.0, 0.0, 0.0]
    assert metrics.get("train/pg_clipfrac", t(0)).sum() == 0
    layout = packed(random_sequences(3))
    layout.old, layout.mu = layout.old.clone().requires_grad_(), layout.mu.clone().requires_grad_()
    PAIRS[name][0](layout)[0].sum().backward()
    assert layout.old.grad is None
    assert layout.mu.grad is None
    assert layout.logprobs.grad is not None
    for dtype in (torch.float32, torch.float64):
        logprobs = torch.tensor([-500.0, -1e-9], dtype=dtype, requires_grad=True)
        anchor = torch.tensor([-1e-9, -500.0], dtype=dtype)
        layout = Layout(logprobs, anchor, anchor, anchor, torch.tensor([1.0, -1.0], dtype=dtype), Packed(torch.arange(2), 2), padded=False)
        loss, metrics = PAIRS[name][0](layout)
        loss.sum().backward()
        assert logprobs.grad is not None
        assert loss.dtype == dtype and loss.isfinite().all() and logprobs.grad.isfinite().all()
        assert all(m.dtype == dtype and m.isfinite().all() for m in metrics.values())
        assert metrics["train/ois"].tolist() == pytest.approx([math.exp(-20), math.exp(20)], rel=1e-5)
    empty = t()
    layout = Layout(empty.clone().requires_grad_(), empty, empty, empty, empty, Packed(torch.zeros(0, dtype=torch.int64), 0), padded=False)
    loss, metrics = PAIRS[name][0](layout)
    assert loss.shape == (0,)
    assert set(metrics) == set(PAIRS[name][0](packed(random_sequences(0)))[1])


def test_dual_clip_by_hand() -> None:
    logprobs = t(1.5, 0.5, 2, 0.9).log().requires_grad_()
    loss, metrics = ppo_clip(logprobs, t(0, 0, 0, 0), t(1, -1, -1, 1), clip_low=0.2, clip_high=0.28, dual_clip=1.5)
    assert loss.tolist() == pytest.approx([-1.28, 0.8, 1.5, -0.9])
    assert metrics["train/pg_dual_clipfrac"].tolist() == [0, 0, 1, 0]
    assert metrics["train/pg_clipfrac"].tolist() == [1, 1, 0, 0]
    assert gradient(loss, logprobs).tolist() == pytest.approx([0, 0, 0, -0.9])
    loss, metrics = ppo_clip(t(math.log(9.0), 0.0), t(0, 0), t(1, 1e-6), clip_low=0.2, clip_high=20.0, dual_clip=1.5)
    assert loss.tolist() == pytest.approx([-9.0, -1e-6])
    assert metrics["train/pg_dual_clipfrac"].tolist() == [0, 0]
    logprobs = t(-0.7).requires_grad_()
    loss, metrics = ppo_clip(logprobs, t(-0.7), t(-2.0), clip_low=0.2, clip_high=0.28, dual_clip=1.0)
    assert gradient(loss, logprobs).tolist() == [2.0]
    assert metrics["train/pg_dual_clipfrac"].tolist() == [0]
    loss, metrics = ppo_clip(t(1.0), t(0), t(-1e-6), clip_low=0.2, clip_high=0.28, dual_clip=1.5)
    assert loss.tolist() == pytest.approx([1.5e-6])
    assert metrics["train/pg_dual_clipfrac"].tolist() == [1]


def test_sapo_by_hand() -> None:
    for tau_positive, tau_negative in ((1.0, 1.05), (0.3, 7.0)):
        logprobs = t(-1.0, -1.0).requires_grad_()
        loss, metrics = sapo(logprobs, logprobs.detach(), t(1.5, -1.5), tau_positive=tau_positive, tau_negative=tau_negative)
        assert loss.tolist() == pytest.approx([-2 * 1.5 / tau_positive, 2 * 1.5 / tau_negative])
        assert gradient(loss, logprobs).tolist() == pytest.approx([-1.5, 1.5], abs=1e-15)
        assert metrics["train/sapo_gate"].tolist() == [1.0, 1.0]
    ratios = t(0.25, 0.5, 1.0, 1.5, 2.5)
    gates = {}
    for sign in (1.0, -1.0):
        logprobs = ratios.log().requires_grad_()
        loss, metrics = sapo(logprobs, torch.zeros_like(ratios), sign * torch.ones_like(ratios), tau_positive=1.0, tau_negative=3.0)
        gate = metrics["train/sapo_gate"]
        assert gradient(loss, logprobs).tolist() == pytest.approx((-sign * gate * ratios).tolist())
        tau = 1.0 if sign > 0 else 3.0
        assert gate.tolist() == pytest.approx([1 / math.cosh(tau * (r - 1) / 2) ** 2 for r in ratios.tolist()])
        gates[sign] = gate
    assert (gates[-1.0] <= gates[1.0]).all()
    _, metrics = sapo(t(-0.5, -0.5), t(-1.0, -0.2), t(0.0, 1e-6), tau_positive=1.0, tau_negative=3.0)
    assert metrics["train/ppo_kl"].tolist() == pytest.approx([-0.5, 0.3])
    assert metrics["train/ois"].tolist() == pytest.approx([math.exp(0.5), math.exp(-0.3)])
    assert metrics["train/sapo_gate"][0].item() == pytest.approx(1 / math.cosh(3 * (math.exp(0.5) - 1) / 2) ** 2)
    assert metrics["train/sapo_gate"][1].item() == pytest.approx(1 / math.cosh((math.exp(-0.3) - 1) / 2) ** 2)


def test_gspo_token_is_gspo_where_the_advantages_of_a_sequence_are_equal() -> None:
    """Their values always, their gradients under a mean over each sequence's tokens."""
    for seed in range(5):
        sequences = random_sequences(seed)
        for layout in (packed(sequences), padded(sequences)):
            weights = [1.0 / sum(token.trained for token in one) for one in sequences for token in one if token.trained]
            found = []
            for loss in (gspo, gspo_token):
                values, metrics = loss(layout.logprobs, layout.old, layout.advantages, layout.sequences, clip_low=0.2, clip_high=0.28)
                found.append((layout.flat(values), layout.flat(metrics["train/pg_clipfrac"]), layout.gradient(values, weights)))
            for own, other in zip(*found, strict=True):
                assert own == pytest.approx(other, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("advantages", [(0.0, 1.0, 0.0, -1.0), (0.0, 0.0, 0.0, 0.0)])
def test_gmpo_clips_nothing_without_an_advantage_nor_at_a_bound(advantages: tuple[float, ...]) -> None:
    logprobs = t(2.0, 0.5, -2.0, -0.5).requires_grad_()
    pairs = Packed(torch.tensor([0, 0, 1, 1]), 2)
    loss, metrics = gmpo(logprobs, t(0, 0, 0, 0), t(*advantages), pairs, log_low=0.5, log_high=0.5)
    assert metrics["train/pg_clipfrac"].tolist() == [0, 0, 0, 0]
    assert loss.tolist() == pytest.approx([0.0, -math.exp(1.25) * advantages[1], 0.0, -math.exp(-1.25) * advantages[3]])
    loss.sum().backward()
    assert logprobs.grad is not None
    half = [loss[place].item() / 2 for place in (1, 1, 3, 3)]
    assert logprobs.grad.tolist() == pytest.approx(half), "of each pair one token has an advantage, and both move its ratio"


def test_losses_of_sequences_read_nothing_outside_the_mask() -> None:
    nan = math.nan
    for one in (gspo, gspo_token, gmpo):
        sequences = Padded(torch.tensor([[True, False, True]]))
        logprobs = torch.tensor([[0.1, nan, 0.2]], dtype=torch.float64, requires_grad=True)
        old, advantages = torch.tensor([[0.0, nan, 0.0]], dtype=torch.float64), torch.tensor([[1.0, nan, -1.0]], dtype=torch.float64)
        bounds = {"log_low": 0.5, "log_high": 0.5} if one is gmpo else {"clip_low": 0.5, "clip_high": 0.5}
        loss, metrics = one(logprobs, old, advantages, sequences, **bounds)
        loss.sum().backward()
        assert loss.tolist()[0] == pytest.approx([-math.exp(0.15), 0.0, math.exp(0.15)])
        assert logprobs.grad is not None and logprobs.grad[0, 1] == 0 and logprobs.grad.isfinite().all()
        assert all(values.isfinite().all() for values in metrics.values())
        if one is gmpo:
            assert metrics["train/ppo_kl"].tolist()[0] == pytest.approx([-0.1, 0.0, -0.2])


def test_gmpo_and_losses_by_covariance_by_hand() -> None:
    """Of four tokens one is e^2 as probable as before: it counts as e^0.4, and the others keep their gradient."""
    logprobs = t(2.0, 0.0, 0.0, 0.0).requires_grad_()
    whole = Packed(torch.zeros(4, dtype=torch.int64), 1)
    loss, metrics = gmpo(logprobs, t(0, 0, 0, 0), t(1, 1, 1, 1), whole, log_low=0.4, log_high=0.4)
    assert loss.tolist() == pytest.approx([-math.exp(0.1)] * 4)
    assert metrics["train/pg_clipfrac"].tolist() == [1, 0, 0, 0]
    loss.mean().backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == pytest.approx([0.0] + [-math.exp(0.1) / 4] * 3)
    given, chosen = (t(-1, -2), t(-1, -2), t(1, 1)), torch.tensor([True, False])
    for _, metrics in (clip_cov(*given, chosen, clip_low=0.2, clip_high=0.2), kl_cov(*given, chosen, coef=1.0)):
        assert metrics["train/cov_fraction"].tolist() == [1, 0]


def test_opsm_masks_only_bad_tokens_of_samples_that_the_policy_left() -> None:
    # Means of log mu - log pi: 0.2, 0.2, -0.2, 0.05.
    old = t(0.1, 0.3, 0.1, 0.3, -0.2, 0.05)
    sequences = Packed(torch.tensor([0, 0, 1, 1, 2, 3]), 4)
    keep, metrics = opsm_keep(t(0, 0, 0, 0, 0, 0), old, t(-1, -1, 1, 1, -1, -1), sequences, delta=0.1)
    assert keep.tolist() == [0, 0, 1, 1, 1, 1]
    assert metrics["train/opsm_clipfrac"].tolist() == [1, 1, 0, 0, 0, 0]
    old, advantages = t(0.25, 0.25, 0.25), t(-1, -1, -1)
    sequences = Packed(torch.tensor([0, 0, 0]), 1)
    assert opsm_keep(t(0, 0, 0), old, advantages, sequences, delta=0.25)[0].tolist() == [1, 1, 1]
    assert opsm_keep(t(0, 0, 0), old, advantages, sequences, delta=0.2499)[0].tolist() == [0, 0, 0]
    keep, _ = opsm_keep(t(0, 0, 0), t(1, 1, 1), t(-1, 0, 1), Packed(torch.tensor([0, 0, 0]), 1), delta=1e-4)
    assert keep.tolist() == [0, 1, 1]


def test_opsm_equals_the_second_implementation() -> None:
    seen = set()
    for seed in range(8):
        sequences = random_sequences(seed)
        kept = reference.opsm(sequences, 0.05)
        want = [float(k) for s, row in zip(sequences, kept, strict=True) for x, k in zip(s, row, strict=True) if x.trained]
        seen |= set(want)
        for x in (packed(sequences), padded(sequences)):
            keep, metrics = opsm_keep(x.logprobs, x.mu, x.advantages, x.sequences, delta=0.05)
            assert x.flat(keep) == want, seed
            assert x.flat(metrics["train/opsm_clipfrac"]) == [1 - w for w in want], seed
            assert not keep.requires_grad
    assert seen == {0.0, 1.0}, "some are masked and some are not in these cases"


def test_the_value_loss_and_its_gradient_around_both_bounds() -> None:
    """Where V has not gone beyond the clip both terms are one, and either's gradient is right."""
    old = 0.3
    for case in itertools.product((0.0, 0.2, 1.0), (-1e-6, 1e-6, -0.3, 0.3, 0.0), (-1.0, 0.0, 1.0), (-2.0, 0.05, 0.4, 3.0)):
        clip, offset, side, target = case
        leaf = torch.tensor(old + side * (clip + offset), dtype=torch.float64, requires_grad=True)
        want = reference.value(leaf, old, target, clip)
        values = leaf.detach()[None].requires_grad_()
        loss, metrics = value_loss(values, t(old), t(target), clip=clip)
        assert loss.tolist() == pytest.approx([want.item()], rel=1e-12), case
        assert gradient(loss, values).tolist() == pytest.approx([gradient(want, leaf).item()], rel=1e-9, abs=1e-12), case
        assert metrics["train/value_clipfrac"].tolist() == [want.item() > (leaf.item() - target) ** 2], case
        assert not metrics["train/value_clipfrac"].requires_grad
    generator = random.Random(0)
    rows = [tuple(generator.gauss(0, 1) for _ in range(3)) for _ in range(250)]
    leaves = [torch.tensor(new, dtype=torch.float64, requires_grad=True) for new, _, _ in rows]
    wants = [reference.value(leaf, before, target, 0.2) for leaf, (_, before, target) in zip(leaves, rows, strict=True)]
    columns = torch.tensor(rows, dtype=torch.float64)
    values, old_values = columns[:, 0].clone().requires_grad_(), columns[:, 1].clone().requires_grad_()
    loss, _ = value_loss(values, old_values, columns[:, 2], clip=0.2)
    loss.sum().backward()
    assert loss.tolist() == pytest.approx([want.item() for want in wants])
    slopes = [gradient(want, leaf).item() for want, leaf in zip(wants, leaves, strict=True)]
    assert values.grad is not None and values.grad.tolist() == pytest.approx(slopes)
    assert old_values.grad is None
    values = t(1.5).requires_grad_()  # both errors are 0.5: the gradient is that of the value itself
    assert gradient(value_loss(values, t(0.0), t(1.0), clip=0.5)[0], values).tolist() == [1.0]
    # old + (values - old) has other last bits than values in float32: nothing is clipped at 1e3, whatever they are.
    values, old_values, returns = torch.randn(3, 4096, generator=torch.Generator().manual_seed(0))
    assert (old_values + (values - old_values) != values).any()
    loss, metrics = value_loss(values, old_values, returns, clip=1e3)
    assert not metrics["train/value_clipfrac"].any() and torch.equal(loss, (values - returns).square())


def test_beyond_huber_the_error_counts_linearly_and_sft_is_the_negative_log_likelihood() -> None:
    """With d = 1: squares of 0.5 and 1, then 2 * 3 - 1 = 5 in place of 9; the slope stays at 2."""
    values = t(0.5, 1.0, 3.0, -3.0).requires_grad_()
    loss, _ = value_loss(values, torch.zeros(4), torch.zeros(4, dtype=torch.float64), clip=0.0, huber=1.0)
    assert loss.tolist() == [0.25, 1.0, 5.0, 5.0]
    assert gradient(loss, values).tolist() == [1.0, 2.0, 2.0, -2.0]
    theirs = torch.nn.functional.huber_loss(values.detach(), torch.zeros(4, dtype=torch.float64), reduction="none", delta=1.0)
    assert loss.tolist() == pytest.approx((2 * theirs).tolist())
    clipped, metrics = value_loss(t(3.0), t(0.0), t(4.0), clip=0.5, huber=1.0)  # max(|3 - 4|, |0.5 - 4|), the second linear
    assert (clipped.item(), metrics["train/value_clipfrac"].item()) == (6.0, 1.0)
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    loss, metrics = sft(logprobs)
    assert loss.tolist() == [1, 2]
    assert metrics == {}
    assert gradient(loss, logprobs).tolist() == [-1, -1]
