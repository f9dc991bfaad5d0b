"""The section `evaluation` and the tables `[[evaluation.sets]]`."""

from __future__ import annotations

from typing import Any

from streamrl.config.bounds import NonNegativeInt, PositiveFraction, PositiveInt, Section
from streamrl.schemas.tasks import Sampling


class SetRewardConfig(Section, frozen=True, kw_only=True):
    """How the answers of one set are scored, where that is not as in training."""

    kind: str = ""
    """As `reward.kind`; empty: that of the run, with its options and key."""
    options: dict[str, Any] = {}
    """Handed to it as keyword arguments."""
    key: str = ""
    """As `reward.key`; empty: that of the run for the run's reward, and for one of its own the part `reward`, or the sum of its parts."""


class EvaluationSetConfig(Section, frozen=True, kw_only=True):
    """A set of problems, as a table `[[evaluation.sets]]`. What it leaves out is as in `evaluation`, `data`, `producer` and `reward`."""

    name: str = ""
    """Letters, digits, '_' and '-': its metrics are `eval/<name>`, `eval/<name>-pass@2` and so on. Must be set."""
    path: str = ""
    """Rows: a JSONL or Parquet file, optionally sliced as `path@[a:b]`. Must be set."""
    n: PositiveInt | None = None
    """Samples of each problem."""
    num_problems: PositiveInt | None = None
    """At most this many rows."""
    every: NonNegativeInt | None = None
    """Versions between its evaluations."""
    pass_reward: float | None = None
    """An answer is right with at least this reward."""
    sampling: dict[str, Any] = {}
    """Fields of `sampling`, put over `evaluation.sampling`."""
    reward: SetRewardConfig = SetRewardConfig()
    function: str = ""
    """As `producer.function`; a taskset is refused."""
    options: dict[str, Any] = {}
    """Put over `producer.options`."""
    prompt_key: str | None = None
    """As `data.prompt_key`, and so on."""
    label_key: str | None = None
    """Field with the expected answer; empty: none."""
    metadata_key: str | None = None
    """Field with a table handed to rewards and producers; empty: none."""
    tools_key: str | None = None
    """Field with tool definitions for the chat template; empty: none."""
    reward_key: str | None = None
    """Field with the row's own reward, as `data.reward_key`; empty: none. Without it a set with a reward of its own has none either."""
    images_key: str | None = None
    """Field with the row's images, as `data.images_key`; empty: none."""
    sampling_key: str | None = None
    """Field with a table of `sampling` fields for the row's own task; empty: none."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template."""
    max_prompt_tokens: PositiveInt | None = None
    """Longer prompts are left out, and counted."""


class EvaluationConfig(Section, frozen=True, kw_only=True):
    """Problems asked while training goes on: those of `data.heldout`, and those of the tables `[[evaluation.sets]]`."""

    every: NonNegativeInt = 0
    """Versions between evaluations; they also run when the warm-up has ended and at the end. 0: only those two."""
    num_problems: PositiveInt = 256
    """At most this many rows."""
    n: PositiveInt = 1
    """Samples of each problem; with more than one there are pass@k and maj@k too."""
    pass_reward: float = 1.0
    """An answer is right, for pass@k, with at least this reward."""
    engines: NonNegativeInt = 0
    """Engine processes for evaluations alone, beside engine.workers: each holds the version that is being evaluated while the others
    move on. 0: the rollouts' engines are asked, which may take newer versions meanwhile."""
    share: PositiveFraction = 0.5
    """Part of the slots of the rollouts' engines that an evaluation has requests for at once; of engines of its own it has all."""
    text_chars: NonNegativeInt = 400
    """Characters of each answer that the files of results keep, its beginning and its end; 0: none."""
    sampling: Sampling = Sampling(temperature=0.0)
    sets: tuple[EvaluationSetConfig, ...] = ()
    """Sets of problems, see [evaluation.sets](#evaluationsets)."""
