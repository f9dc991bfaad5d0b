"""From the section `loss` to advantages of tokens: which estimator runs, in which order, over which tokens."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import streamrl.algorithms
from streamrl.algorithms.advantages import whiten
from streamrl.algorithms.estimators import ESTIMATORS, TokenArrays, needed_scores, token_advantages
from streamrl.algorithms.returns import gae, vtrace
from streamrl.config.loss import LossConfig
from streamrl.config.registry import Role
from streamrl.core.batches import TrainBatch
from streamrl.errors import ConfigError, TrainingError
from tests.support.errors import raises

MakeBatch = Callable[..., TrainBatch]
MASK = [False, True, False, True, False, True, True, False, True]
"""Of the batch below."""


def config(**values: Any) -> LossConfig:
    return msgspec.convert(values, LossConfig)


@pytest.fixture
def batch(make_batch: MakeBatch) -> TrainBatch:
    """Two rollouts of one task, the second of two samples; the first with a tool's token between its two trained ones."""
    return make_batch(
        [
            {"prompt": [1], "answer": [2, 3, 4], "mask": [True, False, True], "mu": [-2.0] * 3, "reward": 1.0, "task": 5, "rollout": 0},
            {"prompt": [1], "answer": [2, 3], "mu": [-2.0] * 2, "reward": 0.0, "task": 5, "rollout": 1},
            {"prompt": [1], "answer": [2], "mu": [-2.0], "reward": 0.0, "task": 5, "rollout": 1},
        ]
    )


def spread(first: float, second: float) -> Any:
    """Approximately these advantages for the tokens of the two rollouts."""
    return pytest.approx([0, first, 0, first, 0, second, second, 0, second], abs=1e-5)


def with_gaps(numbers: list[float]) -> np.ndarray:
    """Numbers for the trained tokens; NaN elsewhere, for nothing there may be read."""
    found = np.full(len(MASK), np.nan)
    found[MASK] = numbers
    return found


ROOT = 0.5**0.5


@pytest.mark.parametrize(
    ("settings", "first", "second"),
    [
        ({"advantage": "grpo"}, ROOT, -ROOT),
        ({"advantage": "rloo"}, 1.0, -1.0),
        ({"advantage": "maxrl"}, 1.0, -1.0),
        ({"advantage": "grpo", "normalize_rewards": False}, 1.0, 0.0),
    ],
)
def test_group_estimators_give_each_trained_token_its_samples_advantage(
    batch: TrainBatch, settings: dict[str, Any], first: float, second: float
) -> None:
    found = token_advantages(batch, config(**settings))
    assert found.advantages == spread(first, second)
    assert found.returns is None and found.finite.all()
    assert found.metrics["rollout/raw_reward"] == 0.5
    assert found.metrics["rollout/advantages"] == pytest.approx((first + second) / 2, abs=1e-5)
    spread_over = {
        "advantages_abs": (abs(first) + abs(second)) / 2,
        "advantages_min": min(first, second),
        "advantages_max": max(first, second),
    }
    assert {name: found.metrics[f"rollout/{name}"] for name in spread_over} == pytest.approx(spread_over, abs=1e-5)
    assert found.metrics["rollout/advantages_std"] == pytest.approx(np.std([first] * 2 + [second] * 3), abs=1e-5)


def test_reinforce_plus_plus_takes_the_reward_at_the_last_token_and_whitens(batch: TrainBatch) -> None:
    loss = config(advantage="reinforce_plus_plus", gamma=0.9, kl={"reward_coef": 0.1, "estimator": "k1"})
    logprobs, reference = with_gaps([0.1, 0.4, 0.2, 0.2, 0.5]), with_gaps([0] * 5)
    found = token_advantages(batch, loss, logprobs=logprobs, reference=reference)
    # One token of a tool between the two steps: two tokens of time.
    last = 1 - 0.04
    returns = np.array([-0.01 + 0.81 * last, last, -0.02 - 0.9 * 0.02, -0.02, -0.05])
    assert found.returns is not None
    assert found.returns[MASK] == pytest.approx(returns)
    assert found.advantages[MASK] == pytest.approx((returns - returns.mean()) / np.sqrt(returns.var(ddof=1) + 1e-8))
    assert not found.advantages[~np.array(MASK)].any() and not found.returns[~np.array(MASK)].any()
    assert found.metrics["rollout/kl"] == pytest.approx((0.25 + 0.3) / 2)
    assert found.metrics["rollout/returns"] == pytest.approx((returns[:2].mean() + returns[2:].mean()) / 2)
    assert found.metrics["rollout/advantages"] == pytest.approx((found.advantages[[1, 3]].mean() + found.advantages[[5, 6, 8]].mean()) / 2)


def test_reinforce_plus_plus_baseline_is_the_centred_reward_less_each_tokens_kl(batch: TrainBatch) -> None:
    """Before whitening the reference's golden numbers: .49, .48, ... for a centred reward of .5."""
    loss = config(advantage="reinforce_plus_plus_baseline", kl={"reward_coef": 0.1})
    found = token_advantages(batch, loss, logprobs=with_gaps([0.1, 0.2, 0.3, 0.4, 0.5]), reference=with_gaps([0] * 5))
    before = with_gaps([0.49, 0.48, -0.53, -0.54, -0.55])
    assert found.advantages == pytest.approx(whiten(before, np.array(MASK)), abs=1e-12)
    assert found.returns is None
    loss = config(advantage="reinforce_plus_plus_baseline", normalize_rewards=False)
    assert token_advantages(batch, loss).advantages == pytest.approx(whiten(with_gaps([1, 1, 0, 0, 0]), np.array(MASK)))


def test_remax_gives_each_token_what_is_to_come_less_the_baseline(batch: TrainBatch) -> None:
    """R - R' is 0.75 and -0.25; of the KL each token has its own and that of the tokens behind it, in its own sample."""
    greedy = msgspec.structs.replace(batch, baselines=np.full(3, 0.25))
    found = token_advantages(greedy, config(advantage="remax"))
    assert found.advantages.tolist() == [0, 0.75, 0, 0.75, 0, -0.25, -0.25, 0, -0.25] and found.returns is None
    logprobs, reference = with_gaps([-1.0] * 5), with_gaps([-1.5, -1.25, -2.0, -1.0, -1.5])
    found = token_advantages(greedy, config(advantage="remax", kl={"reward_coef": 2.0}), logprobs=logprobs, reference=reference)
    kl = np.array([0.5, 0.25, 1.0, 0.0, 0.5])
    expected = [0.75 - 2 * (kl[0] + kl[1]), 0.75 - 2 * kl[1], -0.25 - 2 * (kl[2] + kl[3]), -0.25 - 2 * kl[3], -0.25 - 2 * kl[4]]
    assert found.advantages[MASK] == pytest.approx(expected, abs=1e-12)
    with raises(TrainingError, estimator="remax"):
        token_advantages(batch, config(advantage="remax"))


def test_returns_of_a_critic_are_gaes_or_vtraces(batch: TrainBatch) -> None:
    values = with_gaps([0.5, 0.4, 0.3, 0.2, 0.1])
    loss = config(advantage="ppo", gamma=0.99, gae_lambda=0.95, kl={"reward_coef": 0.5, "estimator": "k2"})
    logprobs = with_gaps([-1, -2, -3, -4, -5])
    found = token_advantages(batch, loss, logprobs=logprobs, reference=with_gaps([-2] * 5), values=values)
    rewards = with_gaps([-0.25, 1.0, -0.25, -1.0, -2.25])
    expected = gae(rewards, values, batch.offsets, batch.loss_mask, gamma=0.99, gae_lambda=0.95)
    assert found.advantages == pytest.approx(expected[0]) and found.returns == pytest.approx(expected[1])
    assert found.metrics["rollout/kl"] == pytest.approx((0.25 + (0.5 + 2 + 4.5) / 3) / 2)
    values = with_gaps([0.5, 0.4, 0.3, 0.2, 0.1])
    plain = token_advantages(batch, config(advantage="ppo"), values=values)
    white = token_advantages(batch, config(advantage="ppo", whiten="on"), values=values)
    assert plain.returns is not None and white.returns is not None
    assert white.returns.tolist() == plain.returns.tolist()
    assert white.advantages == pytest.approx(whiten(plain.advantages, batch.loss_mask))
    critic = {"targets": "vtrace", "vtrace_rho": 1.5, "vtrace_c": 0.8}
    loss = config(advantage="ppo", gamma=0.9, gae_lambda=0.95, critic=critic)
    values, logprobs = with_gaps([0.5, 0.4, 0.3, 0.2, 0.1]), with_gaps([-1, -2.5, -3, -1.5, -2])
    found = token_advantages(batch, loss, logprobs=logprobs, values=values)
    expected = vtrace(
        with_gaps([0, 1, 0, 0, 0]), values, logprobs + 2.0, batch.offsets, batch.loss_mask, gamma=0.9, gae_lambda=0.95, rho=1.5, c=0.8
    )
    assert found.advantages == pytest.approx(expected[0]) and found.returns == pytest.approx(expected[1])


def test_whitening_sums_over_ranks_and_distillation_is_part_of_it(batch: TrainBatch) -> None:
    """Another rank with the same tokens: twice every sum, so only Bessel's correction changes."""
    found = token_advantages(batch, config(whiten="on", normalize_std=False), reduce=lambda sums: 2 * sums)
    values = np.array([0.5, 0.5, -0.5, -0.5, -0.5] * 2)
    assert found.advantages[MASK] == pytest.approx(((values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8))[:5])
    logprobs, teacher = with_gaps([-1, -1, -1, -1, -1]), with_gaps([-2, -1, -1, 0, -3])
    loss = config(normalize_std=False, distillation={"coef": 0.5})
    before = with_gaps([0.0, 0.5, -0.5, 0.0, -1.5])
    found = token_advantages(batch, loss, logprobs=logprobs, teacher=teacher)
    assert found.advantages == pytest.approx(np.nan_to_num(before))
    assert found.metrics["train/opd_reverse_kl"] == pytest.approx((0.5 + 1 / 3) / 2)
    white = token_advantages(batch, msgspec.structs.replace(loss, whiten="on"), logprobs=logprobs, teacher=teacher)
    assert white.advantages == pytest.approx(whiten(before, np.array(MASK)))


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["logprobs", "reference", "teacher", "sampler"])
def test_tokens_with_a_log_prob_that_is_not_finite_take_no_part(batch: TrainBatch, odd: float, where: str) -> None:
    """They get 0 and are reported; everything else is as if they were not trained, the reward's place included."""
    arrays: dict[str, Any] = {name: with_gaps([-1, -2, -3, -4, -5]) for name in ("logprobs", "reference", "teacher")}
    arrays["reference"][1] += 0.5
    loss = config(advantage="reinforce_plus_plus", gamma=0.9, kl={"reward_coef": 0.1}, distillation={"coef": 0.1})
    without = msgspec.structs.replace(batch, loss_mask=batch.loss_mask & (np.arange(9) != 3))
    expected = token_advantages(without, loss, **arrays)
    if where == "sampler":
        sampler = batch.sampler_logprobs.copy()
        sampler[3] = odd
        batch = msgspec.structs.replace(batch, sampler_logprobs=sampler)
    else:
        arrays[where][3] = odd
    found = token_advantages(batch, loss, **arrays)
    assert found.finite.tolist() == [True, True, True, False, True, True, True, True, True]
    assert found.advantages.tolist() == expected.advantages.tolist() and found.advantages[1] != 0
    assert found.metrics == expected.metrics


@pytest.mark.parametrize(
    ("settings", "roles"),
    [
        ({}, set()),
        ({"advantage": "ppo"}, {Role.VALUE}),
        ({"advantage": "ppo", "critic": {"targets": "vtrace"}}, {Role.VALUE, Role.PROXIMAL}),
        ({"advantage": "reinforce_plus_plus", "kl": {"reward_coef": 0.1}}, {Role.PROXIMAL, Role.REFERENCE}),
        ({"distillation": {"coef": 1.0}}, {Role.PROXIMAL, Role.TEACHER}),
    ],
)
def test_what_must_be_scored(batch: TrainBatch, settings: dict[str, Any], roles: set[Role]) -> None:
    loss = config(**settings)
    assert needed_scores(loss) == roles
    name = {Role.PROXIMAL: "logprobs", Role.REFERENCE: "reference", Role.TEACHER: "teacher", Role.VALUE: "values"}
    given: dict[str, Any] = {name[role]: with_gaps([-1] * 5) for role in roles}
    token_advantages(batch, loss, **given)
    for missing in given:
        with raises(TrainingError, scores=missing):
            token_advantages(batch, loss, **{key: array for key, array in given.items() if key != missing})


def test_values_and_arrays_that_do_not_fit_are_refused(batch: TrainBatch) -> None:
    with raises(TrainingError, scores="values", token=5):
        token_advantages(batch, config(advantage="ppo"), values=with_gaps([1, 2, np.nan, 3, 4]))
    with raises(TrainingError, scores="values", expected=(9,), got=(5,)):
        token_advantages(batch, config(advantage="ppo"), values=np.zeros(5))


def by_position(batch: TrainBatch, arrays: TokenArrays) -> np.ndarray:
    """Position in the batch, and the KL where it is known."""
    assert arrays.mask.tolist() == MASK
    return np.arange(batch.num_tokens) + (0.0 if arrays.kl is None else arrays.kl)


def too_few(batch: TrainBatch, arrays: TokenArrays) -> np.ndarray:
    return np.zeros(batch.num_samples)


def odd_somewhere(batch: TrainBatch, arrays: TokenArrays) -> np.ndarray:
    return with_gaps([1, 2, 3, np.inf, 5])


not_a_function = 3.0


def test_a_function_of_the_users(batch: TrainBatch) -> None:
    found = token_advantages(batch, config(advantage=f"{__file__}:by_position"))
    assert found.advantages.tolist() == [0, 1, 0, 3, 0, 5, 6, 0, 8] and found.returns is None
    assert found.metrics["rollout/raw_reward"] == 0.5
    white = token_advantages(batch, config(advantage=f"{__file__}:by_position", whiten="on"))
    assert white.advantages == pytest.approx(whiten(np.arange(9.0), np.array(MASK)))
    loss = config(advantage=f"{Path(__file__).name}:by_position", kl={"reward_coef": 0.5})
    more = token_advantages(batch, loss, logprobs=with_gaps([1] * 5), reference=with_gaps([0.75] * 5), base=Path(__file__).parent)
    assert more.advantages.tolist() == [0, 1.25, 0, 3.25, 0, 5.25, 6.25, 0, 8.25]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("too_few", {"key": "loss.advantage", "expected": (9,), "got": (3,)}),
        ("odd_somewhere", {"key": "loss.advantage", "token": 6}),
        ("not_a_function", {"key": "loss.advantage", "got": "float"}),
        ("by_posizion", {"key": "loss.advantage", "name": "by_posizion"}),
    ],
)
def test_a_function_that_cannot_be_used(batch: TrainBatch, name: str, values: dict[str, Any]) -> None:
    with raises(ConfigError, **values):
        token_advantages(batch, config(advantage=f"{__file__}:{name}"))


def test_what_is_no_estimator_or_has_no_meaning_for_it_is_refused(batch: TrainBatch) -> None:
    with_token_rewards = {"remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"}
    for name in sorted(set(ESTIMATORS) - with_token_rewards):
        with raises(ConfigError, key="loss.kl.reward_coef"):
            token_advantages(batch, config(advantage=name, kl={"reward_coef": 0.1}), logprobs=np.zeros(9), reference=np.zeros(9))
    for name in ("rloo", "maxrl"):  # they are normalizations
        with raises(ConfigError, key="loss.normalize_rewards"):
            token_advantages(batch, config(advantage=name, normalize_rewards=False))
    for name in ("gspo", "cispo"):
        with raises(ConfigError, key="loss.advantage") as caught:
            token_advantages(batch, LossConfig(advantage=name))
        assert f"loss.policy = '{name}'" in caught.value.hint


def test_every_name_is_there_and_none_is_a_module() -> None:
    for name in streamrl.algorithms.__all__:
        assert callable(getattr(streamrl.algorithms, name)), name
    assert dir(streamrl.algorithms) == streamrl.algorithms.__all__ == sorted(streamrl.algorithms.__all__)
    with pytest.raises(AttributeError, match="no attribute 'gpro'"):
        _ = streamrl.algorithms.gpro


@pytest.mark.process
def test_what_needs_no_torch_loads_none() -> None:
    code = "import sys; from streamrl.algorithms import TrainBatch, token_advantages; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
