"""What `reward` and `data.reward_key` may not say."""

from __future__ import annotations

from streamrl.config.bounds import refuse
from streamrl.config.loss import is_function
from streamrl.config.reward_kinds import BOXED, KINDS, LATE, options_of
from streamrl.config.tree import Config


def check_reward(config: Config) -> None:
    """Raise ConfigError for a kind that there is not, and for options that it does not take. Looks at no file and no code."""
    reward, data = config.reward, config.data
    for key, given in (("data.reward_key", data.reward_key), ("reward.key", reward.key), ("reward.options", reward.options)):
        refuse(
            reward.kind == LATE and bool(given),
            f"{key} must be empty for reward.kind = late, whose rewards somebody else gives, got {given!r}",
            hint=f"remove {key}, or choose another reward.kind",
            key=key,
        )
    refuse(
        reward.kind.removeprefix(BOXED) == "dapo" and reward.key != "acc" and config.loss.advantage in ("maxrl", "pass_at_k"),
        f"reward.kind = {reward.kind} gives 1 and -1, got it with loss.advantage = {config.loss.advantage}, which takes no rewards below 0",
        hint='set reward.key = "acc", its part of 1 and 0',
        key="reward.kind",
    )
    if reward.kind != LATE and not is_function(reward.kind):
        options_of(reward.kind, reward.options)
    refuse(
        bool(data.reward_options) and not data.reward_key,
        "data.reward_options are of rewards that rows name, but data.reward_key names no field of the rows",
        hint="set data.reward_key, or give the options in reward.options",
        key="data.reward_options",
    )
    for kind, options in data.reward_options.items():
        refuse(
            kind not in KINDS,
            f"data.reward_options has options by built-in kind ({', '.join(KINDS)}), got {kind!r}",
            hint="those of boxed_math are those of math",
            key="data.reward_options",
        )
        options_of(kind, options, key=f"data.reward_options.{kind}")
