"""The section `reward`: how episodes are scored."""

from __future__ import annotations

from typing import Any, Literal

from streamrl.config.bounds import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class LengthConfig(Section, frozen=True, kw_only=True):
    """A reward on the length of answers, added to every reward when a batch is made (docs/algorithms.md)."""

    kind: Literal["none", "kimi", "alp", "cosine"] = "none"
    """`kimi`: by the shortest and the longest answer to the task (arXiv 2501.12599). `alp`: a price on tokens that rises with the share of
    answers that are right (arXiv 2506.05256). `cosine`: the reward itself goes along half a cosine of the length (arXiv 2502.03373)."""
    right: float = 1.0
    """An answer is right whose reward is at least this."""
    weight: PositiveFloat = 1.0
    """`kimi` and `alp`: times what length gives."""
    longest: NonNegativeInt = 0
    """`alp` and `cosine`: L, in sampled tokens of a whole rollout; 0: its sampling.max_new_tokens, which is of one turn."""
    cosine_right: tuple[float, float] = (2.0, 1.0)
    """The reward of right answers of no length, and of L."""
    cosine_wrong: tuple[float, float] = (-10.0, 0.0)
    """That of wrong ones."""
    cosine_exceeded: float = -10.0
    """That of answers of L tokens and more, right or wrong."""


class RewardConfig(Section, frozen=True, kw_only=True):
    """How episodes are scored."""

    kind: str = "exact_match"
    """`exact_match`, `gsm8k`, `math`, `dapo`, `deepscaler`, `f1`, `gpqa`, `random`, `remote`, `judge` or `python`, most of them also with
    `boxed_` in front (docs/rewards.md); a custom reward as `file.py:name`, `pkg.mod:name` or `pkg.mod.name`; or `late`: samples are
    published without one."""
    options: dict[str, Any] = {}
    """Those of a built-in reward; handed to a custom one as keyword arguments."""
    key: str = ""
    """Of a reward in named parts, the part that is trained; all are kept with the sample. Empty: the part `reward`, or their sum."""
    workers: NonNegativeInt = 0
    """Rewarders started with the run (docs/agents.md): producers publish samples at once, and these processes score them. `streamrl
    rewarder` joins more. 0: producers score, and hold a slot for it."""
    late_versions: NonNegativeInt = 8
    """Versions that a complete group waits for rewards that come late, by reward.kind = `late` or reward.workers; then it is dropped as
    `unrewarded`. 0: for ever."""
    overlong_buffer: NonNegativeInt = 0
    """Tokens below the greatest length over which a penalty grows from 0 to reward.overlong_penalty (soft overlong punishment, arXiv
    2503.14476, eq. 13), taken from every reward when a batch is made; 0: none."""
    overlong_penalty: NonNegativeFloat = 1.0
    """The greatest penalty."""
    overlong_length: NonNegativeInt = 0
    """The greatest length, in sampled tokens of a sample; 0: its own sampling.max_new_tokens, which is of one turn."""
    length: LengthConfig = LengthConfig()
    timeout_s: PositiveFloat = 10.0
    """A custom reward that takes longer for a rollout (a class with `score`: for a group) is cut off, and the rollout ends as `timeout`."""
    children: NonNegativeInt = 0
    """Processes in which one worker runs a custom reward, apart from those of its producer; a plain function (`def`) has one to itself
    while it runs. 0: one a core, at most 4."""
    concurrency: PositiveInt = 64
    """Calls of an `async` custom reward that one worker runs at once."""
    max_hung: PositiveInt = 2
    """Calls of a custom reward that may hang at once in one worker without holding up the others; when more do, their rollouts end as
    timeout before timeout_s (docs/user-code.md)."""
