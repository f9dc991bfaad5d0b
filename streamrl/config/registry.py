"""What is known of estimators, policy losses and kinds of engine without running any of them: names, what they read, what they need.

The rooms above register their code under these names (`streamrl.algorithms.estimators`, `streamrl.algorithms.policy`,
`streamrl.trainers.table.losses`, `streamrl.engines.factory`), tests compare the two both ways, and the configuration's checks and the
documentation are made from the tables. A new estimator is an entry here, a function there, a row in docs/algorithms.md and a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

import msgspec


class Role(StrEnum):
    """Whose log-probs, or values, of a batch's tokens; `ENERGY` is how far the policy's gradient at a token reaches (`token_energies`)."""

    POLICY = "policy"
    REFERENCE = "reference"
    PROXIMAL = "proximal"
    VALUE = "value"
    TEACHER = "teacher"
    ENERGY = "energy"


class Estimator(msgspec.Struct, frozen=True, kw_only=True):
    """Advantages that `loss.advantage` may name."""

    settings: frozenset[str] = frozenset()
    """Keys of the section `loss` that it reads and most others do not; set with another estimator, they are refused."""
    grouped: bool = False
    """Compares the rollouts of a task with each other."""
    whitened: bool = False
    """Not defined without whitening (arXiv 2501.03262)."""
    greedy: bool = False
    """Compares with the reward of the policy's greedy answer: each task has one rollout more, drawn greedily and never trained."""
    needs: frozenset[Role] = frozenset()
    """Whose numbers it cannot do without: of `VALUE` follows a critic, of `ENERGY` a forward pass more."""

    @property
    def token_rewards(self) -> bool:
        """Whether tokens have rewards one by one, so that a KL can be taken off."""
        return "kl.reward_coef" in self.settings


class PolicyLoss(msgspec.Struct, frozen=True, kw_only=True):
    """A loss that `loss.policy` may name: f(log pi, log pi_anchor, advantages, [sequences,] [chosen,] [apart,] **settings)."""

    settings: Mapping[str, str]
    """Its keyword arguments, and the keys of the section `loss` that they are."""
    anchor: Literal["proximal", "sampler"] = "proximal"
    """Whom its ratio is against; `sampler`: whatever `loss.proximal` says."""
    sequences: bool = False
    """Whether it looks at whole samples, and is given whose the tokens are."""
    choice: Mapping[str, str] | None = None
    """Of a loss that decides over all tokens of an optimizer step at once (`streamrl.algorithms.choices`), and is given what it chose: the
    keyword arguments of that decision, and the keys of the section `loss` that they are. None: it looks at each token, or sample."""
    likeliest: bool = False
    """Whether it may go by how far the policy is from the sampler by the latter's likeliest tokens, and is given that where it does."""
    table: bool = False
    """Whether the trainer without torch has it, too."""

    @property
    def keys(self) -> frozenset[str]:
        """Keys of the section `loss` that it reads."""
        return frozenset({*self.settings.values(), *(self.choice or {}).values()})


class EngineKind(msgspec.Struct, frozen=True, kw_only=True):
    """What `engine.kind` may name."""

    model_file: Literal["config.json", "table.json"] = "config.json"
    """What describes the model in its directory: Hugging Face's file, or a table's, which only the table trainer trains."""
    gpus: Literal["none", "shared", "own"] = "none"
    """What an engine takes of them: nothing; one, or a part of one, where there is any; or whole ones, `tensor_parallel` of them."""
    server: bool = False
    """Whether each engine starts a process of its own, under the interpreter that its section `engine.<kind>` names."""
    sources: bool = False
    """Whether it is told where a version's bytes lie, and fetches them itself; else it is handed them."""
    swaps: tuple[str, ...] = ()
    """Ways to get a version in that can be chosen, `auto` apart, the best first."""

    @property
    def tabular(self) -> bool:
        """Whether it serves tabular policies, without any framework."""
        return self.model_file == "table.json"


ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {
        "grpo": Estimator(grouped=True, settings=frozenset({"normalize_rewards", "normalize_std", "std", "leave_one_out"})),
        "rloo": Estimator(grouped=True),
        "maxrl": Estimator(grouped=True),
        "opo": Estimator(grouped=True),
        "opob": Estimator(grouped=True, settings=frozenset({"normalize_std"}), needs=frozenset({Role.PROXIMAL, Role.ENERGY})),
        "optimal_token_baseline": Estimator(grouped=True, needs=frozenset({Role.PROXIMAL, Role.ENERGY})),
        "gpg": Estimator(grouped=True),
        "gdpo": Estimator(grouped=True, settings=frozenset({"objectives"})),
        "pass_at_k": Estimator(grouped=True, settings=frozenset({"pass_k"})),
        "remax": Estimator(greedy=True, settings=frozenset({"kl.reward_coef"})),
        "reinforce_plus_plus": Estimator(whitened=True, settings=frozenset({"kl.reward_coef", "gamma"})),
        "reinforce_plus_plus_baseline": Estimator(grouped=True, whitened=True, settings=frozenset({"normalize_rewards", "kl.reward_coef"})),
        "ppo": Estimator(
            settings=frozenset({"kl.reward_coef", "gamma", "gae_lambda", "bootstrap_truncated", "critic"}), needs=frozenset({Role.VALUE})
        ),
    }
)

_CLIP = {"clip_low": "clip_low", "clip_high": "clip_high"}
POLICY_LOSSES: Mapping[str, PolicyLoss] = MappingProxyType(
    {
        "ppo": PolicyLoss(settings={**_CLIP, "dual_clip": "dual_clip"}, table=True),
        "gspo": PolicyLoss(settings=_CLIP, sequences=True),
        "gspo_token": PolicyLoss(settings=_CLIP, sequences=True),
        "gmpo": PolicyLoss(settings={"log_low": "gmpo_low", "log_high": "gmpo_high"}, sequences=True),
        "cispo": PolicyLoss(settings=_CLIP, table=True),
        "clip_cov": PolicyLoss(settings=_CLIP, choice={"fraction": "clip_cov_fraction", "low": "clip_cov_low", "high": "clip_cov_high"}),
        "kl_cov": PolicyLoss(settings={"coef": "kl_cov_coef"}, choice={"fraction": "kl_cov_fraction"}),
        "sapo": PolicyLoss(settings={"tau_positive": "sapo_tau_positive", "tau_negative": "sapo_tau_negative"}),
        "aipo": PolicyLoss(settings={"cap": "aipo_cap"}, anchor="sampler"),
        "dppo": PolicyLoss(
            settings={
                "bound": "dppo_bound",
                "bound_low": "dppo_bound_low",
                "divergence": "dppo_divergence",
                "symmetric": "dppo_symmetric",
                "kl": "dppo_kl",
            },
            anchor="sampler",
            likeliest=True,
        ),
        "vespo": PolicyLoss(
            settings={
                "c1_positive": "vespo_c1_positive",
                "c2_positive": "vespo_c2_positive",
                "c1_negative": "vespo_c1_negative",
                "c2_negative": "vespo_c2_negative",
            },
            anchor="sampler",
            sequences=True,
        ),
        "m2po": PolicyLoss(settings={}, anchor="sampler", choice={"bound": "m2po_bound"}),
    }
)

EngineName = Literal["local", "table", "sglang"]
ENGINES: Mapping[EngineName, EngineKind] = MappingProxyType(
    {
        "local": EngineKind(gpus="shared"),
        "table": EngineKind(model_file="table.json"),
        "sglang": EngineKind(gpus="own", server=True, sources=True, swaps=("flip", "copy", "copy_pinned", "pause")),
    }
)


def reading(setting: str) -> list[str]:
    """The estimators that read a setting."""
    return [name for name, estimator in ESTIMATORS.items() if setting in estimator.settings]
