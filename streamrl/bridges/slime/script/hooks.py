"""Flags that name code: each is the key of its name in `[slime]`, or is refused; `streamrl.bridges.slime.known` says which, and why."""

from __future__ import annotations

from streamrl.bridges.slime.known import HOOKS, REFUSED
from streamrl.bridges.slime.script.flag import Flag, canonical, mapped, near, refused

NONZERO_STD = "check_reward_nonzero_std"
"""slime's own filter, also with `_with_fallback` behind it: it is tasks.drop_zero_variance."""
GROUP_RM = "--group-rm"
SAMPLE_HOOKS = "--rollout-sample-hook-path"
"""It names several functions."""
_ELSEWHERE = ("custom_loss_function_path", "rollout_function_path")
"""Hooks whose flags say more than which function it is."""


def key_of(flag: str) -> str:
    """`--custom-rm-path` -> `slime.custom_rm_path`."""
    return "slime." + flag.removeprefix("--").replace("-", "_")


NAMED: tuple[str, ...] = tuple(canonical(name) for name in HOOKS if name not in _ELSEWHERE)
"""Flags that name a function, or some, and nothing else."""
CODE: tuple[Flag, ...] = (
    *(
        near(canonical(name), "texts" if canonical(name) == SAMPLE_HOOKS else "text", key_of(canonical(name)), says=hook.differs)
        for name, hook in HOOKS.items()
        if name not in _ELSEWHERE
    ),
    mapped(GROUP_RM, "switch", key_of(GROUP_RM)),
    *(one for name, (reason, nearest) in REFUSED.items() for one in refused(reason, nearest, canonical(name))),
)
