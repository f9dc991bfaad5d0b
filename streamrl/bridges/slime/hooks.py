"""From a reference such as `slime:file.py:rm` at one of our keys to a function of that key's own form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from streamrl.bridges.slime.contracts import check_hook, hook_of
from streamrl.bridges.slime.section import SLIME
from streamrl.config.bridges import split


def adapted(reference: str, *, key: str, base: Path | None = None) -> Any:
    """What `streamrl.config.plugins.resolve` gives for it.

    Raises:
        ConfigError: the key does not take such a function, or it is not there, or cannot be called as slime calls it.
    """
    prefix, name = split(reference)
    flag = hook_of(key, prefix)
    function = check_hook(flag, name, key=key, base=base)
    match flag:
        case "custom_generate_function_path":
            from streamrl.bridges.slime.generate import producer

            return producer(function)
        case "rollout_function_path":
            from streamrl.bridges.slime.rollout_function import RolloutFunction

            return RolloutFunction(function)
        case "custom_rm_path":
            from streamrl.bridges.slime.scoring import grouped, single

            return single(function) if prefix == SLIME else grouped(function)
        case "dynamic_sampling_filter_path":
            from streamrl.bridges.slime.scoring import keeper

            return keeper(function)
        case _:
            from streamrl.bridges.slime import training

            return training.adapted(flag, function, reference)
