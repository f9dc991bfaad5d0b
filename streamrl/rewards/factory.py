"""From the configuration's `[reward]` to a `Reward`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from streamrl.config.loss import is_function
from streamrl.config.plugins import Form, check_form, resolve
from streamrl.config.reward_kinds import LATE, named, options_of
from streamrl.config.tree import RewardConfig
from streamrl.errors import ConfigError
from streamrl.rewards.functions import FunctionReward, InThread
from streamrl.rewards.layers import Boxed, ByRow, Keyed
from streamrl.rewards.protocol import Reward

REWARD = Form(
    key="reward.kind",
    what="reward",
    takes=("task", "episode"),
    hint="write `def score(task, episode, **options)`; reward.options are its keyword arguments",
    method="score",
    called=True,
)
_GRADERS = {
    "exact_match": "built_in:ExactMatch",
    "gsm8k": "built_in:FinalNumber",
    "math": "mathematics:Math",
    "boxed_math": "mathematics:BoxedMath",
    "dapo": "dapo:Dapo",
    "boxed_dapo": "dapo:BoxedDapo",
    "deepscaler": "mathematics:DeepScaler",
    "boxed_deepscaler": "mathematics:BoxedMath",
    "f1": "f1:F1",
    "gpqa": "gpqa:Gpqa",
    "random": "built_in:Random",
    "remote": "remote:Remote",
    "judge": "judge:Judge",
    "python": "python_tests:PythonTests",
    "ifbench": "instructions:IFBench",
    "ifeval": "instructions:IFEval",
}
"""By kind, the module and the class, loaded when one is made. `boxed_` has a class of its own where the box is part of the grading."""


def make_reward(
    config: RewardConfig,
    *,
    base: Path | None = None,
    in_thread: InThread | None = None,
    by_row: Mapping[str, Mapping[str, Any]] | None = None,
) -> Reward | None:
    """Build the reward that `config.kind` names; None for `late`: somebody else gives the rewards (`streamrl.producers.late`).

    A built-in one (`streamrl.config.reward_kinds`), or user code: a function of (task, episode) that gets `options` as keyword arguments; a
    class, built with `options`, whose objects have `async score(task, episodes)`; or such an object.

    Args:
        config: of the run.
        base: directory that a relative file path starts from.
        in_thread: runs plain functions.
        by_row: `data.reward_options`, where rows may name kinds of their own; None: they may not.

    Raises:
        ConfigError: it cannot be found or is none of these.
    """
    if config.kind == LATE:
        _check_late(config)
        return None
    made = _of_code(config, base, in_thread) if is_function(config.kind) else built_in(config.kind, config.options, in_thread=in_thread)
    if by_row is not None:
        build = partial(built_in, in_thread=in_thread)
        made = ByRow(made, build, by_row, alone=not is_function(config.kind), in_thread=in_thread)
    return Keyed(made, config.key) if config.key else made


def built_in(kind: str, options: Mapping[str, Any], *, in_thread: InThread | None = None) -> Reward:
    """A built-in reward; raises ConfigError for another name, for options that it does not take, and for what it lacks here."""
    checked = options_of(kind, options)
    boxes = kind not in _GRADERS
    module, _, name = _GRADERS[kind.removeprefix("boxed_") if boxes else kind].partition(":")
    found: Any = getattr(importlib.import_module(f"streamrl.rewards.{module}"), name)
    grader: Any = found(checked) if checked.__struct_fields__ else found()
    made: Reward = grader
    if hasattr(grader, "grade"):
        made = FunctionReward(grader.grade, {}, in_thread=in_thread if grader.in_children else None)
    return Boxed(made) if boxes or kind.startswith("boxed_") else made


def _of_code(config: RewardConfig, base: Path | None, in_thread: InThread | None) -> Reward:
    found: Any = resolve(config.kind, what=REWARD.what, key=REWARD.key, base=base)
    check_form(REWARD, config.kind, found, tuple(config.options))
    made: Any = _built(found, config) if inspect.isclass(found) else found
    if hasattr(made, "score"):
        return made
    return FunctionReward(made, config.options, in_thread=in_thread)


def _built(found: type[Any], config: RewardConfig) -> Any:
    try:
        return found(**config.options)
    except TypeError as error:
        raise ConfigError(
            f"reward.kind = {config.kind!r} cannot be built with reward.options: {error}",
            hint="correct reward.options",
            key="reward.options",
            kind=config.kind,
        ) from error


def _check_late(config: RewardConfig) -> None:
    if config.options:
        raise ConfigError(
            f"reward.options must be empty for {LATE}, got {sorted(config.options)}",
            hint="remove reward.options",
            key="reward.options",
            got=sorted(config.options),
        )


def is_user_code(config: RewardConfig) -> bool:
    """Whether `make_reward` would load the user's code for it."""
    return is_function(config.kind)


def runs_in_children(config: RewardConfig, *, by_row: bool = False) -> bool:
    """Whether it is scored in the killable processes: the user's code, and what may block or hang.

    Args:
        config: of the run.
        by_row: rows name kinds of their own (`data.reward_key`), any of which may come.
    """
    found = named(config.kind)
    return by_row or is_user_code(config) or (found is not None and found[0].in_children)
