"""What the section `loss` may not say, each with its reason."""

import contextlib
import json
import math
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from streamrl.bridges.retrain.run_files import nested
from streamrl.config.check_loss import check_loss
from streamrl.config.load import convert, load
from streamrl.config.loss import CorrectionConfig, LossConfig
from streamrl.config.tree import Config
from streamrl.errors import ConfigError
from tests.support.errors import raises


def config_of(*settings: str) -> Config:
    """A configuration with `a.b=c` put in; values are those of JSON, `nan`, or words."""
    keys: dict[str, Any] = {}
    for setting in settings:
        key, _, text = setting.partition("=")
        with contextlib.suppress(ValueError):
            keys[key] = text
            keys[key] = math.nan if text == "nan" else json.loads(text)
    return convert(nested(keys), where="test")


GOOD = [
    (),
    ("loss.policy=cispo",),  # against the proximal policy: TIS corrects what is left
    ("loss.policy=cispo", "loss.proximal=sampler", "loss.correction.kind=none", "loss.clip_low=1.0", "loss.clip_high=4.0"),
    ("loss.policy=aipo", "loss.correction.kind=none"),
    ("loss.policy=dppo", "loss.correction.kind=none"),
    ("loss.policy=dppo", "loss.correction.kind=none", 'loss.correction.reject=[{"measure": "k3", "high": 0.1}]'),
    ("loss.advantage=my.file:name", "loss.normalize_std=false"),
    ("loss.policy=file.py:name", "loss.correction.level=sequence"),
    ("loss.advantage=reinforce_plus_plus", "loss.kl.reward_coef=0.1", "loss.gamma=0.9", "tasks.num_rollouts=1"),
    ("loss.advantage=remax", "tasks.num_rollouts=1", "loss.kl.reward_coef=0.1"),
    ("loss.advantage=remax", "tasks.num_rollouts=4", "loss.whiten=on", "reward.length.kind=cosine"),
    ("loss.advantage=ppo", "loss.bootstrap_truncated=true"),
    ("loss.advantage=ppo", "loss.gae_lambda=0.95", "loss.critic.only_steps=3", "tasks.num_rollouts=1"),
    ("loss.advantage=ppo", "loss.critic.targets=vtrace", "loss.critic.vtrace_rho=2.0"),
    ("loss.advantage=grpo", "loss.normalize_rewards=false", "tasks.num_rollouts=1"),
    ("loss.proximal=log_linear", "trainer.minibatches=2"),
    ("loss.policy=kl_cov", "trainer.minibatches=2"),
    ("loss.policy=kl_cov", "loss.proximal=sampler", "loss.correction.kind=none", "loss.top_entropy=0.2"),
    ("loss.policy=file.py:name", "loss.top_entropy=0.2"),
    ("loss.opsm_delta=1e-4",),
    ("loss.opsm_delta=1e-4", "trainer.minibatches=2", "loss.correction.ratio=current"),
    ("loss.opsm_delta=1e-4", "loss.proximal=sampler", "loss.correction.kind=none"),
    ("loss.correction.ratio=current", "trainer.minibatches=2"),
    ("loss.correction.normalize=true",),
    ("loss.correction.kind=mask", "loss.correction.low=0.5", "loss.correction.high=2.0"),
    ('loss.correction.reject=[{"measure": "k1", "low": -0.1, "high": 0.1}]',),
    ("loss.reduction=constant_length", "loss.constant_length=64"),
    ("loss.reduction=token_mean_legacy", "loss.legacy_samples=4"),
    ("loss.kl.loss_coef=0.1", "loss.kl.estimator=k2", "loss.kl.reference=somewhere", "warmup.max_steps=5"),
    ("loss.kl.loss_coef=0.1", "loss.kl.unbiased=true"),
    ("loss.kl.loss_coef=0.1", "loss.kl.estimator=k1+", "loss.kl.target=0.05", "loss.kl.gain=0.2"),
    ("loss.advantage=ppo", "loss.kl.reward_coef=0.1", "loss.kl.estimator=abs", "loss.kl.decay_steps=50", "loss.kl.final_fraction=0.1"),
    ("loss.kl.loss_coef=0.1", "loss.slime_loss=mine.py:loss"),
    ("loss.kl.loss_coef=0.1", "loss.kl.unbiased=true", "loss.kl.estimator=k3"),
    ("loss.distillation.coef=0.1", "loss.distillation.teacher=somewhere"),
    ("loss.dual_clip=3.0",),
    ("loss.policy=file.py:name", "loss.m2po_bound=0.1", "loss.clip_high=0.4"),
    ("loss.policy=dppo", "loss.correction.kind=none", "loss.dppo_divergence=kl", "loss.dppo_bound=1.5"),
    ("loss.slime_loss=mine.py:loss", "loss.clip_high=0.4"),
    ("trainer.backend=table", "engine.kind=table", "loss.advantage=rloo", "loss.policy=cispo", "loss.correction.kind=mask"),
]


def test_what_goes_together_is_allowed() -> None:
    for settings in GOOD:
        check_loss(config_of(*settings))


BAD = [
    # values
    (("loss.clip_low=-0.1",), "loss.clip_low must be at least 0"),
    (("loss.clip_high=-0.1",), "loss.clip_high must be at least 0"),
    (("loss.clip_high=nan",), "loss.clip_high"),
    (("loss.clip_low=1.5",), "a ratio is never below 0"),
    (("loss.dual_clip=0.5",), r"loss.dual_clip must be 0 \(off\) or above 1, got 0.5"),
    (("loss.dual_clip=1.0",), r"loss.dual_clip must be 0 \(off\) or above 1, got 1.0"),
    (("loss.dual_clip=3.0", "loss.policy=cispo"), "loss.dual_clip = 3.0 is for the policy loss ppo, got cispo"),
    (("loss.m2po_bound=0.1",), "loss.m2po_bound = 0.1 is for the policy loss m2po, got ppo"),
    (("loss.clip_high=0.4", "loss.policy=sapo"), "loss.clip_high = 0.4 is for the policy loss ppo or gspo .*, got sapo"),
    (("loss.dppo_symmetric=true", "loss.slime_loss=a.py:b"), "loss.dppo_symmetric = true is for the policy loss dppo, got ppo"),
    (("loss.policy=dppo", "loss.correction.kind=none", "loss.dppo_bound=1.0"), "never above 1, and nothing would be left out"),
    (("loss.policy=dppo", "loss.correction.kind=none", "loss.dppo_bound_low=1.5"), "never above 1, and nothing would be left out"),
    (("loss.gamma=1.1", "loss.advantage=ppo"), "loss.gamma must be at most 1"),
    (("loss.sapo_tau_positive=0.0",), "loss.sapo_tau_positive must be above 0"),
    (("loss.aipo_cap=0.0",), "loss.aipo_cap must be above 0"),
    (("loss.correction.high=0.0",), "loss.correction.high must be above 0"),
    (("loss.correction.staleness_decay=1.5",), "loss.correction.staleness_decay must be at most 1"),
    (("loss.correction.veto=2.0",), "loss.correction.veto must be at most 1"),
    # names
    (("loss.advantage=gpro",), "loss.advantage must be grpo, .* got 'gpro'"),
    (("loss.policy=gppo",), "loss.policy must be ppo, .* got 'gppo'"),
    # advantages
    (("tasks.num_rollouts=1",), "every advantage would be 0"),
    (("tasks.num_rollouts=1", "loss.advantage=rloo"), "every advantage would be 0"),
    (("tasks.num_rollouts=1", "loss.advantage=maxrl"), "every advantage would be 0"),
    (("tasks.num_rollouts=1", "loss.advantage=reinforce_plus_plus_baseline"), "every advantage would be 0"),
    (("loss.advantage=rloo", "loss.normalize_std=false"), "divides by no group's deviation"),
    (("loss.advantage=rloo", "loss.normalize_rewards=false"), "loss.normalize_rewards = false is for"),
    (("loss.advantage=reinforce_plus_plus", "loss.whiten=off"), "whitening is what scales"),
    (("loss.advantage=reinforce_plus_plus_baseline", "loss.whiten=off"), "whitening is what scales"),
    (("loss.advantage=remax", "loss.gamma=0.9"), "loss.gamma = 0.9 is for reinforce_plus_plus and ppo"),
    (("loss.gamma=0.9",), "loss.gamma = 0.9 is for reinforce_plus_plus and ppo"),
    (("loss.gae_lambda=0.9",), "loss.gae_lambda = 0.9 is for ppo"),
    (("loss.bootstrap_truncated=true",), "loss.bootstrap_truncated = .* is for ppo"),
    (("loss.bootstrap_truncated=true", "loss.advantage=ppo", "tasks.overlong=mask"), "no sample that a length limit truncated is trained"),
    # policy loss
    (("loss.slime_loss=a.py:b", "loss.policy=ppo"), "loss.slime_loss takes the place of the policy loss"),
    (("loss.slime_loss=mine",), "loss.slime_loss must be a function"),
    (("loss.reduction=constant_length",), "constant_length go together"),
    (("loss.constant_length=64",), "constant_length go together"),
    (("loss.reduction=token_mean_legacy",), "legacy_samples go together"),
    (("loss.legacy_samples=4",), "legacy_samples go together"),
    (("loss.opsm_delta=1e-4", "trainer.minibatches=2", "loss.policy=a.py:b"), "belongs to the built-in policy losses"),
    # over a whole step
    (("loss.policy=clip_cov", "loss.clip_cov_low=5.0"), "loss.clip_cov_low must be below"),
    (("loss.policy=kl_cov",), "the penalty would always be 0"),
    (("loss.policy=kl_cov", "trainer.minibatches=2", "loss.correction.ratio=current"), "the penalty would always be 0"),
    (("loss.top_entropy=0.2", "loss.slime_loss=a.py:b"), "takes the place of the policy loss"),
    # the same ratio twice
    (("loss.policy=aipo",), "aipo holds the current policy against the sampler itself; .* would count that ratio twice"),
    (("loss.policy=dppo",), "would count that ratio twice"),
    (("loss.policy=cispo", "loss.proximal=sampler"), r"puts pi / mu into the policy loss \(cispo\).* would count it a second time"),
    (("loss.proximal=sampler",), "would count it a second time"),
    (("loss.proximal=sampler", "loss.correction.kind=none", "loss.correction.ratio=current"), "takes the current policy for"),
    (("loss.proximal=log_linear", "trainer.minibatches=2", "loss.correction.ratio=current"), "takes the current policy for"),
    (("loss.proximal=log_linear",), "needs trainer.minibatches >= 2"),
    (
        ("loss.proximal=sampler", "loss.correction.kind=none", 'loss.correction.reject=[{"measure": "k3", "high": 0.1}]'),
        "would reject nothing",
    ),
    (("loss.proximal=sampler", "loss.correction.kind=none", "loss.correction.veto=1e-4"), "veto would reject nothing"),
    # correction
    (("loss.correction.kind=mask", "loss.correction.low=2.0"), "loss.correction.low must be below"),
    (("loss.correction.low=0.5",), "loss.correction.low is for the kinds clip and mask"),
    (("loss.correction.kind=none", "loss.correction.normalize=true"), "loss.correction.normalize needs weights"),
    (("loss.correction.ratio=current", "loss.correction.normalize=true"), "needs all weights of a batch before its first step"),
    (("loss.proximal=log_linear", "trainer.minibatches=2", "loss.correction.normalize=true"), "needs all weights of a batch"),
    (('loss.correction.reject=[{"measure": "k3"}]',), "needs low below high"),
    (('loss.correction.reject=[{"measure": "k3", "low": -1.0, "high": 1.0}]',), "is never negative"),
    (('loss.correction.reject=[{"measure": "k1", "high": 0.1}]',), "k1 has either sign"),
    # KL
    (("loss.advantage=ppo", "loss.kl.reward_coef=0.1", "loss.kl.loss_coef=0.1"), "would count the same distance twice"),
    (("loss.kl.reward_coef=0.1",), "knows rewards of whole rollouts only"),
    (("loss.kl.loss_coef=0.1", "warmup.max_steps=5"), "leaves that behind on purpose"),
    (("loss.kl.unbiased=true",), "loss.kl.loss_coef is 0"),
    (("loss.kl.reference_every=4",), "loss.kl.reference_every renews the reference, but neither"),
    (("loss.kl.loss_coef=0.1",), "the gradient of log pi alone"),
    (("loss.kl.loss_coef=0.1", "loss.kl.estimator=k3+", "loss.kl.unbiased=true"), "has a gradient of its own"),
    (("loss.advantage=ppo", "loss.kl.reward_coef=0.1", "loss.kl.estimator=k1+"), "has a gradient of its own"),
    (("loss.kl.target=0.1",), "move the coefficient of the KL, but"),
    (("loss.kl.decay_steps=5",), "move the coefficient of the KL, but"),
    (("loss.kl.loss_coef=0.1", "loss.kl.estimator=k2", "loss.kl.target=0.1", "loss.kl.decay_steps=5"), "whatever the KL is"),
    (("loss.kl.loss_coef=0.1", "loss.kl.target=0.1", "loss.slime_loss=a.py:b"), "does not see move"),
    (("loss.kl.loss_coef=0.1", "loss.kl.estimator=k2", "loss.kl.gain=0.2"), "loss.kl.gain belongs to loss.kl.target"),
    (("loss.kl.loss_coef=0.1", "loss.kl.estimator=k2", "loss.kl.final_fraction=0.2"), "loss.kl.final_fraction to loss.kl.decay_steps"),
    (("loss.kl.reference=somewhere",), "neither loss.kl.reward_coef nor loss.kl.loss_coef uses it"),
    # models
    (("loss.critic.clip=0.5",), "loss.critic is for loss.advantage = ppo"),
    (("loss.advantage=ppo", "loss.critic.only_steps=100"), "the policy would never be trained"),
    (("loss.advantage=ppo", "loss.critic.vtrace_c=2.0"), "are for loss.critic.targets = vtrace"),
    (("loss.distillation.coef=0.1",), "coef and teacher go together"),
    (("loss.distillation.teacher=somewhere",), "coef and teacher go together"),
]


@pytest.mark.parametrize(("settings", "message"), BAD, ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")
def test_contradictions_are_refused_with_the_reason(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_loss(config_of(*settings))
    assert caught.value.hint
    assert str(caught.value.values["key"]).startswith(("loss.", "tasks."))


@pytest.mark.parametrize(
    ("setting", "hint"),
    [
        ("loss.advantage=GRPO", "did you mean grpo?"),
        ("loss.advantage=REINFORCE-plus-plus", "did you mean reinforce_plus_plus?"),
        ("loss.policy=cipso", "did you mean cispo?"),
        ("loss.policy=mine", "write a function as file.py:name, pkg.mod:name or pkg.mod.name"),
    ],
)
def test_near_names_get_a_hint(setting: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_loss(config_of(setting))
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    "setting",
    [
        *("loss.advantage=ppo", "loss.policy=sapo", "loss.slime_loss=a.py:b", "loss.dual_clip=3.0", "loss.entropy_coef=0.01"),
        *("loss.top_entropy=0.2", "loss.correction.level=sequence", "loss.correction.normalize=true", "loss.correction.veto=1e-4"),
        *("loss.correction.mask_staleness=3", "loss.correction.staleness_decay=0.9", "loss.kl.loss_coef=0.1 loss.kl.estimator=k3"),
        *("loss.experts.balance_coef=0.01", "loss.experts.z_coef=0.001"),
    ],
)
def test_the_table_backend_says_what_it_cannot_do(setting: str) -> None:
    key = setting.partition("=")[0]
    with raises(ConfigError, key=key):
        check_loss(config_of("trainer.backend=table", "engine.kind=table", *setting.split()))
    check_loss(config_of(*setting.split()))


def test_paths_of_models_and_functions_start_at_the_files_folder(write, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("")
    for name in ("reference", "teacher"):
        (tmp_path / name).mkdir()
    text = """
[loss]
advantage = "mine.py:advantages"
policy = "mine.py:policy"
kl = {loss_coef = 0.1, estimator = "k3", reference = "reference"}
distillation = {coef = 0.1, teacher = "teacher"}
"""
    loss = load(write(text)).loss
    assert (loss.advantage, loss.policy) == (f"{tmp_path}/mine.py:advantages", f"{tmp_path}/mine.py:policy")
    assert (loss.kl.reference, loss.distillation.teacher) == (f"{tmp_path}/reference", f"{tmp_path}/teacher")
    (tmp_path / "teacher").rmdir()
    with raises(ConfigError, key="loss.distillation.teacher", path=ANY):
        load(tmp_path / "my.toml")
    (tmp_path / "teacher").mkdir()
    with raises(ConfigError, key="loss.policy", path=ANY):
        load(write(text.replace("mine.py:policy", "yours.py:policy")))


def test_the_default_is_the_quickstarts() -> None:
    assert LossConfig().correction == CorrectionConfig(kind="truncate", level="token", high=2.0)
