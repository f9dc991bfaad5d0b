"""The dispatch from the configuration to a policy loss."""

import itertools
import math
from collections.abc import Callable

import msgspec
import pytest
import torch

from streamrl.algorithms.policy import POLICY_LOSSES, PolicyTokens, policy_loss, usable_tokens
from streamrl.algorithms.sequences import Packed
from streamrl.config import registry
from streamrl.config.loss import LossConfig, policy_name
from streamrl.errors import ConfigError, TrainingError
from tests.algorithms import reference_policy_losses as reference
from tests.algorithms.policy_cases import Layout, packed, padded, random_sequences, reference_result, weights_for
from tests.support.errors import raises

BASE = LossConfig(
    clip_low=0.15, clip_high=0.35, dual_clip=1.4, sapo_tau_positive=0.8, sapo_tau_negative=2.0, aipo_cap=1.3, dppo_bound=0.07, dppo_kl=0.02
)
REFERENCES: dict[str, Callable[[list[reference.Sequence]], reference.PerToken]] = {
    "ppo": lambda s: reference.ppo(s, 0.15, 0.35, 1.4),
    "gspo": lambda s: reference.gspo(s, 0.15, 0.35),
    "cispo": lambda s: reference.cispo(s, 0.15, 0.35),
    "sapo": lambda s: reference.sapo(s, 0.8, 2.0),
    "aipo": lambda s: reference.aipo(s, 1.3),
    "dppo": lambda s: reference.dppo(s, 0.07, 0.02),
}
POLICIES = sorted(REFERENCES)


def tokens_of(layout: Layout, *, with_reference: bool = False) -> PolicyTokens:
    return PolicyTokens(
        logprobs=layout.logprobs,
        proximal=layout.old,
        sampler=layout.mu,
        advantages=layout.advantages,
        entropy=None,
        reference=layout.ref if with_reference else None,
        staleness=torch.zeros(layout.logprobs.shape, dtype=torch.int64),
        sequences=layout.sequences,
    )


def config(policy: str, **changes: float) -> LossConfig:
    return msgspec.structs.replace(BASE, policy=policy, **changes)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_in_both_layouts_with_nan_outside_the_mask(policy: str) -> None:
    for case in itertools.product((packed, padded), (0.0, 0.05), range(4)):
        layout, opsm, seed = case
        sequences = random_sequences(seed)
        losses = REFERENCES[policy](sequences)
        if opsm:
            kept = reference.opsm(sequences, opsm)
            losses = [[None if v is None else v * k for v, k in zip(*rows, strict=True)] for rows in zip(losses, kept, strict=True)]
        weights = weights_for(sequences)
        values, gradient = reference_result(sequences, losses, weights)
        x = layout(sequences)
        loss, metrics = policy_loss(tokens_of(x), config(policy, opsm_delta=opsm))
        assert x.flat(loss) == pytest.approx(values, rel=1e-11, abs=1e-12), case
        assert x.gradient(loss, weights) == pytest.approx(gradient, rel=1e-11, abs=1e-12), case
        assert not loss[~x.sequences.mask].any() and loss.isfinite().all(), case
        assert all(m.isfinite().all() and m.shape == loss.shape and not m.requires_grad for m in metrics.values()), case
        assert ("train/opsm_clipfrac" in metrics) == bool(opsm)
        assert {"train/ppo_kl", "train/ois"} < set(metrics)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("field", ["logprobs", "proximal", "sampler", "advantages", "reference"])
def test_a_token_that_is_not_finite_is_as_if_it_were_not_there(policy: str, field: str) -> None:
    lost = 2
    for bad in (math.nan, math.inf, -math.inf):
        sequences = random_sequences(7)
        flat = [x for s in sequences for x in s if x.trained]
        x = packed(sequences)
        tokens = tokens_of(x, with_reference=True)
        spoiled = getattr(tokens, field).detach().clone()
        spoiled[lost] = bad
        if field == "logprobs":
            x.logprobs = spoiled = spoiled.requires_grad_()
        tokens = tokens._replace(**{field: spoiled})
        assert usable_tokens(tokens).tolist() == [i != lost for i in range(len(flat))]
        loss, metrics = policy_loss(tokens, config(policy, opsm_delta=0.05))
        weights = weights_for(sequences)
        gradient = x.gradient(loss, weights)
        flat[lost].trained = False
        y = packed(sequences)
        want, _ = policy_loss(tokens_of(y, with_reference=True), config(policy, opsm_delta=0.05))
        others = [i for i in range(len(flat)) if i != lost]
        assert loss[lost].item() == 0 and gradient[lost] == 0, bad
        assert loss[others].tolist() == pytest.approx(want.tolist()), bad
        assert [gradient[i] for i in others] == pytest.approx(y.gradient(want, [weights[i] for i in others])), bad
        assert all(m.isfinite().all() for m in metrics.values()), bad


def test_every_loss_is_here_and_usable_tokens_are_trained_ones() -> None:
    assert set(POLICY_LOSSES) == set(registry.POLICY_LOSSES)
    x = padded(random_sequences(1))
    assert torch.equal(usable_tokens(tokens_of(x)), x.sequences.mask)


def test_metric_names_depend_on_the_configuration_alone() -> None:
    empty = torch.zeros(0, dtype=torch.float64)
    nothing = PolicyTokens(empty.clone().requires_grad_(), empty, empty, empty, empty.long(), Packed(torch.zeros(0, dtype=torch.int64), 0))
    some = tokens_of(packed(random_sequences(0)))
    for policy in POLICIES:
        for changes in ({}, {"opsm_delta": 0.1}, {"dual_clip": 0.0}):
            assert set(policy_loss(nothing, config(policy, **changes))[1]) == set(policy_loss(some, config(policy, **changes))[1])


NAMES = [
    *(("grpo", "", "ppo"), ("reinforce_plus_plus", "", "ppo"), ("ppo", "", "ppo"), ("my.py:advantage", "", "ppo")),
    *(("grpo", "gspo", "gspo"), ("grpo", "my.py:loss", "my.py:loss")),
]


def test_an_empty_policy_is_ppo_and_a_users_function_is_not_for_the_dispatch() -> None:
    for advantage, policy, name in NAMES:
        assert policy_name(LossConfig(advantage=advantage, policy=policy)) == name
    with raises(ConfigError, key="loss.policy"):
        policy_loss(tokens_of(packed(random_sequences(0))), LossConfig(policy="my.py:loss"))


def test_m2po_goes_by_what_was_chosen_and_says_so_where_nothing_was() -> None:
    layout = packed(random_sequences(0))
    tokens = tokens_of(layout)
    with raises(TrainingError, policy="m2po"):
        policy_loss(tokens, config("m2po"))
    chosen = torch.arange(len(layout.mu)) % 3 == 0
    loss, metrics = policy_loss(tokens._replace(chosen=chosen), config("m2po"))
    want = -(layout.logprobs - layout.mu).exp() * layout.advantages * ~chosen
    assert loss.tolist() == pytest.approx(want.tolist())
    assert metrics["train/pg_clipfrac"].tolist() == chosen.double().tolist()
