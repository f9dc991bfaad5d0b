"""Every estimator with every policy loss and every kind of correction: a real model is moved towards what was rewarded."""

from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from streamrl.algorithms.objective import make_objective
from streamrl.config.check_loss import check_loss
from streamrl.config.loss import CorrectionConfig, KLConfig, LossConfig, RejectionConfig
from streamrl.config.registry import ESTIMATORS, POLICY_LOSSES, Role
from streamrl.config.tree import Config, TasksConfig, TrainerConfig
from streamrl.core.batches import TrainBatch
from streamrl.errors import ConfigError
from streamrl.schemas.versions import Version
from streamrl.telemetry.names import METRICS
from streamrl.trainers.protocol import Trainer
from streamrl.trainers.torch.terms import policy_tokens
from streamrl.trainers.torch.update import Update
from tests.support import trainers
from tests.support.errors import raises
from tests.support.scoring import score
from tests.support.trainers import Models

VOCAB, EOS, GROUP = 16, 1, 4
KINDS = ("none", "truncate", "clip", "mask")
LEVELS: Any = ("token", "sequence", "geometric")


@pytest.fixture(scope="module")
def tiny(make_model: Models) -> Path:
    return make_model(num_hidden_layers=1, hidden_size=16, intermediate_size=32, head_dim=8)


def combinations() -> list[Any]:
    """All that the configuration's check lets through, with the levels taken in turn.

    GRPO runs with all kinds of correction; other estimators with half of the policy losses, of one kind each, and in CI with all losses.
    """
    found: list[Any] = []
    for number, (advantage, policy, kind) in enumerate(product(ESTIMATORS, POLICY_LOSSES, KINDS)):
        low, high = {"clip": (0.2, 5.0), "mask": (0.2, 5.0)}.get(kind, (0.0, 2.0))
        correction = CorrectionConfig(kind=kind, level=LEVELS[number % 3], low=low, high=high)  # type: ignore[arg-type]
        settings: Any = {"pass_at_k": {"pass_k": 2}, "gdpo": {"objectives": {"correct": 1.0, "short": 0.1}}}.get(advantage, {})
        loss = LossConfig(advantage=advantage, policy=policy, correction=correction, **settings)
        try:
            check_loss(Config(loss=loss, tasks=TasksConfig(drop_zero_variance=advantage != "gdpo"), trainer=TrainerConfig(minibatches=2)))
        except ConfigError:
            continue
        row, column = [*ESTIMATORS].index(advantage), [*POLICY_LOSSES].index(policy)
        in_ci = KINDS.index(kind) == (row + column) % len(KINDS)
        always = advantage == "grpo" or (in_ci and (row + column // 2) % 2 == 0)
        marks = () if always else (pytest.mark.slow,) if in_ci else (pytest.mark.soak,)
        found.append(pytest.param(loss, id=f"{advantage}-{policy}-{kind}-{correction.level}", marks=marks))
    return found


make = partial(trainers.make, rate=3e-3)


def make_batch(stage_step: int = 0) -> TrainBatch:
    """For each of four prompts four answers of different lengths, of which the first is rewarded."""
    rng, n = np.random.default_rng(7), 4 * GROUP
    first = np.arange(n) % GROUP == 0
    batch = TrainBatch.from_lists(
        [[2, 3 + sample // GROUP] for sample in range(n)],
        [[*rng.integers(3, VOCAB, 2 + (sample // GROUP + sample % GROUP) % 3).tolist(), EOS] for sample in range(n)],
        rewards=first.astype(float).tolist(),
        tasks=(np.arange(n) // GROUP).tolist(),
        baselines=[0.5] * n,
        version=Version(0, stage_step),
        stage_step=stage_step,
    )
    return replace(
        batch,
        sampler_logprobs=np.where(batch.loss_mask, -2.7 + 0.3 * rng.standard_normal(batch.num_tokens), 0.0).astype(np.float32),
        staleness=np.where(batch.loss_mask, rng.integers(0, 3, batch.num_tokens), 0).astype(np.int32),
        reward_parts={"correct": first.astype(np.float64), "short": -batch.lengths.astype(np.float64)},
    )


def lead(trainer: Trainer, batch: TrainBatch) -> float:
    """How much more probable the rewarded answers are than the others: sum over samples of (R - mean) log pi(answer)."""
    logprobs = np.add.reduceat(np.where(batch.loss_mask, score(trainer, batch, Role.POLICY), 0.0), batch.offsets[:-1])
    return float((batch.rewards - batch.rewards.mean()) @ logprobs)


@pytest.mark.parametrize("loss", combinations())
def test_two_batches_raise_what_was_rewarded(tiny: Path, loss: LossConfig) -> None:
    trainer = make(tiny, loss, minibatches=2, rate=6e-3)
    batch = make_batch()
    before = lead(trainer, batch)
    results = [trainer.step(make_batch(step)) for step in range(2)]
    assert all(result.finite for result in results)
    assert all(np.isfinite(value) for result in results for value in result.metrics.values())
    assert lead(trainer, batch) > before + 0.1
    assert set().union(*(result.metrics for result in results)) <= set(METRICS)


PIPELINES = {
    "sequences": LossConfig(
        advantage="reinforce_plus_plus",
        policy="gspo",
        kl=KLConfig(reward_coef=0.05),
        correction=CorrectionConfig(
            kind="truncate", level="sequence", reject=(RejectionConfig(measure="k3", level="sequence_max", high=0.3),)
        ),
    ),
    "geometric": LossConfig(
        kl=KLConfig(loss_coef=0.1, estimator="k3", unbiased=True),
        opsm_delta=1e-3,
        entropy_coef=0.01,
        reduction="sequence_mean",
        correction=CorrectionConfig(kind="mask", level="geometric", low=0.7, high=1.3, normalize=True, veto=0.05, staleness_decay=0.9),
    ),
    "critic": LossConfig(
        advantage="ppo",
        gae_lambda=0.9,
        whiten="on",
        reduction="token_mean",
        correction=CorrectionConfig(kind="clip", low=0.5, high=1.5, level="sequence", ratio="current", mask_staleness=1),
    ),
    "chosen": LossConfig(policy="m2po", reduction="token_mean", top_entropy=0.5, correction=CorrectionConfig(kind="none")),
    "drawn": LossConfig(policy="clip_cov", clip_cov_fraction=0.1, clip_cov_low=-1.0, kl=KLConfig(loss_coef=0.1, estimator="k2")),
    "ranked": LossConfig(policy="kl_cov", kl_cov_fraction=0.1, top_entropy=0.3),
    "linear": LossConfig(advantage="rloo", policy="sapo", proximal="log_linear", reduction="constant_length", constant_length=7),
}


@pytest.mark.parametrize("loss", PIPELINES.values(), ids=PIPELINES)
def test_micro_batches_change_nothing_but_rounding(tiny: Path, loss: LossConfig) -> None:
    check_loss(Config(loss=loss, trainer=TrainerConfig(minibatches=2)))
    whole, cut = make(tiny, loss, minibatches=2), make(tiny, loss, minibatches=2, micro_tokens=9)
    for step in range(2):
        one, two = whole.step(make_batch(step)).metrics, cut.step(make_batch(step)).metrics
        # What rounding leaves of the first batch, Adam makes more of in the second.
        assert one == pytest.approx(two, rel=(2e-4, 2e-3)[step], abs=(2e-6, 2e-5)[step]), step
    assert np.abs(score(whole, make_batch(), Role.POLICY) - score(cut, make_batch(), Role.POLICY)).max() < 1e-4


def test_m2po_leaves_out_of_the_loss_what_its_algorithm_does_whatever_a_micro_batch_sees(tiny: Path) -> None:
    """Algorithm 1 of arXiv 2510.01161 on the whole step, by hand, against micro-batches of one or two samples."""
    loss = LossConfig(policy="m2po", m2po_bound=0.3, reduction="token_mean", correction=CorrectionConfig(kind="none"))
    trainer, batch = make(tiny, loss, micro_tokens=9), make_batch()
    mask = batch.loss_mask
    moved = (score(trainer, batch, Role.POLICY).astype(np.float64) - batch.sampler_logprobs)[mask]
    groups = batch.rewards.reshape(-1, GROUP)
    each = (groups - groups.mean(1, keepdims=True)) / groups.std(1, ddof=1, keepdims=True)
    advantages = np.repeat(each.flatten(), batch.lengths)[mask]
    kept = moved * advantages > 0
    pushed = int(kept.sum())
    while (moved[kept] ** 2).mean() > 0.3:
        kept[np.flatnonzero(kept)[np.argmax(moved[kept] ** 2)]] = False
    gone = pushed - int(kept.sum())
    assert 2 < gone < pushed - 2
    kept |= moved * advantages <= 0
    metrics = trainer.step(batch).metrics
    assert metrics["train/pg_clipfrac"] == pytest.approx(gone / mask.sum())
    assert metrics["train/pg_loss"] == pytest.approx((-np.exp(moved) * advantages)[kept].sum() / mask.sum(), rel=1e-4)


@pytest.mark.parametrize(("proximal", "calls"), [("recomputed", 1), ("log_linear", 0), ("sampler", 0)])
def test_only_a_recomputed_proximal_policy_costs_a_pass(tiny: Path, monkeypatch: pytest.MonkeyPatch, proximal: Any, calls: int) -> None:
    kind: Any = "none" if proximal == "sampler" else "truncate"
    trainer = make(tiny, LossConfig(proximal=proximal, correction=CorrectionConfig(kind=kind)), minibatches=2)
    scored, whole = list[int](), Update.score
    monkeypatch.setattr(Update, "score", lambda self, *given, **named: (scored.append(1), whole(self, *given, **named))[1])
    metrics = trainer.step(make_batch()).metrics
    assert len(scored) == calls
    assert np.isfinite(metrics["train/tis"])


def test_weights_and_ratios_are_those_that_the_loss_names(tiny: Path) -> None:
    batch = make_batch()
    plain = make(tiny, LossConfig()).step(batch).metrics
    metrics = make(tiny, LossConfig(correction=CorrectionConfig(normalize=True))).step(batch).metrics
    assert plain["train/mis_is_ratio_mean_final"] != pytest.approx(1.0, abs=0.05)
    assert metrics["train/mis_is_ratio_mean_final"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["train/mis_batch_norm_factor"] == pytest.approx(1 / plain["train/mis_is_ratio_mean_final"], rel=1e-5)
    frozen = make(tiny, LossConfig(), minibatches=4).step(batch).metrics
    current = make(tiny, LossConfig(correction=CorrectionConfig(ratio="current")), minibatches=4).step(batch).metrics
    assert frozen["train/ois"] != 1.0 and frozen["train/ppo_kl"] != 0.0
    assert (current["train/ois"], current["train/ppo_kl"]) == (1.0, 0.0)
    assert current["train/tis"] != pytest.approx(frozen["train/tis"], abs=1e-4)
    loss = LossConfig(proximal="sampler", correction=CorrectionConfig(kind="none"))
    metrics = make(tiny, loss).step(batch).metrics
    assert metrics["train/ois"] != pytest.approx(1.0, abs=1e-3)
    assert metrics["train/ppo_kl"] != pytest.approx(0.0, abs=1e-3)
    assert metrics["train/tis"] == pytest.approx(1.0, abs=1e-12)
    assert metrics["train/mis_is_ratio_max_final"] == 1.0
    old = batch.staleness > 1
    masked = make(tiny, LossConfig(correction=CorrectionConfig(kind="none", mask_staleness=1))).step(batch).metrics
    assert masked["train/rejected_fraction"] == pytest.approx(masked["train/stale_masked_fraction"])
    assert 0 < masked["train/stale_masked_fraction"] < 1
    assert masked["train/ess_weights"] == pytest.approx(1 - old[batch.loss_mask].mean())
    everything = make(tiny, LossConfig(correction=CorrectionConfig(kind="none"))).step(batch).metrics
    # One product with the matrix of all metrics: how it is summed depends on how many there are.
    assert masked["train/entropy_loss"] == pytest.approx(everything["train/entropy_loss"], rel=1e-13)


def test_the_entropy_bonus_raises_the_entropy(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "nothing.py").write_text("def advantages(batch, arrays):\n    return batch.loss_mask * 0.0\n")
    found: dict[float, list[float]] = {}
    for coef in (0.0, 1.0, -1.0):
        trainer = make(tiny, LossConfig(advantage=f"{tmp_path}/nothing.py:advantages", entropy_coef=coef))
        found[coef] = [trainer.step(make_batch(step)).metrics["train/entropy_loss"] for step in range(4)]
    assert found[0.0][-1] == found[0.0][0]
    assert found[1.0][-1] > found[1.0][0] + 1e-3
    assert found[-1.0][-1] < found[-1.0][0] - 1e-3


MINE = """
import numpy as np

def advantages(batch, arrays):
    assert arrays.logprobs is not None
    return np.repeat(batch.rewards - batch.rewards.mean(), batch.lengths)

def policy(tokens, loss):
    assert tokens.sequences.mask.all()
    ratio = (tokens.logprobs - tokens.proximal).exp()
    return -ratio * tokens.advantages, {"train/mine": ratio.detach()}

def short(tokens, loss):
    return tokens.logprobs.sum(), {}

number = 3
"""


def test_users_functions_and_given_proximal_policies_count(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    named = {name: f"{tmp_path}/mine.py:{name}" for name in ("advantages", "policy", "short", "number", "advantage")}
    trainer = make(tiny, LossConfig(advantage=named["advantages"], policy=named["policy"]), minibatches=2)
    before = lead(trainer, make_batch())
    assert trainer.step(make_batch()).metrics["train/mine"] == pytest.approx(1.0, abs=0.1)
    assert lead(trainer, make_batch()) > before
    with raises(ConfigError, key="loss.policy", function=named["short"]):
        make(tiny, LossConfig(policy=named["short"])).step(make_batch())
    with raises(ConfigError, key="loss.policy", got="int"):
        make(tiny, LossConfig(policy=named["number"]))
    with raises(ConfigError, key="loss.policy", name="advantage"):
        make(tiny, LossConfig(policy=named["advantage"]))
    # Whoever calls it decides: log-probs that are handed in are what ratios are taken against, at the batch's first step too.
    batch, loss = make_batch(), LossConfig()
    target = np.flatnonzero(batch.loss_mask)
    logprobs = torch.full((len(target),), -2.0)
    given = np.full(batch.num_tokens, -3.0, np.float32)
    for proximal, want in ((given, -3.0), (None, -2.0)):
        tokens, _ = policy_tokens(batch, make_objective(batch, loss, 1), target, logprobs, logprobs, loss, proximal=proximal, progress=0.0)
        assert set(tokens.proximal.tolist()) == {want}
