"""From the configuration's `[reward]` to a `Reward`."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from streamrl.config.plugins import Form, check_form, resolve
from streamrl.config.tree import RewardConfig
from streamrl.errors import ConfigError
from streamrl.rewards.built_in import ExactMatch, FinalNumber
from streamrl.rewards.functions import FunctionReward, InThread
from streamrl.rewards.protocol import Reward

REWARD = Form(
    key="reward.kind",
    what="reward",
    takes=("task", "episode"),
    hint="write `def score(task, episode, **options)`; reward.options are its keyword arguments",
    method="score",
    called=True,
)
LATE = "late"
"""`reward.kind` of runs whose rewards come after their samples."""
BUILT_IN = ("exact_match", "gsm8k", LATE)


def make_reward(config: RewardConfig, *, base: Path | None = None, in_thread: InThread | None = None) -> Reward | None:
    """Build the reward that `config.kind` names; None for `late`: somebody else gives the rewards (`streamrl.producers.late`).

    `exact_match`, `gsm8k`, or user code: a function of (task, episode) that gets `options` as keyword arguments; a class, built with
    `options`, whose objects have `async score(task, episodes)`; or such an object. `in_thread` runs plain functions.

    Raises:
        ConfigError: it cannot be found or is none of these.
    """
    if config.kind in ("exact_match", LATE):
        if config.options:
            raise ConfigError(
                f"reward.options must be empty for {config.kind}, got {sorted(config.options)}",
                hint="remove reward.options",
                key="reward.options",
                got=sorted(config.options),
            )
        return None if config.kind == LATE else ExactMatch()
    if config.kind == "gsm8k":
        return _built(FinalNumber, config)
    if not any(mark in config.kind for mark in ".:"):
        raise ConfigError(
            f"reward.kind must be {', '.join(BUILT_IN)} or name user code, got {config.kind!r}",
            hint="write it as file.py:name",
            key="reward.kind",
        )
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


def is_user_code(config: RewardConfig) -> bool:
    """Whether `make_reward` would load the user's code for it."""
    return config.kind not in BUILT_IN


def runs_in_children(config: RewardConfig, *, by_row: bool = False) -> bool:
    """Whether it is scored in the killable processes: the user's code, and what may block or hang.

    Args:
        config: of the run.
        by_row: rows name kinds of their own (`data.reward_key`), any of which may come.
    """
    return by_row or is_user_code(config)
